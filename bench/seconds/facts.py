"""Describes the machine, so that readers can judge the figures."""

import datetime
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.seconds.files import file_system
from bench.seconds.memory import meminfo
from bench.seconds.process import Failed, run


def first_line(path: Path, default: str = "") -> str:
    """The first line of a file in /sys or /proc, or DEFAULT if there is none."""
    try:
        return path.read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        return default


def selected(path: Path) -> str:
    """The setting in brackets in a list of settings."""
    found = re.search(r"\[([\w-]+)\]", first_line(path))
    return found[1] if found else ""


def disk(folder: Path) -> str:
    """Name and model of the disk that a folder is on."""
    number = folder.stat().st_dev
    node = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not node.exists():
        return ""
    node = node.resolve()
    whole = node.parent if (node / "partition").exists() else node
    kind = "rotating" if first_line(whole / "queue/rotational") == "1" else "solid state"
    if whole.name.startswith("vd"):
        # `rotational` does not describe the device behind virtio.
        kind = "virtio"
    words = [
        whole.name,
        first_line(whole / "device/model"),
        kind,
        selected(whole / "queue/scheduler"),
    ]
    return ", ".join(word for word in words if word)


def version(command: Sequence[str], scratch: Path) -> str:
    """The first line of a program's version output; empty if the program is missing."""
    out = scratch / "version"
    try:
        run(command, out)
    except Failed:
        return ""
    return first_line(out)


def described(program: Sequence[str], folder: Path, scratch: Path) -> Mapping[str, str]:
    """The description, one line for each property, without names of hosts or users."""
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    thp = Path("/sys/kernel/mm/transparent_hugepage")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "dmafile": version([*program, "--version"], scratch),
        "kernel": platform.release(),
        "processor": f"{cpu[1] if cpu else platform.machine()}, {os.cpu_count()} threads",
        "memory": f"{meminfo('MemTotal') / (1 << 30):.1f} GiB",
        "file system": file_system(folder),
        "disk": disk(folder),
        "huge pages": f"THP {selected(thp / 'enabled')}, shmem {selected(thp / 'shmem_enabled')}, "
        f"hugetlb pool {meminfo('HugePages_Total') // 1024}",
        "load": first_line(Path("/proc/loadavg")),
        "Python": platform.python_version(),
    }
