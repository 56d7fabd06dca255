"""Measures loading tensors: beside other loaders, with checksums, and of many small tensors.

Every load is a process of its own, after memory has been touched and the file put out of the page
cache; candidates take turns in shuffled order. A loader that is not installed is left out by name.
Nothing is asserted: the verdicts inform.
"""

import argparse
import importlib.metadata
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import MIB, cached, prepare, ratio, run, spread, table

from bench import machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "demo"))
from make_model import Shape, make_model

ROOT = Path(__file__).resolve().parent.parent
OURS = "dmafile"
WAYS = {
    OURS: "dmafile",
    "safetensors, mmap": "safetensors",
    "safetensors, pread": "safetensors",
    "read()": "numpy",
    "fastsafetensors": "fastsafetensors",
    "Run:ai Model Streamer": "runai-model-streamer",
}
"""The ways of load_tensors.py, and the package whose version says what was measured."""
CHECKSUMS = ("crc32c", "xxh3", "blake3", "sha256")
SMALL_TENSORS = 10_000

# What dmafile has to reach.
FASTER = 1.5
LESS_CPU = 1 / 5
OPEN_MS = 10
VERIFY_COST = 0.10
TENSOR_US = 2


@dataclass(frozen=True)
class Load:
    """One load, as the process saw it."""

    way: str
    round: int
    seconds: float
    cpu: float
    peak: int
    cached_after: int
    touched: int


def installed() -> dict[str, str]:
    """Versions of the ways that can be measured here; the others are named."""
    versions = {}
    for way, package in WAYS.items():
        try:
            versions[way] = importlib.metadata.version(package)
            if package in ("fastsafetensors", "runai-model-streamer"):
                importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError as error:
            versions.pop(way, None)
            print(f"left out: {way} ({error.name} is not installed)")
    print("left out: tensorizer (it reads files of its own format only)")
    return versions


def beside_others(ways: Sequence[str], path: Path, rounds: int) -> list[Load]:
    """Every way once a round, in an order drawn anew each round."""
    loads = []
    script = str(Path(__file__).with_name("load_tensors.py"))
    for number in range(rounds):
        for way in random.sample(ways, len(ways)):
            prepare(path)
            out = subprocess.check_output([sys.executable, script, way, str(path)])
            said = json.loads(out.splitlines()[-1])
            loads.append(Load(way, number, cached_after=cached(path), **said))
            print(f"  round {number + 1}: {said['seconds']:7.3f} s  {way}", flush=True)
    if len({load.touched for load in loads}) != 1:
        sys.exit("the ways have read different bytes")
    return loads


def checksums(program: str, path: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of cold loads without and with a checksum."""
    seconds: dict[str, list[float]] = {name: [] for name in ("none", *CHECKSUMS)}
    for _ in range(rounds):
        for name in random.sample(list(seconds), len(seconds)):
            prepare(path)
            verify = [] if name == "none" else ["--verify", name]
            seconds[name].append(run([program, "load", str(path), "--quiet", *verify]).wall)
    return seconds


def write_small_tensors(path: Path) -> None:
    """A file of as many tensors as a large model of experts has, of 64 bytes each."""
    entries: dict[str, object] = {}
    for number in range(SMALL_TENSORS):
        name = f"model.layers.{number // 256}.mlp.experts.{number % 256}.down_proj.weight"
        start = number * 64
        entries[name] = {"dtype": "F32", "shape": [4, 4], "data_offsets": [start, start + 64]}
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(64 * SMALL_TENSORS))


def many_tensors(path: Path, rounds: int) -> tuple[list[float], list[float]]:
    """Milliseconds to open such a file, and microseconds a tensor to make all arrays of it."""
    import dmafile
    import dmafile.numpy

    opened, each = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        with dmafile.open_tensors(path):
            opened.append((time.perf_counter() - start) * 1e3)
        start = time.perf_counter()
        with dmafile.load(path, to="anon"):
            bytes_only = time.perf_counter() - start
        start = time.perf_counter()
        tensors = dmafile.numpy.load_file(path)
        whole = time.perf_counter() - start
        # Reading the header is the opening above; what is left are the arrays.
        each.append((whole - bytes_only - opened[-1] / 1e3) / len(tensors) * 1e6)
    return opened, each


def verdicts(
    loads: Sequence[Load],
    verify: dict[str, list[float]],
    opened: Sequence[float],
    each: Sequence[float],
) -> list[str]:
    """The targets, one by one."""

    def line(target: str, found: str, met: bool) -> str:
        return f"{target}: {found}: {'met' if met else 'MISSED'}"

    def of(way: str, field: str) -> list[float]:
        return [float(getattr(load, field)) for load in loads if load.way == way]

    others = {load.way for load in loads} - {OURS}
    fastest = min(others, key=lambda way: statistics.median(of(way, "seconds")))
    least = min(others, key=lambda way: statistics.median(of(way, "cpu")))
    faster = ratio(of(fastest, "seconds"), of(OURS, "seconds"))
    busy = ratio(of(OURS, "cpu"), of(least, "cpu"))
    costs = {name: ratio(verify[name], verify["none"]) - 1 for name in CHECKSUMS}
    cost = {name: f"{name} {100 * costs[name]:+.0f} %" for name in CHECKSUMS}
    return [
        line(
            f"{FASTER} times as fast as the fastest", f"{faster:.2f} ({fastest})", faster >= FASTER
        ),
        line(f"at most {LESS_CPU} of the least CPU", f"{busy:.3f} ({least})", busy <= LESS_CPU),
        line(
            f"{SMALL_TENSORS} tensors opened in {OPEN_MS} ms",
            f"{statistics.median(opened):.1f} ms",
            statistics.median(opened) < OPEN_MS,
        ),
        line(
            f"blake3 or crc32c cost at most {100 * VERIFY_COST:.0f} %",
            ", ".join(cost.values()),
            min(costs["blake3"], costs["crc32c"]) <= VERIFY_COST,
        ),
        line(
            f"at most {TENSOR_US} µs a tensor",
            f"{statistics.median(each):.2f} µs",
            statistics.median(each) <= TENSOR_US,
        ),
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dmafile", default=str(ROOT / "target/release/dmafile"), metavar="PATH")
    parser.add_argument(
        "--file",
        type=Path,
        default=ROOT / ".bench/llama-style-2GiB.safetensors",
        help="a safetensors file of 2 GB or more (default: made as in the demo)",
    )
    parser.add_argument("--rounds", type=int, default=7, help="at least 5 (default 7)")
    parser.add_argument("--out", type=Path, default=ROOT / ".bench/tensors.json")
    args = parser.parse_args()
    if args.rounds < 5:
        parser.error("--rounds: at least 5, fewer show no spread")
    return args


def main() -> None:
    args = arguments()
    if not args.file.exists():
        make_model(args.file, Shape())
    small = args.file.with_name("10000-tensors.safetensors")
    write_small_tensors(small)
    about: dict[str, Any] = {**machine(args.dmafile, args.file.parent), "loaders": installed()}
    for key, value in about.items():
        print(f"{key}: {value}")
    opened, each = many_tensors(small, 20)
    print(f"\nTensors, cold, {args.rounds} rounds:", flush=True)
    loads = beside_others(list(about["loaders"]), args.file, args.rounds)
    print(f"\nChecksums, cold, {args.rounds} rounds", flush=True)
    verify = checksums(args.dmafile, args.file, args.rounds)

    result = {
        "machine": about,
        "file_bytes": args.file.stat().st_size,
        "rounds": args.rounds,
        "loads": [asdict(load) for load in loads],
        "checksum_seconds": verify,
        "open_10000_ms": opened,
        "array_us": each,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")

    size = args.file.stat().st_size
    lines = []
    for way in about["loaders"]:
        own = [load for load in loads if load.way == way]
        seconds, busy = [load.seconds for load in own], [load.cpu for load in own]
        lines.append(
            [
                f"{way} {about['loaders'][way]}" if way != "read()" else way,
                spread(seconds),
                f"{size / statistics.median(seconds) / 1e9:.2f}",
                spread(busy),
                f"{(max(load.peak for load in own) - size) / MIB:,.0f}",
                f"{max(load.cached_after for load in own) / MIB:,.0f}",
            ]
        )
    head = ["tensors, cold", "seconds", "GB/s", "CPU s", "MiB over file", "MiB cached after"]
    print(
        f"\n{size / MIB:,.0f} MiB, {args.rounds} rounds; median [min–max]\n\n{table(head, lines)}\n"
    )
    rows = [[name, spread(seconds)] for name, seconds in verify.items()]
    print(f"{table(['--verify', 'seconds'], rows)}\n")
    print("\n".join(verdicts(loads, verify, opened, each)))
    print(f"\nEvery run: {args.out}")


if __name__ == "__main__":
    main()
