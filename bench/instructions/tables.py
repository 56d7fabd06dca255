"""Counts the instructions of every way from a file into memory, on Debian's 6.12 in QEMU.

All candidates run in one machine, in an order drawn anew each round, cold, and are compared as
ratios within a round; docs/instructions.md tells how, and shows what came out; docs/kernel.md shows
what dmafile.ko is to the others.
"""

import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
from dmafile_bench.published import COPIES
from dmafile_bench.words import table, with_tables

ROOT = Path(__file__).resolve().parents[1]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target").absolute()
DOCS = (ROOT / "docs" / "instructions.md", ROOT / "docs" / "kernel.md")
RESULTS = ROOT / "bench" / "results"

NORMAL = "copy to=heap method=read io=buffered"
"""What all else is compared with: a dma-buf of the system heap, mapped, and one read() into it."""

KINDS = ("anon", "memfd", "udmabuf")
PAGES = ("4k", "thp", "huge")
WAYS = (
    ("uring", "direct"),
    ("threads", "direct"),
    ("read", "direct"),
    ("sendfile", "direct"),
    ("splice", "direct"),
    ("uring", "buffered"),
    ("threads", "buffered"),
    ("read", "buffered"),
    ("mmap", "buffered"),
    ("sendfile", "buffered"),
    ("splice", "buffered"),
)
HEAP_WAYS = (("bounce", "direct"), *WAYS)

# The marks of inside/ways.c, as counts come out: between START and CREATED, and so on.
STEPS = ("create", "fill", "close")
FIRST_MARK, LAST_MARK = 0, 3


def load(kind: str, pages: str, method: str, io: str) -> str:
    return f"load to={kind} pages={pages} method={method} io={io}"


def heap(method: str, io: str) -> str:
    return f"load to=heap:system method={method} io={io}"


def copy(kind: str, method: str, io: str) -> str:
    return f"copy to={kind} method={method} io={io}"


MEMORY = [
    *(f"make to={kind} pages={pages}" for kind in ("anon", "memfd") for pages in PAGES),
    *(f"make to=udmabuf pages={pages}" for pages in PAGES),
    "make to=heap",
    "make to=nothing",
]
"""Memory alone, created and closed, nothing read."""

ALLOC_READ = copy("dmafile", "alloc-read", "direct")
"""dmafile.ko: a dma-buf is created and filled in one step."""
RW = copy("dmafile", "rw", "direct")
"""dmafile.ko: a dma-buf of its own that is there is filled."""
READ_INTO_ITS_MAPPING = copy("dmafile", "read", "buffered")
ENGINE = "load to=dmafile method=module io=direct"
POOL_MADE = f"{load('udmabuf', 'huge', 'uring', 'direct')} pool=made"
"""For a udmabuf of huge pages that nobody has set aside."""

MODULE = {
    "the normal way: heap, `read()` into its mapping": NORMAL,
    "heap, bounce": heap("bounce", "direct"),
    "udmabuf, 4 KiB pages": load("udmabuf", "4k", "uring", "direct"),
    "udmabuf, THP": load("udmabuf", "thp", "uring", "direct"),
    "udmabuf, hugetlb, which were set aside": load("udmabuf", "huge", "uring", "direct"),
    "udmabuf, hugetlb, set aside for it and given back": POOL_MADE,
    "`ALLOC_READ`, direct": ALLOC_READ,
    "`dmafile load --to dmafile`, direct": ENGINE,
    "`ALLOC_READ`, buffered": copy("dmafile", "alloc-read", "buffered"),
    "`ALLOC` alone, nothing read": "make to=dmafile",
    "`ALLOC`, then `RW`, direct": RW,
    "`ALLOC`, then `RW`, buffered": copy("dmafile", "rw", "buffered"),
    "`ALLOC`, then `read()` into its mapping": READ_INTO_ITS_MAPPING,
}
"""What docs/kernel.md shows: ways to a dma-buf."""

ZEROING = (1 << 20) / 8
"""Instructions for a MiB: the kernel of this CPU zeroes a page with `rep stosq`, word by word."""

LOADS = [load(*what, *way) for what in ((k, p) for k in KINDS for p in PAGES) for way in WAYS]
HEAP_LOADS = [heap(*way) for way in HEAP_WAYS]

BLOCKS = {
    (kind, pages, block): f"{load(kind, pages, 'uring', 'direct')} block={block << 10}"
    for kind, pages in (("memfd", "thp"), ("memfd", "4k"), ("udmabuf", "thp"), ("anon", "thp"))
    for block in (512, 1024, 4096)
}


PUBLISHED = {row: f"copy {row.words}" for row in COPIES}
"""Those of CF-13 by how ways.c is told of them."""

SCENARIOS = {
    "normal: heap, `read()`": NORMAL,
    "udmabuf, then `read()`, buffered": copy("u+mfd", "read", "buffered"),
    "udmabuf, then `read()`, direct": copy("u+mfd", "read", "direct"),
    "`sendfile` into the heap's dma-buf, buffered": copy("heap", "sendfile", "buffered"),
    "`sendfile` into the heap's dma-buf, direct": copy("heap", "sendfile", "direct"),
    "reads begun before the udmabuf: dmafile, 4 KiB pages": load(
        "udmabuf", "4k", "uring", "direct"
    ),
    "the same, THP": load("udmabuf", "thp", "uring", "direct"),
    "the same, hugetlb": load("udmabuf", "huge", "uring", "direct"),
    "dmafile into a heap's dma-buf, bounce": heap("bounce", "direct"),
}


def candidates() -> list[str]:
    """All of them, each once."""
    every = [*MEMORY, *PUBLISHED.values(), *SCENARIOS.values()]
    every += MODULE.values()
    return list(dict.fromkeys([*every, *LOADS, *HEAP_LOADS, *BLOCKS.values()]))


@dataclass(frozen=True)
class Gate:
    """A ratio that a test holds us to."""

    name: str
    candidate: str
    against: str
    limit: float


GATES = [
    Gate("memfd, THP", load("memfd", "thp", "uring", "direct"), NORMAL, 0.32),
    Gate("memfd, hugetlb", load("memfd", "huge", "uring", "direct"), NORMAL, 0.135),
    Gate("anon, THP", load("anon", "thp", "uring", "direct"), NORMAL, 0.25),
    Gate("udmabuf, THP", load("udmabuf", "thp", "uring", "direct"), NORMAL, 0.33),
    Gate(
        "udmabuf, 4 KiB, to one made first",
        load("udmabuf", "4k", "uring", "direct"),
        copy("u+mfd", "read", "direct"),
        1.0,
    ),
    Gate("heap, bounce", heap("bounce", "direct"), NORMAL, 0.42),
    Gate("heap, bounce, to the heap alone", heap("bounce", "direct"), "make to=heap", 1.5),
    Gate(
        "memfd, THP, to its memory alone",
        load("memfd", "thp", "uring", "direct"),
        "make to=memfd pages=thp",
        1.22,
    ),
    Gate(
        "memfd, THP, threads to uring",
        load("memfd", "thp", "threads", "direct"),
        load("memfd", "thp", "uring", "direct"),
        1.1,
    ),
    Gate(
        "memfd, 4 KiB, to a bare direct read()",
        load("memfd", "4k", "read", "direct"),
        copy("memfd", "read", "direct"),
        1.08,
    ),
    Gate(
        "memfd, THP, buffered read",
        load("memfd", "thp", "read", "buffered"),
        NORMAL,
        1.07,
    ),
]

MODULE_GATES = [
    Gate("ALLOC_READ, to normal", ALLOC_READ, NORMAL, 1 / 7),
    Gate(
        "ALLOC_READ, to a udmabuf, THP", ALLOC_READ, load("udmabuf", "thp", "uring", "direct"), 0.44
    ),
    Gate("ALLOC_READ, to its memory alone", ALLOC_READ, "make to=dmafile", 1.16),
    Gate("dmafile load, to ALLOC_READ", ENGINE, ALLOC_READ, 1.95),
]
"""The same, with the module."""


# Measuring


@dataclass
class Candidate:
    """What came of one line: (user, kernel) of each step of each round, or why not."""

    line: str
    refused: str | None = None
    report: dict[str, Any] | None = None
    runs: list[list[tuple[int, int]]] = field(default_factory=list)

    def per_mib(self, mib: int, what: Callable[[list[tuple[int, int]]], int]) -> list[float]:
        """Thousands of instructions per MiB, by round."""
        return [what(run) / mib / 1000 for run in self.runs]


def whole(run: list[tuple[int, int]]) -> int:
    return sum(user + kernel for user, kernel in run)


@dataclass
class Measured:
    """A machine's worth of them."""

    mib: int
    rounds: int
    about: dict[str, Any]
    candidates: dict[str, Candidate]

    def ratios(self, line: str, against: str) -> list[float]:
        """Round by round."""
        pairs = zip(self.candidates[line].runs, self.candidates[against].runs, strict=True)
        return [whole(one) / whole(other) for one, other in pairs]

    def json(self) -> dict[str, Any]:
        return {
            "machine": self.about,
            "mib": self.mib,
            "rounds": self.rounds,
            "steps": STEPS,
            "candidates": [vars(one) for one in self.candidates.values()],
        }

    @classmethod
    def of(cls, result: dict[str, Any]) -> "Measured":
        every = [Candidate(**one) for one in result["candidates"]]
        return cls(
            result["mib"], result["rounds"], result["machine"], {one.line: one for one in every}
        )


def build(folder: Path, profile: str) -> Path:
    """The program that runs inside, with the library as Cargo's profile makes it."""
    command = ["cargo", "build", "--quiet", "--locked", "--package", "dmafile-capi"]
    subprocess.run([*command, "--profile", profile], cwd=ROOT, check=True)
    built = TARGET / ("debug" if profile == "dev" else profile)
    program = folder / "ways"
    # What the archive needs, as capi/dmafile.pc says.
    system = re.search(r"^SYSTEM *:= (.*)$", (ROOT / "capi/Makefile").read_text(), re.MULTILINE)
    assert system is not None
    command = ["cc", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'capi/include'}"]
    command += ["-o", str(program), str(ROOT / "vm/inside/ways.c")]
    command += [str(built / "libdmafile_capi.a"), *system[1].split()]
    subprocess.run(command, check=True)
    return program


INSIDE = """
cp "$1" /tmp/ways
shift
echo about $(uname -r) >&2
exec /tmp/ways /mnt/file "$@"
"""


def measure(
    lines: Sequence[str],
    *,
    mib: int = 64,
    rounds: int = 5,
    seed: int = 1,
    timeout: int = 600,
    profile: str = "release",
    module: bool = True,
    kernel: str = "6.12",
) -> Measured:
    """Boots once; ends with CalledProcessError, and what was said, where that fails."""
    # Before it runs: what is edited meanwhile is not what is measured.
    ours = said_by("git", "-C", str(ROOT), "describe", "--always", "--dirty")
    with tempfile.TemporaryDirectory(prefix="dmafile-instructions-") as name:
        folder = Path(name)
        program, marks = build(folder, profile), folder / "marks"
        (folder / "candidates").write_text("".join(f"{line}\n" for line in lines))
        command = [str(ROOT / "vm/run"), "--marks", str(marks), "--timeout", str(timeout)]
        command += [f"--kernel={kernel}", *(["--module"] if module else [])]
        command += [f"--memory={2048 + 8 * mib}M", "--fs=ext4", "--", "sh", "-c", INSIDE, "sh"]
        command += [str(program), str(mib), str(rounds), str(seed)]
        command.append(str(folder / "candidates"))
        result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if result.returncode:
            sys.stderr.write(result.stderr)
            result.check_returncode()
        every = pair(lines, result.stdout.splitlines(), marks.read_text().splitlines())
    guest = re.search(r"^about (.*)$", result.stderr, re.MULTILINE)
    assert guest is not None, result.stderr
    about = {
        "date": datetime.date.today().isoformat(),
        "guest": guest[1],
        "qemu": said_by("qemu-system-x86_64", "--version").splitlines()[0].split("version ")[1],
        "dmafile": ours,
    }
    return Measured(mib, rounds, about, every)


def said_by(*command: str) -> str:
    return subprocess.check_output(command, text=True).strip()


def groups(marks: Sequence[str]) -> Iterator[list[tuple[int, int]]]:
    """What was counted at the marks of each run; of one that was refused, fewer."""
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
    """Brings together what the program inside said, and what was counted meanwhile."""
    every = [Candidate(line) for line in lines]
    counted = groups(marks)
    for sentence in said:
        verb, index, rest = sentence.split(" ", 2)
        one = every[int(index)]
        if verb == "ran":
            group = next(counted)
            if rest != "0":
                assert len(group) == LAST_MARK + 1, f"{one.line}: {len(group)} marks"
                one.runs.append([(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(group)])
        elif verb == "refused":
            one.refused = rest
        elif verb == "report":
            one.report = told(one.line, json.loads(rest))
    assert next(counted, None) is None, "more was counted than run"
    return {one.line: one for one in every}


def told(line: str, report: dict[str, Any]) -> dict[str, Any]:
    """What dmafile says of a load, which has to be what it was asked for."""
    for word in line.split()[1:]:
        key, _, value = word.partition("=")
        key = {"to": "kind"}.get(key, key)
        assert key not in report or report[key] == value, f"{line}: {key} is {report[key]}"
    why = {reason["about"]: reason["choice"] for reason in report["reasons"]}
    return {"method": why.get("method"), "allocation": why.get("allocation")}


# Showing


def thousands(values: Sequence[float]) -> str:
    """The median of thousands of instructions, in as many digits as mean something."""
    middle = statistics.median(values)
    return f"{middle:,.0f}" if abs(middle) >= 99.5 else f"{middle:.1f}"


def spread(values: Sequence[float]) -> str:
    """Median, least and most, of ratios."""
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:.3f} [{least:.3f}–{most:.3f}]"


def step(name: str) -> Callable[[list[tuple[int, int]]], int]:
    """User and kernel of one step."""
    index = STEPS.index(name)
    return lambda run: sum(run[index])


def side(index: int) -> Callable[[list[tuple[int, int]]], int]:
    """The user's (0) or the kernel's (1), of all steps."""
    return lambda run: sum(one[index] for one in run)


class Tables:
    """What the document shows of a measurement, each by its name there."""

    def __init__(self, measured: Measured) -> None:
        self.measured = measured

    def per_mib(self, line: str, what: Callable[[list[tuple[int, int]]], int]) -> str:
        one = self.measured.candidates[line]
        return thousands(one.per_mib(self.measured.mib, what))

    def ratio(self, line: str, against: str = NORMAL) -> str:
        return spread(self.measured.ratios(line, against))

    def less_memory(self, line: str) -> str:
        """What a load takes beyond creating and closing the same memory."""
        candidates = self.measured.candidates
        words = line.split()
        kind = words[1].removeprefix("to=")
        alone = {
            "heap:system": ["make to=heap"],
            "udmabuf": [f"make to=memfd {words[2]}", f"make to=udmabuf {words[2]}"],
        }.get(kind, [f"make to={kind} {words[2]}"])
        runs = zip(candidates[line].runs, *(candidates[one].runs for one in alone), strict=True)
        beyond = [whole(run) - sum(map(whole, memory)) for run, *memory in runs]
        return thousands([one / self.measured.mib / 1000 for one in beyond])

    def steps(self, line: str) -> list[str]:
        return [self.per_mib(line, step(name)) for name in STEPS]

    def ran(self, line: str) -> bool:
        return self.measured.candidates[line].refused is None

    def about(self) -> str:
        about = self.measured.about
        return (
            f"{about['date']}, Linux {about['guest']} in QEMU {about['qemu']}, dmafile "
            f"{about['dmafile']}, {self.measured.mib} MiB, {self.measured.rounds} rounds."
        )

    def memory(self) -> str:
        rows = []
        for line in MEMORY:
            kind, _, pages = line.removeprefix("make to=").partition(" pages=")
            create, _, close = self.steps(line)
            rows.append([kind, pages, create, close, self.ratio(line)])
        return table(["memory", "pages", "create", "close", "both, to normal"], rows)

    def published(self) -> str:
        rows = []
        normal = self.measured.candidates[NORMAL]
        for row, line in PUBLISHED.items():
            theirs = [str(row.create), str(row.fill), str(row.close), f"{row.percent} %"]
            if not self.ran(line):
                rows.append([row.name, *theirs, "refused", "", "", "", ""])
                continue
            one = self.measured.candidates[line]
            pairs = zip(normal.runs, one.runs, strict=True)
            percent = statistics.median(100 * sum(a[1]) / sum(b[1]) for a, b in pairs)
            ours = [*self.steps(line), f"{percent:.0f} %"]
            rows.append([row.name, *theirs, *ours, self.ratio(line)])
        head = ["row", "create ms", "I/O ms", "close ms", "I/O %"]
        head += ["create", "fill", "close", "fill %", "all, to normal"]
        return table(head, rows)

    def scenarios(self) -> str:
        rows = []
        for name, line in SCENARIOS.items():
            if self.ran(line):
                rows.append([name, *self.steps(line), self.ratio(line)])
            else:
                rows.append([name, "refused", "", "", ""])
        return table(["", "create", "fill", "close", "all, to normal"], rows)

    def loads(self) -> str:
        rows = []
        for kind in KINDS:
            for pages in PAGES:
                for method, io in WAYS:
                    line = load(kind, pages, method, io)
                    if self.ran(line):
                        rows.append([kind, pages, method, io, *self.load(line)])
        head = ["kind", "pages", "method", "io"]
        return table([*head, "user", "kernel", "close", "less memory", "all, to normal"], rows)

    def load(self, line: str) -> list[str]:
        each = [side(0), side(1), step("close")]
        counts = [*(self.per_mib(line, what) for what in each), self.less_memory(line)]
        return [*counts, self.ratio(line)]

    def heaps(self) -> str:
        rows = [
            [method, io, *self.load(heap(method, io))]
            for method, io in HEAP_WAYS
            if self.ran(heap(method, io))
        ]
        head = ["method", "io", "user", "kernel", "close", "less memory", "all, to normal"]
        return table(head, rows)

    def blocks(self) -> str:
        kinds = list(dict.fromkeys((kind, pages) for kind, pages, _ in BLOCKS))
        sizes = list(dict.fromkeys(block for _, _, block in BLOCKS))
        rows = []
        for kind, pages in kinds:
            lines = [BLOCKS[kind, pages, block] for block in sizes]
            each = [spread(self.measured.ratios(line, lines[-1])) for line in lines[:-1]]
            rows.append([kind, pages, self.per_mib(lines[-1], whole), *each])
        head = ["kind", "pages", f"{sizes[-1] >> 10} MiB"]
        return table([*head, *(f"{block} KiB, to it" for block in sizes[:-1])], rows)

    def module(self) -> str:
        rows = []
        for name, line in MODULE.items():
            counts = self.measured.candidates[line].per_mib(self.measured.mib, whole)
            above = thousands([one - ZEROING / 1000 for one in counts])
            rows.append([name, *self.steps(line), above, self.ratio(line)])
        return table(["", "create", "fill", "close", "above zeroing", "all, to normal"], rows)

    def goals(self) -> str:
        """What dmafile.ko is held to, and what came of it."""
        floor = ZEROING * self.measured.mib
        stock = {
            "a udmabuf of hugetlb pages, which were set aside": load(
                "udmabuf", "huge", "uring", "direct"
            ),
            "the same, set aside for it and given back": POOL_MADE,
            "a udmabuf, THP": load("udmabuf", "thp", "uring", "direct"),
        }
        candidates = self.measured.candidates
        rows = [["`ALLOC_READ`, to the normal way", "1/7 = 0.143", self.ratio(ALLOC_READ)]]
        for name, line in stock.items():
            pairs = zip(candidates[ALLOC_READ].runs, candidates[line].runs, strict=True)
            ratios = [(whole(one) - floor) / (whole(other) - floor) for one, other in pairs]
            rows.append([f"`ALLOC_READ` above zeroing, to {name}", "1/2", spread(ratios)])
        fills = zip(candidates[RW].runs, candidates[READ_INTO_ITS_MAPPING].runs, strict=True)
        ratios = [sum(one[1]) / sum(other[1]) for one, other in fills]
        rows.append(
            ["`RW` into a dma-buf, to `read()` into its mapping", "1/16 = 0.063", spread(ratios)]
        )
        return table(["", "at most", "measured here"], rows)

    def gates(self) -> str:
        rows = [
            [gate.name, f"{gate.limit:g}", self.ratio(gate.candidate, gate.against)]
            for gate in GATES
        ]
        return table(["", "below", "measured here"], rows)

    def refused(self) -> str:
        why: dict[str, list[str]] = {}
        for one in self.measured.candidates.values():
            if one.refused is not None:
                # The reason itself: what comes before names the candidate, and after the remedy.
                reason = one.refused.split("; ")[0].split(": ")[-1]
                why.setdefault(reason, []).append(one.line)
        lines = []
        for reason, refused in why.items():
            words = [dict(re.findall(r"([\w-]+)=(\S+)", line)) for line in refused]
            kinds = ", ".join(dict.fromkeys(word["to"] for word in words))
            methods = dict.fromkeys(f"{word['method']} {word['io']}" for word in words)
            lines.append(f"- {reason}: to {kinds} by {', '.join(methods)} ({len(refused)})")
        return "\n".join(lines)


def show(document: str, measured: Measured) -> str:
    """The document with its tables made anew."""
    tables = Tables(measured)

    def made(name: str) -> str | None:
        return getattr(tables, name)() if hasattr(tables, name) else None

    return with_tables(document, made)


def newest() -> Measured:
    """The measurement that the document shows."""
    path = max(RESULTS.glob("*-instructions.json"))
    return Measured.of(json.loads(path.read_text()))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="size of the file (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="at least 5 (default 5)")
    parser.add_argument("--seed", type=int, default=1, help="of the order (default 1)")
    parser.add_argument("--out", type=Path, default=ROOT / ".bench/instructions.json")
    parser.add_argument(
        "--keep",
        action="store_true",
        help=f"write to {RESULTS.relative_to(ROOT)}, and the tables to {DOCS[0].parent.name}",
    )
    parser.add_argument(
        "--show", action="store_true", help="measure nothing; the tables of what was kept"
    )
    args = parser.parse_args()
    if args.rounds < 5:
        parser.error("--rounds: at least 5, fewer show no spread")
    return args


def main() -> None:
    args = arguments()
    if args.show:
        measured = newest()
    else:
        lines = candidates()
        print(f"{len(lines)} candidates, {args.rounds} rounds and one to warm up", flush=True)
        measured = measure(
            lines, mib=args.mib, rounds=args.rounds, seed=args.seed, timeout=6 * 3600
        )
        out = RESULTS / f"{measured.about['date']}-instructions.json" if args.keep else args.out
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(written(measured))
        print(f"Every run: {out}")
    for doc in DOCS:
        text = show(doc.read_text(), measured)
        if args.keep or args.show:
            doc.write_text(text)
        print(text)


def written(measured: Measured) -> str:
    """JSON with a line for each candidate's runs."""
    text = json.dumps(measured.json(), indent=1)
    return re.sub(r"\s*\n {4,}\s*", " ", text) + "\n"


if __name__ == "__main__":
    main()
