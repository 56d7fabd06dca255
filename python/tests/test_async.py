"""Awaited loads."""

import asyncio
import threading
from pathlib import Path

import dmafile
import pytest

from conftest import (
    SIZE,
    SLOWLY,
    bytes_read,
    eventually,
    file_sha256,
    open_files,
    sha256,
)


def test_an_awaited_load_does_not_block_the_event_loop(slow: Path, file: Path) -> None:
    async def main() -> int:
        turns = 0
        load = asyncio.ensure_future(dmafile.load_async(slow, length=24 << 20, **SLOWLY))
        while not load.done():
            await asyncio.sleep(0.001)
            turns += 1
        buffers = await asyncio.gather(load, *(dmafile.load_async(file) for _ in range(10)))
        assert buffers[0].nbytes == 24 << 20
        for buffer in buffers[1:]:
            assert sha256(memoryview(buffer)) == file_sha256(file)
        return turns

    # A blocked loop would turn only once.
    assert asyncio.run(main()) > 3


def test_progress_is_reported_on_the_thread_of_the_event_loop(file: Path) -> None:
    told: list[tuple[int, int, int]] = []

    def tell(done: int, total: int) -> None:
        told.append((done, total, threading.get_ident()))

    asyncio.run(dmafile.load_async(file, to="anon", progress=tell)).close()
    assert told[-1] == (SIZE, SIZE, threading.get_ident())


def test_a_cancelled_task_stops_the_load(slow: Path) -> None:
    before, threads_before = open_files(), threads()

    async def main() -> None:
        begun = asyncio.Event()
        going = lambda done, total: begun.set()  # noqa: E731
        load = asyncio.ensure_future(dmafile.load_async(slow, progress=going, **SLOWLY))
        await begun.wait()
        load.cancel()
        await asyncio.sleep(0)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load

    read = bytes_read()
    asyncio.run(main())
    assert bytes_read() - read < slow.stat().st_size
    assert open_files() == before
    # A joined thread is still listed for a moment.
    eventually(lambda: threads() == threads_before)


def threads() -> int:
    """All threads, including those of loads, which are unknown to the interpreter."""
    return len(list(Path("/proc/self/task").iterdir()))


def test_a_timeout_and_an_exception_stop_the_load(slow: Path) -> None:
    before = open_files()

    def fail(done: int, total: int) -> None:
        raise KeyError(done)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(dmafile.load_async(slow, **SLOWLY), 0.1)
        with pytest.raises(KeyError):
            await dmafile.load_async(slow, progress=fail, **SLOWLY)

    asyncio.run(main())
    assert open_files() == before


def test_errors_are_raised_by_await() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        asyncio.run(dmafile.load_async("no/such/file"))
    assert isinstance(caught.value, dmafile.Error)
    with pytest.raises(dmafile.UsageError):
        asyncio.run(dmafile.load_async("no/such/file", block=1))
    with pytest.raises(TypeError, match="'blok' is not an option"):
        asyncio.run(dmafile.load_async("no/such/file", blok=1))  # type: ignore[call-arg]


def test_closing_the_coroutine_stops_the_load(slow: Path) -> None:
    before, threads_before = open_files(), threads()

    async def main() -> None:
        load = dmafile.load_async(slow, **SLOWLY)
        load.send(None)
        load.close()

    read = bytes_read()
    asyncio.run(main())
    eventually(lambda: threads() == threads_before)
    assert open_files() == before
    assert bytes_read() - read < slow.stat().st_size


def test_a_failed_load_keeps_no_buffer(file: Path) -> None:
    before = open_files()

    def fail(done: int, total: int) -> None:
        if done == total:
            raise KeyError(done)

    with pytest.raises(KeyError) as caught:
        asyncio.run(dmafile.load_async(file, progress=fail))
    assert open_files() == before, caught
