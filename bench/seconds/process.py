"""Whole processes, timed from outside."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """What a process took, seen from outside."""

    wall: float
    """Seconds from start to end."""
    cpu: float
    """Seconds of CPU, user and system, without the kernel's own threads and interrupts."""
    peak: int
    """The most bytes it held; at least what this Python held then, as Linux counts before exec."""


class Failed(Exception):
    """A command that did not end well: what it said, or its exit status."""


def forget_peak() -> None:
    """This process's own peak becomes what it holds now: its children's begin with it.

    proc_pid_clear_refs(5); where the kernel can't, peaks may tell too much.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def run(command: Sequence[str], out: Path | None = None) -> Run:
    """Runs a command to its end. What it prints goes to `out`, what it complains of beside it.

    Raises Failed where it can't be started, or fails.
    """
    # What was printed so far comes before what the command prints, in a pipe too.
    sys.stdout.flush()
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    actions = []
    if out:
        errors = out.with_suffix(".err")
        for number, path in ((1, out), (2, errors)):
            actions.append((os.POSIX_SPAWN_OPEN, number, str(path), flags, 0o644))
    forget_peak()
    start = time.perf_counter()
    try:
        pid = os.posix_spawnp(command[0], list(command), os.environ, file_actions=actions)
    except OSError as error:
        raise Failed(f"{command[0]}: {error.strerror}") from None
    try:
        _, status, usage = os.wait4(pid, 0)
    except KeyboardInterrupt:
        # Nobody may be left behind who still moves bytes.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    wall = time.perf_counter() - start
    if status:
        said = errors.read_text().strip() if out else ""
        code = os.waitstatus_to_exitcode(status)
        raise Failed(said or f"{' '.join(command)}: ended with {code}")
    return Run(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)
