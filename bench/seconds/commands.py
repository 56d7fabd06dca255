"""What is compared: ways from a file into memory, each as a command to time from outside."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PHASES = ("create", "fill", "close")
"""Of any way; dmafile's report has its own besides."""


@dataclass(frozen=True)
class Said:
    """What a process tells of itself."""

    seconds: float
    """To make memory and to fill it, by its own clock: without the start of the process."""
    cpu: float
    phases: Mapping[str, float] = field(default_factory=dict)
    report: Any = None
    instructions: Mapping[str, int] = field(default_factory=dict)
    """By phase, where they are counted."""


def said_by_way(out: Path) -> Said | str:
    """What way.py and peer.py print; or why it can't run here."""
    said = json.loads(out.read_text().splitlines()[-1])
    if "refused" in said:
        return str(said["refused"])
    phases = {name: said[name] for name in PHASES}
    counts = said.get("instructions", {})
    # Closing is told, and counts in no load.
    return Said(said["create"] + said["fill"], said["cpu"], phases, said.get("report"), counts)


def said_by_fio(out: Path) -> Said | str:
    """fio's JSON. Its clock leaves out its start, and the threads that it starts."""
    job = json.loads(out.read_text())["jobs"][0]
    seconds = job["read"]["io_bytes"] / job["read"]["bw_bytes"]
    busy = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["read"]["runtime"] / 1000
    return Said(float(seconds), float(busy))


@dataclass(frozen=True)
class Candidate:
    """A way, by the name that tables have for it."""

    name: str
    file: Path
    size: int
    """Bytes that it moves."""
    command: Sequence[str]
    said: Callable[[Path], Said | str] = said_by_way
    checks: str = "check=1"
    """A word that makes it compare the bytes; nothing where it can't."""
    memory: int = 0
    """Bytes that it fills where its file is cold; 0: twice its size, once in the page cache."""


def bare(name: str, *words: str) -> list[str]:
    """A script that needs nothing but Python, which starts twice as fast so."""
    return [sys.executable, "-I", "-S", str(FOLDER / name), *words]


def script(name: str, *words: str) -> list[str]:
    """A script that needs more; without this folder in the path, whose modules it doesn't mean."""
    return [sys.executable, "-P", str(FOLDER / name), *words]


def baseline(file: Path) -> list[str]:
    """The command of plain read() into a memfd, which prints nothing."""
    return bare("read_into_memfd.py", str(file))


def plain(name: str, file: Path, size: int, words: str, count: int = 1) -> Candidate:
    """A way without dmafile: COUNT buffers of `size` bytes; `words` are those of way.py."""
    command = bare("way.py", str(file), str(size), str(count), *words.split())
    reads = "method=populate" not in words.split()
    return Candidate(name, file, size * count, command, memory=0 if reads else size * count)


def ours(name: str, file: Path, words: str) -> Candidate:
    """A load of a whole file by dmafile, with these words."""
    size = file.stat().st_size
    command = script("way.py", str(file), str(size), "1", "by=dmafile", *words.split())
    # It leaves nothing in the page cache.
    return Candidate(name, file, size, command, memory=size)


def fio(name: str, file: Path, block: str, depth: int, *, huge: bool) -> Candidate:
    """Direct reads by fio, into the same few blocks again and again."""
    # Its own huge pages come from a pool, which few systems have; malloc()'s from anywhere.
    command = ["env", "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"] if huge else []
    command += ["fio", "--name=read", "--readonly", "--rw=read", "--ioengine=io_uring"]
    # A thread, not a process of its own: less start-up, and one process to account for.
    command += ["--direct=1", "--thread", f"--bs={block}", f"--iodepth={depth}"]
    command += [f"--filename={file}", "--output-format=json"]
    size, own = file.stat().st_size, 256 << 20
    return Candidate(name, file, size, command, said_by_fio, checks="", memory=own)
