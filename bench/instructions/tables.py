"""The tables of a measurement on stock kernels, by their names in documents."""

import functools
import re
from collections.abc import Callable, Sequence

from bench import runs
from bench.candidates import (
    ALLOC_READ,
    BLOCKS,
    GATES,
    HEAP_WAYS,
    KINDS,
    MEMORY,
    MODULE,
    MODULE_GATES,
    NORMAL,
    PAGES,
    POOL_MADE,
    READ_INTO_ITS_MAPPING,
    RW,
    WAYS,
    heap,
    load,
    make,
    on_stock,
)
from bench.instructions.measure import (
    MIB,
    STEPS,
    Count,
    Measured,
    side,
    step,
    whole,
)
from bench.runs import Rows, Run
from bench.words import ratio_text, thousands

STOCK, NEWEST = "instructions", "instructions-newest"
"""Names of the runs on Debian's 6.12 and on the newest kernel. The tables of the first have a
column for the second."""

ZEROING = MIB / 8
"""Instructions to zero one MiB: on this CPU the kernel uses `rep stosq`, word by word."""


def measured_of(run: Run) -> Measured:
    return Measured.of(run.machine["machine"], run.samples)


def release(measured: Measured) -> str:
    """The kernel's version without the distribution's suffix."""
    return re.split(r"[^\d.]", measured.about["guest"])[0]


def above_zeroing(measured: Measured, line: str, against: str) -> list[float]:
    """Ratios by round of the instructions that both take beyond zeroing their memory once."""
    floor = ZEROING * measured.size / MIB
    return measured.ratios(line, against, lambda run: int(whole(run) - floor))


class Tables:
    """The tables of docs/instructions.md and kernel/docs/module.md."""

    NAMES = (
        "memory",
        "loads",
        "heaps",
        "blocks",
        "module",
        "goals",
        "gates",
        "module-gates",
        "refused",
    )

    def __init__(self, measured: Measured, newest: Measured | None = None) -> None:
        self.measured = measured
        self.newest = newest

    def per_mib(self, line: str, what: Callable[[Sequence[Count]], int]) -> str:
        return thousands(self.measured.per_mib(line, what))

    def ratio(self, line: str, against: str = NORMAL) -> list[str]:
        """The ratio here, and on the newest kernel."""
        return self.each(lambda measured: measured.ratios(line, against), line, against)

    def each(self, what: Callable[[Measured], list[float]], *lines: str) -> list[str]:
        """The spread of WHAT for each kernel, if all of these lines ran."""
        found = [ratio_text(what(self.measured))]
        if self.newest:
            ran = all(self.newest.candidates[line].refused is None for line in lines)
            found.append(ratio_text(what(self.newest)) if ran else "refused")
        return found

    def head(self, name: str) -> list[str]:
        """The header of the columns that `ratio` fills."""
        return [name, f"on Linux {release(self.newest)}"] if self.newest else [name]

    def less_memory(self, line: str) -> str:
        """Instructions of a load beyond creating and closing the same memory."""
        candidates = self.measured.candidates
        words = line.split()
        kind = words[1].removeprefix("to=")
        alone = {
            "heap:system": [make("heap")],
            "udmabuf": [f"make to=memfd {words[2]}", f"make to=udmabuf {words[2]}"],
        }.get(kind, [f"make to={kind} {words[2]}"])
        runs = zip(candidates[line].runs, *(candidates[one].runs for one in alone), strict=True)
        beyond = [whole(run) - sum(map(whole, memory)) for run, *memory in runs]
        return thousands([one * MIB / self.measured.size / 1000 for one in beyond])

    def steps(self, line: str) -> list[str]:
        return [self.per_mib(line, step(name)) for name in STEPS]

    def ran(self, line: str) -> bool:
        return self.measured.candidates[line].refused is None

    def memory(self) -> Rows:
        rows = []
        for line in MEMORY:
            kind, _, pages = line.removeprefix("make to=").partition(" pages=")
            create, _, close = self.steps(line)
            rows.append([kind, pages, create, close, *self.ratio(line)])
        return ["memory", "pages", "create", "close", *self.head("both, to normal")], rows

    def loads(self) -> Rows:
        rows = []
        for kind in KINDS:
            for pages in PAGES:
                for method, io in WAYS:
                    line = load(kind, pages, method, io)
                    if self.ran(line):
                        rows.append([kind, pages, method, io, *self.load(line)])
        head = ["kind", "pages", "method", "io"]
        head += ["user", "kernel", "close", "less memory"]
        return [*head, *self.head("all, to normal")], rows

    def load(self, line: str) -> list[str]:
        each = [side(0), side(1), step("close")]
        counts = [*(self.per_mib(line, what) for what in each), self.less_memory(line)]
        return [*counts, *self.ratio(line)]

    def heaps(self) -> Rows:
        rows = [
            [method, io, *self.load(heap(method, io))]
            for method, io in HEAP_WAYS
            if self.ran(heap(method, io))
        ]
        head = ["method", "io", "user", "kernel", "close", "less memory"]
        return [*head, *self.head("all, to normal")], rows

    def blocks(self) -> Rows:
        kinds = list(dict.fromkeys((kind, pages) for kind, pages, _ in BLOCKS))
        sizes = list(dict.fromkeys(block for _, _, block in BLOCKS))
        rows = []
        for kind, pages in kinds:
            lines = [BLOCKS[kind, pages, block] for block in sizes]
            each = [ratio_text(self.measured.ratios(line, lines[-1])) for line in lines[:-1]]
            rows.append([kind, pages, self.per_mib(lines[-1], whole), *each])
        head = ["kind", "pages", f"{sizes[-1] >> 10} MiB"]
        return [*head, *(f"{block} KiB, to it" for block in sizes[:-1])], rows

    def module(self) -> Rows:
        rows = []
        for name, line in MODULE.items():
            counts = self.measured.per_mib(line, whole)
            above = thousands([one - ZEROING / 1000 for one in counts])
            rows.append([name, *self.steps(line), above, *self.ratio(line)])
        return ["", "create", "fill", "close", "above zeroing", *self.head("all, to normal")], rows

    def goals(self) -> Rows:
        """The goals for dmafile.ko, and the results."""
        stock = {
            "the normal way": NORMAL,
            "a udmabuf of hugetlb pages, which were set aside": load(
                "udmabuf", "huge", "uring", "direct"
            ),
            "the same, set aside for it and given back": POOL_MADE,
            "a udmabuf, THP": load("udmabuf", "thp", "uring", "direct"),
        }

        rows = [["`ALLOC_READ`, to the normal way", "1/7 = 0.143", *self.ratio(ALLOC_READ)]]
        for name, line in stock.items():
            above = functools.partial(above_zeroing, line=ALLOC_READ, against=line)
            most = "1/7 = 0.143" if line == NORMAL else "1/2"
            ratios = self.each(above, ALLOC_READ, line)
            rows.append([f"`ALLOC_READ` above zeroing, to {name}", most, *ratios])
        lines = (RW, READ_INTO_ITS_MAPPING)
        fills = self.each(lambda measured: measured.ratios(*lines, step("fill")), *lines)
        name = "`RW` into a dma-buf, to `read()` into its mapping"
        rows.append([name, "1/16 = 0.063", *fills])
        return ["", "at most", *self.head("measured here")], rows

    def gates(self) -> Rows:
        rows = [
            [gate.name, f"{gate.limit:g}", *self.ratio(gate.candidate, gate.against)]
            for gate in GATES
        ]
        return ["", "below", *self.head("measured here")], rows

    def module_gates(self) -> Rows:
        rows = []
        for gate in MODULE_GATES:
            limits = [f"{one:.4g}" for one in (gate.limit, gate.newest or gate.limit)]
            rows.append([gate.name, *limits, *self.ratio(gate.candidate, gate.against)])
        return ["", "below", "on the newest", *self.head("measured here")], rows

    def refused(self) -> Rows:
        why: dict[str, list[str]] = {}
        for line in on_stock():
            if (refused := self.measured.candidates[line].refused) is not None:
                # Only the reason: the candidate's name comes before it, the remedy after it.
                reason = refused.split("; ")[0].split(": ")[-1]
                why.setdefault(reason, []).append(line)
        rows = []
        for reason, lines in why.items():
            words = [dict(re.findall(r"([\w-]+)=(\S+)", line)) for line in lines]
            kinds = ", ".join(dict.fromkeys(word["to"] for word in words))
            methods = dict.fromkeys(f"{word['method']} {word['io']}" for word in words)
            rows.append([reason, kinds, ", ".join(methods), str(len(lines))])
        return ["", "into", "by", "candidates"], rows


def tables(run: Run) -> dict[str, Rows]:
    """The tables of a run, by name; a run on the newest kernel in .bench is a column."""
    measured = measured_of(run)
    newest = runs.latest(NEWEST) if release(measured).startswith("6.12.") else None
    found = Tables(measured, measured_of(newest) if newest else None)
    return {name: getattr(found, name.replace("-", "_"))() for name in Tables.NAMES}
