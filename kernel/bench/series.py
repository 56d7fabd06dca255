"""What the patches change: small writes with and without them, and loads into a dma-buf.

kernel/docs/costs.md has the results and the method.
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.candidates import ALLOC_READ, NORMAL
from bench.instructions.measure import STEPS, Count, Measured, about_text, measure, step, whole
from bench.runs import ROOT, Rows, Run
from bench.words import compared, ratio_text, size_text, thousands
from kernel.bench.candidates import (
    BY_WRITE,
    COPIES,
    GOALS,
    HEAP,
    HEAP_OURS,
    HEAP_SIZES,
    SAVES,
    SERIES_WAYS,
    UDMABUFS,
    by_size,
    on_series,
)
from vm.compiled import static

BASE, SERIES = KERNELS = ("base", "series")
FOLDERS = {"tmpfs": "/mnt", "ext4": "/mnt2", "xfs": "/mnt3"}
WRITES = 2000
"""The number of writes of each size in a round."""


# Measuring


def measured(size: int, rounds: int, seed: int, version: str = "6.12") -> Run:
    """Writes and udmabufs on both kernels, with a machine for each, and loads on `series`."""
    samples: list[dict[str, Any]] = []
    for kernel in KERNELS:
        samples += writes(kernel, rounds, version)
        found = measure(
            list(UDMABUFS.values()),
            size=size,
            rounds=rounds,
            seed=seed,
            timeout=3600,
            kernel=f"{kernel}-{version}",
        )
        samples += found.samples(part="udmabufs", kernel=kernel)
    ways = measure(
        on_series(),
        size=size,
        rounds=rounds,
        seed=seed,
        timeout=2 * 3600,
        kernel=f"{SERIES}-{version}",
    )
    about = about_text(ways.about, ways.rounds, size_text(size))
    top = {"bench": "series", "machine": ways.about, "about": about}
    return Run(top, [*samples, *ways.samples(part="ways")])


def measured_by_size(
    rounds: int, seed: int, sizes: Sequence[int] = HEAP_SIZES, kernel: str = "series-6.12"
) -> Run:
    """The rows of AR-31's table, at each of its sizes."""
    every = [
        measure(by_size(), size=size, rounds=rounds, seed=seed, timeout=6 * 3600, kernel=kernel)
        for size in sizes
    ]
    samples = [line for one in every for line in one.samples()]
    return Run({"bench": "by-size", "machine": every[0].about}, samples)


def writes(kernel: str, rounds: int, version: str) -> Iterator[dict[str, Any]]:
    """Instructions per write, by file system and size, and how often its source is touched."""
    with tempfile.TemporaryDirectory(prefix="dmafile-series-") as name:
        marks = Path(name) / "marks"
        program = static(
            ROOT / "kernel/bench/writes.c", Path(name), "-Wextra", f"-DWRITES={WRITES}"
        )
        command = [str(ROOT / "vm/run"), f"--kernel={kernel}-{version}"]
        command += ["--marks", str(marks), *(f"--fs={fs}" for fs in FOLDERS)]
        inside = 'cp "$1" /tmp/writes; shift; exec /tmp/writes "$@"'
        command += ["--timeout=1800", "--", "sh", "-c", inside, "sh", str(program), str(rounds)]
        result = subprocess.run([*command, *FOLDERS.values()], capture_output=True, text=True)
        if result.returncode:
            sys.exit(result.stderr)
        lines = [line.split() for line in marks.read_text().splitlines()]
    counts = [int(user) + int(kernel) for number, user, kernel in lines if int(number) < 2]
    pairs = iter(zip(counts[::2], counts[1::2], strict=True))
    names = {folder: fs for fs, folder in FOLDERS.items()}
    for line in result.stdout.splitlines():
        verb, folder, size, *rest = line.split()
        one = {"part": "writes", "kernel": kernel, "fs": names[folder], "bytes": int(size)}
        if verb == "ran":
            begun, done = next(pairs)
            yield {**one, "instructions": (done - begun) / WRITES}
        else:
            yield {**one, "touches": sum(map(int, rest)) / WRITES}
    assert next(pairs, None) is None, "there are more marks than runs"


# Tables


def tables(run: Run) -> dict[str, Rows]:
    """The tables of a run, by name; a table without samples is left out."""

    def of(part: str) -> list[Mapping[str, Any]]:
        return [one for one in run.samples if one["part"] == part]

    ways = Measured.of(run.machine["machine"], of("ways"))
    found = {
        "writes": table_of_writes(of("writes")),
        "ways": table_of_ways(ways),
        "copies": table_of_copies(ways),
        "saves": table_of_saves(ways),
        "goals": table_of_goals(ways),
    }
    if udmabufs := of("udmabufs"):
        found["udmabufs"] = table_of_udmabufs(udmabufs)
    return found


def tables_by_size(run: Run) -> dict[str, Rows]:
    sizes = sorted({one["size"] for one in run.samples})
    by = {
        size: Measured.of({}, [one for one in run.samples if one["size"] == size]) for size in sizes
    }
    return {"published": table_beside_published(by), "costs": table_of_costs(by)}


def table_of_writes(samples: Sequence[Mapping[str, Any]]) -> Rows:
    rows = []
    for fs, size in dict.fromkeys((one["fs"], one["bytes"]) for one in samples):
        counts, touches = [], []
        for kernel in KERNELS:
            mine = [
                one
                for one in samples
                if (one["kernel"], one["fs"], one["bytes"]) == (kernel, fs, size)
            ]
            counts.append([one["instructions"] for one in mine if "instructions" in one])
            touches += [one["touches"] for one in mine if "touches" in one]
        row = [fs, str(size)]
        for each in counts:
            row.append(f"{statistics.median(each):,.1f} [{min(each):,.1f}–{max(each):,.1f}]")
        base, series = map(statistics.median, counts)
        rows.append([*row, f"{base - series:,.1f}", *(f"{one:g}" for one in touches)])
    return ["", "bytes", "base", "series", "less", "touches, base", "touches, series"], rows


def steps(measured: Measured, line: str) -> list[str]:
    return [thousands(measured.per_mib(line, step(which))) for which in STEPS]


def table_of_ways(measured: Measured) -> Rows:
    rows = []
    for name, line in SERIES_WAYS.items():
        every = thousands(measured.per_mib(line, whole))
        ratios = [ratio_text(measured.ratios(line, other)) for other in (NORMAL, ALLOC_READ)]
        rows.append([name, *steps(measured, line), every, *ratios])
    return ["", "create", "fill", "close", "all", "to normal", "to `ALLOC_READ`"], rows


def table_of_copies(measured: Measured) -> Rows:
    """The rows of CF-13's table, as published and as measured here."""
    rows = []
    for row in COPIES:
        theirs = [str(row.create), str(row.fill), str(row.close), f"{row.percent} %"]
        if measured.candidates[row.line].refused is not None:
            rows.append([row.name, *theirs, "refused", "", "", "", ""])
            continue
        percent = 100 * statistics.median(measured.ratios(NORMAL, row.line, step("fill")))
        ours = [*steps(measured, row.line), f"{percent:.0f} %"]
        rows.append([row.name, *theirs, *ours, ratio_text(measured.ratios(row.line, NORMAL))])
    head = ["row", "create ms", "I/O ms", "close ms", "I/O %"]
    return [*head, "create", "fill", "close", "fill %", "all, to normal"], rows


def table_of_udmabufs(samples: Sequence[Mapping[str, Any]]) -> Rows:
    """Udmabufs on both kernels. Each has its own machine, so ratios are not within a round."""
    by = {
        kernel: Measured.of({}, [one for one in samples if one["kernel"] == kernel])
        for kernel in KERNELS
    }
    rows = []
    for name, line in UDMABUFS.items():
        row = [name]
        for which in ("create", "close"):
            row += (thousands(by[kernel].per_mib(line, step(which))) for kernel in KERNELS)
        rows.append(row)
    return ["", "create, base", "create, series", "close, base", "close, series"], rows


def table_of_saves(measured: Measured) -> Rows:
    rows = []
    for name, line in SAVES.items():
        counts = measured.per_mib(line, step("fill"))
        rows.append([name, thousands(counts), ratio_text(measured.ratios(line, BY_WRITE))])
    return ["", "to the disk", "all, to `write()`"], rows


def table_of_goals(measured: Measured) -> Rows:
    rows = []
    for goal in GOALS:
        what = whole if goal.step == "all" else step(goal.step)
        ratios = measured.ratios(goal.line, goal.against, what)
        most = "" if goal.most is None else f"{goal.most:.3g}"
        rows.append([goal.name, goal.step, most, ratio_text(ratios)])
    return ["", "of", "at most", "here"], rows


def made_and_filled(run: Sequence[Count]) -> int:
    """Without closing, as in the published table."""
    return sum(run[STEPS.index("create")]) + sum(run[STEPS.index("fill")])


def lines_by_name() -> dict[str, str]:
    return {**{row.name: row.line for row in HEAP}, **HEAP_OURS}


def table_beside_published(by: Mapping[int, Measured]) -> Rows:
    """AR-31's table by size: ratios to its first row, here and as published."""
    theirs = {row.name: row.nanoseconds for row in HEAP}
    first = HEAP[0].nanoseconds
    rows = []
    for name, line in lines_by_name().items():
        row = [name]
        for size, measured in by.items():
            if measured.candidates[line].refused is not None:
                row.append("refused")
            else:
                runs = measured.per_mib(line, made_and_filled)
                row.append(compared(runs, measured.per_mib(NORMAL, made_and_filled)))
            row.append(f"{theirs[name][size] / first[size]:.2f}" if name in theirs else "")
        rows.append(row)
    return ["", *(word for size in by for word in (size_text(size), "published"))], rows


def table_of_costs(by: Mapping[int, Measured]) -> Rows:
    """The same rows, in thousands of instructions per MiB."""
    rows = []
    for name, line in lines_by_name().items():
        row = [name]
        for measured in by.values():
            ran = measured.candidates[line].refused is None
            row.append(thousands(measured.per_mib(line, made_and_filled)) if ran else "refused")
        rows.append(row)
    return ["", *map(size_text, by)], rows
