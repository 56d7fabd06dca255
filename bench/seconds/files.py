"""Files of noise, in a known state of the page cache."""

import ctypes
import math
import mmap
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bench.seconds.process import Slow

MIB = 1 << 20
PAGE = mmap.PAGESIZE


def noise(total: int) -> Iterator[memoryview]:
    """TOTAL bytes, the same at each call; as BF16 they are finite numbers as large as weights.

    One random block is repeated, so 2 GiB take only seconds. Its length is twice a prime, so all
    pages of a file below 60 GB differ, and a misplaced page is found.
    """
    half = 16_777_213
    block = bytearray(2 * half)
    draw = random.Random(1)
    block[0::2] = draw.randbytes(half)
    # The high byte of a little-endian BF16: a random sign over a fixed exponent.
    block[1::2] = draw.randbytes(half).translate(bytes(0x3C | byte & 0x80 for byte in range(256)))
    for start in range(0, total, len(block)):
        yield memoryview(block)[: total - start]


def make_file(path: Path, head: bytes, body: int, seconds: float = math.inf) -> None:
    """Makes a file of `head` and `body` bytes of noise, on disk and atomically.

    Raises Slow if it takes longer than SECONDS.
    """
    size = len(head) + body
    if path.exists() and path.stat().st_size == size:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if free < size + 256 * MIB:
        sys.exit(
            f"{path} needs {size / MIB:,.0f} MiB of disk, but only {free / MIB:,.0f} MiB are free; "
            "make room or choose another folder"
        )
    partial = path.with_name(path.name + ".partial")
    end = time.monotonic() + seconds
    try:
        with partial.open("wb") as file:
            file.write(head)
            for piece in noise(body):
                if time.monotonic() > end:
                    raise Slow(f"writing {path} was ended after {seconds:.0f} s")
                file.write(piece)
                # Piece by piece, so that no long wait is left for the end.
                file.flush()
                os.fsync(file.fileno())
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def file_system(path: Path) -> str:
    """The type of the file system that contains `path`."""
    words = subprocess.check_output(["df", "--output=fstype", "--", path], text=True).split()
    return words[-1]


libc = ctypes.CDLL(None, use_errno=True)
ODD = bytes(byte & 1 for byte in range(256))
"""The only bit that mincore() defines in the byte for a page."""


def cached(path: Path) -> int:
    """How many bytes of the file are in the page cache, in whole pages (mincore(2)).

    The kernel reports this only to the file's owner and to users with write permission; to others
    every page appears cached.
    """
    size = path.stat().st_size
    if not size:
        return 0
    pages = -(-size // PAGE)
    vector = (ctypes.c_ubyte * pages)()
    # ctypes only takes the address of writable memory; private, so that nothing is written.
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as view:
        place = ctypes.c_char.from_buffer(view)
        failed = libc.mincore(ctypes.byref(place), ctypes.c_size_t(size), vector)
        del place
        if failed:
            error = ctypes.get_errno()
            sys.exit(f"mincore: {path}: {os.strerror(error)}")
    return bytes(vector).translate(ODD).count(1) * PAGE


def evict(path: Path) -> None:
    """Drops the file from the page cache, and checks that no page is left."""
    with path.open("rb") as file:
        # Dirty pages are not dropped.
        os.fsync(file.fileno())
        # Pages on per-CPU lists of the kernel may need another call.
        for _ in range(20):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if cached(path) == 0:
                return
            time.sleep(0.05)
    sys.exit(
        f"{path} stays in the page cache ({cached(path) / MIB:,.1f} MiB): it may be on tmpfs, or "
        "mapped by another process; choose a folder on a disk"
    )


def fill_cache(path: Path) -> None:
    """Reads the whole file into the page cache; the kernel may drop pages at any time."""
    with path.open("rb", buffering=0) as file:
        while file.read(MIB):
            pass
