"""Saves for crashes.py: over an old file several times, to a new name, through a symbolic link."""

import os
import random
from collections.abc import Callable
from pathlib import Path

from tests.vm.inside.crashes import BYSTANDER, Tools, Wrong
from tests.vm.inside.loads import MIB

MODE, ATTRIBUTE, VALUE = 0o640, "user.label", b"kept"
"""What a new file keeps of the one that it replaces."""
SIZES = (MIB + 13, 3 * MIB + 777, 2 * MIB, 5000, 4 * MIB + 1)
VERSIONS = [random.Random(number).randbytes(size) for number, size in enumerate(SIZES)]
"""The successive contents of `to`; it has the first one at the start."""
WAYS = (
    ("--method=uring", "--io=direct", "--block=64K"),
    ("--method=bounce", "--io=direct", "--block=64K"),
    ("--io=buffered",),
    ("--method=threads", "--io=direct", "--block=128K"),
)
OTHER = random.Random("other").randbytes(2 * MIB + 511)
NEW, LINKED = "new", "sub/real"


class Scenario:
    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        # Files on tmpfs are memory, and are saved like a memfd.
        for number, data in enumerate(VERSIONS):
            self.source(number).write_bytes(data)
        self.other = tools.sources / "other"
        self.other.write_bytes(OTHER)

    def source(self, number: int) -> Path:
        return self.tools.sources / f"version-{number}"

    def prepare(self, folder: Path) -> None:
        (folder / "sub").mkdir()
        (folder / "link").symlink_to(LINKED)
        for name in ("to", LINKED):
            path = folder / name
            path.write_bytes(VERSIONS[0])
            path.chmod(MODE)
            os.setxattr(path, ATTRIBUTE, VALUE)

    def work(self, folder: Path, mark: Callable[[str], None]) -> None:
        for number, way in enumerate(WAYS, start=1):
            self.save(folder, str(self.source(number)), "to", *way)
            mark(f"{number}")
        # From here on, `to` is the last version.
        self.save(folder, str(self.other), NEW, "--block=64K")
        mark("new")
        # For a pipe, no space is reserved in advance.
        self.save(folder, "-", "link", stdin=OTHER)
        mark("linked")

    def save(self, folder: Path, source: str, name: str, *way: str, stdin: bytes = b"") -> None:
        words = ("save", "--quiet", source, *way, str(folder / name))
        self.tools.run(folder, *words, stdin=stdin)

    def check(self, folder: Path, marked: str) -> None:
        done = {"": 0, "new": len(WAYS), "linked": len(WAYS)}
        last = done[marked] if marked in done else int(marked)
        self.is_one_of(folder / "to", VERSIONS[last : last + 2])
        if (folder / NEW).exists():
            self.is_one_of(folder / NEW, [OTHER], kept=False)
        elif marked in ("new", "linked"):
            raise Wrong("the new file is not there, though its save had returned")
        self.is_one_of(folder / LINKED, [OTHER] if marked == "linked" else [VERSIONS[0], OTHER])
        self.nothing_is_left(folder)

    def is_one_of(self, path: Path, versions: list[bytes], kept: bool = True) -> None:
        data = path.read_bytes()
        if data not in versions:
            older = [number for number, version in enumerate(VERSIONS) if version == data]
            what = f"version {older[0]}" if older else mixture(data, versions)
            raise Wrong(f"{path.name} is {what}")
        if kept:
            mode = path.stat().st_mode & 0o7777
            value = os.getxattr(path, ATTRIBUTE)
            if (mode, value) != (MODE, VALUE):
                raise Wrong(f"{path.name} has mode {mode:o} and attribute {value!r}")

    def nothing_is_left(self, folder: Path) -> None:
        """A crash may leave a temporary file, which the next save to the same target removes."""
        own = {"to", NEW, "link", "sub", BYSTANDER, "lost+found", "real"}
        for inside in (folder, folder / "sub"):
            left = [path for path in inside.iterdir() if path.name not in own]
            for path in left:
                place, _, number = path.name.removeprefix(".").partition(".dmafile-")
                if not number.isdigit():
                    raise Wrong(f"{path} was left behind")
                self.save(folder, str(self.source(3)), str((inside / place).relative_to(folder)))
                if path.exists():
                    raise Wrong(f"{path} is still there after the next save")


def mixture(data: bytes, versions: list[bytes]) -> str:
    """Describes a file that matches no version."""
    block = 4096
    counts = [
        sum(data[at : at + block] == version[at : at + block] for at in range(0, len(data), block))
        for version in versions
    ]
    zero = sum(not any(data[at : at + block]) for at in range(0, len(data), block))
    blocks = -(-len(data) // block)
    return (
        f"a mixture of {len(data)} bytes, of whose {blocks} blocks {counts} are right, {zero} zero"
    )
