"""Whole processes, timed from outside."""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """The time and memory of a process, measured from outside."""

    wall: float
    """Seconds from start to end."""
    cpu: float
    """Seconds of CPU, user and system, without kernel threads and interrupts."""
    peak: int
    """Peak memory in bytes; at least what this Python used then, as Linux counts before exec."""


class Failed(Exception):
    """A command failed; the message is its error output or its exit status."""


class Slow(Failed):
    """Something took longer than it may."""


def reset_peak() -> None:
    """Resets this process's peak memory, with which its children's peak begins.

    See proc_pid_clear_refs(5). If the kernel does not support it, peaks may be too high.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def run(command: Sequence[str], out: Path | None = None, seconds: float | None = None) -> Run:
    """Runs a command. Its output goes to `out`, its errors to a file next to `out`.

    Raises Failed if it cannot be started, or fails, and Slow if it runs longer than SECONDS.
    """
    # Flush, so that this program's output comes before the command's, in a pipe, too.
    sys.stdout.flush()
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    actions = []
    if out:
        errors = out.with_suffix(".err")
        for number, path in ((1, out), (2, errors)):
            actions.append((os.POSIX_SPAWN_OPEN, number, str(path), flags, 0o644))
    reset_peak()
    start = time.perf_counter()
    try:
        pid = os.posix_spawnp(command[0], list(command), os.environ, file_actions=actions)
    except OSError as error:
        raise Failed(f"{command[0]}: {error.strerror}") from None
    try:
        if seconds is not None and not ends(pid, seconds):
            raise Slow(f"{command[0]} was ended after {max(0, seconds):.0f} s")
        _, status, usage = os.wait4(pid, 0)
    except (KeyboardInterrupt, Slow):
        # A process that still moves bytes must not remain.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    wall = time.perf_counter() - start
    if status:
        said = errors.read_text().strip() if out else ""
        code = os.waitstatus_to_exitcode(status)
        raise Failed(said or f"{' '.join(command)}: exit status {code}")
    return Run(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def ends(pid: int, seconds: float) -> bool:
    """Whether a child ends in SECONDS."""
    process = os.pidfd_open(pid)
    try:
        return bool(select.select([process], [], [], max(0, seconds))[0])
    finally:
        os.close(process)
