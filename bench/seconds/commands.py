"""How a candidate is run and what it says of itself; what is compared is in ../candidates.py."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).parent / "programs"
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


def said_by_ways(out: Path) -> Said | str:
    """What ways.c prints; or why the candidate can't run here."""
    phases: dict[str, float] = {}
    cpu, report = 0.0, None
    for line in out.read_text().splitlines():
        what, rest = line.split(" ", 1)
        if what == "refused":
            return rest
        if what == "report":
            report = json.loads(rest)
            continue
        seconds, busy = map(float, rest.split())
        phases[what] = seconds
        # Closing is told, and counts in no load.
        cpu += busy if what != "close" else 0
    return Said(phases["create"] + phases["fill"], cpu, phases, report)


def said_by_script(out: Path) -> Said | str:
    """What the scripts in programs/ print."""
    said = json.loads(out.read_text().splitlines()[-1])
    if "refused" in said:
        return str(said["refused"])
    phases = {name: said[name] for name in PHASES}
    return Said(said["create"] + said["fill"], said["cpu"], phases, said["report"])


def said_by_fio(out: Path) -> Said | str:
    """fio's JSON. Its clock leaves out its start, and the threads that it starts."""
    job = json.loads(out.read_text())["jobs"][0]
    moved = job["write"] if job["write"]["io_bytes"] else job["read"]
    seconds = moved["io_bytes"] / moved["bw_bytes"]
    busy = (job["usr_cpu"] + job["sys_cpu"]) / 100 * moved["runtime"] / 1000
    return Said(float(seconds), float(busy))


def said_by_save(out: Path) -> Said | str:
    """What ways.c prints of a save, whose memory is there before."""
    said = said_by_ways(out)
    if isinstance(said, str):
        return said
    return Said(said.phases["fill"], said.cpu, said.phases, said.report)


@dataclass(frozen=True)
class Candidate:
    """One to run, by the name that tables have for it."""

    name: str
    what: str
    """The same for results: a line of ways.c, or what stands for the command."""
    file: Path
    size: int
    """Bytes that it moves."""
    command: Sequence[str]
    said: Callable[[Path], Said | str] = said_by_script
    checks: str = "check=1"
    """A word that makes it compare the bytes; nothing where it can't."""
    memory: int = 0
    """Bytes that it fills where its file is cold; 0: twice its size, once in the page cache."""
    writes: bool = False
    """It makes its file, which isn't there before."""


def way(ways: Path, name: str, file: Path, line: str) -> Candidate:
    """A line of ways.c, of a whole file."""
    size = file.stat().st_size
    # What else there is leaves nothing in the page cache.
    memory = 0 if line.startswith("copy ") else size
    command = [str(ways), "once", str(file), line]
    return Candidate(name, line, file, size, command, said_by_ways, str(file), memory)


def saved(ways: Path, name: str, noise: Path, line: str) -> Candidate:
    """A save by ways.c, of the bytes of a file."""
    to, size = noise.with_name(f"{noise.name}.saved"), noise.stat().st_size
    memory = 2 * size if "io=buffered" in line else size
    command = [str(ways), "once", str(noise), line]
    return Candidate(name, line, to, size, command, said_by_save, str(noise), memory, writes=True)


def bare(name: str, *words: str) -> list[str]:
    """A script that needs nothing but Python, which starts twice as fast so."""
    return [sys.executable, "-I", "-S", str(PROGRAMS / name), *words]


def script(name: str, *words: str) -> list[str]:
    """A script that needs more; without any folder of its own, or the current one, in the path."""
    return [sys.executable, "-P", str(PROGRAMS / name), *words]


def baseline(file: Path) -> list[str]:
    """The command of plain read() into a memfd, which prints nothing."""
    return bare("read_into_memfd.py", str(file))


def fio(name: str, file: Path, block: str, depth: int, *, huge: bool) -> Candidate:
    """Direct reads by fio, into the same few blocks again and again."""
    words = ["--name=read", "--readonly", "--rw=read", "--ioengine=io_uring"]
    # A thread, not a process of its own: less start-up, and one process to account for.
    words += ["--direct=1", "--thread", f"--bs={block}", f"--iodepth={depth}"]
    # Its own huge pages come from a pool, which few systems have; malloc()'s from anywhere.
    before = ["env", "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"] if huge else []
    what = " ".join([*before, "fio", *words])
    command = [*before, "fio", *words, f"--filename={file}", "--output-format=json"]
    size, own = file.stat().st_size, 256 << 20
    return Candidate(name, what, file, size, command, said_by_fio, checks="", memory=own)


def fio_to_disk(name: str, file: Path, size: int, engine: str, block: str, depth: int) -> Candidate:
    """Direct writes by fio into a new file, whose space it reserves as dmafile does (fallocate),
    out of the same few blocks on huge pages; to the disk."""
    words = ["--name=write", "--rw=write", f"--ioengine={engine}", "--direct=1", "--thread"]
    words += [f"--bs={block}", f"--iodepth={depth}", "--fallocate=native", "--end_fsync=1"]
    # Every block is written from the same memory; nothing is generated meanwhile.
    words += ["--scramble_buffers=0"]
    before = ["env", "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"]
    what = " ".join([*before, "fio", *words])
    command = [*before, "fio", *words, f"--size={size}", f"--filename={file}"]
    command.append("--output-format=json")
    return Candidate(
        name, what, file, size, command, said_by_fio, checks="", memory=256 << 20, writes=True
    )
