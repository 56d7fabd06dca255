"""Files of noise, in a known state of the page cache."""

import ctypes
import mmap
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MIB = 1 << 20
PAGE = mmap.PAGESIZE


def noise(total: int) -> Iterator[memoryview]:
    """`total` bytes, the same at each call, that read as finite BF16 numbers the size of weights.

    One block is drawn and repeated, which makes 2 GiB a matter of seconds. Its length is twice a
    prime, so that no two pages of a file below 60 GB are alike and a misplaced page shows.
    """
    half = 16_777_213
    block = bytearray(2 * half)
    draw = random.Random(1)
    block[0::2] = draw.randbytes(half)
    # The high byte of a little-endian BF16: a random sign over a fixed exponent.
    block[1::2] = draw.randbytes(half).translate(bytes(0x3C | byte & 0x80 for byte in range(256)))
    for start in range(0, total, len(block)):
        yield memoryview(block)[: total - start]


def make_file(path: Path, head: bytes, body: int) -> None:
    """Makes a file of `head` and `body` bytes of noise, on disk, whole or not at all."""
    size = len(head) + body
    if path.exists() and path.stat().st_size == size:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if free < size + 256 * MIB:
        sys.exit(
            f"{path} takes {size / MIB:,.0f} MiB of disk and {free / MIB:,.0f} MiB are free there; "
            "make room or choose another folder"
        )
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(head)
        for piece in noise(body):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def file_system(path: Path) -> str:
    """The type of the file system that holds `path`."""
    words = subprocess.check_output(["df", "--output=fstype", "--", path], text=True).split()
    return words[-1]


libc = ctypes.CDLL(None, use_errno=True)
ODD = bytes(byte & 1 for byte in range(256))
"""Of what mincore() says of a page, only the lowest bit means something."""


def cached(path: Path) -> int:
    """How many bytes of the file sit in the page cache, in whole pages (mincore(2)).

    The kernel tells that to a file's owner, and to who may write it; all others see all of it
    cached.
    """
    size = path.stat().st_size
    if not size:
        return 0
    pages = -(-size // PAGE)
    vector = (ctypes.c_ubyte * pages)()
    # Writable, as ctypes takes the address of nothing else; private, so that nothing is written.
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as view:
        place = ctypes.c_char.from_buffer(view)
        failed = libc.mincore(ctypes.byref(place), ctypes.c_size_t(size), vector)
        del place
        if failed:
            error = ctypes.get_errno()
            sys.exit(f"mincore: {path}: {os.strerror(error)}")
    return bytes(vector).translate(ODD).count(1) * PAGE


def evict(path: Path) -> None:
    """Puts the file out of the page cache, and makes sure that it is out."""
    with path.open("rb") as file:
        # Dirty pages can't be dropped.
        os.fsync(file.fileno())
        # Pages on their way through the kernel's per-CPU lists may take another try.
        for _ in range(20):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if cached(path) == 0:
                return
            time.sleep(0.05)
    sys.exit(
        f"{path} stays in the page cache ({cached(path) / MIB:,.1f} MiB): is it on tmpfs, or "
        "mapped by another process? Choose a folder on a disk."
    )


def fill_cache(path: Path) -> None:
    """Brings the whole file into the page cache; it may have left it again when this returns."""
    with path.open("rb", buffering=0) as file:
        while file.read(MIB):
            pass
