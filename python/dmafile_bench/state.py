"""The state of the machine in which each run begins."""

import os
import sys
from pathlib import Path

from .files import MIB, cached, evict, fill_cache
from .memory import meminfo, touch_memory

COUNTED = "DMAFILE_MARKS" in os.environ
"""Where instructions are counted (vm/run --count-instructions): the same whatever came before."""


def prepare(path: Path, size: int, *, warm: bool = False, memory: int = 0) -> None:
    """What happens right before each run: the cache state it asks for, and touched memory."""
    # A buffered read fills the page cache besides the buffer.
    memory = memory or 2 * size
    available = meminfo("MemAvailable")
    if available < memory + 256 * MIB:
        sys.exit(
            f"comparing loads of {path} takes {memory / MIB + 256:,.0f} MiB of memory, "
            f"{available / MIB:,.0f} MiB are available"
        )
    if not warm:
        evict(path)
    if not COUNTED:
        touch_memory(size if warm else memory)
    if warm:
        # Last, because a system that reclaims memory ahead of need takes cold pages back soon.
        fill_cache(path)
    elif cached(path):
        sys.exit(f"{path} came into the page cache just before a run: what else uses it?")
