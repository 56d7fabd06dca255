"""From files into memory that devices share, call by call: CF-13's rows."""

import statistics
from collections.abc import Sequence

from .candidates import plain
from .files import MIB
from .heap import beside
from .published import copies
from .quick import ROUNDS, file_of, refusals, room
from .rounds import Cell, Measured, Sample
from .tables import Bars, Job, Place, Result
from .words import ratio, size_text

SIZE, COUNT = 32 * MIB, 32
PHASES = ("create", "close", "fill")


def job(place: Place, rounds: int | None) -> Job:
    count = COUNT
    while count > 1 and count * SIZE > room(place):
        count //= 2
    file = file_of(place, count * SIZE)
    cells = [Cell(plain(row.name, file, SIZE, row.words, count)) for row in copies()]
    return Job(cells, rounds or ROUNDS, lambda measured: [result(measured, count)])


def result(measured: Measured, count: int) -> Result:
    size, rows = count * SIZE, copies()
    first = measured.of(rows[0].name, size)
    lines, bars = [], []
    for row in rows:
        runs = measured.of(row.name, size)
        # By speed, and cut off, as it was published.
        theirs = [f"{100 * rows[0].fill // row.fill} %", f"{row.whole / rows[0].whole:.2f}"]
        if not runs:
            lines.append([row.name, "can't run here", *[""] * 5, *theirs])
            continue
        millis = [1e3 * statistics.median(one.phases[phase] for one in runs) for phase in PHASES]
        rates = [size / MIB / one.phases["fill"] for one in runs]
        percent = (
            100 * ratio(rates, [size / MIB / one.phases["fill"] for one in first]) if first else 0
        )
        lines.append(
            [
                row.name,
                *(f"{figure:.1f}" for figure in millis),
                f"{statistics.median(rates):,.0f}",
                f"{percent:.0f} %" if first else "",
                beside(whole(runs), whole(first)),
                *theirs,
            ]
        )
        bars.append((row.name, rates))
    title = f"Copies, {count} × {size_text(SIZE)}, cold"
    head = ["", "create ms", "close ms", "I/O ms", "MiB/s", "I/O %", "all, to row 1"]
    return Result(
        "copy",
        title,
        [*head, "I/O %, published", "all, published"],
        lines,
        refusals(measured, size),
        [Bars(title, "MiB/s of I/O", bars)] if bars else [],
    )


def whole(runs: Sequence[Sample]) -> list[float]:
    return [sum(one.phases.values()) for one in runs]
