"""Tests that buffered writes from memory that is not mapped yet use large folios, if the file
system supports them.

    cold_writes.py FOLDER    in the machine, as root; the folder is on XFS

Ends with an assertion that names the case, or with a line that counts the writes.
"""

import mmap
import os
import sys
from pathlib import Path

from kernel.tests.vm.inside.copy_faults import opened
from tests.vm.inside.faults import call
from tests.vm.inside.loads import BLOB, MIB, difference

TRACING = Path("/sys/kernel/tracing")
SIZE = 32 * MIB
OFFSETS = (0, 5, 5 * mmap.PAGESIZE, 7 * mmap.PAGESIZE + 123)
"""Offsets in the source. A fault maps aligned groups of pages: a chunk may be partly mapped."""


def copier() -> str:
    """The function that copies to a folio; newer kernels have only the second one."""
    symbols = Path("/proc/kallsyms").read_text().split()
    names = ("copy_page_from_iter_atomic", "copy_folio_from_iter_atomic")
    return next(name for name in names if name in symbols)


def copies() -> int:
    """The number of attempts to copy data into a folio."""
    for line in (TRACING / "kprobe_profile").read_text().splitlines():
        name, hits, _ = line.split()
        if name == "copied":
            return int(hits)
    raise AssertionError("no probe")


def written(path: Path, source: memoryview) -> int:
    """Writes the source to a new file, compares the file, and returns the number of copies."""
    file = opened(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    before = copies()
    assert os.write(file, source) == len(source), "a short write"
    count = copies() - before
    seen = os.pread(file, len(source), 0)
    assert seen == source, f"{path}: {difference(seen, bytes(source))}"
    os.close(file)
    path.unlink()
    return count


def main(folder: str) -> None:
    (TRACING / "kprobe_events").write_text(f"p:copied {copier()}\n")
    (TRACING / "events" / "kprobes" / "enable").write_text("1")
    huge = Path("/run/huge")
    huge.mkdir()
    call("mount", "-t", "tmpfs", "-o", "huge=always", "none", str(huge))
    memory = os.memfd_create("source", os.MFD_CLOEXEC)
    for _ in range(SIZE // len(BLOB) + 1):
        os.write(memory, BLOB)
    count = 0
    for place in (Path(folder), huge):
        for offset in OFFSETS:
            mapping = mmap.mmap(memory, SIZE + len(BLOB), prot=mmap.PROT_READ)
            source = memoryview(mapping)[offset : offset + SIZE]
            cold = written(place / "cold", source)
            warm = written(place / "warm", source)
            print(f"# {place}, {offset}: {cold} copies of a cold source, {warm} of a warm one")
            assert warm < SIZE // mmap.PAGESIZE // 16, f"{place}: no large folios"
            # The first copy of each chunk fails. tmpfs keeps a partial copy: of the first pages of
            # the chunk, which were mapped together with the previous chunk.
            most = (3 if place == huge else 2) * warm + 2
            assert cold <= most, f"{place}, {offset}: {cold}, not {warm}"
            count += 2
            source.release()
            mapping.close()
    call("umount", str(huge))
    print(f"{count} writes checked")


if __name__ == "__main__":
    main(*sys.argv[1:])
