"""Reading a file while its buffer is being allocated: AR-31's schemes and sizes."""

import statistics
from collections.abc import Sequence

from .candidates import PHASES, Candidate, ours, plain
from .published import HEAP, HEAP_SIZES
from .quick import ROUNDS, file_of, refusals, room
from .rounds import Cell, Measured, Sample
from .tables import Bars, Job, Place, Result
from .words import compared, size_text, spread

NORMAL = HEAP[0].name
OURS = {
    "dmafile, memfd": "to=memfd",
    "dmafile, memfd, allocated, then read": "to=memfd allocation=before",
    "dmafile, udmabuf": "to=udmabuf",
    "dmafile, heap": "to=heap:system",
    "dmafile, dmafile.ko": "to=dmafile",
}


def job(place: Place, rounds: int | None) -> Job:
    wanted = [size for size in HEAP_SIZES if size >= place.least]
    sizes = [size for size in wanted if size <= room(place)]
    cells = [Cell(candidate) for size in sizes for candidate in candidates(place, size)]
    return Job(
        cells,
        rounds or ROUNDS,
        lambda measured: [result(measured, size, size in sizes) for size in wanted],
    )


def candidates(place: Place, size: int) -> list[Candidate]:
    file = file_of(place, size)
    every = [plain(row.name, file, size, row.words) for row in HEAP]
    return every + [ours(name, file, words) for name, words in OURS.items()]


def result(measured: Measured, size: int, fits: bool) -> Result:
    normal = costs(measured.of(NORMAL, size))
    lines, bars = [], []
    published = {row.name: row.nanoseconds[size] / HEAP[0].nanoseconds[size] for row in HEAP}
    for name in (*published, *OURS):
        runs = measured.of(name, size)
        theirs = f"{published[name]:.2f}" if name in published else ""
        if not runs:
            lines.append([name, "can't run here", "", theirs, "", "", ""])
            continue
        phases = [f"{statistics.median(one.cost(phase) for one in runs):.2f}" for phase in PHASES]
        found = costs(runs)
        lines.append(
            [name, spread(found), compared(found, normal) if normal else "", theirs, *phases]
        )
        bars.append((name, found))
    title = f"Reading while allocating, {size_text(size)}, cold"
    too_large = ["Too large for the disk or the memory here, or for --most."]
    return Result(
        f"heap-{size // 1024}KiB",
        title,
        ["", measured.unit, "to normal", "published", *PHASES],
        lines,
        refusals(measured, size) if fits else too_large,
        [Bars(title, measured.unit, bars, more_is_better=False)] if bars else [],
    )


def costs(runs: Sequence[Sample]) -> list[float]:
    """To make memory and to fill it."""
    return [one.cost("create", "fill") for one in runs]
