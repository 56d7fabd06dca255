"""The page cache after buffered loads, and the bytes that they read from the disk.

    page_cache.py DMAFILE HELPERS FOLDER drops|fills    in the machine, as root

FOLDER is on an ext4 disk; the last word says what a load does on this kernel. Fails with an
assertion that names the case, or prints the number of cases.
"""

import ctypes
import hashlib
import mmap
import os
import struct
import sys
from pathlib import Path
from typing import Any

from tests.vm.inside.faults import call
from tests.vm.inside.loads import BLOB, MIB, File, Loads, setting

KINDS = ("memfd", "udmabuf", "heap:system")
DATA = b"".join(BLOB[number:] for number in range(3)) + BLOB[:777]
"""The content of files; no two blocks of it are alike."""
WARM = (5 * MIB, 3 * MIB)
OFFSET = MIB + 777
"""An offset at which blocks of a load would not end at folio boundaries by themselves."""
READ_AHEAD = 8192
"""In KiB: enough for folios of 2 MiB."""
CACHESTAT = 451
DIGEST = ("sh", "-c", "head -c $DMAFILE_BYTES /proc/self/fd/$DMAFILE_FD | sha256sum")
ENOUGH = 1.02
"""Allows for metadata of the file system; reading one of 12 folios twice would be more."""

libc = ctypes.CDLL(None, use_errno=True)


def cached(path: Path, start: int = 0, length: int = 0) -> int:
    """The number of cached pages of a file, or of a range of it."""
    counts = ctypes.create_string_buffer(40)
    with path.open("rb") as file:
        where = struct.pack("QQ", start, length)
        assert not libc.syscall(CACHESTAT, file.fileno(), where, counts, 0), ctypes.get_errno()
    return int(struct.unpack_from("Q", counts)[0])


def disk(path: Path) -> Path:
    """The sysfs folder of the disk with a file."""
    number = path.stat().st_dev
    return Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()


def sectors_read(path: Path) -> int:
    return int((disk(path) / "stat").read_text().split()[2])


class PageCache:
    def __init__(self, loads: Loads, drops: bool) -> None:
        self.loads, self.drops = loads, drops

    def cold(self, file: File, kind: str, *words: str, start: int = 0) -> None:
        case = f"{file.path} --to {kind} {' '.join(words)}"
        file.evict()
        assert cached(file.path) == 0, case
        before = sectors_read(file.path)
        report = self.loads.load(file, kind, *words, start=start)
        came = (sectors_read(file.path) - before) * 512
        wanted = len(file.data) - start
        assert report["bytes_buffered"] == wanted and report["bytes_direct"] == 0, (
            f"{case}: {report}"
        )
        assert wanted <= came <= ENOUGH * wanted, f"{case}: {came} bytes from the disk for {wanted}"
        self.is_told(report, case)
        self.leaves(file, 0, case, start)

    def warm(self, file: File) -> None:
        file.evict()
        with file.path.open("rb") as reader:
            os.posix_fadvise(reader.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            os.pread(reader.fileno(), WARM[1], WARM[0])
        before = cached(file.path)
        assert before == WARM[1] // mmap.PAGESIZE, before
        said = self.loads.command(file, "memfd", command=DIGEST)
        assert said.split()[0].decode() == hashlib.sha256(file.data).hexdigest()
        self.leaves(file, before, "partly cached")
        # The cached pages are the same as before.
        assert cached(file.path, *WARM) == before

    def leaves(self, file: File, before: int, case: str, start: int = 0) -> None:
        everything = -(-len(file.data) // mmap.PAGESIZE) - start // mmap.PAGESIZE
        left, wanted = cached(file.path), before if self.drops else everything
        assert left == wanted, f"{case}: {left} pages of {everything} are cached, and not {wanted}"

    def is_told(self, report: Any, case: str) -> None:
        choices = [one["choice"] for one in report["reasons"] if one["about"] == "cache"]
        assert choices == ["left as it was" if self.drops else "filled"], f"{case}: {choices}"

    def is_told_before(self, file: File) -> None:
        plan = self.loads.run("explain", str(file.path)).stdout
        assert ("reads leave nothing in the page cache" in plan) == self.drops, plan
        assert "RWF_DONTCACHE" in plan, plan
        doctor = self.loads.run("doctor", str(file.path)).stdout
        assert ("can drop their pages from the page cache" in doctor) == self.drops, doctor
        assert ("fill the page cache" in doctor) != self.drops, doctor


def main() -> None:
    loads, folder = Loads(*sys.argv[1:3]), Path(sys.argv[3])
    case = PageCache(loads, {"drops": True, "fills": False}[sys.argv[4]])
    journalled, plain = File(folder / "journalled", DATA), File(folder / "plain", DATA)
    # Writes to this file go through the journal of ext4, so it has no direct I/O; with delayed
    # allocation, the flag would have no effect.
    device = f"/dev/{disk(folder).name}"
    call("umount", str(folder))
    call("mount", "-o", "nodelalloc", device, str(folder))
    journalled.path.touch()
    call("chattr", "+j", str(journalled.path))
    for file in (journalled, plain):
        file.path.write_bytes(file.data)
    for kind in KINDS:
        case.cold(journalled, kind)
    case.warm(journalled)
    case.is_told_before(journalled)
    # Large folios, which a journalled file lacks. This file has direct I/O, but not into this
    # memory.
    back = setting(str(disk(plain.path) / "queue/read_ahead_kb"), READ_AHEAD)
    case.cold(plain, "heap:system", "--method=threads")
    case.cold(plain, "heap:system", "--method=threads", f"--offset={OFFSET}", start=OFFSET)
    back()
    # With --io=buffered, the page cache is filled.
    loads.load(journalled, "memfd", "--io=buffered")
    PageCache(loads, drops=False).leaves(journalled, 0, "--io=buffered")
    print(f"{loads.count} loads checked")


if __name__ == "__main__":
    main()
