"""Files whose bytes come through a ring of slots."""

import contextlib
import errno
import gc
import hashlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import dmafile
import pytest

from conftest import eventually, load_threads, write

MIB = 1 << 20
SIZE = 23 * MIB + 777
SMALL: Any = {"ring": 4 * MIB, "slots": 4}


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    return write(folder / "bytes", os.urandom(SIZE))


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    gc.collect()
    eventually(lambda: not load_threads())


@pytest.mark.parametrize("ring", [{}, SMALL])
@pytest.mark.parametrize(("offset", "length"), [(0, None), (1, None), (4097, 9 * MIB + 1)])
def test_all_bytes_come_in_order(file: Path, ring: Any, offset: int, length: int | None) -> None:
    whole, at = hashlib.sha256(), offset
    for place, view in dmafile.stream(file, offset=offset, length=length, **ring):
        assert place == at and view.readonly
        whole.update(view)
        at += view.nbytes
    data = file.read_bytes()[offset : SIZE if length is None else offset + length]
    assert at == offset + len(data)
    assert whole.hexdigest() == hashlib.sha256(data).hexdigest()


def test_a_view_is_released_with_the_next_one(file: Path) -> None:
    views = [view for _, view in dmafile.stream(file, **SMALL)]
    for view in views:
        with pytest.raises(ValueError, match="released"):
            view.tobytes()


@pytest.mark.parametrize("cut", [False, True])
def test_a_view_that_is_used_elsewhere_is_an_error(file: Path, cut: bool) -> None:
    stream = dmafile.stream(file, **SMALL)
    at, view = next(stream)
    other = view[5:9] if cut else memoryview(view)
    with pytest.raises(BufferError, match="still in use"):
        next(stream)
    # The memory stays as long as something uses it.
    gc.collect()
    assert other.tobytes() == file.read_bytes()[at + 5 * cut :][: other.nbytes]


def test_a_digest_is_compared_after_the_last_view(file: Path) -> None:
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    for _ in dmafile.stream(file, verify=f"sha256={digest}", **SMALL):
        pass
    seen = 0
    with pytest.raises(dmafile.Error) as caught:
        for _, view in dmafile.stream(file, verify="sha256=" + 64 * "0", **SMALL):
            seen += view.nbytes
    assert (caught.value.errno, seen) == (errno.EBADMSG, SIZE)


def test_leaving_early_ends_the_load(file: Path) -> None:
    for _, view in dmafile.stream(file, **SMALL):
        assert view.nbytes
        break
    stream = dmafile.stream(file, **SMALL)
    next(stream)
    stream.close()
    # Never started.
    del stream
    dmafile.stream(file, **SMALL)


def test_errors_name_the_file_or_the_option(file: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none"):
        list(dmafile.stream(tmp_path / "none"))
    with pytest.raises(dmafile.UsageError, match="slots"):
        dmafile.stream(file, slots=1)
    with pytest.raises(dmafile.UsageError, match="magic"):
        dmafile.stream(file, method="magic")
    with pytest.raises(dmafile.Error, match="cuda:99"):
        list(dmafile.stream(file, device="cuda:99"))


class Stalling(NamedTuple):
    """A file on FUSE, and the process that serves it: while that is stopped, reads do not end."""

    path: Path
    server: subprocess.Popen[bytes]
    waiting: Path
    """Contains how many requests wait for the process."""


@pytest.fixture
def stalling(folder: Path) -> Iterator[Stalling]:
    if os.geteuid() or not shutil.which("fuse2fs") or not Path("/dev/fuse").exists():
        pytest.skip("needs root and fuse2fs")
    image, place, control = folder / "image", folder / "mounted", folder / "control"
    with image.open("wb") as made:
        made.truncate(64 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    place.mkdir()
    control.mkdir()
    if subprocess.run(["mount", "-t", "fusectl", "none", control], check=False).returncode:
        pytest.skip("needs the right to mount file systems")
    device = place.stat().st_dev
    server = subprocess.Popen(["fuse2fs", "-f", image, place], stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: place.stat().st_dev != device)
        waiting = control / str(os.minor(place.stat().st_dev)) / "waiting"
        yield Stalling(write(place / "file", os.urandom(16 * MIB)), server, waiting)
    finally:
        server.send_signal(signal.SIGCONT)
        subprocess.run(["umount", "--lazy", place, control], check=False)
        # After a failed test, something may still have the file open.
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(60)
        server.kill()
        server.wait()
        place.rmdir()
        control.rmdir()
        image.unlink()


def state(task: Path) -> str:
    """The state of a thread, a letter of proc(5)."""
    return (task / "stat").read_text().rpartition(") ")[2][0]


def test_ctrl_c_ends_the_wait_for_a_read_that_stalls(stalling: Stalling) -> None:
    stream = dmafile.stream(stalling.path, method="threads", io="buffered", **SMALL)
    next(stream)
    stalling.server.send_signal(signal.SIGSTOP)
    # Until then it may still answer.
    tasks = Path(f"/proc/{stalling.server.pid}/task")
    eventually(lambda: all(state(task) == "T" for task in tasks.iterdir()))
    ended, resumed = threading.Event(), threading.Event()

    def interrupt() -> None:
        eventually(lambda: int(stalling.waiting.read_text()) > 0)
        os.kill(os.getpid(), signal.SIGINT)
        if not ended.wait(60):
            resumed.set()
            stalling.server.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):
        thread.start()
        for _ in stream:
            pass
        thread.join()
    ended.set()
    assert not resumed.is_set(), "the wait ended only with the read"
    assert load_threads(), "the read did not stall"
    thread.join()


def test_ctrl_c_in_the_loop_ends_the_load(file: Path) -> None:
    stream = dmafile.stream(file, **SMALL)
    with pytest.raises(KeyboardInterrupt):
        for _ in stream:
            os.kill(os.getpid(), signal.SIGINT)


def test_a_forked_child_is_refused(file: Path) -> None:
    stream = dmafile.stream(file, **SMALL)
    next(stream)
    child = os.fork()
    if child == 0:
        try:
            next(stream)
        except RuntimeError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert sum(view.nbytes for _, view in stream) < SIZE
