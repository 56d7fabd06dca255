"""Measures how long a second process, and four concurrent workers, take to get a model in memory.

A held model (`dmafile hold`, `dmafile.shared`) is compared with loaders that share the page cache,
if these are installed. Each process imports what it needs, waits for a line on its standard input,
then takes the model and touches every 4 KiB of every tensor. The tables are for docs/holding.md.
"""

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import runs
from bench.__main__ import folders, parser_of, program
from bench.runs import Rows, Run
from bench.seconds import facts
from bench.seconds.commands import script
from bench.seconds.files import MIB, cached, evict, fill_cache
from bench.seconds.model import Shape, header, make_model
from bench.seconds.peers import converted, label, to_install
from bench.seconds.programs.peer import HELD, WAYS
from bench.waiting import Waiting, load_at_once
from bench.words import compared, ratio, spread

NAME = f"bench-{os.getpid()}"
HELD_MODEL = f"held:{NAME}"
WORKERS = 4
PEERS = ("safetensors, mmap", "safetensors for torch, mmap", "gguf", "torch.load, mmap")
"""Loaders whose processes share memory, namely the page cache."""
SECOND = ("dmafile.take", "dmafile.numpy, held:", "dmafile.torch, held:", *PEERS)
AT_ONCE = ("dmafile.shared", *PEERS)
TABLES = ("second", "workers")
ALL = {**WAYS, **HELD}


def model(folder: Path, mib: int) -> Path:
    """Makes a model of at most MIB."""
    for hidden in range(3072, 0, -32):
        shape = Shape(hidden=hidden, key_value=max(1, hidden // 4), intermediate=int(3.5 * hidden))
        if header(shape)[1] <= mib * MIB:
            path = folder / f"held-{mib}.safetensors"
            make_model(path, shape)
            return path
    sys.exit(f"--mib: {mib} is too small for the smallest model")


def files(source: Path, ways: Sequence[str]) -> dict[str, Path]:
    """The file that each loader reads, for those that can run here."""
    return {way: converted(source, ALL[way].file) for way in ways if not to_install(ALL[way])}


def workers(way: str, path: str, count: int) -> tuple[list[dict[str, Any]], float, int]:
    """The output of each worker, seconds until the last has finished, and memory of all."""
    command = script("peer.py", way, path, "wait=1")
    try:
        return load_at_once([Waiting(command) for _ in range(count)])
    except RuntimeError as error:
        sys.exit(str(error))


def measure(
    command: Sequence[str], source: Path, rounds: int, draw: random.Random
) -> list[dict[str, Any]]:
    samples = []
    second, at_once = files(source, SECOND), files(source, AT_ONCE)
    hold = [*command, "hold", str(source), f"--name={NAME}"]
    for number in range(1, rounds + 1):
        cells = [("second", way) for way in second] + [("workers", way) for way in at_once]
        draw.shuffle(cells)
        for kind, way in cells:
            path = {"second": second, "workers": at_once}[kind][way]
            held = kind == "second" and way in HELD
            # Held only for this measurement, so that others have all memory.
            holder = subprocess.Popen(hold, stdout=subprocess.PIPE) if held else None
            if holder and holder.stdout and not holder.stdout.readline():
                sys.exit(f"{hold} ended with {holder.wait()}")
            evict(path)
            if kind == "second" and not held:
                fill_cache(path)
            count = 1 if kind == "second" else WORKERS
            said, seconds, memory = workers(way, HELD_MODEL if held else str(path), count)
            samples.append(
                {
                    "table": kind,
                    "way": label_of(way),
                    "held": way in HELD,
                    "round": number,
                    "size": path.stat().st_size,
                    "ready": max(one["ready"] for one in said),
                    "touched": max(one["touched"] for one in said),
                    "all": seconds,
                    "faults": sum(one["faults"] for one in said),
                    "read": sum(one["read"] for one in said),
                    "memory": memory,
                    "cached_after": cached(path),
                }
            )
            if holder:
                holder.terminate()
                holder.wait()
            print(f"round {number} of {rounds}: {kind}, {way}", file=sys.stderr)
    return samples


def label_of(way: str) -> str:
    return way if way in HELD else label(way)


def tables(run: Run) -> dict[str, Rows]:
    return {"second": second_table(run.samples), "workers": workers_table(run.samples)}


def by_way(samples: Sequence[Mapping[str, Any]], kind: str) -> dict[str, list[Mapping[str, Any]]]:
    mine = [one for one in samples if one["table"] == kind]
    listed = {"second": SECOND, "workers": AT_ONCE}[kind]
    # Names end with the loader's version.
    names = sorted(
        {one["way"] for one in mine},
        key=lambda way: next(n for n, name in enumerate(listed) if way.startswith(name)),
    )
    return {name: [one for one in mine if one["way"] == name] for name in names}


def of(samples: Sequence[Mapping[str, Any]], what: str) -> list[float]:
    return [float(one[what]) for one in samples]


def second_table(samples: Sequence[Mapping[str, Any]]) -> Rows:
    ways = by_way(samples, "second")
    ours = next(name for name, found in ways.items() if found[0]["held"])
    rows = []
    for name, found in ways.items():
        row = [name, spread([1000 * one for one in of(found, "ready")])]
        row += [spread(of(found, "touched"), 3), f"{max(of(found, 'faults')):,.0f}"]
        beside = compared(of(found, "touched"), of(ways[ours], "touched"))
        fewer = f"{ratio(of(ways[ours], 'faults'), of(found, 'faults')):.3f}"
        rows.append([*row, *(("", "") if name == ours else (beside, fewer))])
    head = ["", "ready, ms", "touched, s", "page faults", f"time, to {ours}"]
    return [*head, f"page faults of {ours}, to its"], rows


def workers_table(samples: Sequence[Mapping[str, Any]]) -> Rows:
    ways = by_way(samples, "workers")
    ours = next(name for name, found in ways.items() if found[0]["held"])
    rows = []
    for name, found in ways.items():
        row = [name, spread(of(found, "all"))]
        for what in ("read", "memory", "cached_after"):
            row.append(spread([one[what] / one["size"] for one in found]))
        beside = compared(of(found, "all"), of(ways[ours], "all"))
        rows.append([*row, "" if name == ours else beside])
    head = ["", "all ready and touched, s", "read from the disk"]
    head += ["memory of all", "left in the page cache"]
    return [*head, f"time, to {ours}"], rows


def main() -> None:
    parser = parser_of("holding", __doc__)
    parser.add_argument("--mib", type=int, default=4096, help="maximum size of the model [4096]")
    args = parser.parse_args()
    command = program(args.program)
    with folders(args) as (place, scratch), tempfile.TemporaryDirectory() as run_dir:
        # Users' holds are in XDG_RUNTIME_DIR, root's elsewhere.
        os.environ["XDG_RUNTIME_DIR"] = run_dir
        about = {**facts.described(command, place, scratch), "mib": args.mib}
        source = model(place, args.mib)
        samples = measure(command, source, args.rounds, random.Random(args.seed))
    run = Run({"bench": "holding", "machine": about, "seed": args.seed}, samples)
    runs.finish(run, tables(run), args.keep)


if __name__ == "__main__":
    main()
