"""Loads files into udmabufs on a real kernel, and reads them back by the dma-bufs' own mappings.

    udmabuf.py DMAFILE FOLDER...    in the machine, as root; one folder a file system

The first folder gets every case, the others sizes and ranges. Ends with an assertion that names
the case, or with a line that counts them.
"""

import hashlib
import json
import mmap
import os
import random
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MIB = 1 << 20
GATHER = 4 * MIB
SIZES = (1, 4095, 4096, GATHER - 1, GATHER, GATHER + 1, 3 * GATHER + 777)
TAILS = (511, 512, 513)
LIMIT = Path("/sys/module/udmabuf/parameters/size_limit_mb")
NODE = Path("/dev/udmabuf")


class Cases:
    """Loads, checked one by one."""

    def __init__(self, dmafile: str) -> None:
        # The host's files are far away.
        self.dmafile = shutil.copy(dmafile, "/tmp/dmafile")
        self.reader = shutil.copy(Path(__file__).with_name("read_dmabufs.py"), "/tmp")
        self.count = 0
        self.report = Path("/tmp/report.json")

    def load(self, path: Path, *words: str, start: int = 0, size: int | None = None) -> Any:
        """One load of a cold file, checked byte for byte; its report."""
        case = f"{path} {' '.join(words)}"
        self.count += 1
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        command = [self.dmafile, "load", str(path), "--to", "udmabuf", "--quiet", *words]
        command += [f"--json={self.report}", "--gather", str(GATHER), "--block", str(MIB)]
        command += ["--", sys.executable, "-I", "-S", str(self.reader)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{case}: {done.stderr}"
        report = json.loads(self.report.read_text())
        # Asked before the file is read to compare.
        left = cached(path) if "--io=direct" in words else 0
        assert left <= self.allowed(path), f"{case}: {left} bytes in the page cache"
        fds, digest, clean = done.stdout.split()
        want = path.read_bytes()[start : None if size is None else start + size]
        assert digest == hashlib.sha256(want).hexdigest(), f"{case}: wrong bytes"
        assert clean == "1", f"{case}: bytes around them are not zero"
        assert int(fds) == len(report["dma_bufs"]), f"{case}: {report['dma_bufs']}"
        end = 0
        for one in report["dma_bufs"]:
            assert one["at"] == end, f"{case}: {report['dma_bufs']}"
            end += one["bytes"]
        assert end >= report["offset"] + len(want), f"{case}: {report['dma_bufs']}"
        return report

    def allowed(self, path: Path) -> int:
        """What direct reads may leave: btrfs reads a part of a block through the page cache."""
        return mmap.PAGESIZE if file_system(path) == "btrfs" else 0

    def refused(self, *words: str, user: bool = False) -> str:
        """The line with which a load fails."""
        command = [self.dmafile, "load", *words, "--to", "udmabuf", "--quiet"]
        run_as = {"user": 1000, "group": 1000, "extra_groups": []} if user else {}
        done = subprocess.run(command, capture_output=True, text=True, **run_as)  # type: ignore[call-overload]
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, f"{words}: {done}"
        self.count += 1
        return str(done.stderr)


def cached(path: Path) -> int:
    command = ["fincore", "--bytes", "--noheadings", "--output", "RES", str(path)]
    return int(subprocess.check_output(command))


def pinned() -> int:
    """Pages that are pinned on this machine."""
    counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return int(counts["nr_foll_pin_acquired"]) - int(counts["nr_foll_pin_released"])


def write(path: Path, size: int) -> Path:
    path.write_bytes(random.Random(size).randbytes(size))
    return path


def matrix(cases: Cases, folder: Path) -> None:
    """Sizes, ranges and methods, on one file system."""
    direct = [] if file_system(folder) == "tmpfs" else ["--io=direct"]
    for size in SIZES:
        cases.load(write(folder / "sized", size), *direct)
    path = write(folder / "file", 3 * GATHER + 777)
    for tail in TAILS:
        size = GATHER + tail
        cases.load(path, f"--length={size}", *direct, size=size)
    for start, size in ((777, MIB + 5), (4096, 4096), (2 * GATHER + 1, GATHER + 776)):
        words = [f"--offset={start}", f"--length={size}", *direct]
        cases.load(path, *words, start=start, size=size)


def methods(cases: Cases, folder: Path) -> None:
    path = write(folder / "file", 3 * GATHER + 777)
    for method in ("uring", "threads", "read", "sendfile", "splice"):
        report = cases.load(path, f"--method={method}", "--io=direct")
        assert report["method"] == method, report
    for method in ("mmap", "read", "sendfile"):
        cases.load(path, f"--method={method}")
    for pages in ("4k", "thp"):
        report = cases.load(path, f"--pages={pages}", "--io=direct")
        assert report["pages"] == pages, report
    for when in ("before", "in-read"):
        cases.load(path, f"--allocation={when}", "--io=direct")
    Path("/proc/sys/vm/nr_hugepages").write_text("16")
    report = cases.load(path, "--pages=huge", "--io=direct")
    assert report["pages"] == "huge", report
    Path("/proc/sys/vm/nr_hugepages").write_text("0")


def holes(cases: Cases, folder: Path) -> None:
    path = folder / "sparse"
    for data in ((0,), (GATHER,), (3 * GATHER,), (0, 2 * GATHER)):
        path.unlink(missing_ok=True)
        with path.open("wb") as file:
            for start in data:
                os.pwrite(file.fileno(), random.Random(start).randbytes(MIB), start)
            file.truncate(3 * GATHER + MIB + 777)
        cases.load(path, "--io=direct")


def limits(cases: Cases, folder: Path) -> None:
    """Above the limit there are several dma-bufs, each within it."""
    before = LIMIT.read_text()
    path = write(folder / "file", 3 * GATHER + 777)
    for mib, count in ((1, 13), (4, 4), (5, 4), (64, 1)):
        LIMIT.write_text(str(mib))
        pieces = cases.load(path, "--io=direct")["dma_bufs"]
        assert len(pieces) == count and pieces[0]["bytes"] <= mib * MIB, pieces
    LIMIT.write_text(before)


def users(cases: Cases, folder: Path) -> None:
    """Who may not open the node is told so, and who may needs nothing else."""
    path = write(folder / "file", GATHER)
    path.chmod(stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)
    NODE.chmod(0o600)
    line = cases.refused(str(path), user=True)
    assert "/dev/udmabuf cannot be opened (EACCES)" in line and "usermod" in line, line


def file_system(folder: Path) -> str:
    return subprocess.check_output(["stat", "-fc%T", str(folder)], text=True).strip()


def main(dmafile: str, folders: Sequence[Path]) -> None:
    cases = Cases(dmafile)
    if not NODE.exists():
        line = cases.refused(str(write(folders[0] / "file", 5000)))
        assert "there is no /dev/udmabuf (ENOENT)" in line and "modprobe" in line, line
        print("no udmabuf here: refused, as it should be")
        return
    before = pinned()
    for folder in folders:
        matrix(cases, folder)
    methods(cases, folders[0])
    holes(cases, folders[0])
    limits(cases, folders[0])
    users(cases, folders[0])
    assert pinned() == before, f"{pinned() - before} pages stay pinned"
    print(f"{cases.count} loads checked")


if __name__ == "__main__":
    main(sys.argv[1], [Path(folder) for folder in sys.argv[2:]])
