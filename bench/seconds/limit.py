"""Compares loads with the limits of the machine: the disk by fio, memory by allocation."""

import shutil
import statistics
from collections.abc import Iterable

from bench.candidates import ALLOCATION, FIO, LIMIT
from bench.seconds.commands import fio, way
from bench.seconds.files import MIB
from bench.seconds.rounds import Cell, Measured, Sample, seconds
from bench.seconds.tables import ROUNDS, Job, Place, Result
from bench.words import compared, size_text, spread

SIZES = tuple(4096 * MIB >> shift for shift in range(10))


def job(place: Place, rounds: int | None) -> Job:
    size = next((size for size in SIZES if size <= place.room()), SIZES[-1])
    file = place.file_of(size)
    every = [way(place.ways, name, file, line) for name, line in {**LIMIT, **ALLOCATION}.items()]
    missing = []
    if shutil.which("fio"):
        for name, (block, depth, huge) in FIO.items():
            every.append(fio(name, file, block, depth, huge=huge))
    else:
        missing.append("fio: not installed; apt install fio")
    return Job([Cell(one) for one in every], rounds or ROUNDS, missing)


def results(measured: Measured) -> list[Result]:
    return [result(measured, size) for size in measured.sizes[:1]]


def result(measured: Measured, size: int) -> Result:
    def of(names: Iterable[str]) -> dict[str, list[Sample]]:
        return {name: runs for name in names if (runs := measured.of(name, size))}

    rivals = of(FIO)
    best = min(rivals, key=lambda name: statistics.median(seconds(rivals[name])), default=None)
    every = {**of(LIMIT), **rivals, **of(ALLOCATION)}
    lines = []
    for name, runs in every.items():
        share = ""
        if best and name in LIMIT:
            share = compared(seconds(rivals[best]), seconds(runs))
        lines.append(
            [
                name + (" (best)" if name == best else ""),
                spread(seconds(runs), 3),
                f"{size / statistics.median(seconds(runs)) / 1e9:.2f}",
                f"{statistics.median(one.own_cpu for one in runs) / size * 1e9:.3f}",
                share,
            ]
        )
    title = f"The limits, {size_text(size)}, cold"
    return Result(
        "limit",
        title,
        ["", "seconds", "GB/s", "CPU s/GB", "share of fio's speed"],
        lines,
        [*measured.refusals(size), *measured.missing],
    )
