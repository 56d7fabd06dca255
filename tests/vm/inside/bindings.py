"""dma-bufs in C and Python on a real kernel: several per buffer, with synchronised CPU access.

    bindings.py EXERCISE PACKAGE FOLDER    in the machine, as root

EXERCISE is crates/capi/tests/exercise.c, PACKAGE the folder of the Python package, FOLDER one on a
disk. Kprobes count the exporter's functions for CPU access. Few imports: they are slow here.
"""

import errno
import importlib
import mmap
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import dmafile

MIB = 1 << 20
SIZE = 3 * MIB + 777
LIMIT = Path("/sys/module/udmabuf/parameters/size_limit_mb")
TRACING = Path("/sys/kernel/tracing")
EXPORTERS = {"udmabuf": "%s_cpu_udmabuf", "heap:system": "system_heap_dma_buf_%s_cpu_access"}


class Told:
    """Counts how often CPU access to dma-bufs of a kind begins and ends."""

    def __init__(self, kind: str) -> None:
        self.seen = (0, 0)
        probes = [f"p:{word} {EXPORTERS[kind] % word}" for word in ("begin", "end")]
        (TRACING / "kprobe_events").write_text("\n".join(probes) + "\n")
        self.enable("1")

    def enable(self, value: str) -> None:
        (TRACING / "events/kprobes/enable").write_text(value)

    def since(self) -> tuple[int, int]:
        """The counts since the last call."""
        lines = (TRACING / "kprobe_profile").read_text().splitlines()
        hits = {name: int(count) for name, count, _ in (line.split() for line in lines)}
        before, self.seen = self.seen, (hits["begin"], hits["end"])
        return self.seen[0] - before[0], self.seen[1] - before[1]


def exercise(program: str, path: Path) -> None:
    for kind, mib, count in (("udmabuf", 1, 4), ("udmabuf", 64, 1), ("heap:system", 64, 1)):
        LIMIT.write_text(str(mib))
        command = [program, "dmabufs", str(path), "auto", kind, str(count)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stderr}"


def saves(buffer: "dmafile.Buffer", folder: Path, want: bytes) -> None:
    """All dma-bufs of a buffer are saved to one file."""
    import dmafile

    to, snapshot = folder / "saved", folder / "snapshot"
    assert dmafile.save(buffer, to)["bytes"] == len(want)
    assert to.read_bytes() == want
    dmafile.save(buffer, to, length=len(want) - 5)
    assert to.read_bytes() == want[:-5]
    snapshot.mkdir(exist_ok=True)
    dmafile.save_snapshot({"all": buffer}, snapshot, verify="sha256")
    (file,) = snapshot.glob("all.*")
    assert file.read_bytes() == want


def views(path: Path, kind: str, count: int) -> None:
    import dmafile

    told = Told(kind)
    want = path.read_bytes()
    buffer = dmafile.load(path, to=kind)
    pieces = buffer.dma_bufs
    assert len(pieces) == count and pieces[0] == (pieces[0].fd, 0, pieces[0].bytes), pieces
    shown = b""
    for fd, at, nbytes in pieces:
        assert at == len(shown), pieces
        with mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ) as piece:
            shown += piece[:]
    assert shown[buffer.offset :][: buffer.nbytes] == want
    if count == 1:
        assert buffer.fileno() == pieces[0].fd
    else:
        try:
            buffer.fileno()
        except dmafile.Error as error:
            assert error.errno == errno.EFBIG and "dma_bufs" in error.remedy, error
        else:
            raise AssertionError("one descriptor for several")
        assert repr(buffer).endswith(f" dma_bufs={count}>"), buffer

    saves(buffer, path.parent, want)
    with dmafile.load(path, to=kind, offset=777) as later:
        saves(later, path.parent, want[777:])

    told.since()
    view = memoryview(buffer)
    assert told.since() == (count, 0)
    assert view == want and view.readonly
    part = view[1:5]
    view.release()
    assert told.since() == (0, 0), "a part of the view still exists"
    other = memoryview(buffer)
    assert told.since() == (count, 0)
    part.release()
    assert told.since() == (0, count)
    capsule = buffer.__dlpack__(max_version=(1, 0))
    assert told.since() == (count, 0)
    try:
        buffer.close()
    except BufferError:
        pass
    else:
        raise AssertionError("closed under its views")
    del capsule
    other.release()
    assert told.since() == (0, 2 * count)
    copied = buffer.__dlpack__(copy=True)
    assert told.since() == (count, count)
    # Before version 1.0, DLPack cannot express read-only memory.
    try:
        buffer.__dlpack__()
    except BufferError:
        begun, ended = told.since()
        assert begun == ended
    del copied

    ours, theirs = socket.socketpair()
    buffer.send(ours)
    received = dmafile.Buffer.receive(theirs)
    assert [one[1:] for one in received.dma_bufs] == [one[1:] for one in pieces]
    told.since()
    with memoryview(received) as view:
        assert view == want
    assert told.since() == (count, count)
    received.close()
    buffer.close()

    with dmafile.load(path) as plain, memoryview(plain) as view:
        told.since()
        with memoryview(plain) as again:
            assert again == view == want
        assert told.since() == (0, 0), "a memfd needs no synchronisation"
    told.enable("0")


def main(program: str, package: str, folder: Path) -> None:
    # Files of the host are slow to read.
    shutil.copytree(package, "/tmp/package/dmafile")
    importlib.invalidate_caches()
    path = folder / "file"
    path.write_bytes(os.urandom(SIZE))
    os.sync()
    exercise(shutil.copy(program, "/tmp/exercise"), path)
    for kind, mib, count in (("udmabuf", 1, 4), ("udmabuf", 64, 1), ("heap:system", 64, 1)):
        LIMIT.write_text(str(mib))
        views(path, kind, count)
    print("C and Python checked")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
