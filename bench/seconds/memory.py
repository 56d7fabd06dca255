"""Makes sure that memory is available and backed by the host before a run."""

import math
import shutil
import subprocess
import sys
import time
from pathlib import Path


def meminfo(field: str) -> int:
    """A field of /proc/meminfo, in bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise KeyError(field)


def room(folder: Path) -> int:
    """The maximum size of a file there. Memory must hold the buffer, and a copy in the cache."""
    free = min(shutil.disk_usage(folder).free, meminfo("MemAvailable") // 2)
    return free - 512 * (1 << 20)


# 23 is MADV_POPULATE_WRITE, which the module mmap does not define yet.
TOUCH = """
import mmap, sys, time
memory = mmap.mmap(-1, int(sys.argv[1]), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_HUGEPAGE)
start = time.perf_counter()
memory.madvise(23)
print(time.perf_counter() - start)
"""
TOUCH_TRIES = 8
TOUCH_SECONDS = 10.0
fastest_touch = math.inf
"""Seconds per byte, the minimum seen by this program."""


def touch_memory(size: int, seconds: float = TOUCH_SECONDS) -> bool:
    """Allocates and frees `size` bytes in a separate process, until that is fast.

    Returns whether it became fast, in at most so many tries and seconds.

    The host may back a virtual machine's memory only when it is first touched, which is several
    times slower, and take it back seconds after it is freed. So all memory is touched right before
    each run; otherwise the first run would pay for the others. Touching backed memory always takes
    the same time, so a slower attempt is repeated.
    """
    global fastest_touch
    command = [sys.executable, "-I", "-S", "-c", TOUCH, str(size)]
    end = time.monotonic() + seconds
    for _ in range(TOUCH_TRIES):
        left = max(0.0, end - time.monotonic())
        try:
            rate = float(subprocess.check_output(command, timeout=left)) / size
        except subprocess.TimeoutExpired:
            return False
        fastest_touch = min(fastest_touch, rate)
        if rate < 1.25 * fastest_touch:
            return True
    return False
