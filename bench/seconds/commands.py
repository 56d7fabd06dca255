"""Commands that run candidates, and parsers of their output; ../candidates.py lists candidates."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).parent / "programs"
PHASES = ("create", "fill", "close")
"""The phases of every candidate; dmafile's report has more."""


@dataclass(frozen=True)
class Output:
    """The measurements that a process prints."""

    seconds: float
    """Time to create memory and to fill it, by the process's clock, without its start-up."""
    cpu: float
    phases: Mapping[str, float] = field(default_factory=dict)
    report: Any = None


def parse_ways(out: Path) -> Output | str:
    """Parses the output of ways.c. A string is the reason why the candidate cannot run here."""
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
        # Closing is reported, but does not count as part of the load.
        cpu += busy if what != "close" else 0
    return Output(phases["create"] + phases["fill"], cpu, phases, report)


def parse_script(out: Path) -> Output | str:
    """Parses the output of the scripts in programs/."""
    said = json.loads(out.read_text().splitlines()[-1])
    if "refused" in said:
        return str(said["refused"])
    phases = {name: said[name] for name in PHASES}
    return Output(said["create"] + said["fill"], said["cpu"], phases, said["report"])


def parse_fio(out: Path) -> Output | str:
    """Parses fio's JSON. fio's clock excludes its start and that of its threads."""
    job = json.loads(out.read_text())["jobs"][0]
    moved = job["write"] if job["write"]["io_bytes"] else job["read"]
    seconds = moved["io_bytes"] / moved["bw_bytes"]
    busy = (job["usr_cpu"] + job["sys_cpu"]) / 100 * moved["runtime"] / 1000
    return Output(float(seconds), float(busy))


def parse_save(out: Path) -> Output | str:
    """Parses the output of ways.c for a save, whose memory exists before it starts."""
    said = parse_ways(out)
    if isinstance(said, str):
        return said
    return Output(said.phases["fill"], said.cpu, said.phases, said.report)


@dataclass(frozen=True)
class Candidate:
    """A candidate, with its name in tables."""

    name: str
    what: str
    """Its description in results: a line of ways.c, or a short form of the command."""
    file: Path
    size: int
    """Number of bytes that it moves."""
    command: Sequence[str]
    parse: Callable[[Path], Output | str] = parse_script
    checks: str = "check=1"
    """An argument that makes it compare the bytes; empty if it cannot."""
    memory: int = 0
    """Bytes of memory that it fills with a cold file; 0 means twice the file: buffer and cache."""
    writes: bool = False
    """Whether it creates its file, which must not exist before."""


def way(ways: Path, name: str, file: Path, line: str) -> Candidate:
    """A line of ways.c that reads a whole file."""
    size = file.stat().st_size
    # All others leave nothing in the page cache.
    memory = 0 if line.startswith("copy ") else size
    command = [str(ways), "once", str(file), line]
    return Candidate(name, line, file, size, command, parse_ways, str(file), memory)


def saved(ways: Path, name: str, noise: Path, line: str) -> Candidate:
    """A save by ways.c, of the bytes of a file."""
    to, size = noise.with_name(f"{noise.name}.saved"), noise.stat().st_size
    memory = 2 * size if "io=buffered" in line else size
    command = [str(ways), "once", str(noise), line]
    return Candidate(name, line, to, size, command, parse_save, str(noise), memory, writes=True)


def bare(name: str, *words: str) -> list[str]:
    """A script that needs only Python, which starts twice as fast with -I -S."""
    return [sys.executable, "-I", "-S", str(PROGRAMS / name), *words]


def script(name: str, *words: str) -> list[str]:
    """A script that needs packages; -P keeps its folder and the current one out of the path."""
    return [sys.executable, "-P", str(PROGRAMS / name), *words]


def baseline(file: Path) -> list[str]:
    """The command for plain read() into a memfd, which prints nothing."""
    return bare("read_into_memfd.py", str(file))


def fio(name: str, file: Path, block: str, depth: int, *, huge: bool) -> Candidate:
    """Direct reads by fio, into the same few blocks again and again."""
    words = ["--name=read", "--readonly", "--rw=read", "--ioengine=io_uring"]
    # A thread instead of a process: it starts faster, and only one process is measured.
    words += ["--direct=1", "--thread", f"--bs={block}", f"--iodepth={depth}"]
    # fio's own huge pages need a pool, which few systems have; malloc()'s do not.
    before = ["env", "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"] if huge else []
    what = " ".join([*before, "fio", *words])
    command = [*before, "fio", *words, f"--filename={file}", "--output-format=json"]
    size, own = file.stat().st_size, 256 << 20
    return Candidate(name, what, file, size, command, parse_fio, checks="", memory=own)


def fio_to_disk(name: str, file: Path, size: int, engine: str, block: str, depth: int) -> Candidate:
    """Direct writes to the disk by fio, into a new file with reserved space (fallocate), as with
    dmafile. All writes are from the same few blocks on huge pages."""
    words = ["--name=write", "--rw=write", f"--ioengine={engine}", "--direct=1", "--thread"]
    words += [f"--bs={block}", f"--iodepth={depth}", "--fallocate=native", "--end_fsync=1"]
    # Every block is written from the same memory; fio must not generate data during the run.
    words += ["--scramble_buffers=0"]
    before = ["env", "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"]
    what = " ".join([*before, "fio", *words])
    command = [*before, "fio", *words, f"--size={size}", f"--filename={file}"]
    command.append("--output-format=json")
    return Candidate(
        name, what, file, size, command, parse_fio, checks="", memory=256 << 20, writes=True
    )
