"""Reading a file while its buffer is being allocated: AR-31's schemes and sizes."""

import statistics
from collections.abc import Sequence

from .candidates import Candidate, ours, plain
from .published import HEAP, HEAP_SIZES
from .quick import ROUNDS, file_of, refusals, room, seconds
from .rounds import Cell, Measured
from .tables import Bars, Job, Place, Result
from .words import decided, ratio, size_text, spread

NORMAL = HEAP[0].name
OURS = {
    "dmafile, memfd": "to=memfd",
    "dmafile, memfd, allocated, then read": "to=memfd allocation=before",
    "dmafile, udmabuf": "to=udmabuf",
    "dmafile, heap": "to=heap:system",
    "dmafile, dmafile.ko": "to=dmafile",
}


def job(place: Place, rounds: int | None) -> Job:
    sizes = [size for size in HEAP_SIZES if size <= room(place)]
    cells = [Cell(candidate) for size in sizes for candidate in candidates(place, size)]
    return Job(
        cells,
        rounds or ROUNDS,
        lambda measured: [result(measured, size, size in sizes) for size in HEAP_SIZES],
    )


def candidates(place: Place, size: int) -> list[Candidate]:
    file = file_of(place, size)
    every = [plain(row.name, file, size, row.words) for row in HEAP]
    return every + [ours(name, file, words) for name, words in OURS.items()]


def result(measured: Measured, size: int, fits: bool) -> Result:
    normal = measured.of(NORMAL, size)
    lines, bars = [], []
    published = {row.name: row.nanoseconds[size] / HEAP[0].nanoseconds[size] for row in HEAP}
    for name in (*published, *OURS):
        runs = measured.of(name, size)
        theirs = f"{published[name]:.2f}" if name in published else ""
        if not runs:
            lines.append([name, "can't run here", "", theirs, "", "", ""])
            continue
        phases = [
            f"{1e3 * statistics.median(one.phases[phase] for one in runs):.2f}"
            for phase in ("create", "fill", "close")
        ]
        millis = [1e3 * one for one in seconds(runs)]
        lines.append(
            [name, spread(millis), beside(seconds(runs), seconds(normal)), theirs, *phases]
        )
        bars.append((name, millis))
    title = f"Reading while allocating, {size_text(size)}, cold"
    return Result(
        f"heap-{size // 1024}KiB",
        title,
        ["", "ms", "to normal", "published", "create ms", "fill ms", "close ms"],
        lines,
        refusals(measured, size) if fits else ["too little disk or memory for a file of this size"],
        [Bars(title, "ms", bars, more_is_better=False)] if bars else [],
    )


def beside(runs: Sequence[float], normal: Sequence[float]) -> str:
    if not normal or len(runs) != len(normal):
        return ""
    found = ratio(runs, normal)
    return f"{found:.2f}" if runs is normal or decided(runs, normal) else f"{found:.2f}, undecided"
