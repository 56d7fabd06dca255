"""Counts what the series changes: small writes on `base` and on `series`, and ways into a dma-buf.

docs/series.md shows what came out, and tells how.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vm.instructions import (
    ALLOC_READ,
    NORMAL,
    PUBLISHED,
    RESULTS,
    ROOT,
    STEPS,
    Measured,
    Tables,
    copy,
    heap,
    measure,
    said_by,
    spread,
    step,
    thousands,
    whole,
    written,
)

sys.path.insert(0, str(ROOT / "python"))
from dmafile_bench.words import table, with_tables

from vm.compiled import static

DOC = ROOT / "docs" / "series.md"
KERNELS = ("base", "series")
FOLDERS = {"tmpfs": "/mnt", "ext4": "/mnt2", "xfs": "/mnt3"}
WRITES = 2000
"""In a round, of each sort."""

WAYS = {
    "the normal way: heap, `read()` into its mapping": NORMAL,
    "udmabuf, then `read()`, buffered": copy("u+mfd", "read", "buffered"),
    "patch 1: all allocated, then read, buffered": copy("heap", "in-order", "buffered"),
    "patches 1–5: read while allocating, buffered": copy("heap", "heap-read", "buffered"),
    "udmabuf, then `read()`, direct": copy("u+mfd", "read", "direct"),
    "patch 1: all allocated, then read, direct": copy("heap", "in-order", "direct"),
    "patches 1–5: read while allocating, direct": copy("heap", "heap-read", "direct"),
    "`sendfile` into the heap's dma-buf, buffered": copy("heap", "sendfile", "buffered"),
    "`sendfile` into the heap's dma-buf, direct": copy("heap", "sendfile", "direct"),
    "`dmafile load --to heap:system`": heap("heap-read", "direct"),
    "dmafile.ko, `ALLOC_READ`, direct": ALLOC_READ,
}
"""AR-31's rows, and the module."""

UDMABUFS = {
    "over pages of 4 KiB": "make to=udmabuf pages=4k",
    "over huge pages that tmpfs has made": "make to=udmabuf pages=thp",
    "over huge pages of hugetlb": "make to=udmabuf pages=huge",
}
"""Each over a memfd that is there."""

BY_WRITE = "save from=heap method=write io=buffered"
SAVES = {
    "`write()` from its mapping, buffered": BY_WRITE,
    "`copy_file_range`, buffered": "save from=heap method=copy-file-range io=buffered",
    "`copy_file_range`, direct": "save from=heap method=copy-file-range io=direct",
}
"""From a heap's dma-buf to the disk."""

INTO_HEAP = copy("heap", "copy-file-range", "direct")
INTO_MEMFD = copy("memfd", "copy-file-range", "direct")
BY_SENDFILE = copy("memfd", "sendfile", "buffered")


@dataclass(frozen=True)
class Goal:
    """How little a copy shall take, of what another way takes to the same end."""

    name: str
    line: str
    against: str
    most: float | None
    """None where it only shows what another costs."""
    step: str = "fill"
    """`all` where neither creates memory before it fills it."""


GOALS = (
    Goal("into a heap's dma-buf, direct, to `read()` into its mapping", INTO_HEAP, NORMAL, 1 / 16),
    Goal(
        "the same, to direct `read()` into the memfd under a udmabuf",
        INTO_HEAP,
        copy("u+mfd", "read", "direct"),
        0.8,
    ),
    Goal("into a memfd, direct, to buffered `sendfile`", INTO_MEMFD, BY_SENDFILE, 1 / 3, "all"),
    Goal(
        "`fallocate` of a memfd, without a file, to the same",
        "make to=memfd pages=4k method=fallocate",
        BY_SENDFILE,
        None,
        "all",
    ),
    Goal(
        "the same two copies, where tmpfs gives huge pages",
        f"{INTO_MEMFD} pages=thp",
        f"{BY_SENDFILE} pages=thp",
        1 / 3,
        "all",
    ),
    Goal(
        "a heap's dma-buf to the disk, direct, to `write()` from its mapping",
        SAVES["`copy_file_range`, direct"],
        BY_WRITE,
        1 / 8,
    ),
)


def writes(kernel: str, rounds: int) -> dict[str, Any]:
    """Instructions of each write, by folder and size, and how often its source is touched."""
    with tempfile.TemporaryDirectory(prefix="dmafile-series-") as name:
        marks = Path(name) / "marks"
        program = static(ROOT / "vm/inside/writes.c", Path(name), "-Wextra", f"-DWRITES={WRITES}")
        command = [str(ROOT / "vm/run"), f"--kernel={kernel}", "--marks", str(marks)]
        command += [f"--fs={fs}" for fs in FOLDERS]
        inside = 'cp "$1" /tmp/writes; shift; exec /tmp/writes "$@"'
        command += ["--timeout=1800", "--", "sh", "-c", inside, "sh", str(program), str(rounds)]
        result = subprocess.run([*command, *FOLDERS.values()], capture_output=True, text=True)
        if result.returncode:
            sys.exit(result.stderr)
        lines = [line.split() for line in marks.read_text().splitlines()]
    counts = [int(user) + int(kernel) for number, user, kernel in lines if int(number) < 2]
    pairs = iter(zip(counts[::2], counts[1::2], strict=True))
    names = {folder: fs for fs, folder in FOLDERS.items()}
    found: dict[str, Any] = {}
    for line in result.stdout.splitlines():
        verb, folder, size, *rest = line.split()
        one = found.setdefault(f"{names[folder]} {size}", {"runs": []})
        if verb == "ran":
            begun, done = next(pairs)
            one["runs"].append((done - begun) / WRITES)
        else:
            one["touched"] = [int(count) / WRITES for count in rest]
    assert next(pairs, None) is None, "more was counted than run"
    return found


def table_of_writes(runs: dict[str, dict[str, Any]]) -> str:
    rows = []
    for what in runs["base"]:
        fs, size = what.split()
        row = [fs, size]
        for kernel in KERNELS:
            one = runs[kernel][what]
            low, high = min(one["runs"]), max(one["runs"])
            row.append(f"{statistics.median(one['runs']):,.1f} [{low:,.1f}–{high:,.1f}]")
        medians = [statistics.median(runs[kernel][what]["runs"]) for kernel in KERNELS]
        row.append(f"{medians[0] - medians[1]:,.1f}")
        for kernel in KERNELS:
            faulted, copied = runs[kernel][what]["touched"]
            row.append(f"{faulted + copied:g}")
        rows.append(row)
    head = ["", "bytes", "base", "series", "less", "touches, base", "touches, series"]
    return table(head, rows)


def table_of_ways(measured: Measured) -> str:
    rows = []
    for name, line in WAYS.items():
        one = measured.candidates[line]
        counts = [thousands(one.per_mib(measured.mib, step(which))) for which in STEPS]
        every = thousands(one.per_mib(measured.mib, whole))
        ratios = [spread(measured.ratios(line, other)) for other in (NORMAL, ALLOC_READ)]
        rows.append([name, *counts, every, *ratios])
    head = ["", "create", "fill", "close", "all", "to normal", "to `ALLOC_READ`"]
    return table(head, rows)


def table_of_udmabufs(base: Measured, series: Measured) -> str:
    rows = []
    for name, line in UDMABUFS.items():
        row = [name]
        for which in ("create", "close"):
            for measured in (base, series):
                one = measured.candidates[line]
                row.append(thousands(one.per_mib(measured.mib, step(which))))
        rows.append(row)
    head = ["", "create, base", "create, series", "close, base", "close, series"]
    return table(head, rows)


def udmabufs(mib: int, rounds: int) -> str:
    """Of both kernels; they are not compared within a round, as each is a machine of its own."""
    lines = list(UDMABUFS.values())
    measured = [
        measure(lines, mib=mib, rounds=rounds, timeout=3600, kernel=kernel) for kernel in KERNELS
    ]
    return table_of_udmabufs(*measured)


def table_of_saves(measured: Measured) -> str:
    rows = []
    for name, line in SAVES.items():
        counts = measured.candidates[line].per_mib(measured.mib, step("fill"))
        rows.append([name, thousands(counts), spread(measured.ratios(line, BY_WRITE))])
    return table(["", "to the disk", "all, to `write()`"], rows)


def table_of_goals(measured: Measured) -> str:
    rows = []
    for goal in GOALS:
        what = whole if goal.step == "all" else step(goal.step)
        pairs = zip(
            measured.candidates[goal.line].runs, measured.candidates[goal.against].runs, strict=True
        )
        ratios = [what(one) / what(other) for one, other in pairs]
        most = "" if goal.most is None else f"{goal.most:.3g}"
        rows.append([goal.name, goal.step, most, spread(ratios)])
    return table(["", "of", "at most", "here"], rows)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="size of the file (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="at least 5 (default 5)")
    args = parser.parse_args(words)
    if args.rounds < 5:
        parser.error("--rounds: at least 5, fewer show no spread")
    runs = {kernel: writes(kernel, args.rounds) for kernel in KERNELS}
    print(table_of_writes(runs), flush=True)
    lines = [*WAYS.values(), *PUBLISHED.values(), *SAVES.values()]
    lines += (line for goal in GOALS for line in (goal.line, goal.against))
    lines = list(dict.fromkeys(lines))
    measured = measure(lines, mib=args.mib, rounds=args.rounds, timeout=2 * 3600, kernel="series")
    copies = Tables(measured).published()
    print(table_of_ways(measured), copies, table_of_saves(measured), table_of_goals(measured))
    today = datetime.date.today().isoformat()
    (RESULTS / f"{today}-series-writes.json").write_text(json.dumps(runs, indent=1) + "\n")
    (RESULTS / f"{today}-series-ways.json").write_text(written(measured))
    ours = said_by("git", "-C", str(ROOT), "describe", "--always", "--dirty")
    about = (
        f"{today}, Linux {measured.about['guest']} and its `base`, dmafile {ours}, {args.mib} MiB, "
        f"{args.rounds} rounds."
    )
    tables = {
        "about": about,
        "writes": table_of_writes(runs),
        "ways": table_of_ways(measured),
        "copies": copies,
        "udmabufs": udmabufs(args.mib, args.rounds),
        "saves": table_of_saves(measured),
        "goals": table_of_goals(measured),
    }
    DOC.write_text(with_tables(DOC.read_text(), tables.get))


if __name__ == "__main__":
    main()
