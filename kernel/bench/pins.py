"""The cost of tracking pins: the same work without the tracker, with it off, and with it on.

kernel/docs/costs.md has the results and the method.
"""

import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.instructions.measure import about_text, machine
from bench.instructions.measure import version as dmafile_version
from bench.runs import ROOT, Rows, Run
from vm.compiled import static

WITHOUT, OFF, ON = "without", "off", "on"
STATES = {WITHOUT: ("-unpinned", ""), OFF: ("", ""), ON: ("", "pin_owner=on")}
"""One machine for each: the variant of its kernel, and words for the kernel's command line."""
MEMORY = 2048
"""Memory of each machine in MiB."""

READS = {
    f"read {disk} {way}": [disk, name]
    for disk in ("null_blk", "NVMe", "ext4")
    for way, name in (("one", "1"), ("batch", "64"))
}
PAGES = {"4k": "4 KiB", "thp": "THP"}
CALLS = {
    f"gup {call} {pages} {each}": [call, name, str(each)]
    for call in ("PIN_FAST", "PIN_LONGTERM", "GUP_FAST")
    for pages, name in PAGES.items()
    for each in (1, 16, 512)
}
BUFFERS = {
    "register 4k": ["io_uring", "64 MiB", "4 KiB"],
    "register thp": ["io_uring", "64 MiB", "THP"],
    "register huge": ["io_uring", "64 MiB", "hugetlb"],
    "register page": ["io_uring", "4 KiB", "4 KiB"],
    "udmabuf 4k": ["udmabuf", "64 MiB", "4 KiB"],
}
FREES = {"free 4k": ["4 KiB"], "free thp": ["THP"]}
"""Allocating, clearing and freeing pages that nobody pins."""
JOBS = {**READS, **CALLS, **BUFFERS, **FREES}
"""The jobs of pins.c, and the first columns of their rows."""


@dataclass(frozen=True)
class Limit:
    """The largest ratio of a job's instructions to those on a kernel without the tracker."""

    what: str
    job: str
    state: str
    most: float
    missed: float | None = None
    """The limit that a test enforces instead, if the job misses `most`."""

    @property
    def allowed(self) -> float:
        return self.missed or self.most


LIMITS = (
    Limit("a direct read of 4 KiB, null_blk", "read null_blk one", OFF, 1.001, missed=1.002),
    Limit("a direct read of 4 KiB, null_blk", "read null_blk one", ON, 1.03),
    Limit("a direct read of 4 KiB, NVMe", "read NVMe one", ON, 1.03),
    Limit("a short pin of a page, one a call", "gup PIN_FAST 4k 1", ON, 2),
    Limit("a short pin of a page, 512 a call", "gup PIN_FAST 4k 512", ON, 2),
    Limit("a short pin of THP, 512 pages a call", "gup PIN_FAST thp 512", ON, 1.03),
    Limit("a registration of 64 MiB, 4 KiB pages", "register 4k", ON, 1.4, missed=1.45),
    Limit("a registration of 64 MiB, THP", "register thp", ON, 1.03),
)

PUBLISHED = (
    ("published, the slower run, ms", 18826, 20453),
    ("published, the faster run, ms", 18826, 19499),
)
"""PT-7: 1 GiB read by fio from an NVMe disk, 4 KiB at a time, 64 in flight."""
PROFILE = 1.01
"""PT-6: the tracker's share in a profile of such a run."""

Sample = Mapping[str, Any]


# Measuring


def measured(rounds: int, seed: int, states: Iterable[str] = STATES, version: str = "6.12") -> Run:
    ours = dmafile_version()
    samples: list[dict[str, Any]] = []
    guests = []
    for state in states:
        print(f"{state}", flush=True)
        guest, found = one_machine(state, version, rounds, seed)
        guests.append(guest)
        samples += ({"state": state, **one} for one in found)
    about = machine(guests[-1], ours)
    top = {"bench": "pins", "machine": about, "about": about_text(about, rounds)}
    return Run(top, samples)


INSIDE = """
modprobe null_blk irqmode=0 completion_nsec=0
cp "$1" /tmp/pins; shift
echo about $(uname -r) >&2
dmesg | grep page_ext >&2
exec /tmp/pins "$@" "$RAW" /mnt/file
"""


def one_machine(
    state: str, version: str, rounds: int, seed: int
) -> tuple[str, list[dict[str, Any]]]:
    variant, words = STATES[state]
    kernel = f"series-{version}{variant}"
    guest, (head, *said), marks, log = boot(kernel, INSIDE, [str(rounds), str(seed)], words)
    return guest, [memory(state, head, log), *paired(said, marks)]


def boot(
    kernel: str, script: str, words: Sequence[str], append: str = ""
) -> tuple[str, list[str], list[str], str]:
    """Runs a script that runs pins.c: the name of the kernel, its output, the marks, its log."""
    with tempfile.TemporaryDirectory(prefix="dmafile-pins-") as name:
        marks = Path(name) / "marks"
        program = static(ROOT / "kernel/bench/pins.c", Path(name), "-Wextra")
        command = [str(ROOT / "vm/run"), f"--kernel={kernel}", "--marks", str(marks)]
        command += ["--fs=ext4", "--fs=raw", "--disk-size=64M", f"--memory={MEMORY}M"]
        command += [f"--append={append}", "--timeout=1800", "--", "sh", "-c", script, "sh"]
        command += [str(program), *words]
        result = subprocess.run(command, capture_output=True, text=True)
        guest = re.search(r"^about (.*)$", result.stderr, re.MULTILINE)
        if result.returncode or not guest:
            sys.exit(result.stderr)
        return guest[1], result.stdout.splitlines(), marks.read_text().splitlines(), result.stderr


def memory(state: str, head: str, log: str) -> dict[str, Any]:
    """In KiB: the memory left by the kernel, its page descriptors, and the page_ext among them."""
    verb, tracked, total, described = head.split()
    assert verb == "machine", head
    assert (tracked == "on") == (state == ON), f"{state}: tracking of pins is {tracked}"
    extra = re.search(r"allocated (\d+) bytes of page_ext", log)
    return {
        "total": int(total),
        "described": int(described) * 4,
        "page_ext": int(extra[1]) // 1024 if extra else 0,
    }


def paired(
    said: Sequence[str], marks: Sequence[str], jobs: Collection[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Instructions of an operation, by round, without the warm-up round."""
    lines = [tuple(map(int, line.split())) for line in marks]
    at = iter([(number, user + kernel) for number, user, kernel in lines if number < 2])
    rounds: dict[str, int] = {}
    for line in said:
        verb, *name, operations, last = line.split()
        job = " ".join(name)
        assert job in JOBS and verb in ("marked", "timed"), line
        if verb == "timed":
            # One instruction takes one nanosecond of guest time.
            count = int(last) / int(operations)
        else:
            batches = []
            for _ in range(int(last)):
                (begin, before), (end, after) = next(at), next(at)
                assert (begin, end) == (0, 1), line
                batches.append((after - before) / int(operations))
            count = statistics.median(batches)
        number = rounds[job] = rounds.get(job, -1) + 1
        if number:
            yield {"job": job, "round": number, "instructions": count}
    assert next(at, None) is None, "there are more marks than runs"
    wanted = set(jobs or JOBS)
    assert rounds.keys() == wanted, rounds.keys() ^ wanted


# Tables


def tables(run: Run) -> dict[str, Rows]:
    """The tables of a run, by name."""
    return {
        "reads": table_of(run, READS, ["disk", "reads a call"]),
        "calls": table_of(run, CALLS, ["gup_test", "pages", "a call"]),
        "buffers": table_of(run, BUFFERS, ["buffer", "size", "pages"]),
        "frees": table_of(run, FREES, ["pages"]),
        "limits": table_of_limits(run),
        "published": table_beside_published(run),
        "memory": table_of_memory(run),
    }


def values(run: Run, state: str, job: str) -> list[float]:
    """The values of one job, by round."""
    found = [
        one["instructions"]
        for one in run.samples
        if one["state"] == state and one.get("job") == job
    ]
    assert found, (state, job)
    return found


def middle(run: Run, state: str, job: str) -> float:
    return statistics.median(values(run, state, job))


def ratio(run: Run, state: str, job: str, to: str = WITHOUT) -> float:
    """The ratio of the medians, because each state has its own machine and rounds."""
    return middle(run, state, job) / middle(run, to, job)


def table_of(run: Run, jobs: Mapping[str, Sequence[str]], head: Sequence[str]) -> Rows:
    rows = []
    for job, names in jobs.items():
        row = [*names]
        for state in STATES:
            found = values(run, state, job)
            digits = 0 if min(found) > 100_000 else 1
            least, most = (f"{one:,.{digits}f}" for one in (min(found), max(found)))
            row.append(f"{statistics.median(found):,.{digits}f} [{least}–{most}]")
            if state != WITHOUT:
                row.append(f"{ratio(run, state, job):.4f}")
        rows.append(row)
    return [*head, WITHOUT, OFF, "to without", ON, "to without"], rows


def table_of_limits(run: Run) -> Rows:
    rows = [
        [one.what, one.state, f"{one.most:g}", f"{ratio(run, one.state, one.job):.4f}"]
        for one in LIMITS
    ]
    return ["", "tracker", "at most", "here"], rows


def table_beside_published(run: Run) -> Rows:
    rows = [[name, f"{a:,}", f"{b:,}", f"{b / a:.3f}"] for name, a, b in PUBLISHED]
    rows.append(["published, by a profile", "", "", f"{PROFILE:.3f}"])
    job = "read NVMe one"
    for state in (OFF, ON):
        row = [f"{middle(run, one, job):,.0f}" for one in (WITHOUT, state)]
        rows.append([f"here, {state}, instructions", *row, f"{ratio(run, state, job):.3f}"])
    return ["", "without", "with", "ratio"], rows


def table_of_memory(run: Run) -> Rows:
    rows = []
    for one in run.samples:
        if "page_ext" in one:
            share = one["page_ext"] / (MEMORY << 10)
            counts = [f"{one[name]:,}" for name in ("total", "described", "page_ext")]
            rows.append([one["state"], *counts, f"{100 * share:.2f} %"])
    head = ["KiB", "MemTotal", "describes pages", "of that page_ext", "of all memory"]
    return head, rows
