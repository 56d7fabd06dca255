"""Loads with a heap of the series, which allocates and reads in one call, and its limits.

    heap_read.py DMAFILE HELPERS FOLDER...    in the machine, as root

Fails with an assertion that names the case, or prints the number of cases.
"""

import hashlib
import sys
from pathlib import Path

from tests.vm.inside.loads import MAPPED, MIB, File, Loads, setting

KIND = "heap:system"
IN_ORDER = "/sys/module/dma_heap_read/parameters/in_order"
SIZES = (1, 4095, 4096, MIB + 1, 6 * MIB + 777)
BUFFERED = ("tmpfs",)
"""File systems whose direct reads are copies from the page cache."""


def whole(loads: Loads, folder: Path) -> None:
    """Files of several sizes, direct and buffered, allocated during the reads and before them."""
    for in_order in "NY":
        back = setting(IN_ORDER, in_order)
        for size in SIZES:
            file = File.of(folder / "file", size)
            digest = hashlib.sha256(file.data).hexdigest()
            for io in ("direct", "buffered"):
                if io == "direct" and file.file_system in BUFFERED:
                    continue
                report = loads.load(file, KIND, f"--io={io}", f"--verify=sha256={digest}")
                assert (report["method"], report["io"]) == ("heap-read", io), report
                assert report["verify"]["matched"], report
        back()


def others(loads: Loads, folder: Path) -> None:
    """Loads that the heap does not support use other methods."""
    size = 3 * MIB + 777
    file = File.of(folder / "file", size)
    cases = [["--offset=4096"], ["--length=8192"], ["--allocation=before"], ["--method=bounce"]]
    for words in cases:
        start = 4096 if words == ["--offset=4096"] else 0
        length = 8192 if words == ["--length=8192"] else size - start
        report = loads.load(file, KIND, *words, start=start, size=length)
        assert report["method"] != "heap-read", report
    sparse = File.sparse(folder / "sparse", [(0, MIB), (2 * MIB, 3 * MIB)], 4 * MIB + 1)
    report = loads.load(sparse, KIND)
    assert report["method"] != "heap-read", report
    for words in (["--offset=4096"], ["--allocation=before"]):
        line = loads.refused("load", str(file.path), f"--to={KIND}", "--method=heap-read", *words)
        assert "(EOPNOTSUPP)" in line, line
        # Of several reasons, the last one is reported.
        assert file.file_system in BUFFERED or "whole files" in line, line


def cached(loads: Loads, folder: Path) -> None:
    """A cached file is copied from the page cache."""
    file = File.of(folder / "file", 2 * MIB + 5)
    file.path.read_bytes()
    _, report = loads.read("a cached file", [*loads.words(file, KIND), str(file.path)])
    assert (report["method"], report["io"]) == ("heap-read", "buffered"), report


def best(loads: Loads, folder: Path) -> None:
    """`dma-buf` selects this heap for a whole file. For a part of a file, it selects the heap if
    memory is premapped for the disk, and a udmabuf otherwise.
    """
    file = File.of(folder / "file", 2 * MIB + 5)
    report = loads.load(file, "dma-buf")
    assert (report["kind"], report["method"]) == (KIND, "heap-read"), report
    report = loads.load(file, "dma-buf", "--offset=4096", start=4096)
    mapped = file.file_system in MAPPED
    assert report["kind"] == (KIND if mapped else "udmabuf"), report
    assert (report["method"] == "premap") == mapped, report


def main(dmafile: str, helpers: str, *folders: str) -> None:
    loads = Loads(dmafile, helpers)
    for folder in map(Path, folders):
        whole(loads, folder)
        others(loads, folder)
    cached(loads, Path(folders[0]))
    best(loads, Path(folders[0]))
    print(f"{loads.count} loads checked")


if __name__ == "__main__":
    main(*sys.argv[1:])
