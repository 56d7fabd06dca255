"""The ways of this machine side by side, in two to three minutes: `dmafile bench`."""

import shutil
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from .candidates import Candidate, ours, plain
from .files import MIB, make_file
from .memory import meminfo
from .rounds import Cell, Measured, Sample
from .tables import Bars, Job, Place, Result
from .words import compared, decided, ratio, size_text, spread

SIZES = tuple(1024 * MIB >> shift for shift in range(8))
"""Of the large file: the first for which there are disk and memory."""
SMALL = 8 * MIB
ROUNDS = 5
KINDS = {"memfd": "dmafile, memfd", "anon": "dmafile, anon", "dma-buf": "dmafile, dma-buf"}
READ, NORMAL = "read() into a memfd", "read() into a heap's dma-buf"
PHASES = ("alloc", "submit", "wait", "copy", "export")


def job(place: Place, rounds: int | None) -> Job:
    sizes = list(dict.fromkeys([large(place), SMALL]))
    names = [*KINDS.values(), *place.more, READ, NORMAL]
    cells = [
        Cell(candidate, warm=warm)
        for size in sizes
        for candidate in candidates(place, size)
        for warm in (False, True)
    ]
    return Job(
        cells,
        rounds or ROUNDS,
        lambda measured: list(results(measured, names, sizes)),
        lambda measured: advice(measured, sizes[0]),
    )


def large(place: Place) -> int:
    """As large as disk and memory allow."""
    return next((size for size in SIZES if size <= room(place)), SIZES[-1])


def room(place: Place) -> int:
    """Bytes that a file may have; the page cache holds a copy beside the buffer."""
    free = shutil.disk_usage(place.folder).free
    there = min(free - 512 * MIB, (meminfo("MemAvailable") - 512 * MIB) // 2)
    return there if place.most is None else min(there, place.most)


def file_of(place: Place, size: int) -> Path:
    """Made, unless it is there."""
    file = place.folder / f"{size // 1024}KiB.noise"
    make_file(file, b"", size)
    return file


def candidates(place: Place, size: int) -> list[Candidate]:
    file = file_of(place, size)
    every = [ours(name, file, f"to={kind}") for kind, name in KINDS.items()]
    every += [ours(name, file, words) for name, words in place.more.items()]
    every.append(plain(READ, file, size, "to=memfd method=read io=buffered"))
    every.append(plain(NORMAL, file, size, "to=heap method=read io=buffered"))
    return every


def results(measured: Measured, names: Sequence[str], sizes: Sequence[int]) -> Iterator[Result]:
    for size in sizes:
        for warm in (False, True):
            rows = [(name, runs) for name in names if (runs := measured.of(name, size, warm=warm))]
            if rows:
                yield result(rows, measured, size, warm)


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
        "MiB over file",
        "MiB cached after",
        "to the fastest",
    ]
    return Result(
        f"quick-{size // MIB}MiB-{'warm' if warm else 'cold'}", title, head, lines, notes, charts
    )


def refusals(measured: Measured, size: int) -> list[str]:
    """Who couldn't run with so many bytes, and why."""
    by_reason: dict[str, list[str]] = {}
    for (name, bytes), why in measured.refused.items():
        if bytes == size:
            by_reason.setdefault(why, []).append(name)
    return [f"Can't run here: {'; '.join(names)}: {why}" for why, names in by_reason.items()]


def seconds(runs: Sequence[Sample]) -> list[float]:
    return [one.seconds for one in runs]


def rate(runs: Sequence[Sample]) -> float:
    """GB/s at the median."""
    return runs[0].size / statistics.median(seconds(runs)) / 1e9


def advice(measured: Measured, size: int) -> str:
    """What to use on this machine for files like this, and why."""
    cold = {name: runs for name in (*KINDS.values(), READ) if (runs := measured.of(name, size))}
    mine = [name for name in cold if name in KINDS.values()]
    if not mine or READ not in cold or measured.interrupted or measured.failed:
        return "Too little was measured for a recommendation."
    best = min(mine, key=lambda name: statistics.median(seconds(cold[name])))
    others = cold[READ]
    faster = ratio(seconds(others), seconds(cold[best]))
    less = ratio([one.own_cpu for one in cold[best]], [one.own_cpu for one in others])
    certain = decided(seconds(others), seconds(cold[best]))
    what = f"On this machine, for files like this ({size_text(size)}, cold)"
    if certain and faster < 1:
        return f"{what}, use read(): dmafile takes {1 / faster:.2f} times as long."
    kind = next(kind for kind, name in KINDS.items() if name == best)
    speed = (
        f"{faster:.2f} times the speed of read()"
        if certain
        else "the speed of read(), as far as can be told"
    )
    left = max(one.cached_after for one in others) / MIB
    return (
        f"{what}, use `dmafile load --to {kind}`, because it has {speed}, takes {less:.2f} of its "
        f"CPU time, and leaves no page cache, where read() leaves {left:,.0f} MiB."
    )
