"""Snapshots for crashes.py: several in turn in a folder, of two and of three sources."""

import hashlib
import json
import random
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.vm.inside.crashes import Tools, Wrong, call

KIB = 1 << 10
SIZES = (
    {"a": 300 * KIB + 777, "b": 5000},
    {"a": 200 * KIB + 1, "b": 64 * KIB},
    {"a": 4096, "b": 300 * KIB + 13, "c": 1},
    {"a": 300 * KIB + 777, "c": 128 * KIB + 511},
    {"b": 256 * KIB, "c": 4095},
)
"""The sources of each snapshot; the first one exists at the start."""
WAYS = (
    (),
    ("--method=uring", "--io=direct", "--block=64K"),
    ("--io=buffered",),
    ("--method=bounce", "--io=direct", "--block=64K"),
    ("--method=threads", "--io=direct", "--block=64K"),
)
FOLDER, MANIFEST = "task", "dmafile-snapshot.json"
LEFT = re.compile(r"[a-z]\.\d+\.dmafile|\..*\.dmafile-\d+")
Digests = Mapping[str, str]


class Scenario:
    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.versions: list[Digests] = []
        for number, sizes in enumerate(SIZES):
            digests = {}
            for name, size in sizes.items():
                data = random.Random(f"{number}{name}").randbytes(size)
                # Files on tmpfs are memory, and are saved like a memfd.
                self.source(number, name).write_bytes(data)
                digests[name] = hashlib.sha256(data).hexdigest()
            self.versions.append(digests)

    def source(self, number: int, name: str) -> Path:
        return self.tools.sources / f"{name}-{number}"

    def words(self, folder: Path, number: int) -> list[str]:
        sources = (f"{self.source(number, name)}={name}" for name in SIZES[number])
        way = ("--quiet", "--verify=sha256", *WAYS[number])
        return ["save", *sources, *way, str(folder / FOLDER)]

    def prepare(self, folder: Path) -> None:
        (folder / FOLDER).mkdir()
        call(self.tools.dmafile, *self.words(folder, 0))

    def work(self, folder: Path, mark: Callable[[str], None]) -> None:
        for number in range(1, len(SIZES)):
            self.tools.run(folder, *self.words(folder, number))
            mark(f"{number}")

    def check(self, folder: Path, marked: str) -> None:
        last = int(marked or 0)
        place = folder / FOLDER
        kept = self.is_one_of(place, self.versions[last : last + 2])
        left = [name for name in names(place) - kept if not LEFT.fullmatch(name)]
        if left:
            raise Wrong(f"{left} in the folder")
        if names(place) != kept:
            # The next save removes what a crash has left.
            call(self.tools.dmafile, *self.words(folder, 0))
            kept = self.is_one_of(place, self.versions[:1])
            if names(place) != kept:
                raise Wrong(f"{names(place) - kept} still there after the next save")

    def is_one_of(self, place: Path, versions: list[Digests]) -> set[str]:
        """Checks the valid snapshot; returns the names of its files."""
        # Checked without dmafile, as in docs/saving.md.
        manifest = json.loads((place / MANIFEST).read_bytes())
        sources = manifest["sources"]
        lines = "".join(f"{one['digest']}  {one['file']}\n" for one in sources)
        check = ("sha256sum", "--check", "--strict", "--quiet")
        done = subprocess.run(check, input=lines, cwd=place, capture_output=True, text=True)
        if done.returncode:
            raise Wrong(f"sha256sum: {done.stdout}{done.stderr}")
        digests = {one["name"]: one["digest"] for one in sources}
        if digests not in versions:
            known = [number for number, one in enumerate(self.versions) if one == digests]
            raise Wrong(f"the snapshot is version {known}" if known else f"a mixture: {digests}")
        # Checked as dmafile loads it.
        reader = str(self.tools.sources / "reader")
        command = (self.tools.dmafile, "load", str(place), "--quiet", "--", reader)
        loaded = subprocess.run(command, capture_output=True)
        if loaded.returncode:
            raise Wrong(f"cannot be loaded: {loaded.stderr.decode()}")
        header, _, data = loaded.stdout.partition(b"\n")
        pieces = [int(word.split(b":")[1]) for word in header.split()[2:]]
        for one, size in zip(sources, pieces, strict=True):
            digest = hashlib.sha256(data[: one["bytes"]]).hexdigest()
            if digest != one["digest"] or any(data[one["bytes"] : size]):
                raise Wrong(f"{one} is loaded with {digest}")
            data = data[size:]
        return {MANIFEST, *(one["file"] for one in sources)}


def names(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()}
