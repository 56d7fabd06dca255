"""From files into memory that devices share, call by call: CF-13's rows."""

import statistics
from collections.abc import Sequence

from .candidates import plain
from .files import MIB
from .published import COPIES
from .quick import ROUNDS, file_of, refusals, room
from .rounds import Cell, Measured, Sample
from .tables import Bars, Job, Place, Result
from .words import compared, ratio, size_text

SIZE, COUNT = 32 * MIB, 32
STEPS = ("create", "close", "fill")


def job(place: Place, rounds: int | None) -> Job:
    count = COUNT
    while count > 1 and count * SIZE > room(place):
        count //= 2
    file = file_of(place, count * SIZE)
    cells = [Cell(plain(row.name, file, SIZE, row.words, count)) for row in COPIES]
    return Job(cells, rounds or ROUNDS, lambda measured: [result(measured, count)])


def result(measured: Measured, count: int) -> Result:
    size = count * SIZE
    first = measured.of(COPIES[0].name, size)
    lines, bars = [], []
    for row in COPIES:
        runs = measured.of(row.name, size)
        theirs = [f"{row.percent} %", f"{row.whole / COPIES[0].whole:.2f}"]
        if not runs:
            lines.append([row.name, "can't run here", *[""] * 5, *theirs])
            continue
        steps = [statistics.median(one.cost(step) for one in runs) for step in STEPS]
        fills = [one.cost("fill") for one in runs]
        faster = ratio([one.cost("fill") for one in first], fills) if first else 0
        lines.append(
            [
                row.name,
                *(f"{figure:.1f}" for figure in steps),
                f"{statistics.median(size / MIB / one.phases['fill'] for one in runs):,.0f}",
                f"{100 * faster:.0f} %" if first else "",
                compared(whole(runs), whole(first)) if first else "",
                *theirs,
            ]
        )
        bars.append((row.name, fills))
    title = f"Copies, {count} × {size_text(SIZE)}, cold"
    unit = measured.unit
    head = ["", f"create, {unit}", "close", "I/O", "MiB/s", "I/O %", "all, to row 1"]
    return Result(
        "copy",
        title,
        [*head, "I/O %, published", "all, published"],
        lines,
        refusals(measured, size),
        [Bars(f"{title}: I/O", unit, bars, more_is_better=False)] if bars else [],
    )


def whole(runs: Sequence[Sample]) -> list[float]:
    return [one.cost(*STEPS) for one in runs]
