"""Loads: at once, and awaited."""

import asyncio
import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeAlias, TypedDict, Unpack

from . import _dmafile
from ._dmafile import Buffer
from ._errors import Error, make
from ._progress import Callback, callback

StrPath: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]
ModelPath: TypeAlias = StrPath | Sequence[StrPath]
"""What a model is known by: one path, or all of its files."""


class Options(TypedDict, total=False):
    """How bytes come into memory; `load` says what each means."""

    pages: str
    method: str
    io: str
    allocation: str
    gather: int | None
    block: int | None
    queue_depth: int | None
    memory_check: bool


class LoadOptions(Options, total=False):
    """And which bytes, into what kind of memory."""

    to: str
    offset: int
    length: int | None
    verify: str | None


def load(
    path: StrPath,
    *,
    to: str = "memfd",
    pages: str = "auto",
    method: str = "auto",
    io: str = "auto",
    allocation: str = "auto",
    offset: int = 0,
    length: int | None = None,
    gather: int | None = None,
    block: int | None = None,
    queue_depth: int | None = None,
    verify: str | None = None,
    memory_check: bool = True,
    progress: Callback | bool | None = None,
) -> Buffer:
    """Loads a file into memory that devices and processes can share.

    The interpreter's other threads run on meanwhile, and Ctrl-C stops the load where it is the
    main thread's: the interpreter handles signals on no other. Sizes are in bytes.

    Args:
        path: A regular file or a block device.
        to: The kind of memory: `anon` (private, no descriptor), `memfd` (sealable), `udmabuf` (a
            dma-buf over a memfd, or several), `heap:NAME` (a dma-buf from `/dev/dma_heap/NAME`),
            `dmafile` (a dma-buf of dmafile.ko), `dma-buf` (the best of these three that works),
            `fd:N` (fill a memfd or a dma-buf that exists, from its start to its end), `fd:N@OFFSET`
            (only a part of it, from byte OFFSET on), `cuda-host`, `cuda-host:N`, `hip-host`,
            `hip-host:N` (a memfd that is pinned for a GPU while it is filled, `Buffer.pin`).
        pages: The size of its pages: `auto`, `4k`, `thp`, `huge`.
        method: How bytes move: `auto`, `uring`, `threads`, `read`, `mmap`, `bounce`, `sendfile`,
            `splice`, `module`, `copy-file-range`, `heap-read`, `premap`.
        io: Past or through the page cache: `auto`, `direct`, `buffered`.
        allocation: When pages come into being: `auto`, `ahead` of the reads by one `gather`,
            `in-read`, all of them `before` the first read.
        offset: The first byte of the file that is wanted.
        length: How many bytes are wanted; to the end of the file if None.
        gather: How much of the buffer is allocated before its reads begin; 128 MiB if None.
        block: The size of one operation, 4 KiB to 64 MiB; chosen if None.
        queue_depth: Operations in flight, 1 to 4096; chosen if None.
        verify: A checksum to compute while the bytes come, `crc32c`, `xxh3`, `blake3` or
            `sha256`, and with `=HEX` to compare: a load that differs fails with EBADMSG. `hub`
            compares each file with the digest that names it in a Hugging Face cache, and fails
            with EINVAL where it has none. The digest is in `Buffer.report["verify"]`.
        memory_check: Whether to refuse early what exceeds available memory or a cgroup's limit.
        progress: Called with bytes in place and bytes in all, at most 20 times a second, on this
            thread; an exception in it stops the load and comes out of here. `True` draws a bar
            on stderr where that is a terminal.

    Raises:
        UsageError: A value is out of range or cannot be combined (also a ValueError).
        Error: Everything else, with the errno of the call that failed (also an OSError, and
            FileNotFoundError, PermissionError, ... where it is one).
        KeyboardInterrupt: Ctrl-C. As after any error, nothing is left behind then, except in an
            `fd:N` that was being filled.
    """
    options: LoadOptions = {
        "to": to,
        "pages": pages,
        "method": method,
        "io": io,
        "allocation": allocation,
        "offset": offset,
        "length": length,
        "gather": gather,
        "block": block,
        "queue_depth": queue_depth,
        "verify": verify,
        "memory_check": memory_check,
    }
    with callback(progress) as tell:
        return _dmafile.load(os.fsdecode(path), options, tell)


def open_model(path: ModelPath) -> _dmafile.Model:
    """Opens a model."""
    if isinstance(path, (str, bytes, os.PathLike)):
        return _dmafile.Model(os.fsdecode(path))
    return _dmafile.Model([os.fsdecode(one) for one in path])


def check_empty(path: ModelPath, options: Options, verify: str | None) -> None:
    """Raises what the load of tensors without a byte would, if there were anything to load."""
    _dmafile.check({**options, "verify": verify})
    if verify is not None:
        name = os.fsdecode(path if isinstance(path, (str, bytes, os.PathLike)) else path[0])
        text = f"cannot verify: {name}: the tensors have no bytes (ENODATA)"
        raise make("failed", errno.ENODATA, text, name, "leave verify out")


async def load_async(
    path: StrPath, *, progress: Callback | bool | None = None, **options: Unpack[LoadOptions]
) -> Buffer:
    """As `load`, for asyncio: the event loop runs on, and `progress` is called on it.

    Cancelling the task stops the load; the cancellation arrives once what was in flight has
    landed and all of it has been undone.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def wake() -> None:
        # A loop that is closed waits for nobody.
        if not loop.is_closed():
            loop.call_soon_threadsafe(ended.set)

    with callback(progress) as tell:
        running = _dmafile.start(os.fsdecode(path), options, wake)
        try:
            if tell is None:
                await ended.wait()
            else:
                await _tell_until(ended, running, tell)
        except GeneratorExit:
            # A coroutine that is thrown away may not await any more.
            running.cancel()
            raise
        except BaseException:
            running.cancel()
            while not ended.is_set():
                # Impatience does not make a disk faster.
                try:
                    await ended.wait()
                except asyncio.CancelledError:
                    continue
            # The exception may be kept, and its frames with it: not the buffer too.
            with suppress(Error):
                running.result().close()
            raise
    return running.result()


async def _tell_until(ended: asyncio.Event, running: _dmafile.Running, tell: Callback) -> None:
    """Calls `tell` whenever there is news."""
    waiting = asyncio.ensure_future(ended.wait())
    told = (0, 0)
    try:
        while True:
            done, _ = await asyncio.wait((waiting,), timeout=0.05)
            now = running.progress()
            if now != told:
                tell(*now)
                told = now
            if done:
                return
    finally:
        waiting.cancel()
