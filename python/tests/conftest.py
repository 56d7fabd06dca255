"""Files to load, on the disk of the checkout: /tmp may be a tmpfs, which has no direct I/O."""

import contextlib
import fcntl
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypedDict

import pytest
from double import NOTHING, Double, stand_in, the_double

# As in a terminal: background jobs of a script ignore SIGINT, and so do their children.
signal.signal(signal.SIGINT, signal.default_int_handler)

HERE = Path(__file__).parent
SIZE = (3 << 20) + 123

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def write(path: Path, data: bytes) -> Path:
    """Writes a file and drops it from the page cache."""
    with path.open("wb") as file:
        file.write(data)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Types, shapes and bytes, by name."""


def write_safetensors(path: Path, tensors: Tensors) -> Path:
    """Written here, so that tests need no other package."""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        offsets = [at, at + len(data)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        at += len(data)
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    every = b"".join(data for _, _, data in tensors.values())
    return write(path, len(text).to_bytes(8, "little") + text + every)


def eventually(happened: Callable[[], bool]) -> None:
    """Waits until it returns true; even on a busy machine, only a hang takes a minute."""
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.001)


def bytes_read() -> int:
    """Bytes that this process has read by system calls; a stopped load reads less than the file."""
    first = Path("/proc/self/io").read_text().splitlines()[0]
    return int(first.removeprefix("rchar: "))


def sha256(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: str | Path) -> str:
    """Computed by sha256sum."""
    command = ["sha256sum", "--", str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0]


def load_threads() -> list[str]:
    """Threads of loads that have not ended."""
    tasks = Path("/proc/self/task").iterdir()
    return [name for task in tasks if (name := _comm(task)).startswith("dmafile")]


def _comm(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(scope="session", autouse=True)
def pool() -> Iterator[None]:
    """Loads may take huge pages from the pool. Tests of the command that rely on its size hold this
    lock exclusively, so they do not run at the same time, in any process."""
    path = Path("/proc/sys/vm/nr_hugepages")
    with contextlib.ExitStack() as held:
        if path.exists():
            fcntl.flock(held.enter_context(path.open()), fcntl.LOCK_SH)
        yield


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=HERE, prefix=".files-") as name:
        yield Path(name)


@pytest.fixture(scope="session")
def file(folder: Path) -> Path:
    return write(folder / "noise", random.Random(1).randbytes(SIZE))


@pytest.fixture(scope="session")
def slow(folder: Path) -> Path:
    """A file that is slow to load with SLOWLY, which reads one page after another."""
    return write(folder / "slow", random.Random(2).randbytes(1 << 20) * 192)


class Slowly(TypedDict):
    method: str
    io: str
    block: int
    queue_depth: int


SLOWLY: Slowly = {"method": "threads", "io": "direct", "block": 4096, "queue_depth": 1}


@pytest.fixture
def python() -> Run:
    """Runs a program in a separate interpreter."""

    def run(program: str, *args: object) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", program, *map(str, args)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    return run


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Double]:
    """Makes PyTorch use GPUs: those of the double of the driver, with memory of the CPU, or real
    ones."""
    double = the_double()
    double.reset()
    stand_in(double, monkeypatch)
    yield double
    assert double.left() == NOTHING


@pytest.fixture(params=["cpu", "cuda:0"])
def device(request: pytest.FixtureRequest) -> Any:
    """Every device that PyTorch's tensors are tested on."""
    if request.param != "cpu":
        request.getfixturevalue("gpu")
    return request.param
