"""Measures the CPU time that a load into the memory of a GPU costs, without a GPU.

A load through the ring into the memory of the double of the driver (tests/double/driver.c), which
copies with the CPU, is compared with a load into memory of the process, and with one memcpy of the
same bytes into fresh memory. The double is compiled without delays and without checksums. Each way
runs in its own process, with nothing of the file in the page cache. With dmafile installed:

    python -m bench.ring
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench import runs
from bench.__main__ import folders, parser_of, program
from bench.runs import ROOT, Rows, Run
from bench.seconds import facts
from bench.seconds.commands import script
from bench.seconds.files import MIB, evict, make_file
from bench.words import ratios, spread

WAYS = {
    "device": "into the memory of the double",
    "anon": "`--to anon`",
    "memcpy": "`memcpy` into fresh memory",
}
GOAL = 1.1
"""What the first one may cost more than the second one, in times of the third one."""


def driver(folder: Path, define: str) -> Path:
    """Builds the double of CUDA's driver into a folder."""
    name = "libcuda.so.1"
    build = ["cc", "-O2", "-shared", "-fPIC", "-pthread", f"-D{define}", f"-Wl,-soname,{name}"]
    source = ROOT / "tests" / "double" / "driver.c"
    subprocess.run([*build, str(source), "-o", str(folder / name)], check=True)
    return folder


def model(folder: Path, mib: int) -> Path:
    """Makes a model of one tensor of MIB."""
    size = mib * MIB
    header = {"t": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    text = json.dumps(header).encode().ljust(4096 - 8)
    path = folder / f"ring-{mib}.safetensors"
    make_file(path, len(text).to_bytes(8, "little") + text, size)
    return path


def measure(file: Path, driver: Path, rounds: int, draw: random.Random) -> list[dict[str, Any]]:
    samples, ways = [], list(WAYS)
    own = os.environ | {"LD_LIBRARY_PATH": str(driver)}
    for number in range(1, rounds + 1):
        draw.shuffle(ways)
        for way in ways:
            evict(file)
            done = subprocess.run(
                script("ring.py", way, str(file)), env=own, stdout=subprocess.PIPE, check=True
            )
            samples.append({"way": way, "round": number, **json.loads(done.stdout)})
            print(f"round {number} of {rounds}: {way}", file=sys.stderr)
    return samples


def tables(run: Run) -> dict[str, Rows]:
    cpu = {way: [one["cpu"] for one in run.samples if one["way"] == way] for way in WAYS}
    more = [a - b for a, b in zip(cpu["device"], cpu["anon"], strict=True)]
    rows = [
        [what, spread(cpu[way], 3), spread(ratios(cpu[way], cpu["memcpy"]))]
        for way, what in WAYS.items()
    ]
    name = f"the first minus the second (goal: {GOAL} `memcpy` or less)"
    rows.append([name, spread(more, 3), spread(ratios(more, cpu["memcpy"]))])
    return {"ring": (("", "CPU time, s", "in times of `memcpy`"), rows)}


def main() -> None:
    parser = parser_of("ring", __doc__)
    parser.set_defaults(rounds=9)
    parser.add_argument("--mib", type=int, default=1024, help="size of the model [1024]")
    args = parser.parse_args()
    with folders(args) as (place, scratch):
        described = facts.described(program(args.program), place, scratch)
        file = model(place, args.mib)
        samples = measure(file, driver(scratch, "UNCHECKED"), args.rounds, random.Random(args.seed))
    run = Run(
        {"bench": "ring", "machine": {**described, "mib": args.mib}, "seed": args.seed}, samples
    )
    runs.finish(run, tables(run), args.keep)


if __name__ == "__main__":
    main()
