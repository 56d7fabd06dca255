"""Counts the instructions of candidates, in a machine that runs nothing else.

All candidates run in one machine, cold, in random order each round, and are compared as ratios
within a round; see docs/instructions.md.
"""

import datetime
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench import ways
from bench.runs import ROOT, Run
from bench.words import size_text

STEPS = ("create", "fill", "close")
"""The steps between the marks of ways.c: START to CREATED, and so on."""
FIRST_MARK, LAST_MARK = 0, 3
MIB = 1 << 20

Count = tuple[int, ...]
"""Instructions in user space and in the kernel; older results only have the sum."""


@dataclass
class Candidate:
    """The results of one line: counts by step and round, or why it was refused."""

    line: str
    refused: str | None = None
    report: dict[str, Any] | None = None
    runs: list[list[Count]] = field(default_factory=list)


def whole(run: Sequence[Count]) -> int:
    return sum(map(sum, run))


def step(name: str) -> Callable[[Sequence[Count]], int]:
    """Instructions of one step, user space and kernel."""
    index = STEPS.index(name)
    return lambda run: sum(run[index])


def side(index: int) -> Callable[[Sequence[Count]], int]:
    """Instructions of all steps, in user space (0) or in the kernel (1)."""
    return lambda run: sum(one[index] for one in run)


@dataclass
class Measured:
    """All candidates of one machine, with files of one size."""

    size: int
    about: Mapping[str, Any]
    candidates: dict[str, Candidate]

    @property
    def rounds(self) -> int:
        return max(len(one.runs) for one in self.candidates.values())

    def per_mib(self, line: str, what: Callable[[Sequence[Count]], int]) -> list[float]:
        """Thousands of instructions per MiB, by round."""
        return [what(run) / (self.size / MIB) / 1000 for run in self.candidates[line].runs]

    def ratios(
        self, line: str, against: str, what: Callable[[Sequence[Count]], int] = whole
    ) -> list[float]:
        """Ratios by round."""
        pairs = zip(self.candidates[line].runs, self.candidates[against].runs, strict=True)
        return [what(one) / what(other) for one, other in pairs]

    def samples(self, **more: Any) -> Iterator[dict[str, Any]]:
        """A line of the results for each run and each refusal; `more` comes first."""
        for one in self.candidates.values():
            about = {**more, "candidate": one.line, "size": self.size}
            if one.refused is not None:
                yield {**about, "refused": one.refused}
            for number, run in enumerate(one.runs, 1):
                report = {"report": one.report} if one.report and number == 1 else {}
                yield {**about, "round": number, **dict(zip(STEPS, run, strict=True)), **report}

    @classmethod
    def of(cls, about: Mapping[str, Any], samples: Iterable[Mapping[str, Any]]) -> "Measured":
        """The inverse of `samples`. All samples have the same size."""
        every: dict[str, Candidate] = {}
        sizes = set()
        for line in samples:
            sizes.add(line["size"])
            one = every.setdefault(line["candidate"], Candidate(line["candidate"]))
            one.refused = line.get("refused")
            one.report = one.report or line.get("report")
            if "round" in line:
                one.runs.append([tuple(line[name]) for name in STEPS])
        (size,) = sizes
        return cls(size, about, every)


def as_run(bench: str, measured: Measured) -> Run:
    about = about_text(measured.about, measured.rounds, size_text(measured.size))
    return Run(
        {"bench": bench, "machine": measured.about, "about": about}, list(measured.samples())
    )


def about_text(of: Mapping[str, Any], rounds: int, size: str = "") -> str:
    """Describes a measurement."""
    return (
        f"{of['date']}, Linux {of['guest']} in QEMU {of['qemu']}, dmafile {of['dmafile']}, "
        f"{size and f'{size}, '}{rounds} rounds."
    )


INSIDE = """
cp "$1" /tmp/ways
shift
limit=/sys/module/udmabuf/parameters/size_limit_mb
[ ! -e $limit ] || echo 4096 >$limit
echo about $(uname -r) >&2
exec /tmp/ways rounds "${RAW:-/mnt/file}" "$@"
"""


def measure(
    lines: Sequence[str],
    *,
    size: int = 64 * MIB,
    rounds: int = 5,
    seed: int = 1,
    timeout: int = 3600,
    profile: str = "release",
    module: bool = True,
    kernel: str = "6.12",
    raw: bool = False,
) -> Measured:
    """Boots one machine. If that fails, prints its errors and raises CalledProcessError.

    The file is on ext4; with RAW it is a disk of that size without a file system.
    """
    # Before the run, because the sources may change during it.
    ours = version()
    # Room for the file's contents to compare with, the page cache and the buffer, and for a pool of
    # huge pages as large as two files.
    mib = -(-size // MIB)
    memory = 2048 + (8 if any("pages=huge" in line for line in lines) else 4) * mib
    with tempfile.TemporaryDirectory(prefix="dmafile-instructions-") as name:
        folder = Path(name)
        program, marks = ways.build(folder, profile), folder / "marks"
        (folder / "candidates").write_text("".join(f"{line}\n" for line in lines))
        command = [str(ROOT / "vm/run"), "--marks", str(marks), "--timeout", str(timeout)]
        command += [f"--kernel={kernel}", *(["--module"] if module else [])]
        disk = mib if raw else max(2048, 1024 + 2 * mib)
        command += [f"--memory={memory}M", f"--disk-size={disk}M"]
        command += [f"--fs={'raw' if raw else 'ext4'}", "--", "sh", "-c", INSIDE, "sh"]
        command += [str(program), str(size >> 10), str(rounds), str(seed)]
        command.append(str(folder / "candidates"))
        result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if result.returncode:
            sys.stderr.write(result.stderr)
            result.check_returncode()
        every = pair(lines, result.stdout.splitlines(), marks.read_text().splitlines())
    guest = re.search(r"^about (.*)$", result.stderr, re.MULTILINE)
    assert guest is not None, result.stderr
    return Measured(size, machine(guest[1], ours), every)


def version() -> str:
    """The version of this tree."""
    return output_of("git", "-C", str(ROOT), "describe", "--always", "--dirty")


def machine(guest: str, ours: str) -> dict[str, str]:
    """What a measurement ran on: the release of the guest's kernel, and the version of this tree
    before the run."""
    return {
        "date": datetime.date.today().isoformat(),
        "guest": guest,
        "qemu": output_of("qemu-system-x86_64", "--version").splitlines()[0].split("version ")[1],
        "dmafile": ours,
    }


def output_of(*command: str) -> str:
    return subprocess.check_output(command, text=True).strip()


def groups(marks: Sequence[str]) -> Iterator[list[tuple[int, int]]]:
    """The counts at the marks of each run; a refused run has fewer marks."""
    group: list[tuple[int, int]] = []
    for line in marks:
        number, user, kernel = map(int, line.split())
        if number == FIRST_MARK and group:
            yield group
            group = []
        if number <= LAST_MARK:
            group.append((user, kernel))
    if group:
        yield group


def pair(lines: Sequence[str], said: Sequence[str], marks: Sequence[str]) -> dict[str, Candidate]:
    """Joins the output of the program in the machine with the counts at its marks."""
    every = [Candidate(line) for line in lines]
    counted = groups(marks)
    for line in said:
        verb, index, rest = line.split(" ", 2)
        one = every[int(index)]
        if verb == "ran":
            group = next(counted)
            if rest != "0":
                assert len(group) == LAST_MARK + 1, f"{one.line}: {len(group)} marks"
                one.runs.append([(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(group)])
        elif verb == "refused":
            one.refused = rest
        elif verb == "report":
            one.report = checked(one.line, json.loads(rest))
    assert next(counted, None) is None, "there are more marks than runs"
    return {one.line: one for one in every}


def checked(line: str, report: dict[str, Any]) -> dict[str, Any]:
    """The choices in dmafile's report, after checking that it did what the line asks for."""
    for word in line.split()[1:]:
        key, _, value = word.partition("=")
        key = {"to": "kind"}.get(key, key)
        assert key not in report or report[key] == value, f"{line}: {key} is {report[key]}"
    why = {reason["about"]: reason["choice"] for reason in report["reasons"]}
    return {"method": why.get("method"), "allocation": why.get("allocation")}
