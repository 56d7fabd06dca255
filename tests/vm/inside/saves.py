"""Saves on a real kernel: from every kind of memory to every file system, and to a failing disk.

    saves.py DMAFILE HELPERS ways KIND... -- FOLDER...    as root; one folder per file system
    saves.py DMAFILE HELPERS series FOLDER...             as root, with the series, on NVMe
    saves.py DMAFILE HELPERS faults                       as root, with loop and dm-flakey

Saved bytes are compared with the source by cmp(1). Fails with an assertion that names the case, or
prints the number of cases.
"""

import contextlib
import json
import mmap
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.vm.inside.loads import MIB, File, as_user, pinned, settles
from tests.vm.inside.sources import DATA, SOURCES

BLOCK = 64 << 10
SIZES = (1, 4095, 4096, 4097, MIB - 1, MIB, MIB + 1, 5 * MIB + 777)
ODD = 3 * MIB + 777
OLD = b"old" * 5000

METHODS = {
    "memfd": ("uring", "threads", "bounce"),
    "udmabuf": ("bounce",),
    "heap:system": ("bounce",),
    "module": ("module", "bounce"),
}
"""The methods of each kind that write directly on any kernel."""
REFUSED = {
    "memfd": ("module", "premap"),
    "udmabuf": ("uring", "module"),
    "heap:system": ("uring", "module"),
    "module": ("uring",),
}
"""The methods of each kind that cannot: most mappings of dma-bufs cannot be pinned."""
SECTOR = 512
SECTORS = (128 * MIB) // SECTOR


def call(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}: {done.stderr}"


def names_in(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


class Saves:
    def __init__(self, dmafile: str) -> None:
        self.dmafile = shutil.copy(dmafile, "/tmp/dmafile")
        self.report = Path("/tmp/report.json")
        self.file = File.of(Path("/tmp/source"), max(SIZES))
        self.made: dict[str, int] = {}
        self.count = 0
        self.pinned = pinned()

    def words(self, kind: str, to: str, *words: str, start: int, size: int) -> list[str]:
        """The command that saves a part of memory of this kind."""
        origin = f"fd:{self.source(kind)}@{start}"
        save = ["save", origin, f"--length={size}", f"--json={self.report}", "--quiet"]
        return [self.dmafile, *save, *words, to]

    def source(self, kind: str) -> int:
        """The descriptor of memory of this kind, which is made once."""
        if kind not in self.made:
            self.made[kind] = SOURCES[kind]()
            # The pages of a udmabuf are pinned.
            self.pinned = pinned()
        return self.made[kind]

    def loaded(self, kind: str, to: Path) -> None:
        """Runs a load into memory of this kind, whose COMMAND saves it."""
        self.count += 1
        save = f"save fd:$DMAFILE_FD@$DMAFILE_OFFSET --length={MIB + 1} --quiet {to}"
        load = [self.dmafile, "load", str(self.file.path), "--to", kind, "--quiet"]
        call(*load, "--", "sh", "-c", f"exec {self.dmafile} {save}")
        Path("/tmp/want").write_bytes(self.file.data[: MIB + 1])
        call("cmp", "/tmp/want", str(to))

    def save(
        self, kind: str, to: Path, *words: str, start: int = 0, size: int, at: int | None = None
    ) -> Any:
        """Saves a part of this memory as a file, or into a file; returns the report."""
        self.count += 1
        if at is not None:
            words = (*words, f"--offset={at}")
        case = f"{size} bytes from {start} of {kind} to {to} by {' '.join(words)}"
        before = to.read_bytes() if at is not None else b""
        names = names_in(to.parent) | {to.name}
        self.report.unlink(missing_ok=True)
        command = self.words(kind, str(to), *words, start=start, size=size)
        done = self.run(kind, command)
        assert done.returncode == 0, f"{case}: {done.stderr}"
        report = json.loads(self.report.read_text())
        if "--io=direct" in words:
            # Before the comparison, which reads it.
            cached = ("fincore", "--bytes", "--noheadings", "--output=RES", str(to))
            pages = int(subprocess.check_output(cached)) // mmap.PAGESIZE
            assert pages == 0 or at is not None, f"{case}: {pages} pages in the page cache"
        want = DATA[start : start + size]
        if at is not None:
            want = before[:at].ljust(at, b"\0") + want + before[at + size :]
        Path("/tmp/want").write_bytes(want)
        call("cmp", "/tmp/want", str(to))
        assert names_in(to.parent) == names, f"{case}: {names_in(to.parent)}"
        settles(lambda: pinned() - self.pinned, lambda more: not more, f"{case}: pages stay pinned")
        return report

    def run(self, kind: str, command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        inherited = (self.source(kind),)
        return subprocess.run(command, pass_fds=inherited, capture_output=True, text=True)

    def refused(self, kind: str, to: Path, *words: str) -> str:
        """The one line of a save that must fail and change nothing."""
        self.count += 1
        names, before = names_in(to.parent), to.read_bytes()
        command = self.words(kind, str(to), *words, start=0, size=ODD)
        done = self.run(kind, command)
        case = f"{kind} by {words}: {done}"
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, case
        assert done.stderr.startswith("dmafile: ") and done.stdout == "", case
        assert names_in(to.parent) == names, f"{case}: {names_in(to.parent)}"
        assert to.read_bytes() == before, case
        return done.stderr


def ways(saves: Saves, kinds: Sequence[str], folders: Sequence[str]) -> None:
    for folder in map(Path, folders):
        to = folder / "to"
        in_memory = File(to, b"").file_system == "tmpfs"
        for kind in kinds:
            direct = () if in_memory else METHODS[kind]
            for method in direct:
                words = (f"--method={method}", "--io=direct")
                report = saves.save(kind, to, *words, f"--block={BLOCK}", size=ODD)
                assert report["method"] == method, report
                assert report["bytes_direct"] == ODD - ODD % mmap.PAGESIZE, report
            for size in SIZES:
                saves.save(kind, to, size=size)
            saves.loaded(kind, to)
            saves.save(kind, to, "--io=buffered", size=ODD)
            saves.save(kind, to, "--verify=sha256", start=777, size=ODD)
            saves.save(kind, to, start=4096, size=MIB, at=4096)
            saves.save(kind, to, start=1, size=MIB + 1, at=MIB - 7)
            for method in REFUSED[kind]:
                line = saves.refused(kind, to, f"--method={method}", "--io=direct")
                assert "cannot save like this: " in line, line
            to.unlink()
        # From a file and from a pipe.
        for source in (f"save {saves.file.path}", f"save - <{saves.file.path}"):
            save, _, stdin = source.partition("<")
            script = f"{saves.dmafile} {save} --quiet {to}" + (f" <{stdin}" if stdin else "")
            call("sh", "-c", script)
            call("cmp", str(saves.file.path), str(to))
            saves.count += 1
        # As a user without write permission on the folder.
        folder.chmod(0o755)
        command = as_user([saves.dmafile, "save", "/proc/self/exe", f"{folder}/new"])
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 1 and "(EACCES)" in done.stderr, done
        to.unlink()


def series(saves: Saves, folders: Sequence[str]) -> None:
    """The methods that the series adds: each by name, and the first one by default."""
    for folder in map(Path, folders):
        to = folder / "to"
        premaps = File(to, b"").file_system in ("ext4", "xfs")
        for kind in ("heap:system", "udmabuf"):
            methods = (*("premap",)[: int(premaps)], "copy-file-range")
            for method in methods:
                words = (f"--method={method}", "--io=direct")
                for size in (*SIZES, ODD):
                    report = saves.save(kind, to, *words, size=size)
                    assert report["method"] == method, report
                    assert report["bytes_direct"] == size - size % mmap.PAGESIZE, report
                report = saves.save(kind, to, *words, f"--block={BLOCK}", start=4096, size=ODD)
                assert report["method"] == method, report
                saves.save(kind, to, *words, start=4096, size=MIB + 1, at=8192)
            report = saves.save(kind, to, "--verify=sha256", size=ODD)
            assert report["method"] == methods[0], report
            saves.save(kind, to, start=777, size=ODD)
            saves.save(kind, to, start=1, size=MIB + 1, at=MIB - 7)
        to.unlink()


@contextlib.contextmanager
def disk() -> Iterator[Path]:
    """A file system with a file, on a disk that can be made to fail."""
    image, folder = Path("/tmp/image"), Path("/tmp/failing")
    with image.open("wb") as file:
        file.truncate(SECTORS * SECTOR)
    folder.mkdir(exist_ok=True)
    loop = subprocess.check_output(("losetup", "-f", "--show", str(image)), text=True).strip()
    try:
        call("dmsetup", "create", "failing", "--table", f"0 {SECTORS} linear {loop} 0")
        # There is no udev that would make the node.
        call("dmsetup", "mknodes")
        table = f"0 {SECTORS} flakey {loop} 0 0 3600 1 error_writes"
        Path("/tmp/table").write_text(table)
        call("mkfs.ext4", "-q", "/dev/mapper/failing")
        call("mount", "/dev/mapper/failing", str(folder))
        (folder / "to").write_bytes(OLD)
        call("sync")
        yield folder
    finally:
        subprocess.run(("umount", str(folder)), capture_output=True)
        subprocess.run(("dmsetup", "remove", "failing"), capture_output=True)
        subprocess.run(("losetup", "-d", loop), capture_output=True)


def faults(saves: Saves) -> None:
    call("modprobe", "-a", "dm-mod", "dm-flakey", "loop")
    # A write that fails at once, and one that fails at the sync.
    for words, says in (
        (("--io=direct",), "cannot write: "),
        (("--io=direct", "--method=threads"), "cannot write: "),
        (("--io=direct", "--method=bounce"), "cannot write: "),
        (("--io=buffered",), "cannot sync: "),
    ):
        with disk() as folder:
            to = folder / "to"
            names = names_in(folder)
            call("dmsetup", "suspend", "--nolockfs", "failing")
            call("dmsetup", "load", "failing", "/tmp/table")
            call("dmsetup", "resume", "failing")
            line = saves.refused("memfd", to, *words)
            assert says in line and "(EIO); the device failed to write" in line, line
            # The disk itself also has the old file.
            call("umount", str(folder))
            call("dmsetup", "remove", "failing")
            loop = Path("/tmp/table").read_text().split()[3]
            call("mount", loop, str(folder))
            assert to.read_bytes() == OLD, words
            assert names_in(folder) == names, names_in(folder)


def main() -> None:
    dmafile, _, part, *words = sys.argv[1:]
    saves = Saves(dmafile)
    if part == "ways":
        middle = words.index("--")
        ways(saves, words[:middle], words[middle + 1 :])
    elif part == "series":
        series(saves, words)
    else:
        faults(saves)
    print(f"{saves.count} saves checked")


if __name__ == "__main__":
    main()
