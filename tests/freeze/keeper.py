"""A process with all kinds of shared memory. It prints a line for each that it gets: digests of all
of it, by a library of Python, positions, and a counter.

keeper.py [FILE]...    reads the files, too; started by `dmafile take`, it also has the held files
"""

import ctypes
import fcntl
import hashlib
import mmap
import os
import sys
from pathlib import Path

READ_ONLY = mmap.PROT_READ
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
F_ADD_SEALS = fcntl.F_ADD_SEALS


def memory(name: str, size: int, *, sealable: bool = True) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if sealable else 0))
    os.truncate(fd, size)
    return fd


def main() -> None:
    views: list[mmap.mmap] = []
    # Holes before, between and after data; an odd size; another open file with its own position.
    sparse = memory("sparse", (9 << 20) + 5)
    os.pwrite(sparse, os.urandom(4097), 3 << 20)
    # More than a piece of what a thaw reads at once, and odd.
    os.pwrite(sparse, os.urandom((2 << 20) + 77), (5 << 20) + 1234)
    os.pwrite(sparse, b"end", (9 << 20) + 2)
    views.append(mmap.mmap(sparse, (9 << 20) + 5))
    os.lseek(sparse, 4321, os.SEEK_SET)
    other = os.open(f"/proc/self/fd/{sparse}", os.O_RDONLY)
    os.lseek(other, 77, os.SEEK_SET)
    # Only mapped.
    closed = memory("sparse", 1 << 20)
    views.append(mmap.mmap(closed, 1 << 20))
    views[-1][:] = os.urandom(1 << 20)
    os.close(closed)
    # Only open, sealed.
    sealed = memory("sealed", 70_001)
    os.pwrite(sealed, os.urandom(70_001), 0)
    fcntl.fcntl(sealed, F_ADD_SEALS, SEALS)
    views.append(mmap.mmap(sealed, 70_001, prot=READ_ONLY))
    # Never sealable, and empty.
    plain, empty = memory("plain", 4096, sealable=False), memory("empty", 0)
    os.pwrite(plain, b"plain" * 800, 0)
    # Reading a mapping of holes would fill them.
    holes = memory("holes", (9 << 20) + 5)
    os.pwrite(holes, os.urandom(4097), 3 << 20)
    # Larger than what a thaw reads in pieces.
    large = memory("large", (24 << 20) + 5)
    os.pwrite(large, os.urandom(300_000), (17 << 20) - 3)
    # Without a descriptor, shared with a child that is frozen, too.
    shared = mmap.mmap(-1, 3 << 20)
    shared[:100] = os.urandom(100)
    views.append(shared)
    huge = -1
    if os.environ.get("HUGE"):
        huge = os.memfd_create("huge", os.MFD_CLOEXEC | os.MFD_HUGETLB)
        os.truncate(huge, 6 << 20)
        views.append(mmap.mmap(huge, 6 << 20))
        # The page in the middle is a hole.
        views[-1][:1000] = os.urandom(1000)
        views[-1][-5:] = b"begin"
    held = [os.environ.get(f"DMAFILE_{name}", "").split(",") for name in ("FD", "BYTES")]
    for number, size in zip(*held, strict=True):
        if number:
            views.append(mmap.mmap(int(number), int(size), prot=READ_ONLY))
    own = os.urandom(100_000)
    if os.fork() == 0:
        # Ends with its parent, which the test kills.
        ctypes.CDLL(None).prctl(1, 9)
        while True:
            shared[-8:] = b"childish"
            ctypes.CDLL(None).usleep(50_000)
    count = 0
    while sys.stdin.readline():
        digests = [hashlib.sha256(view).hexdigest()[:16] for view in views if view is not shared]
        digests.append(hashlib.sha256(shared[:100]).hexdigest()[:16])
        child, shared[-8:] = shared[-8:].decode(errors="replace"), bytes(8)
        facts = [
            os.lseek(sparse, 0, os.SEEK_CUR),
            os.lseek(other, 0, os.SEEK_CUR),
            fcntl.fcntl(other, fcntl.F_GETFL) & os.O_ACCMODE,
            fcntl.fcntl(sealed, fcntl.F_GET_SEALS),
            fcntl.fcntl(plain, fcntl.F_GET_SEALS),
            os.fstat(empty).st_size,
            os.pread(plain, 10, 0).decode(),
            hashlib.sha256(os.pread(holes, (9 << 20) + 5, 0)).hexdigest()[:16],
            hashlib.sha256(os.pread(large, (24 << 20) + 5, 0)).hexdigest()[:16],
            hashlib.sha256(own).hexdigest()[:16],
            *(os.fstat(huge).st_blksize for huge in [huge] if huge >= 0),
            *(hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] for file in sys.argv[1:]),
        ]
        print(count, child, *digests, *facts, flush=True)
        count += 1


if __name__ == "__main__":
    main()
