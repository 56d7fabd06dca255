"""Loads in a machine, whose bytes are compared with those that an independent program reads.

Few imports, and all programs are copied to the memory of the machine: starting a program from the
files of the host takes longer than a load.
"""

import json
import mmap
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB = 1 << 20
SENTINEL = 0xA5
"""The byte with which maker.c fills memory."""
USER = 1000
MAPPED = ("ext4", "xfs") if Path("/sys/module/nvme/parameters/premap").exists() else ()
"""File systems for which memory is premapped, on a kernel that has this: not series-7.3."""
PATIENCE = 300
"""A timeout in seconds that is long enough for a machine on a busy host."""
GROUP = Path("/sys/fs/cgroup/limited")
ENTER = ("sh", "-c", f'echo $$ >{GROUP}/cgroup.procs && exec "$@"', "sh")
"""A prefix that moves a command into this cgroup."""

BLOB = random.Random(4).randbytes(8 * MIB)
"""The content of files; no two parts of it are alike."""


@dataclass(frozen=True)
class File:
    """A file and its bytes."""

    path: Path
    data: bytes

    @classmethod
    def of(cls, path: Path, size: int) -> "File":
        """Writes a file of `size` bytes."""
        assert 0 < size <= len(BLOB), size
        path.write_bytes(data := BLOB[-size:])
        path.chmod(0o644)
        return cls(path, data)

    @classmethod
    def sparse(cls, path: Path, pieces: Sequence[tuple[int, int]], size: int) -> "File":
        """Writes a file with data in these ranges (start, end) and holes elsewhere."""
        path.unlink(missing_ok=True)
        data = bytearray(size)
        with path.open("wb") as file:
            for start, end in pieces:
                data[start:end] = BLOB[start:end]
                os.pwrite(file.fileno(), BLOB[start:end], start)
            file.truncate(size)
        return cls(path, bytes(data))

    def evict(self) -> None:
        """Drops the file from the page cache."""
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    @property
    def file_system(self) -> str:
        """The type of the file system of the file."""
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
        on = [mount for mount in mounts if self.path.is_relative_to(mount[1])]
        return max(on, key=lambda mount: len(mount[1]))[2]


@dataclass(frozen=True)
class Seen:
    """The output of reader.c in a load."""

    cached: int
    reserved: int
    descriptors: list[tuple[str, int]]
    data: bytes


class Loads:
    """Runs loads with helpers that were built on the host, and counts them."""

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
        """Loads a cold file as root or as a user, and checks all bytes; returns the report."""
        case = f"load {file.path} --to {kind} {' '.join(words)}"
        file.evict()
        self.report.unlink(missing_ok=True)
        command = self.words(file, kind, *words)
        # An ordinary user cannot query the page cache.
        command = as_user(command) if user else [*command, str(file.path)]
        seen, report = self.read(case, command)
        want = file.data[start : None if size is None else start + size]
        lead = report["offset"]
        total = sum(bytes for _, bytes in seen.descriptors)
        assert total >= lead + len(want), f"{case}: {seen.descriptors}"
        # The bytes around the requested ones are zero.
        whole = bytes(lead) + want + bytes(total - lead - len(want))
        assert seen.data == whole, f"{case}: {difference(seen.data, whole)}"
        if kind != "memfd":
            pieces = [("dma-buf", one["bytes"]) for one in report["dma_bufs"]]
            assert seen.descriptors == pieces, f"{case}: {seen.descriptors}, {pieces}"
            starts = [sum(bytes for _, bytes in pieces[:number]) for number in range(len(pieces))]
            assert [one["at"] for one in report["dma_bufs"]] == starts, f"{case}: {report}"
        if "--io=direct" in words:
            # btrfs reads a partial block through the page cache, f2fs data that is in an inode.
            small = file.file_system == "f2fs" and len(file.data) < mmap.PAGESIZE
            allowed = 1 if small or file.file_system == "btrfs" else 0
            assert seen.cached <= allowed, f"{case}: {seen.cached} pages in the page cache"
        return report

    def fill(self, file: File, kind: str, size: int, *words: str, at: int | None = None) -> Any:
        """Loads into existing memory of `size` dirty bytes; returns the report."""
        target = "fd:9" if at is None else f"fd:9@{at}"
        case = f"load {file.path} --to {target} ({kind}, {size} bytes) {' '.join(words)}"
        file.evict()
        maker = [str(self.helpers / "maker"), kind, str(size), "9"]
        seen, report = self.read(case, [*maker, *self.words(file, target, *words)])
        if at is None:
            # The load fills all of the memory: the bytes after the file are zero.
            whole = file.data + bytes(size - len(file.data))
        else:
            # The load fills a range: nothing around it changes.
            dirt = bytes([SENTINEL]) * size
            whole = dirt[:at] + file.data + dirt[at + len(file.data) :]
        assert seen.data == whole, f"{case}: {difference(seen.data, whole)}"
        return report

    def command(self, file: File, kind: str, *words: str, command: Sequence[str]) -> bytes:
        """The output of a COMMAND of a load."""
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
        """Runs a load whose COMMAND is the reader; returns its output and the report."""
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
        # A reservation that is released twice shows as 2^64 - 1 reserved pages.
        assert seen.reserved == 0, f"{case}: {seen.reserved} huge pages reserved"
        return seen, json.loads(self.report.read_text())

    def nothing_stays_pinned(self, case: str) -> None:
        # A ring unpins its memory some time after its process has ended.
        settles(lambda: pinned() - self.pinned, lambda more: not more, f"{case}: pages stay pinned")

    def refused(self, *words: str, user: bool = False, status: int = 1) -> str:
        """The one line with which a dmafile command fails."""
        self.count += 1
        done = self.run(*words, user=user)
        assert done.returncode == status, f"{words}: {done}"
        assert done.stdout == "" and len(done.stderr.splitlines()) == 1, f"{words}: {done}"
        self.nothing_stays_pinned(str(words))
        return done.stderr

    def run(
        self, *words: str, user: bool = False, group: bool = False
    ) -> "subprocess.CompletedProcess[str]":
        """Runs a dmafile command, optionally as an ordinary user or in the cgroup with a limit."""
        command = [self.dmafile, *words]
        command = as_user(command) if user else command
        command = [*ENTER, *command] if group else command
        return subprocess.run(command, capture_output=True, text=True)


def as_user(command: Sequence[str]) -> list[str]:
    ids = ["--reuid", str(USER), "--regid", str(USER), "--clear-groups"]
    return ["setpriv", *ids, "--", *command]


def difference(seen: bytes, want: bytes) -> str:
    """Describes where two pieces of memory differ."""
    if len(seen) != len(want):
        return f"{len(seen)} bytes instead of {len(want)}"
    pages = range(0, len(want), mmap.PAGESIZE)
    wrong = [at for at in pages if seen[at : at + mmap.PAGESIZE] != want[at : at + mmap.PAGESIZE]]
    return f"wrong bytes on {len(wrong)} of {len(pages)} pages, the first at {wrong[0]}"


def settles(look: Callable[[], Any], well: Callable[[Any], bool], case: str) -> None:
    """Waits until `well` accepts the result of `look`: the kernel does some work later."""
    end = time.monotonic() + PATIENCE
    while not well(seen := look()):
        assert time.monotonic() < end, f"{case}: {seen}"
        time.sleep(0.05)


def vmstat() -> Mapping[str, int]:
    pairs = (line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return {name: int(count) for name, count in pairs}


def pinned() -> int:
    """Pages that are pinned on this machine."""
    # Each CPU adds its own count to the total about once a second, or on request.
    Path("/proc/sys/vm/stat_refresh").read_text()
    counts = vmstat()
    return counts["nr_foll_pin_acquired"] - counts["nr_foll_pin_released"]


def meminfo(name: str) -> int:
    [line] = [one for one in Path("/proc/meminfo").read_text().splitlines() if one.startswith(name)]
    return int(line.split()[1])


def setting(path: str, value: object) -> Callable[[], None]:
    """Changes a file in /proc or /sys; the returned function restores it."""
    file = Path(path)
    before = file.read_text()
    file.write_text(str(value))
    return lambda: void(file.write_text(before))


def void(_: object) -> None:
    pass
