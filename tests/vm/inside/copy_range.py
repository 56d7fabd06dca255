"""What the kernel of the series copies between disks and memory, as dmafile uses it.

    copy_range.py DMAFILE HELPERS FOLDER...    in the machine, as root

Ends with an assertion that names the case, or with a line that counts them.
"""

import sys
from pathlib import Path

from tests.vm.inside.loads import MIB, File, Loads, setting

METHOD = "copy-file-range"
SIZES = (1, 4095, 4096, MIB + 1, 6 * MIB + 777)
FILLED = ("memfd", "udmabuf", "heap:system")
"""Memory of somebody else."""
MADE = ("memfd", "udmabuf", "heap:system")
"""Memory of the load's own, in which it is asked for by name."""
PLACES = ((0, 0), (777, 777), (4096, 8192), (5, 4098), (MIB + 1, 0))
"""Where a range begins in the file, and where it goes."""
MAPPED = ("ext4", "xfs")
"""File systems for whose files memory is mapped."""
BLOCK = 512
"""Of the machine's disks."""
POOL = "/proc/sys/vm/nr_hugepages"
OVERLAPS = "/sys/kernel/debug/dma-api/driver_filter"
"""By a driver that isn't there: kernel/tests/vm/test_series.py says why."""


def existing(loads: Loads, folder: Path) -> None:
    """Memory that is there is filled so without being asked to, in both ways; but for dma-bufs that
    are mapped for the disk.
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
    """The method that nobody has to name."""
    mapped = kind != "memfd" and io == "direct" and file.file_system in MAPPED
    return "premap" if mapped and congruent else METHOD


def parts(loads: Loads, folder: Path) -> None:
    """A range of a file to any place, and nothing around it is touched."""
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
    """By name, into memory that the load makes."""
    file = File.of(folder / "file", 5 * MIB + 777)
    back = setting(POOL, 4)
    for kind in MADE:
        for io in ("direct", "buffered"):
            pages = [[]] if kind.startswith("heap") else [["--pages=4k"], ["--pages=thp"]]
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
