"""What demo and benchmark share: files in a known cache state, processes timed from outside."""

import math
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
READ_INTO_MEMFD = Path(__file__).with_name("read_into_memfd.py")


def baseline(path: Path) -> list[str]:
    """The command of plain read() into a memfd; -I and -S because they make Python start fast."""
    return [sys.executable, "-I", "-S", str(READ_INTO_MEMFD), str(path)]


# Files


def noise(total: int) -> Iterator[memoryview]:
    """`total` bytes, the same at each call, that read as finite BF16 numbers the size of weights.

    One block is drawn and repeated, which makes 2 GiB a matter of seconds. Its length is twice a
    prime, so that no two pages of a file below 60 GB are alike and a misplaced page shows.
    """
    half = 16_777_213
    block = bytearray(2 * half)
    draw = random.Random(1)
    block[0::2] = draw.randbytes(half)
    # The high byte of a little-endian BF16: a random sign over a fixed exponent.
    block[1::2] = draw.randbytes(half).translate(bytes(0x3C | byte & 0x80 for byte in range(256)))
    for start in range(0, total, len(block)):
        yield memoryview(block)[: total - start]


def make_file(path: Path, head: bytes, body: int) -> None:
    """Makes a file of `head` and `body` bytes of noise, on disk, whole or not at all."""
    size = len(head) + body
    if path.exists() and path.stat().st_size == size:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if free < size + 256 * MIB:
        sys.exit(
            f"{path} takes {size / MIB:,.0f} MiB of disk and {free / MIB:,.0f} MiB are free there; "
            "make room or choose another folder"
        )
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(head)
        for piece in noise(body):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def file_system(path: Path) -> str:
    """The type of the file system that holds `path`."""
    words = subprocess.check_output(["df", "--output=fstype", "--", path], text=True).split()
    return words[-1]


# Page cache


def cached(path: Path) -> int:
    """How many bytes of the file sit in the page cache, as fincore sees it."""
    command = ["fincore", "--bytes", "--noheadings", "--output", "RES", str(path)]
    return int(subprocess.check_output(command))


def evict(path: Path) -> None:
    """Puts the file out of the page cache, and makes sure that it is out."""
    with path.open("rb") as file:
        # Dirty pages can't be dropped.
        os.fsync(file.fileno())
        # Pages on their way through the kernel's per-CPU lists may take another try.
        for _ in range(20):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if cached(path) == 0:
                return
            time.sleep(0.05)
    sys.exit(
        f"{path} stays in the page cache ({cached(path) / MIB:,.1f} MiB): is it on tmpfs, or "
        "mapped by another process? Choose a folder on a disk."
    )


def fill_cache(path: Path) -> None:
    """Brings the whole file into the page cache, and makes sure that it is there."""
    pages = math.ceil(path.stat().st_size / os.sysconf("SC_PAGE_SIZE"))
    with path.open("rb", buffering=0) as file:
        while file.read(MIB):
            pass
    if cached(path) != pages * os.sysconf("SC_PAGE_SIZE"):
        sys.exit(
            f"{path} doesn't stay in the page cache whole: too little memory for this comparison"
        )


# Memory


def memory(field: str) -> int:
    """A line of /proc/meminfo, in bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise KeyError(field)


# 23 is MADV_POPULATE_WRITE, for which Python has no name yet.
TOUCH = """
import mmap, sys, time
memory = mmap.mmap(-1, int(sys.argv[1]), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_HUGEPAGE)
start = time.perf_counter()
memory.madvise(23)
print(time.perf_counter() - start)
"""
TOUCH_TRIES = 8
fastest_touch = math.inf
"""Seconds a byte, the least seen by this program."""


def touch_memory(size: int) -> None:
    """Allocates `size` bytes and gives them back, in a process of its own, until that is quick.

    A virtual machine's memory may be backed by the host only when first touched, which is several
    times as slow, and taken back seconds after it was freed. Unless all memory is touched right
    before each run, the run that comes first pays for the others. Touching what is backed takes
    the same time again and again; anything slower is done again.
    """
    global fastest_touch
    for _ in range(TOUCH_TRIES):
        command = [sys.executable, "-I", "-S", "-c", TOUCH, str(size)]
        rate = float(subprocess.check_output(command)) / size
        fastest_touch = min(fastest_touch, rate)
        if rate < 1.25 * fastest_touch:
            return


def prepare(path: Path, *, warm: bool = False) -> None:
    """What happens right before each timed run: the cache state it asks for, and touched memory."""
    size = path.stat().st_size
    available = memory("MemAvailable")
    # A buffered read fills the page cache besides the buffer.
    if available < 2 * size + 256 * MIB:
        sys.exit(
            f"comparing loads of {path} takes {(2 * size) / MIB + 256:,.0f} MiB of memory, "
            f"{available / MIB:,.0f} MiB are available"
        )
    if not warm:
        evict(path)
    touch_memory(size if warm else 2 * size)
    if warm:
        # Last, because a system that reclaims memory ahead of need takes cold pages back soon.
        fill_cache(path)
    elif cached(path):
        sys.exit(f"{path} came into the page cache just before a run: what else uses it?")


# Processes


@dataclass(frozen=True)
class Run:
    """What a process took, seen from outside."""

    wall: float
    """Seconds from start to end."""
    cpu: float
    """Seconds of CPU, user and system, without the kernel's own threads and interrupts."""
    peak: int
    """The most bytes it held; at least what this Python holds, as Linux counts from before exec."""


def run(command: list[str], *, silent: bool = False) -> Run:
    """Runs a command to its end; ends this program when it fails. `silent` drops what it prints."""
    # What was printed so far comes before what the command prints, in a pipe too.
    sys.stdout.flush()
    actions = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)] if silent else []
    start = time.perf_counter()
    try:
        pid = os.posix_spawnp(command[0], command, os.environ, file_actions=actions)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")
    _, status, usage = os.wait4(pid, 0)
    wall = time.perf_counter() - start
    if status:
        sys.exit(f"{' '.join(command)}: ended with {os.waitstatus_to_exitcode(status)}")
    return Run(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


# Words


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median, least and most."""
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} [{least:.{digits}f}–{most:.{digits}f}]"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that also reads well as it is: the first column left, figures right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = []
    for row in [head, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])], *rows]:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def with_tables(document: str, made: Callable[[str], str | None]) -> str:
    """The document with its tables made anew, each by its name; those that are None stay."""

    def put(match: re.Match[str]) -> str:
        text = made(match[2])
        return match[0] if text is None else f"{match[1]}\n\n{text}\n\n{match[3]}"

    return re.sub(r"(<!-- table: (\w+) -->).*?(<!-- end -->)", put, document, flags=re.DOTALL)


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the ratios within each round: disks and hosts have moods, a round has one."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))
