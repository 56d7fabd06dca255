"""What a load that cannot read directly leaves in the page cache, and what it reads from the disk.

    page_cache.py DMAFILE HELPERS FOLDER drops|fills    in the machine, as root

FOLDER is on an ext4 disk; the last word is what its kernel lets a load do. Ends with an assertion
that names the case, or with a line that counts them.
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
"""No two blocks of it are alike."""
WARM = (5 * MIB, 3 * MIB)
OFFSET = MIB + 777
"""Where blocks of a load that starts there would not end where folios do."""
READ_AHEAD = 8192
"""KiB: enough for folios of 2 MiB."""
CACHESTAT = 451
DIGEST = ("sh", "-c", "head -c $DMAFILE_BYTES /proc/self/fd/$DMAFILE_FD | sha256sum")
ENOUGH = 1.02
"""The file, and what the file system has to know of it; read twice is a folio at least, of 12."""

libc = ctypes.CDLL(None, use_errno=True)


def cached(path: Path, start: int = 0, length: int = 0) -> int:
    """Pages of a range, or of all of a file, that are in the page cache."""
    counts = ctypes.create_string_buffer(40)
    with path.open("rb") as file:
        where = struct.pack("QQ", start, length)
        assert not libc.syscall(CACHESTAT, file.fileno(), where, counts, 0), ctypes.get_errno()
    return int(struct.unpack_from("Q", counts)[0])


def disk(path: Path) -> Path:
    """The folder of sysfs of the disk that a file is on."""
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
        # It is the same pages that are left.
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
        assert ("dropped behind them" in plan) == self.drops, plan
        assert "RWF_DONTCACHE" in plan, plan
        doctor = self.loads.run("doctor", str(file.path)).stdout
        assert ("dropped behind them" in doctor) == self.drops, doctor
        assert ("fill the page cache" in doctor) != self.drops, doctor


def main() -> None:
    loads, folder = Loads(*sys.argv[1:3]), Path(sys.argv[3])
    case = PageCache(loads, {"drops": True, "fills": False}[sys.argv[4]])
    journalled, plain = File(folder / "journalled", DATA), File(folder / "plain", DATA)
    # What is written to it goes through ext4's journal, which direct I/O could not; the flag counts
    # for nothing while allocation is delayed.
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
    # Large folios, which a journalled file has not: it can be read directly, but not into there.
    back = setting(str(disk(plain.path) / "queue/read_ahead_kb"), READ_AHEAD)
    case.cold(plain, "heap:system", "--method=threads")
    case.cold(plain, "heap:system", "--method=threads", f"--offset={OFFSET}", start=OFFSET)
    back()
    # Who wants it in the page cache gets it there.
    loads.load(journalled, "memfd", "--io=buffered")
    PageCache(loads, drops=False).leaves(journalled, 0, "--io=buffered")
    print(f"{loads.count} loads checked")


if __name__ == "__main__":
    main()
