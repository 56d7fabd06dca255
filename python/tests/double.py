"""The double of GPU drivers (tests/double/driver.c), for this process.

Its devices use memory of this process, so that a tensor of the CPU can stand for one of
a GPU.
"""

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

SOURCE = Path(__file__).parents[2] / "tests" / "double" / "driver.c"


class Left(NamedTuple):
    """What has not been released, and the first complaint of the double."""

    registered: int
    memory: int
    events: int
    streams: int
    contexts: int
    complaint: str


NOTHING = Left(0, 0, 0, 0, 0, "")


@cache
def the_double() -> "Double":
    """The double of this process."""
    return Double()


class Double:
    """One per process: dlopen(3) returns a library that is already loaded under the same name."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "libcuda.so.1"
            build = ["cc", "-O2", "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{path.name}"]
            subprocess.run([*build, str(SOURCE), "-o", str(path)], check=True)
            self.library = ctypes.CDLL(str(path))
        self.library.double_adopt.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.library.double_disown.argtypes = [ctypes.c_void_p]
        self.library.double_fail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]

    def reset(self) -> None:
        self.library.double_reset()
        self.library.double_set(100, 1)

    def fail(self, call: str, nth: int, code: int) -> None:
        """Makes the nth call of a function return this code."""
        self.library.double_fail(call.encode(), nth, code)

    def adopt(self, tensor: Any) -> None:
        """Makes the memory of a tensor count as device memory."""
        assert self.library.double_adopt(tensor.data_ptr(), tensor.numel()) == 0

    def disown(self, address: int) -> None:
        self.library.double_disown(address)

    def counts(self) -> tuple[list[int], str]:
        counts, text = (ctypes.c_uint64 * 8)(), ctypes.create_string_buffer(256)
        self.library.double_counts(counts, text, len(text))
        return list(counts), text.value.decode()

    def left(self) -> Left:
        counts, complaint = self.counts()
        registered, memory, events, streams, contexts = counts[:5]
        return Left(registered, memory, events, streams, contexts, complaint)
