"""Whether loads stay as fast: from small files to large ones, and beside one another."""

import shutil
import statistics
from pathlib import Path

from .candidates import Candidate, ours, script
from .files import MIB
from .memory import meminfo
from .quick import ROUNDS, file_of, seconds
from .rounds import Cell, Measured, Sample
from .tables import Bars, Job, Place, Result
from .words import compared, size_text, spread

SIZES = tuple(MIB << shift for shift in (3, 6, 9, 12, 14))
"""8 MiB to 16 GiB."""
MARGIN = 1024 * MIB
OURS = {"dmafile, memfd": "to=memfd", "dmafile, anon": "to=anon"}
IN_TURN, AT_ONCE = "two loads, one after the other", "two loads at once"


def job(place: Place, rounds: int | None) -> Job:
    sizes = [size for size in SIZES if size + MARGIN <= room(place)] or [SIZES[0]]
    every = [
        ours(name, file_of(place, size), words) for size in sizes for name, words in OURS.items()
    ]
    shared = file_of(place, max(size for size in sizes if size <= 4096 * MIB))
    every += [halves(AT_ONCE, shared, "at-once"), halves(IN_TURN, shared, "in-turn")]
    return Job(
        [Cell(one) for one in every],
        rounds or ROUNDS,
        lambda measured: [by_size(measured, sizes), together(measured, shared)],
    )


def room(place: Place) -> int:
    """Bytes that a file may have that leaves no copy in the page cache."""
    files = place.folder.glob("*.noise")
    # Those that are there need no more.
    free = shutil.disk_usage(place.folder).free + sum(one.stat().st_size for one in files)
    there = min(free, meminfo("MemAvailable"))
    return there if place.most is None else min(there, place.most + MARGIN)


def halves(name: str, file: Path, how: str) -> Candidate:
    size = file.stat().st_size
    return Candidate(name, file, size, script("halves.py", str(file), how), memory=size)


def by_size(measured: Measured, sizes: list[int]) -> Result:
    lines, bars = [], []
    for name in OURS:
        for size in sizes:
            if not (runs := measured.of(name, size)):
                continue
            cost = cpu(runs)
            label = f"{name}, {size_text(size)}"
            rate = size / statistics.median(seconds(runs)) / 1e9
            lines.append([label, spread(seconds(runs), 3), f"{rate:.2f}", spread(cost, 3)])
            bars.append((label, cost))
    title = "By size, cold"
    head = ["", "seconds", "GB/s", "CPU s/GB"]
    chart = Bars(title, "CPU seconds per GB", bars, more_is_better=False)
    return Result("by-size", title, head, lines, charts=[chart] if bars else [])


def cpu(runs: list[Sample]) -> list[float]:
    return [one.own_cpu / one.size * 1e9 for one in runs]


def together(measured: Measured, file: Path) -> Result:
    size = file.stat().st_size
    turns = measured.of(IN_TURN, size)
    lines = []
    for name in (IN_TURN, AT_ONCE):
        if turns and (runs := measured.of(name, size)):
            beside = compared(seconds(runs), seconds(turns))
            lines.append([name, spread(seconds(runs), 3), beside, spread(cpu(runs), 3)])
    title = f"Two loads of {size_text(size // 2)}, cold"
    return Result("two-loads", title, ["", "seconds", "to in turn", "CPU s/GB"], lines)
