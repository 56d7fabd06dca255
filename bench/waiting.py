"""Processes that import what they need, and wait for a line before they load."""

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Waiting:
    """A process that waits for a line on its standard input."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        pipe = subprocess.PIPE
        self.child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environ)

    def line(self) -> str:
        """The next line that it prints. Raises RuntimeError if it ends instead."""
        assert self.child.stdout is not None
        text = self.child.stdout.readline()
        if not text:
            raise RuntimeError(f"{self.child.args!r} ended with {self.child.wait()}")
        return text

    def go(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write("\n")
        self.child.stdin.flush()

    def pss(self) -> int:
        """Its proportional share of the memory that it maps, in bytes."""
        lines = Path(f"/proc/{self.child.pid}/smaps_rollup").read_text().splitlines()
        return 1024 * next(int(one.split()[1]) for one in lines if one.startswith("Pss:"))


def load_at_once(processes: Sequence[Waiting]) -> tuple[list[dict[str, Any]], float, int]:
    """Starts all loads; returns their results, the seconds until the last one has finished, and the
    increase of memory of all."""
    try:
        for one in processes:
            one.line()
        before = sum(one.pss() for one in processes)
        started = time.perf_counter()
        for one in processes:
            one.go()
        said = [json.loads(one.line()) for one in processes]
        seconds = time.perf_counter() - started
        memory = sum(one.pss() for one in processes) - before
        for one in processes:
            one.go()
            one.child.wait()
    finally:
        for one in processes:
            one.child.kill()
            one.child.wait()
    return said, seconds, memory
