"""Measures dmafile beside fio and plain read(), with the file cold and warm, and its start-up.

Every run is a whole process timed from outside, after memory has been touched and the cache state
verified; candidates take turns in shuffled order. Nothing is asserted: the verdicts inform.
"""

import argparse
import datetime
import json
import os
import platform
import random
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import (
    MIB,
    Run,
    baseline,
    cached,
    evict,
    file_system,
    make_file,
    memory,
    prepare,
    ratio,
    run,
    spread,
    table,
)

ROOT = Path(__file__).resolve().parent.parent

FIO = "fio"
OURS = "dmafile"
READ = "read()"

SWEEP_BLOCKS_MIB = (1, 4)
SWEEP_DEPTHS = (4, 8, 16, 32)
SWEEP_PASSES = 3

START_UP_RUNS = 50

# What dmafile has to reach, as ratios to the others unless a unit is named.
FIO_THROUGHPUT = 0.95
READ_THROUGHPUT = 2.5
READ_CPU = 0.25
EXTRA_MEMORY_MIB = 64
START_UP_MS = 10


@dataclass(frozen=True)
class Candidate:
    """A way to read the file: a command, and the report in JSON that it leaves, if any."""

    name: str
    command: list[str]
    report: Path | None = None


@dataclass(frozen=True)
class Sample:
    """One run of a candidate."""

    candidate: str
    round: int
    run: Run
    cached_before: int
    cached_after: int
    report: Any


def fio(path: Path, block_mib: int, depth: int, report: Path) -> Candidate:
    command = ["fio", "--name=read", "--readonly", "--rw=read", "--ioengine=io_uring", "--direct=1"]
    # A thread, not a process of its own: less start-up, and one process to account for.
    command += ["--thread", f"--bs={block_mib}m", f"--iodepth={depth}", f"--filename={path}"]
    command += ["--output-format=json", f"--output={report}"]
    return Candidate(FIO, command, report)


def fio_seconds(report: Any) -> float:
    """The time fio took by its own clock, which leaves out its start-up."""
    reads = report["jobs"][0]["read"]
    return float(reads["io_bytes"] / reads["bw_bytes"])


def dmafile(
    program: str, path: Path, name: str, arguments: Sequence[str], report: Path
) -> Candidate:
    command = [program, "load", str(path), *arguments, "--quiet", f"--json={report}"]
    return Candidate(name, command, report)


def sample(candidate: Candidate, path: Path, number: int) -> Sample:
    """Runs a candidate once; the cache state is the caller's."""
    before = cached(path)
    if candidate.report:
        candidate.report.unlink(missing_ok=True)  # never the previous run's
    done = run(candidate.command)
    report = json.loads(candidate.report.read_text()) if candidate.report else None
    return Sample(candidate.name, number, done, before, cached(path), report)


def measure(
    candidates: Sequence[Candidate], path: Path, rounds: int, *, warm: bool
) -> list[Sample]:
    """Every candidate once a round, in an order drawn anew each round."""
    samples = []
    for number in range(rounds):
        for candidate in random.sample(candidates, len(candidates)):
            prepare(path, warm=warm)
            samples.append(sample(candidate, path, number))
            print(
                f"  round {number + 1}: {samples[-1].run.wall:7.3f} s  {candidate.name}", flush=True
            )
    return samples


def sweep(path: Path, report: Path) -> tuple[int, int, list[dict[str, Any]]]:
    """Finds the block size in MiB and the depth at which fio reads this file fastest."""
    pairs = [(block, depth) for block in SWEEP_BLOCKS_MIB for depth in SWEEP_DEPTHS]
    rates: dict[tuple[int, int], list[float]] = {pair: [] for pair in pairs}
    for number in range(SWEEP_PASSES):
        for pair in random.sample(pairs, len(pairs)):
            # fio reuses a few blocks of memory, so there is no need to touch more.
            evict(path)
            done = sample(fio(path, *pair, report), path, number)
            rates[pair].append(path.stat().st_size / fio_seconds(done.report) / 1e9)
    print(
        table(
            ["fio block × depth", "GB/s"],
            [[f"{b} MiB × {d}", spread(rates[b, d])] for b, d in pairs],
        )
    )
    best = max(pairs, key=lambda pair: statistics.median(rates[pair]))
    raw = [{"block_mib": b, "depth": d, "gb_per_s": rates[b, d]} for b, d in pairs]
    return *best, raw


def start_up(commands: dict[str, list[str]]) -> dict[str, list[float]]:
    """Milliseconds of each run of commands that have next to nothing to do."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(START_UP_RUNS):
        for name, command in commands.items():
            times[name].append(run(command, silent=True).wall * 1000)
    return times


# What the samples say


def per_round(
    samples: Sequence[Sample], name: str, value: Callable[[Sample], float]
) -> list[float]:
    return [value(each) for each in samples if each.candidate == name]


def wall(each: Sample) -> float:
    return each.run.wall


def cpu(each: Sample) -> float:
    return each.run.cpu


def rows(samples: Sequence[Sample], names: Sequence[str], size: int, state: str) -> list[list[str]]:
    """A line of the table for each candidate."""
    lines = []
    for name in names:
        seconds, busy = per_round(samples, name, wall), per_round(samples, name, cpu)
        over = (max(per_round(samples, name, lambda each: each.run.peak)) - size) / MIB
        left = max(per_round(samples, name, lambda each: each.cached_after)) / MIB
        lines.append(
            [
                f"{name}, {state}",
                spread(seconds),
                f"{size / statistics.median(seconds) / 1e9:.2f}",
                spread(busy),
                f"{statistics.median(busy) / size * 1e9:.3f}",
                # fio holds a few blocks, never the file.
                f"{over:,.0f}" if name != FIO else "",
                f"{left:,.0f}",
            ]
        )
        if name == FIO:
            own = per_round(samples, name, lambda each: fio_seconds(each.report))
            rate = f"{size / statistics.median(own) / 1e9:.2f}"
            lines.append([f"{name}, {state}, its own clock", spread(own), rate, "", "", "", ""])
    return lines


def verdicts(
    cold: Sequence[Sample], warm: Sequence[Sample], startup: dict[str, list[float]], size: int
) -> list[str]:
    """The targets, one by one."""

    def line(target: str, found: str, met: bool) -> str:
        return f"{target}: {found}: {'met' if met else 'MISSED'}"

    ours, plain = per_round(cold, OURS, wall), per_round(cold, READ, wall)
    # fio's start-up, some 0.3 s, would flatter us: what counts is its own clock, ours from outside.
    own = per_round(cold, FIO, lambda each: fio_seconds(each.report))
    strict = ratio(own, ours)
    outside = ratio(per_round(cold, FIO, wall), ours)
    faster = ratio(plain, ours)
    # How much faster than read() this disk lets anyone be.
    ceiling = ratio(plain, own)
    busy = ratio(per_round(cold, OURS, cpu), per_round(cold, READ, cpu))
    extra = (max(per_round(cold, OURS, lambda each: each.run.peak)) - size) / MIB
    left = max(per_round(cold, OURS, lambda each: each.cached_after)) / MIB
    warm_ratio = ratio(per_round(warm, READ, wall), per_round(warm, OURS, wall))
    slowest = max(statistics.median(times) for times in startup.values())
    return [
        line(
            f"(a) throughput at least {FIO_THROUGHPUT} of fio's",
            f"{strict:.2f} by fio's own clock, {outside:.2f} with both timed from outside",
            strict >= FIO_THROUGHPUT,
        ),
        line(
            f"(b) read()'s throughput {READ_THROUGHPUT} times or more, CPU {READ_CPU} or less",
            f"{faster:.2f} times (fio {ceiling:.2f}), {busy:.3f} of its CPU",
            faster >= READ_THROUGHPUT and busy <= READ_CPU,
        ),
        line(
            f"(c) at most {EXTRA_MEMORY_MIB} MiB of memory over the file, no page cache left",
            f"{extra:.1f} MiB over, {left:.1f} MiB left",
            extra <= EXTRA_MEMORY_MIB and left == 0,
        ),
        line(
            "(d) warm, not slower than read()",
            f"{warm_ratio:.2f} times its throughput",
            warm_ratio >= 1,
        ),
        line(f"(e) start-up under {START_UP_MS} ms", f"{slowest:.1f} ms", slowest < START_UP_MS),
    ]


def as_typed(command: Sequence[str]) -> list[str]:
    """A command as one would type it in this project, without the paths of this machine."""
    words = ["python3" if word == sys.executable else word for word in command]
    return [word.replace(f"{ROOT}/", "") for word in words]


def first_line(*command: str) -> str:
    try:
        return subprocess.check_output(command, text=True).splitlines()[0]
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


def machine(program: str, folder: Path) -> dict[str, Any]:
    """What a reader needs to know to place the figures."""
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "kernel": platform.release(),
        "cpu": model[1] if model else platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": memory("MemTotal"),
        "file_system": file_system(folder),
        "dmafile": first_line(program, "--version"),
        "python": platform.python_version(),
    }


def arguments() -> argparse.Namespace:
    def candidate(text: str) -> tuple[str, list[str]]:
        name, separator, words = text.partition("=")
        if not name or not separator or name in (FIO, OURS, READ):
            raise argparse.ArgumentTypeError(f"wanted NAME=ARGS with a new NAME, got {text!r}")
        return name, shlex.split(words)

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dmafile", default=str(ROOT / "target/release/dmafile"), metavar="PATH")
    parser.add_argument(
        "--dir",
        type=Path,
        default=ROOT / ".bench",
        help="where the file read is kept: the disk measured",
    )
    parser.add_argument(
        "--mib", type=int, default=4096, help="size of the file, a multiple of 4 (default 4096)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="at least 5 (default 7)")
    parser.add_argument(
        "--candidate",
        type=candidate,
        action="append",
        default=[],
        metavar="NAME=ARGS",
        help="measure `dmafile load FILE ARGS` too, as in 'anon=--to anon'; repeatable",
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / ".bench/result.json", help="every run, in JSON"
    )
    args = parser.parse_args()
    if args.rounds < 5:
        parser.error("--rounds: at least 5, fewer show no spread")
    if args.mib <= 0 or args.mib % max(SWEEP_BLOCKS_MIB):
        parser.error(
            f"--mib: a multiple of {max(SWEEP_BLOCKS_MIB)}, so that fio reads the file whole"
        )
    return args


def main() -> None:
    args = arguments()
    size = args.mib * MIB
    path, tiny = args.dir / f"{args.mib}MiB.noise", args.dir / "4KiB.noise"
    report = args.dir / "report.json"
    print(f"Writing {path}, unless it is there.", flush=True)
    make_file(path, b"", size)
    make_file(tiny, b"", 4096)
    about = {**machine(args.dmafile, args.dir), "fio": first_line("fio", "--version")}
    for key, value in about.items():
        print(f"{key}: {value}")

    print("\nfio's best block size and depth:", flush=True)
    block, depth, swept = sweep(path, report)

    ours = dmafile(args.dmafile, path, OURS, ["--to", "memfd"], report)
    plain = Candidate(READ, baseline(path))
    extra = [dmafile(args.dmafile, path, name, words, report) for name, words in args.candidate]
    candidates = [fio(path, block, depth, report), ours, plain, *extra]

    print(f"\nCold, {args.rounds} rounds:", flush=True)
    cold = measure(candidates, path, args.rounds, warm=False)
    print(f"\nWarm, {args.rounds} rounds:", flush=True)
    warm = measure([ours, plain], path, args.rounds, warm=True)
    startup = start_up(
        {
            "dmafile --version": [args.dmafile, "--version"],
            "dmafile load, 4 KiB": [args.dmafile, "load", str(tiny), "--to", "memfd", "--quiet"],
        }
    )

    result = {
        "machine": about,
        "file_bytes": size,
        "rounds": args.rounds,
        "fio_sweep": swept,
        "commands": {each.name: as_typed(each.command) for each in candidates},
        "cold": [asdict(each) for each in cold],
        "warm": [asdict(each) for each in warm],
        "start_up_ms": startup,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")

    print(
        f"\n{args.mib} MiB, {args.rounds} rounds, fio at {block} MiB × {depth}; median [min–max]\n"
    )
    head = ["", "seconds", "GB/s", "CPU s", "CPU s/GB", "MiB over file", "MiB cached after"]
    lines = rows(cold, [each.name for each in candidates], size, "cold") + rows(
        warm, [OURS, READ], size, "warm"
    )
    print(table(head, lines))
    print()
    print(table(["start-up", "ms"], [[name, spread(ms, 1)] for name, ms in startup.items()]))
    print()
    print("\n".join(verdicts(cold, warm, startup, size)))
    print(f"\nEvery run: {args.out}")


if __name__ == "__main__":
    main()
