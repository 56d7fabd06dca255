"""The driver of GPUs that is tested: the double (tests/double/driver.c), or with DMAFILE_GPU=real
that of this machine.

The devices of the double use memory of this process, so that a tensor of the CPU can stand for one
of a GPU.
"""

import ctypes
import mmap
import os
import subprocess
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import pytest
from dmafile import Error, _dmafile

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


RING = (1 << 18, 4)

REAL = os.environ.get("DMAFILE_GPU") == "real"


def _has(device: str) -> bool:
    try:
        _dmafile.check_device(device)
    except Error:
        return False
    return True


KIND = "hip" if REAL and not _has("cuda:0") else "cuda"
"""The vendor of the driver."""
LAST = int(not REAL or _has(f"{KIND}:1"))
"""The number of the last device that tests use, at most 1."""
KINDS = [KIND] if REAL else ["cuda", "hip"]


def the_double(*, hip: bool = False) -> "Double":
    """The driver of this process."""
    return _driver(hip)


# The engine uses the library that was opened first, so each is opened only once.
@cache
def _driver(hip: bool) -> "Double":
    return Real() if REAL else Double(hip)


class Double:
    """One per driver and process: dlopen(3) returns a library that is already loaded under the same
    name."""

    def __init__(self, hip: bool) -> None:
        self.api = "hip" if hip else "cuda"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / ("libamdhip64.so.7" if hip else "libcuda.so.1")
            build = ["cc", "-O2", "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{path.name}"]
            build += ["-DHIP"] if hip else []
            subprocess.run([*build, str(SOURCE), "-o", str(path)], check=True)
            self.library = ctypes.CDLL(str(path))
        self.library.double_adopt.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.library.double_disown.argtypes = [ctypes.c_void_p]
        self.library.double_fail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]

    def device(self, number: int) -> str:
        """One of its devices; always the same one on a machine with one GPU."""
        return f"{self.api}:{min(number, LAST)}"

    def reset(self) -> None:
        self.library.double_reset()
        self.library.double_set(100, 1)

    def fail(self, call: str, nth: int, code: int) -> None:
        """Makes the nth call of a function return this code."""
        self.library.double_fail(call.encode(), nth, code)

    def adopt(self, array: Any) -> None:
        """Makes the memory of an array count as device memory until it is freed."""
        address = array.ctypes.data
        assert self.library.double_adopt(address, array.nbytes) == 0
        weakref.finalize(array, self.library.double_disown, address).atexit = False

    def counts(self) -> tuple[list[int], str]:
        counts, text = (ctypes.c_uint64 * 8)(), ctypes.create_string_buffer(256)
        self.library.double_counts(counts, text, len(text))
        return list(counts), text.value.decode()

    def left(self) -> Left:
        counts, complaint = self.counts()
        registered, memory, events, streams, contexts = counts[:5]
        return Left(registered, memory, events, streams, contexts, complaint)


class Real(Double):
    """A real driver, which can neither be made to fail nor say what is left."""

    def __init__(self) -> None:
        self.api = KIND
        # Otherwise PyTorch would copy the tensors, and the tests would pass.
        _dmafile.check_device(f"{KIND}:0")

    def reset(self) -> None:
        pass

    def fail(self, call: str, nth: int, code: int) -> None:
        only_the_double("makes calls fail")

    def counts(self) -> tuple[list[int], str]:
        only_the_double("counts calls")

    def left(self) -> Left:
        return NOTHING


def only_the_double(does: str) -> NoReturn:
    """Skips a test, or the rest of it."""
    pytest.skip(f"the driver is real, and only the double {does}")


def stand_in(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets loads of PyTorch use a small ring and, with the double, memory of the CPU stand for that
    of a GPU."""
    import dmafile.torch
    import torch

    empty, driver = torch.empty, dmafile.torch._driver

    def ringed(where: Any) -> Any:
        how = driver(where)
        assert how or not REAL or where.type != "cuda"
        return how and (*how[:2], RING)

    monkeypatch.setattr(dmafile.torch, "_driver", ringed)
    if REAL:
        if not torch.cuda.is_available():
            pytest.skip("this PyTorch has no GPU")
        return
    import numpy as np

    def allocated(*shape: Any, device: Any = None, **how: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return empty(*shape, device=device, **how)
        tensor = empty(*shape, device="cpu", **how)
        if not tensor.numel():
            return tensor
        # Memory of its own, which is returned at once when it is freed.
        block = np.frombuffer(mmap.mmap(-1, tensor.nbytes), np.uint8)
        double.adopt(block)
        return torch.from_numpy(block).view(tensor.dtype).view(tensor.shape)

    streams = [SimpleNamespace(cuda_stream=0)]

    @contextmanager
    def stream(one: Any) -> Iterator[None]:
        streams.append(one)
        try:
            yield
        finally:
            streams.pop()

    monkeypatch.setattr(torch, "empty", allocated)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda where=None: streams[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
