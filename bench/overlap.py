"""Measures how much of an allocation dmafile.ko overlaps with reads, by the speed of the disk.

There is one machine for each ratio of allocation time to I/O time; QEMU limits its disk to the
speed for that ratio. Each machine times the parts and the whole, in random order each round.
docs/kernel.md has the results.
"""

import argparse
import datetime
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.runs import RESULTS, ROOT, Rows, Run
from bench.words import spread, table
from vm.compiled import static

RATIOS = (0.25, 0.5, 1.0, 2.0)
"""Ratios of allocation time to I/O time."""
PARTS = ("first", "alloc", "io", "together", "in-order")

INSIDE = """
head -c $3M /dev/urandom >/mnt/file && sync && echo 3 >/proc/sys/vm/drop_caches
"$1" /mnt/file "$2" 1
"""

Seconds = Mapping[str, Sequence[float]]
"""Seconds of each part, by round."""


def measure(program: Path, mib: int, rounds: int, speed: int | None) -> Seconds:
    # This measures time, so the CPUs must not take turns.
    command = [str(ROOT / "vm/run"), "--parallel", "--module", "--fs=ext4"]
    command.append(f"--memory={1024 + 3 * mib}M")
    command += [f"--disk-speed={speed}"] if speed else []
    # Writing the file is limited to that speed, too.
    command += ["--timeout=3600", "--", "sh", "-ec", INSIDE, "sh", str(program), str(rounds)]
    result = subprocess.run([*command, str(mib)], capture_output=True, text=True)
    if result.returncode:
        sys.exit(result.stderr)
    seconds: dict[str, list[float]] = {part: [] for part in PARTS}
    for line in result.stdout.splitlines():
        part, took = line.split()
        seconds[part].append(int(took) / 1e9)
    return seconds


def samples(speed: int | None, seconds: Seconds) -> Iterator[dict[str, Any]]:
    """A line of the results for each round."""
    for number, took in enumerate(zip(*(seconds[part] for part in PARTS), strict=True), 1):
        yield {"speed": speed, "round": number, **dict(zip(PARTS, took, strict=True))}


def predicted(seconds: Seconds) -> float:
    """AR-22: the first chunk, plus the longer of I/O and the rest of the allocation."""
    first, alloc, io = (statistics.median(seconds[part]) for part in ("first", "alloc", "io"))
    return first + max(alloc - first, io)


def tables(run: Run) -> dict[str, Rows]:
    return {"overlap": table_of(run.samples)}


def table_of(lines: Sequence[Mapping[str, Any]]) -> Rows:
    rows = []
    for speed in dict.fromkeys(one["speed"] for one in lines):
        mine = [one for one in lines if one["speed"] == speed]
        seconds = {part: [one[part] for one in mine] for part in PARTS}
        alloc, io = (statistics.median(seconds[part]) for part in ("alloc", "io"))
        expected = predicted(seconds)
        name = f"{speed / 1e6:,.0f} MB/s" if speed else "no limit"
        row = [name, f"{alloc / io:.2f}", *(f"{one:.2f}" for one in (alloc, io, expected))]
        for part in ("together", "in-order"):
            row.append(spread([one / expected for one in seconds[part]], 3))
        rows.append(row)
    head = ["disk", "allocation to I/O", "allocation, s", "I/O, s", "predicted, s"]
    return [*head, "`ALLOC_READ`, to that", "in order, to that"], rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="overlap", description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of the file [1024]")
    parser.add_argument("--rounds", type=int, default=7, help="number of rounds, at least 5 [7]")
    parser.add_argument(
        "--keep",
        action="store_true",
        help=f"write to {RESULTS.relative_to(ROOT)} and docs/kernel.md [to .bench]",
    )
    args = parser.parse_args()
    if args.rounds < 5:
        parser.error("--rounds must be at least 5, because fewer show no spread")
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="dmafile-overlap-") as scratch:
        program = static(ROOT / "kernel/tests/overlap.c", Path(scratch), "-Wextra")
        alloc = 0.0
        for ratio in (None, *RATIOS):
            speed = int((args.mib << 20) * ratio / alloc) if ratio else None
            seconds = measure(program, args.mib, args.rounds, speed)
            alloc = alloc or statistics.median(seconds["alloc"])
            lines += samples(speed, seconds)
            print(table(*table_of(lines)), flush=True)
    date = datetime.date.today().isoformat()
    # A run with another file size gets another name.
    name = "overlap" if args.mib == parser.get_default("mib") else f"overlap-{args.mib}mib"
    run = Run({"bench": "overlap", "machine": {"date": date, "mib": args.mib}}, lines)
    # Imported here because documents imports this module.
    from bench import documents

    print(f"All runs: {documents.written(run, date, name, args.keep)}")


if __name__ == "__main__":
    main()
