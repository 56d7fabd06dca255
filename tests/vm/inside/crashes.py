"""Crashes of the machine at every flush of a disk and between flushes, and checks of the result.

    crashes.py DMAFILE HELPERS SCENARIO COUNT PLAN FS...    as root, in machines with dm-log-writes

A scenario is a module of this folder with a class `Scenario`, which works on a file system whose
writes are all logged (dm-log-writes), and marks completed steps in the log. The log is then
replayed up to every flush, FUA and mark, and up to COUNT other entries. Each time, a copy of the
disk is mounted, so that the file system recovers, and the scenario checks the files. PLAN is that
of syncs.c, which controls each fsync of a command. Prints for each file system how many states were
checked, how many of them were wrong, and the first few wrong ones.
"""

import contextlib
import ctypes
import fcntl
import importlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from tests.vm.inside.loads import MIB
from tests.vm.inside.write_log import Log, State, states

SECTOR = 512
FOLDER = Path("/run/crashes")
"""A tmpfs with the disks and the sources."""
MOUNT = FOLDER / "mount"
BYSTANDER = "bystander"
"""A file that another program syncs repeatedly."""
NAME, COPY = "logged", "copy"
SEED = 23
SHOWN = 5

MAKE = {
    "ext4": (64 * MIB, ("mkfs.ext4", "-q", "-F")),
    "xfs": (300 * MIB, ("mkfs.xfs", "-q", "-f")),
    "btrfs": (128 * MIB, ("mkfs.btrfs", "-q", "-f")),
    "f2fs": (128 * MIB, ("mkfs.f2fs", "-q", "-f")),
}
"""The size of the disk, and the command that makes the file system."""
LOG_SIZE = 512 * MIB


class Wrong(Exception):
    """A state that must not occur."""


class Scenario(Protocol):
    """Work on a file system, and the checks after a crash."""

    def __init__(self, tools: "Tools") -> None: ...

    def prepare(self, folder: Path) -> None:
        """Makes the files that exist before the first logged write."""

    def work(self, folder: Path, mark: Callable[[str], None]) -> None:
        """Does the work. `mark` notes in the log that everything so far must be on the disk."""

    def check(self, folder: Path, marked: str) -> None:
        """Raises Wrong if the files are wrong after a crash. `marked` is the last mark, if any."""


class Tools:
    """The programs that scenarios run."""

    def __init__(self, dmafile: str, helpers: str, plan: str) -> None:
        self.dmafile = str(shutil.copy(dmafile, FOLDER / "dmafile"))
        for helper in Path(helpers).iterdir():
            shutil.copy(helper, FOLDER / helper.name)
        self.syncs = str(FOLDER / "syncs")
        self.plan = plan
        self.sources = FOLDER

    def run(self, folder: Path, *words: str, stdin: bytes = b"") -> None:
        """Runs the command."""
        call(*self.command(folder, "dmafile", *words), stdin=stdin)

    def command(self, folder: Path, name: str, *words: str) -> Sequence[str]:
        """The command line of a program whose fsync calls follow the plan."""
        return (self.syncs, self.plan, str(folder / BYSTANDER), str(FOLDER / name), *words)


def call(*words: str, stdin: bytes = b"") -> str:
    done = subprocess.run(words, input=stdin, capture_output=True)
    assert done.returncode == 0, f"{words}: {done.returncode}, {done.stderr.decode()}"
    return done.stdout.decode()


# System calls, because starting a program takes a tenth of a second or more.
# linux/loop.h
LOOP_SET_FD, LOOP_CLR_FD, LOOP_CTL_GET_FREE = 0x4C00, 0x4C01, 0x4C82
LIBC = ctypes.CDLL(None, use_errno=True)


def succeeded(result: int, what: str) -> None:
    if result:
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno), what)


@contextlib.contextmanager
def opened(path: Path | str, flags: int) -> Iterator[int]:
    fd = os.open(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def loop(path: Path, size: int | None = None) -> Iterator[str]:
    """A file as a disk; with `size`, a new file."""
    if size is not None:
        with path.open("wb") as file:
            file.truncate(size)
    with opened("/dev/loop-control", os.O_RDWR) as control:
        device = f"/dev/loop{fcntl.ioctl(control, LOOP_CTL_GET_FREE)}"
    with opened(path, os.O_RDWR) as file_fd, opened(device, os.O_RDWR) as fd:
        fcntl.ioctl(fd, LOOP_SET_FD, file_fd)
        try:
            yield device
        finally:
            fcntl.ioctl(fd, LOOP_CLR_FD)


@contextlib.contextmanager
def mapped(name: str, table: str) -> Iterator[str]:
    """A disk of the device mapper."""
    call("dmsetup", "create", name, "--table", table)
    try:
        # Without udev, there is no node with this name.
        names = Path("/sys/block").glob("dm-*/dm/name")
        [found] = [path for path in names if path.read_text().strip() == name]
        yield f"/dev/{found.parts[-3]}"
    finally:
        call("dmsetup", "remove", "--retry", name)


@contextlib.contextmanager
def mounted(fs: str, device: str) -> Iterator[Path]:
    succeeded(LIBC.mount(device.encode(), bytes(MOUNT), fs.encode(), 0, None), "mount")
    try:
        yield MOUNT
    finally:
        succeeded(LIBC.umount2(bytes(MOUNT), 0), "umount")


class Crashes:
    def __init__(self, fs: str, scenario: Scenario) -> None:
        self.fs, self.scenario = fs, scenario
        self.size, self.make = MAKE[fs]
        self.disk, self.before, self.log = (FOLDER / name for name in ("disk", "before", "log"))

    def record(self) -> None:
        """Runs the scenario with its writes in a log."""
        with loop(self.disk, self.size) as device:
            call(*self.make, device)
            with mounted(self.fs, device) as folder:
                (folder / BYSTANDER).write_bytes(b"\0")
                self.scenario.prepare(folder)
        call("cp", "--sparse=always", str(self.disk), str(self.before))
        with loop(self.disk) as device, loop(self.log, LOG_SIZE) as log:
            table = f"0 {self.size // SECTOR} log-writes {device} {log}"
            with mapped(NAME, table) as logged, mounted(self.fs, logged) as folder:

                def mark(text: str) -> None:
                    call("dmsetup", "message", NAME, "0", "mark", text)

                mark("start")
                self.scenario.work(folder, mark)
                mark("end")
                status = call("dmsetup", "status", NAME)
                assert "logging_disabled" not in status, status
        self.disk.unlink()

    def replay(self, count: int) -> tuple[int, list[str]]:
        """The number of checked states, and the descriptions of wrong ones."""
        log, wrong, checked = Log(self.log), [], 0
        print(f"{self.fs}: {len(log.entries)} entries", flush=True)
        marks = [entry.mark for entry in log.entries]
        start, end = marks.index("start"), marks.index("end")
        entries = log.entries[: end + 1]
        file, applied = os.open(self.before, os.O_RDWR), 0
        with loop(self.before) as device:
            for state in states(entries, start, count, SEED):
                for entry in entries[applied : state.base]:
                    log.apply(entry, file)
                applied = max(applied, state.base)
                past = [mark for mark in marks[start + 1 : state.after + 1] if mark]
                marked = past[-1] if past else ""
                if marked == "end":
                    marked = past[-2]
                try:
                    self.look(device, log, state, marked)
                except Wrong as error:
                    wrong.append(f"after entry {state.after} ({marked}), {state}: {error}")
                checked += 1
        os.close(file)
        return checked, wrong

    def look(self, device: str, log: Log, state: State, marked: str) -> None:
        """Mounts a copy of a state, and lets the scenario check it."""
        sectors = self.size // SECTOR
        with (
            loop(FOLDER / "changes", self.size) as changes,
            mapped(COPY, f"0 {sectors} snapshot {device} {changes} N 8") as copy,
        ):
            if state.more:
                disk = os.open(copy, os.O_WRONLY)
                for number, most in state.more:
                    log.apply(log.entries[number], disk, most)
                os.fsync(disk)
                os.close(disk)
            try:
                with mounted(self.fs, copy) as folder:
                    self.scenario.check(folder, marked)
            except OSError as error:
                raise Wrong(f"{type(error).__name__}: {error}") from error


def main(dmafile: str, helpers: str, name: str, count: str, plan: str, *systems: str) -> None:
    call("modprobe", "-a", "loop", "dm-mod", "dm-log-writes", "dm-snapshot", *systems)
    MOUNT.mkdir(parents=True, exist_ok=True)
    module = importlib.import_module(f"tests.vm.inside.{name}")
    tools = Tools(dmafile, helpers, plan)
    lines: Sequence[str] = ()
    for fs in systems:
        began = time.monotonic()
        crashes = Crashes(fs, module.Scenario(tools))
        crashes.record()
        checked, lines = crashes.replay(int(count))
        for line in lines[:SHOWN]:
            print(line)
        took = time.monotonic() - began
        print(f"{fs}, {plan}: {checked} states, {len(lines)} wrong ({took:.0f} s)", flush=True)


if __name__ == "__main__":
    # Runs the module that scenarios import, so that there is only one class Wrong.
    importlib.import_module("tests.vm.inside.crashes").main(*sys.argv[1:])
