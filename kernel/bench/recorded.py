"""The cost of `dmafile pins --record` on stock kernels: the same work without it, and with it.

docs/pins.md has the results.
"""

import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.instructions.measure import about_text, machine
from bench.instructions.measure import version as dmafile_version
from bench.runs import ROOT, Rows, Run
from kernel.bench import pins
from vm import kernels

KERNELS = ("6.12", kernels.NEWEST)
"""Debian's 6.1 has no udmabuf."""
WITHOUT, RECORDED = "without", "recorded"
JOBS = {**pins.READS, **pins.BUFFERS}
"""Those of pins.c whose cost it may change; gup_test is not in stock kernels."""

INSIDE = """
modprobe null_blk irqmode=0 completion_nsec=0
cp "$1" /tmp/pins; cp "$2" /tmp/dmafile; recorded=$3; shift 3
mount -t bpf -o mode=700 bpf /sys/fs/bpf
[ "$recorded" = without ] || /tmp/dmafile pins --record >&2
echo about $(uname -r) >&2
/tmp/pins "$@" "$RAW" /mnt/file || exit
[ "$recorded" = without ] || /tmp/dmafile pins --json >&2
"""


def measured(rounds: int, seed: int) -> Run:
    build = ["cargo", "build", "--quiet", "--release", "--package", "dmafile-cli"]
    subprocess.run([*build, "--features", "bpf"], cwd=ROOT, check=True)
    ours = dmafile_version()
    samples: list[dict[str, Any]] = []
    for kernel in KERNELS:
        for state in (WITHOUT, RECORDED):
            print(f"{kernel} {state}", flush=True)
            samples += (
                {"kernel": kernel, "state": state, **one}
                for one in one_machine(kernel, state, rounds, seed)
            )
    about = machine(", ".join(KERNELS), ours)
    top = {"bench": "recorded", "machine": about, "about": about_text(about, rounds)}
    return Run(top, samples)


def one_machine(kernel: str, state: str, rounds: int, seed: int) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="dmafile-pins-") as name:
        dmafile = Path(name) / "dmafile"
        subprocess.run(["strip", "-o", dmafile, ROOT / "target/release/dmafile"], check=True)
        words = [str(dmafile), state, str(rounds), str(seed)]
        _, (_, *said), marks, log = pins.boot(kernel, INSIDE, words)
    if state == RECORDED:
        assert '"lost":0,"beyond":0,"missed":0,"disturbed":0' in log, log
    jobs = [job for job in pins.JOBS if job in JOBS or job in pins.FREES]
    return (one for one in pins.paired(said, marks, jobs) if one["job"] in JOBS)


def tables(run: Run) -> dict[str, Rows]:
    return {"cost": table_of_cost(run)}


def values(run: Run, kernel: str, state: str, job: str) -> Sequence[float]:
    return [
        one["instructions"]
        for one in run.samples
        if (one["kernel"], one["state"], one["job"]) == (kernel, state, job)
    ]


def table_of_cost(run: Run) -> Rows:
    rows = []
    for job, names in JOBS.items():
        row = [" ".join(names)]
        for kernel in KERNELS:
            without, recorded = (values(run, kernel, one, job) for one in (WITHOUT, RECORDED))
            ratio = statistics.median(recorded) / statistics.median(without)
            row += [f"{statistics.median(without):,.0f}", f"{ratio:.3f}"]
        rows.append(row)
    head = [word for kernel in KERNELS for word in (f"Linux {kernel}", "recorded")]
    return ["", *head], rows
