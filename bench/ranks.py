"""Measures how long several ranks of a process group take to get a model in memory.

dmafile is compared with safetensors in every rank, and with installed loaders that read each byte
once. Each rank imports what it needs, joins the group by gloo, waits for a line on its standard
input, then loads and touches every 4 KiB of every tensor. With PyTorch, safetensors and dmafile
installed:

    python -m bench.ranks
"""

import importlib.metadata
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import documents
from bench.arguments import add_keep, add_place, folders, parser_of, program
from bench.runs import Rows, Run
from bench.seconds import facts
from bench.seconds.commands import script
from bench.seconds.files import MIB, cached, evict
from bench.seconds.programs.rank import WAYS
from bench.words import compared, ratio, spread

OURS = next(iter(WAYS))
SHARDS = 4
TENSOR = 16
"""Size of a tensor in MiB."""


class Waiting:
    """A process that waits for a line on its standard input."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        pipe = subprocess.PIPE
        self.child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environ)

    def line(self) -> str:
        """The next line that it prints. Raises RuntimeError if it ends instead."""
        assert self.child.stdout is not None
        text = self.child.stdout.readline()
        if not text:
            raise RuntimeError(f"{self.child.args!r} ended with {self.child.wait()}")
        return text

    def go(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write("\n")
        self.child.stdin.flush()

    def pss(self) -> int:
        """Its proportional share of the memory that it maps, in bytes."""
        lines = Path(f"/proc/{self.child.pid}/smaps_rollup").read_text().splitlines()
        return 1024 * next(int(one.split()[1]) for one in lines if one.startswith("Pss:"))


def load_at_once(processes: Sequence[Waiting]) -> tuple[list[dict[str, Any]], float, int]:
    """Starts all loads; returns their results, the seconds until the last one has finished, and the
    increase of memory of all."""
    try:
        for one in processes:
            one.line()
        before = sum(one.pss() for one in processes)
        started = time.perf_counter()
        for one in processes:
            one.go()
        said = [json.loads(one.line()) for one in processes]
        seconds = time.perf_counter() - started
        memory = sum(one.pss() for one in processes) - before
        for one in processes:
            one.go()
            one.child.wait()
    finally:
        for one in processes:
            one.child.kill()
            one.child.wait()
    return said, seconds, memory


def rank(way: str, files: Sequence[Path], number: int, count: int, port: int) -> Waiting:
    """Starts a rank, which prints a line when it has joined the group."""
    command = script("rank.py", way, *map(str, files))
    found = {"RANK": number, "WORLD_SIZE": count, "MASTER_PORT": port}
    own = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return Waiting(
        command, {**os.environ, **own, **{name: str(one) for name, one in found.items()}}
    )


def model(folder: Path, mib: int) -> list[Path]:
    """Makes the shards of a model of MIB, or a little less."""
    import safetensors.torch
    import torch

    files = [folder / f"ranks-{mib}-{number}.safetensors" for number in range(SHARDS)]
    generator = torch.Generator().manual_seed(1)
    for number, file in enumerate(files):
        if not file.exists():
            tensors = {
                f"{number}.{at}": torch.randint(
                    0, 256, (TENSOR * MIB,), dtype=torch.uint8, generator=generator
                )
                for at in range(max(1, mib // SHARDS // TENSOR))
            }
            safetensors.torch.save_file(tensors, file)
    return files


def is_missing(way: str) -> bool:
    try:
        importlib.metadata.version(WAYS[way][1])
    except importlib.metadata.PackageNotFoundError:
        return True
    return False


def label(way: str) -> str:
    return f"{way} ({importlib.metadata.version(WAYS[way][1])})"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def together(way: str, files: Sequence[Path], count: int) -> dict[str, Any]:
    """Time, CPU time, reads and memory of all ranks."""
    port = free_port()
    ranks = [rank(way, files, number, count, port) for number in range(count)]
    said, seconds, memory = load_at_once(ranks)
    return {
        "all": seconds,
        "cpu": sum(one["cpu"] for one in said),
        "read": sum(one["read"] for one in said),
        "memory": memory,
    }


def measure(
    files: Sequence[Path], count: int, rounds: int, draw: random.Random
) -> list[dict[str, Any]]:
    samples = []
    ways = [way for way in WAYS if not is_missing(way)]
    size = sum(file.stat().st_size for file in files)
    for number in range(1, rounds + 1):
        draw.shuffle(ways)
        for way in list(ways):
            for file in files:
                evict(file)
            try:
                found = together(way, files, count)
            except RuntimeError as error:
                print(f"skipping {way}: {error}", file=sys.stderr)
                ways.remove(way)
                continue
            own = {"way": label(way), "ours": way == OURS, "round": number, "size": size}
            left = sum(cached(file) for file in files)
            samples.append({**own, **found, "cached_after": left})
            print(f"round {number} of {rounds}: {way}", file=sys.stderr)
    return samples


def tables(run: Run) -> dict[str, Rows]:
    by_way: dict[str, list[Any]] = {}
    for one in sorted(run.samples, key=lambda one: (not one["ours"], one["way"])):
        by_way.setdefault(one["way"], []).append(one)
    ours = next(found for found in by_way.values() if found[0]["ours"])
    rows = []
    for name, found in by_way.items():
        row = [name, spread([one["all"] for one in found])]
        for what in ("read", "memory"):
            row.append(spread([one[what] / one["size"] for one in found]))
        row.append(spread([one["cpu"] for one in found]))
        beside = ["", ""]
        if found is not ours:
            beside[0] = compared([one["all"] for one in found], [one["all"] for one in ours])
            memory = ([one["memory"] for one in each] for each in (ours, found))
            beside[1] = f"{ratio(*memory):.2f}"
        rows.append([*row, *beside])
    head = ["", "all ranks done, s", "bytes read / size of the files"]
    head += ["memory of all / size of the files", "CPU of all, s"]
    head += ["time / dmafile's", "dmafile's memory / its"]
    return {"ranks": (head, rows)}


def main() -> None:
    parser = parser_of("bench.ranks", __doc__)
    parser.add_argument("--mib", type=int, default=2048, help="size of the model [2048]")
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks [4]")
    add_place(parser)
    add_keep(parser)
    args = parser.parse_args()
    with folders(args.dir) as (place, scratch), tempfile.TemporaryDirectory() as run_dir:
        os.environ["XDG_RUNTIME_DIR"] = run_dir
        described = facts.described(program(args.program), place, scratch)
        about = {**described, "mib": args.mib, "ranks": args.ranks}
        samples = measure(model(place, args.mib), args.ranks, args.rounds, random.Random(args.seed))
    run = Run({"bench": "ranks", "machine": about, "seed": args.seed}, samples)
    documents.finish(run, "ranks", tables(run), kept=args.keep)


if __name__ == "__main__":
    main()
