"""Loads by dmafile and by `read()`, as `dmafile bench` compares them, as tables for documents.

python -m bench.quick [--keep]
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import documents
from bench.arguments import add_keep, add_place, folders, program
from bench.runs import Rows, Run
from bench.seconds import facts
from bench.seconds.files import MIB
from bench.seconds.memory import room

SIZES = tuple(1024 * MIB >> shift for shift in range(8))
"""Sizes of the large file; the first one that fits on disk and in memory is used."""
SMALL = 8 * MIB


def measured(command: Sequence[str], folder: Path, scratch: Path) -> Run:
    """Runs the command for a large file and a small one."""
    about = facts.described(command, folder, scratch)
    large = next((size for size in SIZES if size <= room(folder)), SIZES[-1])
    samples = []
    for size in dict.fromkeys((large, SMALL)):
        said = scratch / "bench.json"
        words = ["bench", f"--dir={folder}", f"--size={size}", "--quiet", f"--json={said}"]
        if status := subprocess.run([*command, *words]).returncode:
            sys.exit(status)
        samples.append(json.loads(said.read_text()))
    return Run({"bench": "quick", "machine": about}, samples)


def tables(run: Run) -> dict[str, Rows]:
    return {
        f"quick-{one['bytes'] // MIB}MiB-{state}": table_of(one, state)
        for one in run.samples
        for state in dict.fromkeys(line["state"] for line in one["table"])
    }


def table_of(said: Mapping[str, Any], state: str) -> Rows:
    size = said["bytes"]
    rows = []
    for line in said["table"]:
        if line["state"] != state:
            continue
        left = line["cached_after"]
        runs = (
            one for one in said["samples"] if (one["state"], one["way"]) == (state, line["way"])
        )
        peak = max(one["peak_bytes"] or 0 for one in runs)
        unsure = ", undecided" if line["undecided"] else ""
        rows.append(
            [
                line["what"],
                between(line["seconds"], 3),
                f"{size / line['seconds']['median'] / 1e9:.2f}",
                f"{line['cpu_seconds']['median'] / size * 1e9:.3f}",
                f"{max(0, peak - size) / MIB:,.0f}",
                "?" if left is None else f"{left / MIB:,.0f}",
                between(line["ratio"], 2) + unsure if line["ratio"] else "",
            ]
        )
    head = ["", "seconds", "GB/s", "CPU s/GB", "extra MiB", "MiB cached after"]
    return [*head, "time, to dmafile's"], rows


def between(of: Mapping[str, float], digits: int) -> str:
    return f"{of['median']:.{digits}f} [{of['min']:.{digits}f}–{of['max']:.{digits}f}]"


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.quick", description=__doc__)
    add_place(parser)
    add_keep(parser)
    args = parser.parse_args()
    with folders(args.dir) as (folder, scratch):
        run = measured(program(args.program), folder, scratch)
    documents.finish(run, "vm-quick", tables(run), kept=args.keep)


if __name__ == "__main__":
    main()
