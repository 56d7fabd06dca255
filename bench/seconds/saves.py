"""Compares saves and recorders, each to the disk: `--table saves`."""

import importlib.metadata
import importlib.util
import shutil
import statistics
from collections.abc import Iterable, Sequence

from bench.candidates import BY_PAGE_CACHE, FIO_TO_DISK, RECORDS, TO_DISK
from bench.seconds.commands import Candidate, fio_to_disk, saved, script
from bench.seconds.files import MIB
from bench.seconds.programs.save import WAYS, Way
from bench.seconds.rounds import Cell, Measured, Sample, seconds
from bench.seconds.tables import ROUNDS, Job, Place, Result
from bench.words import compared, ratio, size_text, spread

SIZES = tuple(4096 * MIB >> shift for shift in range(8))
"""Sizes of the file; the smallest is two of the largest recorded buffers."""
SMALLEST = 64 * MIB


def job(place: Place, rounds: int | None) -> Job:
    # Room for the file that is read, and the one that is written.
    disk = shutil.disk_usage(place.folder).free // 2 - 512 * MIB
    there = min(place.room(), disk)
    size = next((size for size in SIZES if size <= there), SMALLEST)
    noise = place.file_of(max(size, SMALLEST))
    size = noise.stat().st_size
    every = [saved(place.ways, name, noise, line) for name, line in {**TO_DISK, **RECORDS}.items()]
    to = every[0].file
    missing = []
    if shutil.which("fio"):
        every += [fio_to_disk(name, to, size, *way) for name, way in FIO_TO_DISK.items()]
    else:
        missing.append("fio: not installed; apt install fio")
    for name, way in WAYS.items():
        if why := to_install(way):
            missing.append(f"{name}: not installed ({why})")
        else:
            command = script("save.py", name, str(noise), str(to))
            what = f"save.py {name}"
            every.append(Candidate(label(name), what, to, size, command, writes=True))
    return Job([Cell(one) for one in every], rounds or ROUNDS, missing)


def to_install(way: Way) -> str:
    """How to install what is missing for a package; empty if nothing is."""
    wanted = [one for one in (way.package, *way.needs) if importlib.util.find_spec(one) is None]
    return f"pip install {' '.join(wanted)}" if wanted else ""


def label(name: str) -> str:
    package = WAYS[name].package
    return f"{name}, {package} {importlib.metadata.version(package)}"


def results(measured: Measured) -> list[Result]:
    size = max(measured.sizes, default=0)
    records = [name for name in RECORDS if name in measured.candidates]
    rivals = [name for name in FIO_TO_DISK if name in measured.candidates]
    others = [
        name for name in measured.candidates if name not in (*TO_DISK, *RECORDS, *FIO_TO_DISK)
    ]
    notes = [*measured.refusals(size), *measured.missing]
    return [
        result("saves", "Saves", measured, size, [*TO_DISK, *rivals, *others], notes),
        result("records", "Recorders", measured, size, [*records, *rivals]),
    ]


def result(
    name: str,
    title: str,
    measured: Measured,
    size: int,
    names: Iterable[str],
    notes: Sequence[str] = (),
) -> Result:
    every = {one: runs for one in names if (runs := measured.of(one, size))}
    rivals = {one: runs for one, runs in every.items() if one in FIO_TO_DISK}
    best = min(rivals, key=lambda one: statistics.median(seconds(rivals[one])), default=None)
    cached = every.get(BY_PAGE_CACHE)
    lines = []
    for one, runs in every.items():
        share, less = "", ""
        if best and one not in FIO_TO_DISK:
            share = compared(seconds(every[best]), seconds(runs))
        if cached and one not in (*FIO_TO_DISK, BY_PAGE_CACHE):
            less = f"{ratio(cpu(runs), cpu(cached)):.3f}"
        lines.append(
            [
                one + (" (best)" if one == best else ""),
                spread(seconds(runs), 3),
                f"{size / statistics.median(seconds(runs)) / 1e9:.2f}",
                f"{statistics.median(cpu(runs)) / size * 1e9:.3f}",
                f"{max(run.cached_after for run in runs) / MIB:,.1f}",
                share,
                *([less] if cached else []),
            ]
        )
    head = ["", "seconds", "GB/s", "CPU s/GB", "MiB cached after", "share of fio's speed"]
    title = f"{title}, {size_text(size)}, to the disk"
    return Result(
        name,
        title,
        [*head, *([f"CPU, to {BY_PAGE_CACHE}"] if cached else [])],
        lines,
        notes,
    )


def cpu(runs: Sequence[Sample]) -> list[float]:
    return [one.own_cpu for one in runs]
