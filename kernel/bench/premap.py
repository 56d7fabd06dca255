"""The saving of mapping a buffer once: reads from a disk, mapped per request and once, in turns.

kernel/docs/costs.md has the results and the method.
"""

import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.instructions.measure import (
    STEPS,
    Measured,
    about_text,
    machine,
    measure,
    step,
    version,
    whole,
)
from bench.runs import ROOT, Rows, Run
from bench.words import ratio_text, size_text, thousands
from vm.compiled import static

BASE, SERIES = "base", "series"
IOMMUS = {"off": "no IOMMU", "intel": "lazy", "intel-strict": "strict"}
"""Names in the tables, by --iommu of vm/run."""
RINGS = ("polled", "interrupts")
PER_REQUEST, ONCE = WAYS = ("request", "once")
BATCHES, DEPTH = 10, 8
"""As in premap.c."""
NEVER_SPLIT = 128 << 10

LOADS = {
    "through a ring, and copied": "load to=heap:system method=bounce io=direct",
    "mapped once": "load to=heap:system method=premap io=direct",
}
"""Loads from a raw disk into a heap's dma-buf."""

Sample = Mapping[str, Any]


# Measuring


def measured(rounds: int) -> Run:
    """One machine for each IOMMU mode, and one with a kernel without the series."""
    ours = version()
    samples: list[dict[str, Any]] = []
    guests = []
    for kernel, iommu in [*((SERIES, one) for one in IOMMUS), (BASE, "off"), (BASE, "intel")]:
        print(f"{kernel}, {IOMMUS[iommu]}", flush=True)
        guest, found = one_machine(kernel, iommu, rounds)
        guests.append(guest)
        samples += ({"part": "reads", "kernel": kernel, "iommu": iommu, **one} for one in found)
    for kernel in (BASE, SERIES):
        print(f"{kernel}, loads", flush=True)
        # Only the first where the kernel cannot map a buffer once.
        lines = list(LOADS.values())[: 1 if kernel == BASE else None]
        loads = measure(lines, rounds=rounds, kernel=f"{kernel}-6.12", module=False, raw=True)
        samples += loads.samples(part="loads", kernel=kernel)
    about = machine(guests[0], ours)
    top = {"bench": "premap", "machine": about, "about": about_text(about, rounds)}
    return Run(top, samples)


INSIDE = """
cp "$1" /tmp/premap
echo about $(uname -r) >&2
exec /tmp/premap "$RAW" "$2"
"""


def one_machine(kernel: str, iommu: str, rounds: int) -> tuple[str, list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory(prefix="dmafile-premap-") as name:
        marks = Path(name) / "marks"
        program = static(ROOT / "kernel/bench/premap.c", Path(name), "-Wextra")
        command = [str(ROOT / "vm/run"), f"--kernel={kernel}-6.12", "--marks", str(marks)]
        # 1 MiB, a common limit of drives.
        command += ["--fs=raw", "--disk-size=64M", f"--iommu={iommu}", "--poll-queues=1"]
        command += ["--mdts=8", "--timeout=1800", "--", "sh", "-c", INSIDE, "sh"]
        result = subprocess.run(
            [*command, str(program), str(rounds)], capture_output=True, text=True
        )
        guest = re.search(r"^about (.*)$", result.stderr, re.MULTILINE)
        if result.returncode or not guest:
            sys.exit(result.stderr)
        return guest[1], list(paired(result.stdout.splitlines(), marks.read_text().splitlines()))


def paired(said: Sequence[str], marks: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Instructions of a request: the median of the batches, without the warm-up."""
    lines = [tuple(map(int, line.split())) for line in marks]
    at = iter([(number, user + kernel) for number, user, kernel in lines if number < 2])
    rounds: dict[tuple[str, ...], int] = {}
    for line in said:
        verb, ring, memory, size, way, commands = line.split()
        assert verb == "ran", line
        pairs = 2 if ring == "polled" and int(size) <= NEVER_SPLIT else 1
        batches = []
        for _ in range(BATCHES):
            total = 0
            for _ in range(pairs):
                (begin, before), (end, after) = next(at), next(at)
                assert (begin, end) == (0, 1), line
                total += after - before
            batches.append(total / DEPTH)
        number = rounds[ring, memory, size, way] = rounds.get((ring, memory, size, way), -1) + 1
        if number:
            yield {
                "ring": ring,
                "memory": memory,
                "size": int(size),
                "way": way,
                "round": number,
                "instructions": statistics.median(batches),
                "commands": int(commands) / BATCHES / DEPTH,
            }
    assert next(at, None) is None, "there are more marks than runs"


# Tables


def tables(run: Run) -> dict[str, Rows]:
    """The tables of a run, by name."""
    samples = reads(run)
    return {
        **{ring: table_of(samples, ring) for ring in RINGS},
        "published": table_beside_published(samples),
        "unmapped": table_of_others(samples),
        "commands": table_of_commands(samples),
        "loads": table_of_loads([one for one in run.samples if one["part"] == "loads"]),
    }


def reads(run: Run) -> list[Sample]:
    return [one for one in run.samples if one["part"] == "reads"]


def values(samples: Sequence[Sample], what: str = "instructions", **wanted: Any) -> list[float]:
    """The values of one kind of request, by round."""
    found = [
        one[what] for one in samples if all(one[name] == value for name, value in wanted.items())
    ]
    assert found, wanted
    return found


def kinds(samples: Sequence[Sample]) -> list[tuple[int, str]]:
    return list(dict.fromkeys((one["size"], one["memory"]) for one in in_order(samples)))


def in_order(samples: Sequence[Sample]) -> list[Sample]:
    return sorted(samples, key=lambda one: one["size"])


def table_of(samples: Sequence[Sample], ring: str) -> Rows:
    head = ["", "memory"]
    for name in IOMMUS.values():
        head += [f"{name}: per request", "once", "ratio"]
    rows = []
    for size, memory in kinds(samples):
        row = [size_text(size), memory]
        for iommu in IOMMUS:
            of: dict[str, Any] = {
                "kernel": SERIES,
                "iommu": iommu,
                "ring": ring,
                "size": size,
                "memory": memory,
            }
            request, once = (values(samples, way=way, **of) for way in WAYS)
            row += [f"{statistics.median(one):,.0f}" for one in (request, once)]
            row.append(ratio_text([b / a for a, b in zip(request, once, strict=True)]))
        rows.append(row)
    return head, rows


UDMABUF = "dma-bufs (udmabuf), 4 KiB"
PUBLISHED = (
    ("the proposal at first, 512 B", "off", 512, "pages", "44.66 → 43.70 MIOPS", 43.70 / 44.66),
    ("the same, its speed mended", "off", 512, "pages", "45.72 → 46.13 MIOPS", 46.13 / 45.72),
    ("the proposal, 128 KiB", "off", 131072, "pages", "123.18 → 124.19 GiB/s", 124.19 / 123.18),
    (
        "dma-bufs (udmabuf), 4 KiB",
        "intel-strict",
        4096,
        "udmabuf",
        "0.57 → 5.01 MIOPS",
        5.01 / 0.57,
    ),
    (UDMABUF, "intel", 4096, "udmabuf", "1.93 → 5.01 MIOPS", 5.01 / 1.93),
)
"""Polled, 8 requests at a time: name, IOMMU, size, memory, published figures, and their ratio."""


def table_beside_published(samples: Sequence[Sample]) -> Rows:
    rows = []
    for name, iommu, size, memory, text, gain in PUBLISHED:
        of: dict[str, Any] = {
            "kernel": SERIES,
            "iommu": iommu,
            "ring": "polled",
            "size": size,
            "memory": memory,
        }
        request, once = (statistics.median(values(samples, way=way, **of)) for way in WAYS)
        rows.append(
            [
                f"{name}, {IOMMUS[iommu]}",
                text,
                f"{gain:.2f}",
                f"{request:,.0f} → {once:,.0f}",
                f"{request / once:.2f}",
            ]
        )
    return ["", "published", "more", "instructions here", "fewer"], rows


def table_of_others(samples: Sequence[Sample]) -> Rows:
    """Requests without premapping, on a kernel that supports it and on one that does not."""
    rows = []
    for size, memory in kinds(samples):
        if memory == "heap":
            continue
        row = [size_text(size), memory]
        for iommu in ("off", "intel"):
            of: dict[str, Any] = {"iommu": iommu, "ring": "polled", "size": size, "memory": memory}
            base, series = (
                statistics.median(values(samples, kernel=kernel, way=PER_REQUEST, **of))
                for kernel in (BASE, SERIES)
            )
            row += [f"{base:,.0f}", f"{series:,.0f}", f"{series / base:.4f}"]
        rows.append(row)
    head = ["", "memory"]
    for iommu in ("off", "intel"):
        head += [f"{IOMMUS[iommu]}: {BASE}", SERIES, "ratio"]
    return head, rows


def table_of_commands(samples: Sequence[Sample]) -> Rows:
    """Commands for one request, for sizes that may take several."""
    size = max(one["size"] for one in samples)
    head = [f"commands to the disk for {size_text(size)}"]
    rows = []
    for memory in dict.fromkeys(one["memory"] for one in samples):
        row = [memory]
        for iommu in IOMMUS:
            of: dict[str, Any] = {
                "kernel": SERIES,
                "iommu": iommu,
                "ring": "interrupts",
                "size": size,
            }
            for way in WAYS:
                count = statistics.median(values(samples, "commands", memory=memory, way=way, **of))
                row.append(f"{count:g}")
        rows.append(row)
    for name in IOMMUS.values():
        head += [f"{name}: per request", "once"]
    return head, rows


def table_of_loads(samples: Sequence[Sample]) -> Rows:
    """Thousands of instructions per MiB, by step."""
    rows = []
    first = None
    for kernel in (BASE, SERIES):
        found = Measured.of({}, [one for one in samples if one["kernel"] == kernel])
        for name, line in LOADS.items():
            if line not in found.candidates:
                continue
            row = [thousands(found.per_mib(line, step(one))) for one in STEPS]
            every = found.per_mib(line, whole)
            first = first or every
            ratio = statistics.median(every) / statistics.median(first)
            rows.append([f"{kernel}: {name}", *row, thousands(every), f"{ratio:.3f}"])
    return ["", *STEPS, "all", "to the first"], rows
