"""Loads in a machine, compared byte for byte with what a program of somebody else reads.

Few imports, and everything that is started lies in the machine's own memory: starting a program
from the host's files takes longer than the load.
"""

import json
import mmap
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB = 1 << 20
SENTINEL = 0xA5
"""What maker.c fills memory with."""
USER = 1000
GROUP = Path("/sys/fs/cgroup/limited")
ENTER = ("sh", "-c", f'echo $$ >{GROUP}/cgroup.procs && exec "$@"', "sh")
"""Before a command, puts it into that cgroup."""

BLOB = random.Random(4).randbytes(8 * MIB)
"""What files are made of: no two places of it are alike."""


@dataclass(frozen=True)
class File:
    """A file and what is in it."""

    path: Path
    data: bytes

    @classmethod
    def of(cls, path: Path, size: int) -> "File":
        """One of that many bytes."""
        assert 0 < size <= len(BLOB), size
        path.write_bytes(data := BLOB[-size:])
        path.chmod(0o644)
        return cls(path, data)

    @classmethod
    def sparse(cls, path: Path, pieces: Sequence[tuple[int, int]], size: int) -> "File":
        """One with data in some places, START and END, and holes elsewhere."""
        path.unlink(missing_ok=True)
        data = bytearray(size)
        with path.open("wb") as file:
            for start, end in pieces:
                data[start:end] = BLOB[start:end]
                os.pwrite(file.fileno(), BLOB[start:end], start)
            file.truncate(size)
        return cls(path, bytes(data))

    def evict(self) -> None:
        """Leaves none of it in the page cache."""
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    @property
    def file_system(self) -> str:
        """The type of the deepest mount that it is on."""
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
        on = [mount for mount in mounts if self.path.is_relative_to(mount[1])]
        return max(on, key=lambda mount: len(mount[1]))[2]


@dataclass(frozen=True)
class Seen:
    """What the reader of a load sees."""

    cached: int
    reserved: int
    descriptors: list[tuple[str, int]]
    data: bytes


class Loads:
    """Starts loads with the helpers that the host has built, and counts them."""

    def __init__(self, dmafile: str, helpers: str) -> None:
        self.helpers = Path("/tmp/helpers")
        shutil.copytree(helpers, self.helpers)
        self.dmafile = shutil.copy(dmafile, "/tmp/dmafile")
        self.report = Path("/tmp/report.json")
        self.said = Path("/tmp/said")
        self.count = 0
        self.pinned = pinned()

    def load(
        self,
        file: File,
        kind: str,
        *words: str,
        start: int = 0,
        size: int | None = None,
        user: bool = False,
    ) -> Any:
        """A load of a cold file, by root or an ordinary user, checked byte for byte; its report."""
        case = f"load {file.path} --to {kind} {' '.join(words)}"
        file.evict()
        self.report.unlink(missing_ok=True)
        command = self.words(file, kind, *words)
        # The page cache is not an ordinary user's to look at.
        command = as_user(command) if user else [*command, str(file.path)]
        seen, report = self.read(case, command)
        want = file.data[start : None if size is None else start + size]
        lead = report["offset"]
        total = sum(bytes for _, bytes in seen.descriptors)
        assert total >= lead + len(want), f"{case}: {seen.descriptors}"
        # What is around the wanted bytes is zero.
        whole = bytes(lead) + want + bytes(total - lead - len(want))
        assert seen.data == whole, f"{case}: {difference(seen.data, whole)}"
        if kind != "memfd":
            pieces = [("dma-buf", one["bytes"]) for one in report["dma_bufs"]]
            assert seen.descriptors == pieces, f"{case}: {seen.descriptors}, {pieces}"
            starts = [sum(bytes for _, bytes in pieces[:number]) for number in range(len(pieces))]
            assert [one["at"] for one in report["dma_bufs"]] == starts, f"{case}: {report}"
        if "--io=direct" in words:
            # btrfs reads a part of a block through the page cache, f2fs what it keeps in an inode.
            small = file.file_system == "f2fs" and len(file.data) < mmap.PAGESIZE
            allowed = 1 if small or file.file_system == "btrfs" else 0
            assert seen.cached <= allowed, f"{case}: {seen.cached} pages in the page cache"
        return report

    def fill(self, file: File, kind: str, size: int, *words: str, at: int | None = None) -> Any:
        """A load into memory of somebody else, of `size` dirty bytes; its report."""
        target = "fd:9" if at is None else f"fd:9@{at}"
        case = f"load {file.path} --to {target} ({kind}, {size} bytes) {' '.join(words)}"
        file.evict()
        maker = [str(self.helpers / "maker"), kind, str(size), "9"]
        seen, report = self.read(case, [*maker, *self.words(file, target, *words)])
        if at is None:
            # All of the memory is the load's: what the file doesn't fill is zero.
            whole = file.data + bytes(size - len(file.data))
        else:
            # Only a range is: around it nothing changes.
            dirt = bytes([SENTINEL]) * size
            whole = dirt[:at] + file.data + dirt[at + len(file.data) :]
        assert seen.data == whole, f"{case}: {difference(seen.data, whole)}"
        return report

    def command(self, file: File, kind: str, *words: str, command: Sequence[str]) -> bytes:
        """What a COMMAND of a load prints."""
        self.count += 1
        done = subprocess.run(
            [self.dmafile, "load", str(file.path), "--to", kind, "--quiet", *words, "--", *command],
            capture_output=True,
        )
        assert done.returncode == 0, f"{kind} {words} {command}: {done.stderr.decode()}"
        self.nothing_stays_pinned(f"{kind} {words} {command}")
        return done.stdout

    def words(self, file: File, kind: str, *words: str) -> list[str]:
        command = [self.dmafile, "load", str(file.path), "--to", kind, "--quiet", *words]
        return [*command, f"--json={self.report}", "--", str(self.helpers / "reader")]

    def read(self, case: str, command: Sequence[str]) -> tuple[Seen, Any]:
        """Starts a load with the reader as its COMMAND, and takes what that prints."""
        self.count += 1
        with self.said.open("wb") as said:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said)
            assert process.stdout
            header = process.stdout.readline().split()
            data = process.stdout.read()
            status = process.wait()
        assert status == 0, f"{case}: exit status {status}: {self.said.read_text()}"
        self.nothing_stays_pinned(case)
        descriptors = [word.decode().split(":") for word in header[2:]]
        pieces = [(kind, int(size)) for kind, size in descriptors]
        seen = Seen(int(header[0]), int(header[1]), pieces, data)
        # A pool with one page too few taken from it has 2^64 - 1 reserved.
        assert seen.reserved == 0, f"{case}: {seen.reserved} huge pages reserved"
        return seen, json.loads(self.report.read_text())

    def nothing_stays_pinned(self, case: str) -> None:
        assert pinned() == self.pinned, f"{case}: {pinned() - self.pinned} pages stay pinned"

    def refused(self, *words: str, user: bool = False, status: int = 1) -> str:
        """The one line with which a command of ours fails."""
        self.count += 1
        done = self.run(*words, user=user)
        assert done.returncode == status, f"{words}: {done}"
        assert done.stdout == "" and len(done.stderr.splitlines()) == 1, f"{words}: {done}"
        self.nothing_stays_pinned(str(words))
        return done.stderr

    def run(
        self, *words: str, user: bool = False, group: bool = False
    ) -> "subprocess.CompletedProcess[str]":
        """A command of ours, of an ordinary user, in the cgroup with a limit."""
        command = [self.dmafile, *words]
        command = as_user(command) if user else command
        command = [*ENTER, *command] if group else command
        return subprocess.run(command, capture_output=True, text=True)


def as_user(command: Sequence[str]) -> list[str]:
    ids = ["--reuid", str(USER), "--regid", str(USER), "--clear-groups"]
    return ["setpriv", *ids, "--", *command]


def difference(seen: bytes, want: bytes) -> str:
    """Where two pieces of memory begin to differ."""
    if len(seen) != len(want):
        return f"{len(seen)} bytes instead of {len(want)}"
    pages = range(0, len(want), mmap.PAGESIZE)
    wrong = [at for at in pages if seen[at : at + mmap.PAGESIZE] != want[at : at + mmap.PAGESIZE]]
    return f"wrong bytes on {len(wrong)} of {len(pages)} pages, the first at {wrong[0]}"


def vmstat() -> Mapping[str, int]:
    pairs = (line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return {name: int(count) for name, count in pairs}


def pinned() -> int:
    """Pages that are pinned on this machine."""
    # Each processor counts for itself, and tells the others about once a second; or when asked to.
    Path("/proc/sys/vm/stat_refresh").read_text()
    counts = vmstat()
    return counts["nr_foll_pin_acquired"] - counts["nr_foll_pin_released"]


def meminfo(name: str) -> int:
    [line] = [one for one in Path("/proc/meminfo").read_text().splitlines() if one.startswith(name)]
    return int(line.split()[1])


def setting(path: str, value: object) -> Callable[[], None]:
    """Changes a file of /proc or /sys; what is returned takes that back."""
    file = Path(path)
    before = file.read_text()
    file.write_text(str(value))
    return lambda: void(file.write_text(before))


def void(_: object) -> None:
    pass
