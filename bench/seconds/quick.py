"""Compares loads on this machine in two to three minutes: `make bench`."""

import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path

from bench.candidates import QUICK, READ, RIVALS
from bench.seconds.commands import way
from bench.seconds.files import MIB, make_file
from bench.seconds.memory import meminfo
from bench.seconds.rounds import Cell, Measured, Sample
from bench.seconds.tables import Bars, Job, Place, Result
from bench.words import compared, decided, ratio, size_text, spread

SIZES = tuple(1024 * MIB >> shift for shift in range(8))
"""Sizes of the large file; the first one that fits on disk and in memory is used."""
SMALL = 8 * MIB
ROUNDS = 5
PHASES = ("alloc", "submit", "wait", "copy", "export")


def job(place: Place, rounds: int | None) -> Job:
    lines = {**QUICK, **place.more, **RIVALS}
    cells = [
        Cell(way(place.ways, name, file_of(place, size), line), warm=warm)
        for size in dict.fromkeys([large(place), SMALL])
        for name, line in lines.items()
        for warm in (False, True)
    ]
    return Job(cells, rounds or ROUNDS)


def large(place: Place) -> int:
    """The size of the large file: the largest that disk and memory allow."""
    return next((size for size in SIZES if size <= room(place)), SIZES[-1])


def room(place: Place) -> int:
    """The maximum size of a file; memory must hold the buffer and a copy in the page cache."""
    free = shutil.disk_usage(place.folder).free
    there = min(free - 512 * MIB, (meminfo("MemAvailable") - 512 * MIB) // 2)
    return there if place.most is None else min(there, place.most)


def file_of(place: Place, size: int) -> Path:
    """The file of that size, made unless it exists."""
    file = place.folder / f"{size // 1024}KiB.noise"
    make_file(file, b"", size)
    return file


def results(measured: Measured) -> list[Result]:
    found = []
    for size in measured.sizes:
        for warm in (False, True):
            every = ((name, measured.of(name, size, warm=warm)) for name in measured.candidates)
            if rows := [(name, runs) for name, runs in every if runs]:
                found.append(result(rows, measured, size, warm))
    return found


def result(
    rows: Sequence[tuple[str, Sequence[Sample]]], measured: Measured, size: int, warm: bool
) -> Result:
    state = "in the page cache" if warm else "cold"
    least = min((seconds(runs) for _, runs in rows), key=statistics.median)
    lines = []
    for name, runs in rows:
        lines.append(
            [
                name,
                spread(seconds(runs), 3),
                f"{rate(runs):.2f}",
                f"{statistics.median(one.own_cpu for one in runs) / size * 1e9:.3f}",
                f"{max(0, max(one.peak for one in runs) - size) / MIB:,.0f}",
                f"{max(one.cached_after for one in runs) / MIB:,.0f}",
                compared(seconds(runs), least),
            ]
        )
    notes = [] if warm else refusals(measured, size)
    title = f"{size_text(size)}, {state}"
    phases = [(name, runs) for name, runs in rows if runs[0].report]
    charts = [
        Bars(
            f"Throughput, {title}",
            "GB/s",
            [(name, [size / one.seconds / 1e9 for one in runs]) for name, runs in rows],
        ),
        Bars(
            f"CPU, {title}",
            "CPU seconds per GB",
            [(name, [one.own_cpu / size * 1e9 for one in runs]) for name, runs in rows],
            more_is_better=False,
        ),
        Bars(
            f"Phases of dmafile, {title} (they overlap)",
            "seconds",
            [(name, []) for name, _ in phases],
            [
                (
                    phase,
                    [
                        statistics.median(one.report["phases"][phase] for one in runs)
                        for _, runs in phases
                    ],
                )
                for phase in PHASES
            ],
            more_is_better=False,
        ),
    ]
    head = [
        "",
        "seconds",
        "GB/s",
        "CPU s/GB",
        "extra MiB",
        "MiB cached after",
        "relative time",
    ]
    return Result(
        f"quick-{size // MIB}MiB-{'warm' if warm else 'cold'}", title, head, lines, notes, charts
    )


def refusals(measured: Measured, size: int) -> list[str]:
    """The candidates that cannot run at this size, with the reasons."""
    by_reason: dict[str, list[str]] = {}
    for (name, bytes), why in measured.refused.items():
        if bytes == size:
            by_reason.setdefault(why, []).append(name)
    return [f"Cannot run here: {'; '.join(names)}: {why}" for why, names in by_reason.items()]


def seconds(runs: Sequence[Sample]) -> list[float]:
    return [one.seconds for one in runs]


def rate(runs: Sequence[Sample]) -> float:
    """GB/s at the median."""
    return runs[0].size / statistics.median(seconds(runs)) / 1e9


def advice(measured: Measured) -> str:
    """A recommendation for large files on this machine, with reasons."""
    size = measured.sizes[0] if measured.sizes else 0
    cold = {name: runs for name in (*QUICK, READ) if (runs := measured.of(name, size))}
    mine = [name for name in cold if name in QUICK]
    if not mine or READ not in cold or measured.interrupted or measured.failed:
        return "There are too few runs for a recommendation."
    best = min(mine, key=lambda name: statistics.median(seconds(cold[name])))
    others = cold[READ]
    faster = ratio(seconds(others), seconds(cold[best]))
    less = ratio([one.own_cpu for one in cold[best]], [one.own_cpu for one in others])
    certain = decided(seconds(others), seconds(cold[best]))
    what = f"On this machine, for files like this ({size_text(size)}, cold)"
    if certain and faster < 1:
        return f"{what}, use read(): dmafile takes {1 / faster:.2f} times as long."
    kind = QUICK[best].partition("to=")[2]
    speed = f"{faster:.2f} times the speed of read()" if certain else "about the speed of read()"
    left = max(one.cached_after for one in others) / MIB
    return (
        f"{what}, use `dmafile load --to {kind}`: it has {speed}, takes {less:.2f} of its CPU "
        f"time, and leaves nothing in the page cache, where read() leaves {left:,.0f} MiB."
    )
