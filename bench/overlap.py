"""Measures how much of an allocation dmafile.ko hides behind the reads, by the speed of the disk.

One machine for each ratio of the time of allocation to that of I/O, whose disk QEMU holds to the
speed that it takes. The parts and the whole are timed in that machine, in an order drawn anew each
round; docs/kernel.md shows what came out.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
from dmafile_bench.words import table as made
from dmafile_bench.words import with_tables

from vm.compiled import static
from vm.instructions import DOCS, RESULTS, ROOT, spread

KERNEL_DOC = DOCS[1]
RATIOS = (0.25, 0.5, 1.0, 2.0)
"""Of the time of allocation to that of I/O."""
PARTS = ("first", "alloc", "io", "together", "in-order")

INSIDE = """
head -c $3M /dev/urandom >/mnt/file && sync && echo 3 >/proc/sys/vm/drop_caches
"$1" /mnt/file "$2" 1
"""


def measure(program: Path, mib: int, rounds: int, speed: int | None) -> dict[str, list[float]]:
    """Seconds of each part, by round."""
    # Time is what is measured: CPUs don't take turns.
    command = [str(ROOT / "vm/run"), "--parallel", "--module", "--fs=ext4"]
    command.append(f"--memory={1024 + 3 * mib}M")
    command += [f"--disk-speed={speed}"] if speed else []
    # The file is written at that speed, too.
    command += ["--timeout=3600", "--", "sh", "-ec", INSIDE, "sh", str(program), str(rounds)]
    result = subprocess.run([*command, str(mib)], capture_output=True, text=True)
    if result.returncode:
        sys.exit(result.stderr)
    seconds: dict[str, list[float]] = {part: [] for part in PARTS}
    for line in result.stdout.splitlines():
        part, took = line.split()
        seconds[part].append(int(took) / 1e9)
    return seconds


def foretold(seconds: dict[str, list[float]]) -> float:
    """What AR-22 says: the first gather, and the longer of the rest of allocation and I/O."""
    first, alloc, io = (statistics.median(seconds[part]) for part in ("first", "alloc", "io"))
    return first + max(alloc - first, io)


def table(runs: Sequence[dict[str, Any]]) -> str:
    rows = []
    for run in runs:
        seconds = run["seconds"]
        alloc, io = (statistics.median(seconds[part]) for part in ("alloc", "io"))
        expected = foretold(seconds)
        speed = f"{run['speed'] / 1e6:,.0f} MB/s" if run["speed"] else "as it comes"
        row = [speed, f"{alloc / io:.2f}", *(f"{one:.2f}" for one in (alloc, io, expected))]
        for part in ("together", "in-order"):
            row.append(spread([one / expected for one in seconds[part]]))
        rows.append(row)
    head = ["disk", "allocation to I/O", "allocation, s", "I/O, s", "foretold, s"]
    return made([*head, "`ALLOC_READ`, to that", "in order, to that"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of the file (default 1024)")
    parser.add_argument("--rounds", type=int, default=7, help="at least 5 (default 7)")
    args = parser.parse_args()
    if args.rounds < 5:
        parser.error("--rounds: at least 5, fewer show no spread")
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="dmafile-overlap-") as name:
        program = static(ROOT / "kernel/tests/overlap.c", Path(name), "-Wextra")
        alloc = 0.0
        for ratio in (None, *RATIOS):
            speed = int((args.mib << 20) * ratio / alloc) if ratio else None
            seconds = measure(program, args.mib, args.rounds, speed)
            alloc = alloc or statistics.median(seconds["alloc"])
            runs.append({"speed": speed, "seconds": seconds})
            print(table(runs), flush=True)
    out = RESULTS / f"{datetime.date.today().isoformat()}-overlap.json"
    out.write_text(json.dumps({"mib": args.mib, "rounds": args.rounds, "runs": runs}) + "\n")
    text = with_tables(KERNEL_DOC.read_text(), {"overlap": table(runs)}.get)
    KERNEL_DOC.write_text(text)


if __name__ == "__main__":
    main()
