"""Injects failures, in a kernel with fault injection (`series-6.12-debug`)."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from tests.vm.inside.faults import device_of

DEBUG = Path("/sys/kernel/debug")
ALLOCATIONS = ("failslab", "fail_page_alloc")

Result = TypeVar("Result")


class Nth:
    """Lets the nth allocation or disk request of this thread fail once (see fail-nth in
    Documentation/fault-injection/fault-injection.rst of Linux).
    """

    def __init__(self) -> None:
        for what in (*ALLOCATIONS, "fail_make_request"):
            (DEBUG / what / "verbose").write_text("0")
        (DEBUG / "fail_page_alloc" / "min-order").write_text("0")
        self.of_those_that_wait(True)
        self.node = os.open("/proc/self/fail-nth", os.O_RDWR)

    def of_those_that_wait(self, may: bool) -> None:
        """Selects whether allocations fail that may sleep, which are most of them."""
        for what in ALLOCATIONS:
            (DEBUG / what / "ignore-gfp-wait").write_text("N" if may else "Y")

    @contextlib.contextmanager
    def disk_of(self, path: Path) -> Iterator[None]:
        """Also counts requests to the disk that has this file."""
        device = device_of(path) / "make-it-fail"
        device.write_text("1")
        yield
        device.write_text("0")

    def at(self, place: int, act: Callable[[], Result]) -> tuple[bool, Result | OSError]:
        """Returns whether a failure was injected in this place, and the result of the call."""
        result: Result | OSError
        os.pwrite(self.node, str(place).encode(), 0)
        try:
            result = act()
        except OSError as error:
            result = error
        failed = int(os.pread(self.node, 20, 0)) == 0
        os.pwrite(self.node, b"0", 0)
        return failed, result
