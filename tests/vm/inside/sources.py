"""Memory and files to save from, all with the same bytes, made without dmafile."""

import fcntl
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.vm.inside.loads import BLOB, MIB, meminfo

HUGE = 2 * MIB
ROOM = 3 * HUGE
"""The size of each source."""
DATA = BLOB[:ROOM]
POOL = Path("/proc/sys/vm/nr_hugepages")
SPARSE = Path("/mnt/sparse")
PIECES = ((1, 4097), (65535, 69632), (HUGE - 1, HUGE + 1), (2 * HUGE + 513, ROOM - 5000))
"""The data of a sparse file; no boundary is that of a block."""
SHMEM = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
NODES = {
    "udmabuf": Path("/dev/udmabuf"),
    "heap:system": Path("/dev/dma_heap/system"),
    "module": Path("/dev/dmafile"),
}
"""Device nodes that make dma-bufs, if the kernel has them."""

# linux/udmabuf.h, linux/dma-heap.h, kernel/uapi/dmafile.h
UDMABUF_CREATE = 0x40187542
DMA_HEAP_IOCTL_ALLOC = 0xC0184800
ALLOC = struct.Struct("=IIQIiQ")
DMAFILE_IOC_ALLOC = 0xC0000000 | ALLOC.size << 16 | 0xDE << 8 | 1


def filled(fd: int) -> int:
    """Fills memory with the data through a mapping."""
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
    # A udmabuf needs memory that is sealed against shrinking.
    fd = memfd()
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with NODES["udmabuf"].open("rb+", buffering=0) as node:
        # The ioctl returns the descriptor; it is not in the request.
        request = bytearray(struct.pack("=IIQQ", fd, 1, 0, ROOM))
        made: int = fcntl.ioctl(node, UDMABUF_CREATE, request)
    os.close(fd)
    return made


def heap() -> int:
    with NODES["heap:system"].open("rb", buffering=0) as node:
        request = struct.pack("=QIIQ", ROOM, 0, os.O_RDWR | os.O_CLOEXEC, 0)
        _, fd, *_ = struct.unpack("=QIIQ", fcntl.ioctl(node, DMA_HEAP_IOCTL_ALLOC, request))
    return filled(fd)


def module() -> int:
    with NODES["module"].open("rb+", buffering=0) as node:
        request = ALLOC.pack(ALLOC.size, os.O_RDWR | os.O_CLOEXEC, ROOM, 0, 0, 0)
        *_, fd, _ = ALLOC.unpack(fcntl.ioctl(node, DMAFILE_IOC_ALLOC, request))
    return filled(fd)


def sparse() -> int:
    fd = os.open(SPARSE, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    for start, end in PIECES:
        os.pwrite(fd, DATA[start:end], start)
    os.truncate(fd, ROOM)
    return fd


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
    "heap:system": heap,
    "module": module,
    "sparse": sparse,
}


def data_of(kind: str) -> bytes:
    return holey() if kind == "sparse" else DATA


def sources() -> Iterator[tuple[str, int, bytes]]:
    """All sources that this kernel supports."""
    for kind, make in SOURCES.items():
        if kind in NODES and not NODES[kind].exists():
            print(f"no {kind}")
            continue
        fd = make()
        yield kind, fd, data_of(kind)
        os.close(fd)
