"""Memory as runs need it: enough of it, and backed by the host before the clock starts."""

import math
import subprocess
import sys
from pathlib import Path


def meminfo(field: str) -> int:
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


def touch_memory(size: int) -> bool:
    """Allocates `size` bytes and gives them back, in a process of its own, until that is quick.

    Returns whether it became so.

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
            return True
    return False
