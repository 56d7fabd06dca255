"""How near a load comes to what the machine gives: the disk by fio, memory by allocating it."""

import shutil
import statistics

from .candidates import Candidate, fio, ours, plain
from .files import MIB
from .quick import ROUNDS, file_of, refusals, room, seconds
from .rounds import Cell, Measured, Sample
from .tables import Bars, Job, Place, Result
from .words import compared, size_text, spread

SIZES = tuple(4096 * MIB >> shift for shift in range(10))
SETTINGS = {
    f"fio, {block.upper()} × {depth}, {'huge' if huge else '4 KiB'} pages": (block, depth, huge)
    for block, depth in (("1m", 32), ("4m", 8), ("4m", 32))
    for huge in (False, True)
}
OURS = {"dmafile, memfd": "to=memfd", "dmafile, anon": "to=anon"}
FLOORS = {
    f"allocation alone, {kind}, {pages}": f"to={kind} pages={pages} method=populate io=buffered"
    for kind, pages in (
        ("anon", "4k"),
        ("anon", "thp"),
        ("anon", "huge"),
        ("memfd", "4k"),
        ("memfd", "huge"),
    )
}


def job(place: Place, rounds: int | None) -> Job:
    size = next((size for size in SIZES if size <= room(place)), SIZES[-1])
    file = file_of(place, size)
    every: list[Candidate] = [ours(name, file, words) for name, words in OURS.items()]
    every += [plain(name, file, size, words) for name, words in FLOORS.items()]
    cannot = []
    if shutil.which("fio"):
        for name, (block, depth, huge) in SETTINGS.items():
            every.append(fio(name, file, block, depth, huge=huge))
    else:
        cannot.append("fio: not installed; apt install fio")
    return Job(
        [Cell(one) for one in every],
        rounds or ROUNDS,
        lambda measured: [result(measured, size, cannot)],
    )


def result(measured: Measured, size: int, cannot: list[str]) -> Result:
    def of(names: list[str]) -> dict[str, list[Sample]]:
        return {name: runs for name in names if (runs := measured.of(name, size))}

    rivals = of(list(SETTINGS))
    best = min(rivals, key=lambda name: statistics.median(seconds(rivals[name])), default=None)
    every = {**of(list(OURS)), **rivals, **of(list(FLOORS))}
    lines = []
    for name, runs in every.items():
        share = ""
        if best and name in OURS:
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
    rates = [(name, [size / one / 1e9 for one in seconds(runs)]) for name, runs in every.items()]
    return Result(
        "limit",
        title,
        ["", "seconds", "GB/s", "CPU s/GB", "share of fio's speed"],
        lines,
        [*refusals(measured, size), *cannot],
        [Bars(title, "GB/s", rates)] if rates else [],
    )
