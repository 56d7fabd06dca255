"""Copies between disks and memory by the kernel of the series, as dmafile uses them.

    copy_range.py DMAFILE HELPERS FOLDER...    in the machine, as root

Fails with an assertion that names the case, or prints the number of cases.
"""

import sys
from pathlib import Path

from tests.vm.inside.loads import MAPPED, MIB, File, Loads, setting

METHOD = "copy-file-range"
SIZES = (1, 4095, 4096, MIB + 1, 6 * MIB + 777)
FILLED = ("memfd", "udmabuf", "heap:system")
"""Kinds of existing memory."""
MADE = ("memfd", "udmabuf", "heap:system")
"""Kinds of memory that the load makes, for which the method is requested."""
PLACES = ((0, 0), (777, 777), (4096, 8192), (5, 4098), (MIB + 1, 0))
"""Where a range begins in the file, and its offset in memory."""
BLOCK = 512
"""The block size of the disks of the machine."""
POOL = "/proc/sys/vm/nr_hugepages"
OVERLAPS = "/sys/kernel/debug/dma-api/driver_filter"
"""A filter on a driver that does not exist: see kernel/tests/vm/test_series.py."""


def existing(loads: Loads, folder: Path) -> None:
    """Existing memory is filled with this method by default, directly and buffered, except for
    dma-bufs that are premapped.
    """
    for kind in FILLED:
        for size in SIZES:
            file = File.of(folder / "file", size)
            room = (size + 8191) // 4096 * 4096
            for io in ("direct", "buffered"):
                report = loads.fill(file, kind, room, f"--io={io}")
                method = best(kind, file, io)
                assert (report["method"], report["io"]) == (method, io), report


def best(kind: str, file: File, io: str, congruent: bool = True) -> str:
    """The default method."""
    mapped = kind != "memfd" and io == "direct" and file.file_system in MAPPED
    return "premap" if mapped and congruent else METHOD


def parts(loads: Loads, folder: Path) -> None:
    """A range of a file is loaded to any offset, and nothing around it changes."""
    file = File.of(folder / "file", 3 * MIB + 777)
    for kind in FILLED:
        for start, at in PLACES:
            for length in (1, 4096, 2 * MIB - 3):
                part = File(file.path, file.data[start : start + length])
                for io in ("direct", "buffered"):
                    words = (f"--offset={start}", f"--length={length}", f"--io={io}")
                    report = loads.fill(part, kind, 4 * MIB, *words, at=at)
                    method = best(kind, part, io, (start - at) % BLOCK == 0)
                    assert (report["method"], report["io"]) == (method, io), report


def made(loads: Loads, folder: Path) -> None:
    """On request, the method fills memory that the load makes."""
    file = File.of(folder / "file", 5 * MIB + 777)
    back = setting(POOL, 4)
    for kind in MADE:
        for io in ("direct", "buffered"):
            pages = [[]] if kind.startswith("heap") else [["--pages=base"], ["--pages=thp"]]
            pages += [["--pages=huge"]] if kind == "memfd" else []
            for words in pages:
                report = loads.load(file, kind, f"--method={METHOD}", f"--io={io}", *words)
                assert (report["method"], report["io"]) == (METHOD, io), report
    back()
    sparse = File.sparse(folder / "sparse", [(0, MIB), (2 * MIB, 3 * MIB)], 4 * MIB + 1)
    for kind in MADE:
        loads.load(sparse, kind, f"--method={METHOD}")


def main(dmafile: str, helpers: str, *folders: str) -> None:
    loads = Loads(dmafile, helpers)
    if Path(OVERLAPS).exists():
        setting(OVERLAPS, "none")
    for folder in map(Path, folders):
        existing(loads, folder)
        parts(loads, folder)
        made(loads, folder)
    print(f"{loads.count} loads checked")


if __name__ == "__main__":
    main(*sys.argv[1:])
