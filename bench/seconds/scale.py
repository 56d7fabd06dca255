"""Measures loads by file size, and two concurrent loads: `--table scale`."""

import shutil
import statistics
from pathlib import Path

from bench.candidates import SCALE
from bench.seconds.commands import Candidate, script, way
from bench.seconds.files import MIB
from bench.seconds.memory import meminfo
from bench.seconds.quick import ROUNDS, file_of, seconds
from bench.seconds.rounds import Cell, Measured, Sample
from bench.seconds.tables import Bars, Job, Place, Result
from bench.words import compared, size_text, spread

SIZES = tuple(MIB << shift for shift in (3, 6, 9, 12, 14))
"""8 MiB to 16 GiB."""
MARGIN = 1024 * MIB
IN_TURN, AT_ONCE = "two loads, one after the other", "two loads at once"


def job(place: Place, rounds: int | None) -> Job:
    sizes = [size for size in SIZES if size + MARGIN <= room(place)] or [SIZES[0]]
    every = [
        way(place.ways, name, file_of(place, size), line)
        for size in sizes
        for name, line in SCALE.items()
    ]
    shared = file_of(place, max(size for size in sizes if size <= 4096 * MIB))
    every += [halves(AT_ONCE, shared, "at-once"), halves(IN_TURN, shared, "in-turn")]
    return Job([Cell(one) for one in every], rounds or ROUNDS)


def results(measured: Measured) -> list[Result]:
    return [by_size(measured), together(measured)]


def room(place: Place) -> int:
    """The maximum size of a file that leaves no copy in the page cache."""
    files = place.folder.glob("*.noise")
    # Files that exist already need no more space.
    free = shutil.disk_usage(place.folder).free + sum(one.stat().st_size for one in files)
    there = min(free, meminfo("MemAvailable"))
    return there if place.most is None else min(there, place.most + MARGIN)


def halves(name: str, file: Path, how: str) -> Candidate:
    size = file.stat().st_size
    command = script("halves.py", str(file), how)
    return Candidate(name, f"halves.py {how}", file, size, command, memory=size)


def by_size(measured: Measured) -> Result:
    lines, bars = [], []
    for name in SCALE:
        for size in reversed(measured.sizes):
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


def together(measured: Measured) -> Result:
    size = next((one.size for one in measured.samples if one.candidate == IN_TURN), 0)
    turns = measured.of(IN_TURN, size)
    lines = []
    for name in (IN_TURN, AT_ONCE):
        if turns and (runs := measured.of(name, size)):
            beside = compared(seconds(runs), seconds(turns))
            lines.append([name, spread(seconds(runs), 3), beside, spread(cpu(runs), 3)])
    title = f"Two loads of {size_text(size // 2)}, cold"
    return Result("two-loads", title, ["", "seconds", "to in turn", "CPU s/GB"], lines)
