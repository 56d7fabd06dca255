"""Every kind of dma-buf with every method from every file system, on a real kernel.

    matrix.py DMAFILE HELPERS short|whole KIND... -- FOLDER...    as root; a folder per file system

`short` tests all methods, sizes, holes and ranges once in the first folder, and a few cases in the
others; `whole` tests all combinations. Fails with an assertion that names the case, or prints the
number of cases.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.vm.inside.loads import MIB, File, Loads, setting

CHUNK = 2 * MIB
BLOCK = "--block=256K"
TAILS = (0, 1, 511, 512, 513, 4095)
SIZES = (1, 4096, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 777)
RANGES = ((777, MIB + 5), (4096, 4096), (2 * CHUNK + 1, CHUNK + 776), (CHUNK - 1, 2))
LIMIT = "/sys/module/udmabuf/parameters/size_limit_mb"
POOL = "/proc/sys/vm/nr_hugepages"

BUFFERED = ("uring", "threads")
METHODS = {
    "udmabuf": (("uring", "threads"), BUFFERED),
    # Only the CPU can write to memory of a heap, not a disk.
    "heap:system": (("bounce",), BUFFERED),
    "module": (("module", "bounce"), (*BUFFERED, "module")),
}
"""The direct and the buffered methods of each kind."""
UNPINNED = ("uring", "threads")
REFUSED = {"udmabuf": ("module",), "heap:system": (*UNPINNED, "module"), "module": UNPINNED}
"""The methods of each kind that cannot read directly."""


class Matrix:
    def __init__(self, loads: Loads, kind: str, folder: Path, whole: bool) -> None:
        self.loads, self.kind, self.folder, self.whole = loads, kind, folder, whole
        self.direct, self.buffered = METHODS[kind]
        # tmpfs has its files in memory, without direct I/O.
        self.in_memory = File(folder / "file", b"").file_system == "tmpfs"

    def load(self, file: File, *words: str, start: int = 0, size: int | None = None) -> Any:
        chunk = [f"--chunk={CHUNK}", BLOCK]
        return self.loads.load(file, self.kind, *chunk, *words, start=start, size=size)

    def file(self, size: int) -> File:
        return File.of(self.folder / "file", size)

    def ways(self, every: bool) -> Iterator[tuple[str, ...]]:
        """The options of all methods, or of the default only."""
        yield () if self.in_memory else ("--io=direct",)
        if every:
            direct = () if self.in_memory else self.direct
            yield from ((f"--method={name}", "--io=direct") for name in direct)
            yield from ((f"--method={name}", "--io=buffered") for name in self.buffered)

    def sizes(self) -> None:
        for size in (*SIZES, *(CHUNK + tail for tail in TAILS)):
            file = self.file(size)
            for way in self.ways(self.whole):
                self.load(file, *way)

    def methods(self) -> None:
        file = self.file(2 * CHUNK + 777)
        for way in self.ways(every=True):
            self.load(file, *way)

    def few(self) -> None:
        """The cases in which file systems differ: the alignment of direct reads."""
        for size in (1, CHUNK + 513, 2 * CHUNK):
            file = self.file(size)
            for way in self.ways(every=False):
                self.load(file, *way)
                if size > CHUNK:
                    self.load(file, "--offset=777", "--length=1M", *way, start=777, size=MIB)

    def ranges(self) -> None:
        file = self.file(3 * CHUNK + 777)
        for start, size in RANGES:
            for way in self.ways(self.whole):
                self.load(
                    file, f"--offset={start}", f"--length={size}", *way, start=start, size=size
                )
                if "--io=buffered" in way:
                    # Pages that are being read ahead cannot be dropped, and would be counted for
                    # the next load: this waits for them.
                    file.path.read_bytes()

    def holes(self) -> None:
        """Holes at the start, in the middle, at the end, and everywhere."""
        end = 2 * CHUNK + 777
        for pieces in (
            [(CHUNK, end)],
            [(0, MIB), (CHUNK + MIB, end)],
            [(0, CHUNK)],
            [(4096, 8192), (CHUNK, CHUNK + 4096)],
            [],
        ):
            file = File.sparse(self.folder / "sparse", pieces, end)
            for way in self.ways(self.whole):
                self.load(file, *way)

    def pages(self) -> None:
        """Base, transparent huge and hugetlb pages, allocated ahead and by the reads."""
        file = self.file(2 * CHUNK + 777)
        back = setting(POOL, 4)
        for pages in ("base", "thp", "huge"):
            for when in ("before", "ahead", "in-read"):
                for way in self.ways(self.whole and when == "ahead"):
                    words = (f"--pages={pages}", f"--allocation={when}", *way)
                    got = self.load(file, *words)["pages"]
                    # Pages that the reads allocate are not merged into huge pages.
                    assert got == pages or (pages, when) == ("thp", "in-read"), (words, got)
        back()

    def steps(self) -> None:
        """Allocated ahead of the reads, before them, and by them."""
        for size in (1, CHUNK + 777):
            file = self.file(size)
            for when in ("ahead", "before", "in-read"):
                for way in self.ways(self.whole):
                    self.load(file, f"--allocation={when}", *way)
                    words = ("--offset=777", "--length=1M", f"--allocation={when}", *way)
                    if size > MIB + 777:
                        self.load(file, *words, start=777, size=MIB)

    def refusals(self) -> None:
        """Methods that cannot fill this memory are refused."""
        file = self.file(5000)
        for name in REFUSED[self.kind]:
            words = ("load", str(file.path), "--to", self.kind, "--io=direct", f"--method={name}")
            line = self.loads.refused(*words)
            assert "(EOPNOTSUPP)" in line, line

    def limits(self) -> None:
        """Above the limit, a buffer has several adjacent dma-bufs, each within the limit."""
        file = self.file(3 * CHUNK + 777)
        for mib, count in ((1, 7), (2, 4), (5, 2), (64, 1)):
            back = setting(LIMIT, mib)
            [way] = self.ways(every=False)
            pieces = self.load(file, *way)["dma_bufs"]
            assert len(pieces) == count and pieces[0]["bytes"] <= mib * MIB, (mib, pieces)
            back()


def fills(loads: Loads, folder: Path, whole: bool) -> None:
    """Existing memory is filled completely, or in a range with other bytes around it."""
    ways: list[tuple[str, ...]] = [()]
    if whole:
        ways += [("--io=buffered",)]
        if File(folder / "file", b"").file_system != "tmpfs":
            ways += [("--io=direct",)]
    nodes = {
        "udmabuf": "/dev/udmabuf",
        "heap:system": "/dev/dma_heap/system",
        "module": "/dev/dmafile",
    }
    for kind in ("memfd", *(kind for kind, node in nodes.items() if Path(node).exists())):
        for size in (1, CHUNK + 777) if whole else (CHUNK + 777,):
            file = File.of(folder / "file", size)
            for words in ways:
                report = loads.fill(file, kind, 2 * CHUNK, *words)
                assert (report["method"] == "module") == (kind == "module"), (kind, report)
                # At the start, inside a page, inside a block, and up to the last byte.
                for at in (0, 777, MIB + 512, 2 * CHUNK - size):
                    if at + size <= 2 * CHUNK:
                        loads.fill(file, kind, 2 * CHUNK, *words, at=at)


def main(dmafile: str, helpers: str, extent: str, *rest: str) -> None:
    loads, whole = Loads(dmafile, helpers), extent == "whole"
    end = rest.index("--")
    kinds, folders = rest[:end], [Path(folder) for folder in rest[end + 1 :]]
    for number, folder in enumerate(folders):
        for kind in kinds:
            start, count = time.monotonic(), loads.count
            if kind == "fd":
                if whole or number == 0:
                    fills(loads, folder, whole)
            else:
                cases(Matrix(loads, kind, folder, whole), first=number == 0)
            spent = time.monotonic() - start
            print(f"{folder} {kind}: {loads.count - count} in {spent:.0f} s", flush=True)
    loads.nothing_stays_pinned("all")
    print(f"{loads.count} loads checked")


def cases(matrix: Matrix, first: bool) -> None:
    if not matrix.whole and not first:
        matrix.few()
        return
    matrix.sizes()
    matrix.ranges()
    matrix.holes()
    if matrix.kind == "udmabuf":
        # For other dma-bufs, the exporter chooses the page size.
        matrix.pages()
    if matrix.kind == "module":
        matrix.steps()
    if not matrix.whole:
        matrix.methods()
    if first:
        matrix.refusals()
        if matrix.kind == "udmabuf":
            matrix.limits()


if __name__ == "__main__":
    main(*sys.argv[1:])
