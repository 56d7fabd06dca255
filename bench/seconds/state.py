"""Prepares the state in which each run begins."""

import sys
from pathlib import Path

from bench.seconds.files import MIB, cached, evict, fill_cache
from bench.seconds.memory import TOUCH_SECONDS, meminfo, touch_memory

WARM_TRIES = 5


def prepare(
    path: Path,
    size: int,
    *,
    warm: bool = False,
    memory: int = 0,
    seconds: float = TOUCH_SECONDS,
) -> bool:
    """Right before each run: brings the page cache into its state, and touches memory for SECONDS
    at most.

    Returns whether allocation is as fast as the fastest so far.
    """
    # A buffered read fills the page cache in addition to the buffer.
    memory = memory or 2 * size
    available = meminfo("MemAvailable")
    if available < memory + 256 * MIB:
        sys.exit(
            f"comparing loads of {path} needs {memory / MIB + 256:,.0f} MiB of memory, but only "
            f"{available / MIB:,.0f} MiB are available"
        )
    if warm:
        return warm_up(path, size)
    evict(path)
    quick = touch_memory(memory, seconds)
    if cached(path):
        sys.exit(f"{path} was read into the page cache just before a run; stop what else uses it")
    return quick


def warm_up(path: Path, memory: int) -> bool:
    """Brings the file into the page cache, and touches memory, until both hold at the same time.

    Each step may undo the other, if the system reclaims cold pages of the cache early, or if the
    host takes back memory that was touched and freed.
    """
    for _ in range(WARM_TRIES):
        fill_cache(path)
        quick = touch_memory(memory)
        if cached(path) >= path.stat().st_size:
            return quick
    sys.exit(f"{path} does not stay in the page cache: too little memory for this comparison")
