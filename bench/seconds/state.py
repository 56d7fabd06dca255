"""The state of the machine in which each run begins."""

import sys
from pathlib import Path

from bench.seconds.files import MIB, cached, evict, fill_cache
from bench.seconds.memory import meminfo, touch_memory

WARM_TRIES = 5


def prepare(path: Path, size: int, *, warm: bool = False, memory: int = 0) -> bool:
    """What happens right before each run: the cache state it asks for, and touched memory.

    Returns whether memory is as quick as it was at best.
    """
    # A buffered read fills the page cache besides the buffer.
    memory = memory or 2 * size
    available = meminfo("MemAvailable")
    if available < memory + 256 * MIB:
        sys.exit(
            f"comparing loads of {path} takes {memory / MIB + 256:,.0f} MiB of memory, "
            f"{available / MIB:,.0f} MiB are available"
        )
    if warm:
        return warmed(path, size)
    evict(path)
    quick = touch_memory(memory)
    if cached(path):
        sys.exit(f"{path} came into the page cache just before a run: what else uses it?")
    return quick


def warmed(path: Path, memory: int) -> bool:
    """The file in the page cache, and so much memory touched: both at the same time.

    While the one is done, a system that takes memory back ahead of need may undo the other: cold
    pages of the cache, or what was touched and is free, which goes back to the host.
    """
    for _ in range(WARM_TRIES):
        fill_cache(path)
        quick = touch_memory(memory)
        if cached(path) >= path.stat().st_size:
            return quick
    sys.exit(f"{path} doesn't stay in the page cache whole: too little memory for this comparison")
