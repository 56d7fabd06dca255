"""Saves at every boundary of size and offset, from every source, to files and into them.

    save_edges.py DMAFILE HELPERS edges DISK FOLDER...    as root; DISK is raw
    save_edges.py DMAFILE HELPERS larger FOLDER           more bytes than there is memory

DISK is written to in place, then it takes a vfat, which is one more folder. What is saved is
compared with the source by sha256sum(1) or cmp(1).
"""

import fcntl
import hashlib
import mmap
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.vm.inside.loads import BLOB, MIB, meminfo, pinned, settles
from tests.vm.inside.saves import call, names_in

HUGE = 2 * MIB
BLOCK = 64 << 10
AROUND = (512, 4096, BLOCK, HUGE)
SIZES = (0, 1, *(edge + more for edge in AROUND for more in (-1, 0, 1)))
OFFSETS = (0, 1, 511, 512, 513, 4095, 4096, 4097, BLOCK - 1, BLOCK + 1, HUGE - 1, HUGE, HUGE + 1)
ROOM = 3 * HUGE
"""The size of sources: a save of the largest size at the largest offset fits."""
DATA = BLOB[:ROOM]
POOL = Path("/proc/sys/vm/nr_hugepages")
SHMEM = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

# linux/udmabuf.h, linux/dma-heap.h, kernel/uapi/dmafile.h
UDMABUF_CREATE = 0x40187542
DMA_HEAP_IOCTL_ALLOC = 0xC0184800
ALLOC = struct.Struct("=IIQIiQ")
DMAFILE_IOC_ALLOC = 0xC0000000 | ALLOC.size << 16 | 0xDE << 8 | 1


def filled(fd: int) -> int:
    """Fills memory with the data, by way of a mapping: as a device would be asked to."""
    with mmap.mmap(fd, ROOM) as memory:
        memory[:] = DATA
    return fd


def memfd(flags: int = 0) -> int:
    fd = os.memfd_create("source", flags | os.MFD_ALLOW_SEALING)
    os.truncate(fd, ROOM)
    return filled(fd)


def hugetlb() -> int:
    POOL.write_text(f"{ROOM // HUGE + 1}")
    return memfd(os.MFD_HUGETLB)


def thp() -> int:
    before = SHMEM.read_text().partition("[")[2].partition("]")[0]
    SHMEM.write_text("force")
    fd = memfd()
    SHMEM.write_text(before)
    assert meminfo("ShmemHugePages:") >= ROOM >> 10, meminfo("ShmemHugePages:")
    return fd


def udmabuf() -> int:
    # Of memory with a seal.
    fd = memfd()
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with Path("/dev/udmabuf").open("rb+", buffering=0) as node:
        # Its answer is a descriptor, and not in the request.
        request = bytearray(struct.pack("=IIQQ", fd, 1, 0, ROOM))
        made: int = fcntl.ioctl(node, UDMABUF_CREATE, request)
    os.close(fd)
    return made


def heap() -> int:
    with Path("/dev/dma_heap/system").open("rb", buffering=0) as node:
        request = struct.pack("=QIIQ", ROOM, 0, os.O_RDWR | os.O_CLOEXEC, 0)
        _, fd, *_ = struct.unpack("=QIIQ", fcntl.ioctl(node, DMA_HEAP_IOCTL_ALLOC, request))
    return filled(fd)


def dmafile() -> int:
    with Path("/dev/dmafile").open("rb+", buffering=0) as node:
        request = ALLOC.pack(ALLOC.size, os.O_RDWR | os.O_CLOEXEC, ROOM, 0, 0, 0)
        *_, fd, _ = ALLOC.unpack(fcntl.ioctl(node, DMAFILE_IOC_ALLOC, request))
    return filled(fd)


def sparse() -> int:
    """A file with holes of which no border is that of a block, on a disk."""
    fd = os.open(SPARSE, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    for start, end in PIECES:
        os.pwrite(fd, DATA[start:end], start)
    os.truncate(fd, ROOM)
    return fd


SPARSE = Path("/mnt/sparse")
PIECES = ((1, 4097), (BLOCK - 1, BLOCK + 4096), (HUGE - 1, HUGE + 1), (2 * HUGE + 513, ROOM - 5000))


def holey() -> bytes:
    data = bytearray(ROOM)
    for start, end in PIECES:
        data[start:end] = DATA[start:end]
    return bytes(data)


SOURCES: Mapping[str, Callable[[], int]] = {
    "memfd": memfd,
    "hugetlb": hugetlb,
    "thp": thp,
    "udmabuf": udmabuf,
    "heap": heap,
    "dmafile": dmafile,
    "sparse": sparse,
}
NEEDS = {"udmabuf": "/dev/udmabuf", "heap": "/dev/dma_heap/system", "dmafile": "/dev/dmafile"}


class Edges:
    def __init__(self, program: str) -> None:
        self.dmafile = shutil.copy(program, "/tmp/dmafile")
        self.count = 0
        self.pinned = pinned()

    def save(self, case: str, source: int, to: str, size: int, start: int = 0) -> None:
        self.count += 1
        words = [self.dmafile, "save", f"--from=fd:{source}@{start}", f"--length={size}"]
        done = subprocess.run([*words, "--quiet", to], pass_fds=(source,), capture_output=True)
        assert (done.returncode, done.stderr) == (0, b""), f"{case}: {done}"

    def whole(self, source: str, fd: int, data: bytes, folder: Path) -> None:
        """Each size as a file, from another offset each time."""
        to = folder / "to"
        names = names_in(folder) | {"to"}
        for number, size in enumerate(SIZES):
            start = OFFSETS[number % len(OFFSETS)]
            case = f"{size} bytes from {start} of {source} to {folder}"
            self.save(case, fd, str(to), size, start)
            assert sha256(to) == hashlib.sha256(data[start : start + size]).hexdigest(), case
            assert names_in(folder) == names, f"{case}: {names_in(folder)}"
        to.unlink()

    def piped(self, folder: Path) -> None:
        to, names = folder / "to", names_in(folder) | {"to"}
        for size in SIZES:
            self.count += 1
            case = f"{size} bytes of a pipe to {folder}"
            words = [self.dmafile, "save", "--from=-", "--quiet", str(to)]
            done = subprocess.run(words, input=DATA[:size], capture_output=True)
            assert (done.returncode, done.stderr) == (0, b""), f"{case}: {done}"
            assert sha256(to) == hashlib.sha256(DATA[:size]).hexdigest(), case
            assert names_in(folder) == names, f"{case}: {names_in(folder)}"
        to.unlink()

    def inside(self, source: str, fd: int, data: bytes, to: Path, room: int) -> None:
        """At each offset of a file or device, each time another size: nothing else changes."""
        around = b"\xa5" * room
        for number, at in enumerate(OFFSETS):
            size = SIZES[(5 * number + 3) % len(SIZES)]
            start = OFFSETS[(3 * number + 1) % len(OFFSETS)]
            case = f"{size} bytes from {start} of {source} to {to}@{at}"
            with to.open("rb+") as file:
                file.write(around)
                os.fsync(file.fileno())
            self.save(case, fd, f"{to}@{at}", size, start)
            want = around[:at] + data[start : start + size] + around[at + size :]
            head = subprocess.run(("head", f"--bytes={room}", str(to)), stdout=subprocess.PIPE)
            assert head.stdout == want, f"{case}: {difference(head.stdout, want)}"

    def settled(self) -> None:
        settles(lambda: pinned() - self.pinned, lambda more: not more, "pages stay pinned")


def difference(seen: bytes, want: bytes) -> str:
    wrong = [at for at in range(len(want)) if seen[at : at + 1] != want[at : at + 1]]
    return f"{len(wrong)} bytes, from {wrong[0]} to {wrong[-1]}"


def sha256(path: Path) -> str:
    return subprocess.check_output(("sha256sum", str(path)), text=True).split()[0]


def sources() -> Iterator[tuple[str, int, bytes]]:
    for name, make in SOURCES.items():
        if name in NEEDS and not Path(NEEDS[name]).exists():
            print(f"no {name}")
            continue
        fd = make()
        yield name, fd, holey() if name == "sparse" else DATA
        os.close(fd)


def edges(edges: Edges, disk: str, *folders: str) -> None:
    for name, fd, data in sources():
        edges.inside(name, fd, data, Path(disk), ROOM)
    call("modprobe", "vfat")
    call("busybox", "mkdosfs", disk)
    vfat = Path("/run/vfat")
    vfat.mkdir()
    call("mount", "-t", "vfat", disk, str(vfat))
    for name, fd, data in sources():
        for folder in (vfat, *map(Path, folders)):
            edges.whole(name, fd, data, folder)
            part = folder / "part"
            part.touch()
            edges.inside(name, fd, data, part, ROOM)
            part.unlink()
    for folder in (vfat, *map(Path, folders)):
        edges.piped(folder)
    call("umount", str(vfat))


def larger(edges: Edges, folder: str) -> None:
    """By way of blocks, out of a file and out of a pipe."""
    source, to = Path(folder) / "source", Path(folder) / "to"
    size = meminfo("MemTotal:") * 1024 * 5 // 4 + 777
    with source.open("wb") as file:
        while file.tell() < size:
            # No two blocks of the file are alike.
            at = file.tell() // len(BLOB) * 511
            file.write((BLOB[at:] + BLOB[:at])[: size - file.tell()])
    for script in (f"save --quiet --from {source} {to}", f"save --quiet --from - {to} <{source}"):
        call("sh", "-c", f"{edges.dmafile} {script}")
        edges.count += 1
        call("cmp", str(source), str(to))


def main() -> None:
    program, _, part, *words = sys.argv[1:]
    these = Edges(program)
    if part == "edges":
        edges(these, *words)
    else:
        larger(these, *words)
    these.settled()
    print(f"{these.count} saves checked")


if __name__ == "__main__":
    main()
