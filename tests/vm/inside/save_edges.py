"""Saves at every boundary of size and offset, from every source, to files and into them.

    save_edges.py DMAFILE HELPERS edges KIND... -- FOLDER...    as root, with a raw disk
    save_edges.py DMAFILE HELPERS larger FOLDER      more bytes than memory

KINDS are the sources that this kernel must have. First, saves write to the disk in place; then it
gets a vfat file system, which is an additional folder. Saved bytes are compared with the source by
sha256sum(1) or cmp(1).
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.vm.inside.loads import BLOB, MIB, File, meminfo, pinned, settles
from tests.vm.inside.saves import call, names_in
from tests.vm.inside.sources import DATA, HUGE, PIECES, ROOM, sources

BLOCK = 64 << 10
BOUNCE = 512 << 10
DEFAULT = 4 * MIB
"""Size of the blocks of direct saves, which those of bounce buffers are smaller than."""
AROUND = (512, 4096, BLOCK, BOUNCE, HUGE)
SIZES = (0, 1, *(edge + more for edge in (*AROUND, DEFAULT) for more in (-1, 0, 1)))
OFFSETS = (0, *(edge + more for edge in AROUND for more in (-1, 0, 1)))
NO_HOLES = ("vfat",)
"""File systems without sparse files."""


class Edges:
    def __init__(self, program: str) -> None:
        self.dmafile = shutil.copy(program, "/tmp/dmafile")
        self.count = 0
        self.pinned = pinned()

    def save(
        self, case: str, source: int, to: Path, size: int, start: int = 0, at: int | None = None
    ) -> None:
        self.count += 1
        words = [self.dmafile, "save", f"fd:{source}@{start}", f"--length={size}"]
        if at is not None:
            words.append(f"--offset={at}")
        words += ("--quiet", str(to))
        done = subprocess.run(words, pass_fds=(source,), capture_output=True)
        assert (done.returncode, done.stderr) == (0, b""), f"{case}: {done}"

    def whole(self, source: str, fd: int, data: bytes, folder: Path) -> None:
        """Saves each size as a file, each from a different offset."""
        to = folder / "to"
        names = names_in(folder) | {"to"}
        for number, size in enumerate(SIZES):
            start = OFFSETS[number % len(OFFSETS)]
            case = f"{size} bytes from {start} of {source} to {folder}"
            self.save(case, fd, to, size, start)
            assert sha256(to) == hashlib.sha256(data[start : start + size]).hexdigest(), case
            assert names_in(folder) == names, f"{case}: {names_in(folder)}"
        to.unlink()

    def piped(self, folder: Path) -> None:
        to, names = folder / "to", names_in(folder) | {"to"}
        for size in SIZES:
            self.count += 1
            case = f"{size} bytes of a pipe to {folder}"
            words = [self.dmafile, "save", "-", "--quiet", str(to)]
            done = subprocess.run(words, input=DATA[:size], capture_output=True)
            assert (done.returncode, done.stderr) == (0, b""), f"{case}: {done}"
            assert sha256(to) == hashlib.sha256(DATA[:size]).hexdigest(), case
            assert names_in(folder) == names, f"{case}: {names_in(folder)}"
        to.unlink()

    def inside(self, source: str, fd: int, data: bytes, to: Path) -> None:
        """Saves to each offset of a file or device, with different sizes: nothing else changes."""
        for number, at in enumerate(OFFSETS):
            size = SIZES[(7 * number + 3) % len(SIZES)]
            start = OFFSETS[(3 * number + 1) % len(OFFSETS)]
            case = f"{size} bytes from {start} of {source} to {to}@{at}"
            room = at + size + BLOCK
            around = b"\xa5" * room
            with to.open("rb+") as file:
                file.write(around)
                os.fsync(file.fileno())
            self.save(case, fd, to, size, start, at)
            want = around[:at] + data[start : start + size] + around[at + size :]
            head = subprocess.run(("head", f"--bytes={room}", str(to)), stdout=subprocess.PIPE)
            assert head.stdout == want, f"{case}: {difference(head.stdout, want)}"

    def holes(self, source: str, fd: int, data: bytes, folder: Path) -> None:
        """All of a sparse file: its holes take no space."""
        to = folder / "to"
        self.save(f"all of {source} to {folder}", fd, to, ROOM)
        assert sha256(to) == hashlib.sha256(data).hexdigest(), folder
        space = to.stat().st_blocks * 512
        assert space <= sum(end - start + 2 * BLOCK for start, end in PIECES), (folder, space)
        to.unlink()

    def into(self, folder: Path) -> None:
        """Saves from every source and from a pipe, as a file and into one."""
        for name, fd, data in sources():
            self.whole(name, fd, data, folder)
            part = folder / "part"
            part.touch()
            self.inside(name, fd, data, part)
            part.unlink()
            if name == "sparse" and File(folder, b"").file_system not in NO_HOLES:
                self.holes(name, fd, data, folder)
            print(f"{folder}, {name}: {self.count} so far", flush=True)
        self.piped(folder)

    def settled(self) -> None:
        settles(lambda: pinned() - self.pinned, lambda more: not more, "pages stay pinned")


def difference(seen: bytes, want: bytes) -> str:
    wrong = [at for at in range(len(want)) if seen[at : at + 1] != want[at : at + 1]]
    return f"{len(wrong)} bytes, from {wrong[0]} to {wrong[-1]}"


def sha256(path: Path) -> str:
    return subprocess.check_output(("sha256sum", str(path)), text=True).split()[0]


def edges(edges: Edges, kinds: Sequence[str], folders: Sequence[str]) -> None:
    disk = os.environ["RAW"]
    found = []
    for name, fd, data in sources():
        edges.inside(name, fd, data, Path(disk))
        found.append(name)
        print(f"{name}: {edges.count} so far", flush=True)
    assert found == list(kinds), found
    call("modprobe", "vfat")
    call("busybox", "mkdosfs", disk)
    vfat = Path("/run/vfat")
    vfat.mkdir()
    call("mount", "-t", "vfat", disk, str(vfat))
    # Stock kernels count the pins of direct I/O on vfat wrongly: more are released than acquired.
    edges.settled()
    edges.into(vfat)
    edges.pinned = pinned()
    for folder in folders:
        edges.into(Path(folder))
    call("umount", str(vfat))


def larger(edges: Edges, folder: str) -> None:
    """Through bounce buffers, from a file and from a pipe."""
    source, to = Path(folder) / "source", Path(folder) / "to"
    size = meminfo("MemTotal:") * 1024 * 5 // 4 + 777
    with source.open("wb") as file:
        while file.tell() < size:
            # No two blocks of the file are alike.
            at = file.tell() // len(BLOB) * 511
            file.write((BLOB[at:] + BLOB[:at])[: size - file.tell()])
    for script in (f"save --quiet {source} {to}", f"save --quiet - {to} <{source}"):
        call("sh", "-c", f"{edges.dmafile} {script}")
        edges.count += 1
        call("cmp", str(source), str(to))


def main() -> None:
    program, _, part, *words = sys.argv[1:]
    these = Edges(program)
    if part == "edges":
        middle = words.index("--")
        edges(these, words[:middle], words[middle + 1 :])
    else:
        larger(these, *words)
    these.settled()
    print(f"{these.count} saves checked")


if __name__ == "__main__":
    main()
