"""Runs candidates in turns, in random order each round, each from a known state."""

import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.runs import Run
from bench.seconds.commands import Candidate
from bench.seconds.files import cached
from bench.seconds.process import Failed, run
from bench.seconds.state import prepare


@dataclass(frozen=True)
class Sample:
    """One run of a candidate."""

    candidate: str
    size: int
    round: int
    warm: bool
    wall: float
    """Seconds of the whole process, measured from outside."""
    cpu: float
    """Seconds of CPU of the whole process, io_uring's workers included."""
    peak: int
    """Peak memory in bytes, by getrusage(2)."""
    cached_after: int
    """Bytes of the file in the page cache after the run. Before it: 0 if cold, all if warm."""
    seconds: float
    """Seconds by its own clock, without the start of the process."""
    own_cpu: float
    phases: Mapping[str, float] = field(default_factory=dict)
    report: Any = None
    quick_memory: bool = True
    """Whether allocation right before the run was as fast as the fastest so far."""


@dataclass(frozen=True)
class Cell:
    """A candidate, with the file cold or in the page cache."""

    candidate: Candidate
    warm: bool = False


@dataclass
class Measured:
    """The results for a table so far."""

    seed: int
    candidates: dict[str, str] = field(default_factory=dict)
    """Descriptions of the candidates by name, in the order of the table."""
    samples: list[Sample] = field(default_factory=list)
    refused: dict[tuple[str, int], str] = field(default_factory=dict)
    """The reasons why candidates cannot run here, by name and size."""
    missing: list[str] = field(default_factory=list)
    """Candidates that are not installed, and how to install them."""
    interrupted: bool = False
    failed: str = ""
    """The error that ended the measurement; empty if it finished or was interrupted."""

    @property
    def sizes(self) -> list[int]:
        """The sizes that ran, the largest first."""
        return sorted({one.size for one in self.samples}, reverse=True)

    def refusals(self, size: int) -> list[str]:
        """The candidates that cannot run at this size, with the reasons."""
        by_reason: dict[str, list[str]] = {}
        for (name, bytes), why in self.refused.items():
            if bytes == size:
                by_reason.setdefault(why, []).append(name)
        return [f"Cannot run here: {'; '.join(names)}: {why}" for why, names in by_reason.items()]

    def of(self, name: str, size: int, *, warm: bool = False) -> list[Sample]:
        return [
            one for one in self.samples if (one.candidate, one.size, one.warm) == (name, size, warm)
        ]


def seconds(runs: Sequence[Sample]) -> list[float]:
    return [one.seconds for one in runs]


def as_run(machine: Mapping[str, str], seed: int, tables: Mapping[str, Measured]) -> Run:
    """The whole measurement, as it is stored in the results."""
    about = {
        name: {
            "candidates": one.candidates,
            "interrupted": one.interrupted,
            "failed": one.failed,
        }
        for name, one in tables.items()
    }
    lines: list[dict[str, Any]] = []
    for table, measured in tables.items():
        lines += ({"table": table, **asdict(one)} for one in measured.samples)
        for (name, size), why in measured.refused.items():
            lines.append({"table": table, "candidate": name, "size": size, "refused": why})
    top = {"bench": "seconds", "machine": dict(machine), "seed": seed, "tables": about}
    return Run(top, lines)


def of_run(run: Run) -> dict[str, Measured]:
    """The inverse of `as_run`, by the name of the table."""
    found = {
        table: Measured(run.machine["seed"], **about)
        for table, about in run.machine["tables"].items()
    }
    for line in run.samples:
        fields = dict(line)
        measured = found[fields.pop("table")]
        if "refused" in fields:
            measured.refused[fields["candidate"], fields["size"]] = fields["refused"]
        else:
            measured.samples.append(Sample(**fields))
    return found


def sample(cell: Cell, number: int, scratch: Path) -> Sample | str:
    """One run; a string is the reason why it is not possible."""
    candidate, out = cell.candidate, scratch / "said"
    if candidate.writes:
        candidate.file.unlink(missing_ok=True)
        # So that work of the file system for the previous file does not count.
        os.sync()
        candidate.file.touch()
    quick = prepare(candidate.file, candidate.size, warm=cell.warm, memory=candidate.memory)
    try:
        done = run(candidate.command, out)
        output = candidate.parse(out)
    except Failed as why:
        # A candidate that cannot run reports `refused`. This is another error, such as wrong bytes.
        sys.exit(f"{candidate.name}: {why}")
    if isinstance(output, str):
        return output
    return Sample(
        candidate.name,
        candidate.size,
        number,
        cell.warm,
        done.wall,
        done.cpu,
        done.peak,
        cached(candidate.file),
        output.seconds,
        output.cpu,
        output.phases,
        output.report,
        quick,
    )


def try_candidate(cell: Cell, scratch: Path, same: Mapping[str, Any]) -> str | None:
    """The reason why a candidate cannot run here. Exits if it reads wrong bytes."""
    command, checks = cell.candidate.command, cell.candidate.checks
    checking = replace(cell.candidate, command=[*command, checks] if checks else command)
    one = sample(replace(cell, candidate=checking), 0, scratch)
    if isinstance(one, str):
        return one
    for name, wanted in same.items():
        if one.report[name] != wanted:
            sys.exit(f"{cell.candidate.name}: wrong bytes: {name} {one.report[name]}, not {wanted}")
    return None


def progress(number: int, rounds: int, since: float) -> str:
    """The round that begins, and the time left, if the rounds so far took `since` seconds."""
    if number == 1:
        return f"round 1 of {rounds}"
    left = since / (number - 1) * (rounds - number + 1)
    return f"round {number} of {rounds}, {left / 60:.1f} minutes left"


def measure(
    cells: Sequence[Cell],
    measured: Measured,
    scratch: Path,
    rounds: int,
    same: Mapping[str, Any],
) -> Iterator[Sample]:
    """Runs each candidate once, to check that it reads the right bytes, and then the rounds."""
    draw = random.Random(measured.seed)
    measured.candidates |= {cell.candidate.name: cell.candidate.what for cell in cells}
    # Shows the progress and the time left.
    left = len(cells) * (rounds + 1)
    with tqdm(total=left, disable=None, unit="run", leave=False) as bar:
        usable = []
        for cell in cells:
            bar.set_description(f"trying {cell.candidate.name}")
            # Only in the first of its states.
            if (cell.candidate.name, cell.candidate.size) in measured.refused:
                bar.total = left = left - rounds - 1
                continue
            if why := try_candidate(cell, scratch, same):
                measured.refused[cell.candidate.name, cell.candidate.size] = why
                bar.total = left = left - rounds
            else:
                usable.append(cell)
            bar.update()
        began = time.monotonic()
        for number in range(1, rounds + 1):
            if bar.disable:
                # A file or a pipe gets a line for each round.
                print(progress(number, rounds, time.monotonic() - began), file=sys.stderr)
            for cell in draw.sample(usable, len(usable)):
                bar.set_description(f"round {number}: {cell.candidate.name}")
                one = sample(cell, number, scratch)
                if isinstance(one, str):
                    sys.exit(
                        f"{cell.candidate.name}: worked in an earlier round, but now fails: {one}"
                    )
                measured.samples.append(one)
                bar.update()
                yield one
