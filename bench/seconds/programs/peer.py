"""Loads every tensor of a model one way, as that loader's documentation tells its users to, and
touches every 4 KiB of it; in a process of its own.

    peer.py WAY FILE [check=1 | wait=1]

Prints one JSON object: seconds to `fill`, from before the load to after the last
touch, and of CPU, imports left out; with check=1 a `report` with a digest of all names and bytes.
With wait=1 it says so when it has imported all that it needs, and begins when a line comes. It
says how long the tensors took to be there (`ready`), and until they were touched as well, and stays
until the next line.
"""

import hashlib
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = 4096

Tensors = Iterable[tuple[str, Any]]


def bytes_of_array(array: Any) -> Any:
    """A NumPy array's bytes, as an array of them."""
    import numpy as np

    return array.reshape(-1).view(np.uint8)


def bytes_of_tensor(tensor: Any) -> Any:
    """A torch tensor's bytes, as a NumPy array of them."""
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy()


def dmafile() -> Callable[[Path], Tensors]:
    import dmafile.numpy

    return lambda path: dmafile.numpy.load_file(path).items()


def safetensors_mmap() -> Callable[[Path], Tensors]:
    import ml_dtypes  # noqa: F401  (gives NumPy its bfloat16)
    import safetensors.numpy

    return lambda path: safetensors.numpy.load_file(path).items()


def safetensors_torch() -> Callable[[Path], Tensors]:
    import safetensors.torch

    return lambda path: safetensors.torch.load_file(path).items()


def safetensors_pread() -> Callable[[Path], Tensors]:
    import ml_dtypes  # noqa: F401
    import safetensors.numpy

    return lambda path: safetensors.numpy.load_file(path, backend="pread").items()


def read() -> Callable[[Path], Tensors]:
    """Plain read() of the whole file, and views of it."""
    import numpy as np

    def load(path: Path) -> Iterator[tuple[str, Any]]:
        with path.open("rb", buffering=0) as file:
            memory = np.empty(path.stat().st_size, np.uint8)
            view, done = memory.data, 0
            while got := file.readinto(view[done:]):
                done += got
        data = 8 + int.from_bytes(memory[:8].tobytes(), "little")
        header = json.loads(memory[8:data].tobytes())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            yield name, memory[data + start : data + end]

    return load


def fastsafetensors() -> Callable[[Path], Tensors]:
    from fastsafetensors import fastsafe_open

    def load(path: Path) -> Iterator[tuple[str, Any]]:
        with fastsafe_open([str(path)], nogds=True, device="cpu") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)

    return load


def runai() -> Callable[[Path], Tensors]:
    """Tensors as they come, which lie in memory that is used again."""
    from runai_model_streamer import SafetensorsStreamer

    def load(path: Path) -> Iterator[tuple[str, Any]]:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(path))
            yield from streamer.get_tensors()

    return load


def runai_kept() -> Callable[[Path], Tensors]:
    """The same, and each is copied to stay."""
    load = runai()
    return lambda path: [(name, tensor.clone()) for name, tensor in load(path)]


def torch_load() -> Callable[[Path], Tensors]:
    import torch

    return lambda path: torch.load(path, map_location="cpu", weights_only=True).items()


def torch_mmap() -> Callable[[Path], Tensors]:
    import torch

    return lambda path: torch.load(path, map_location="cpu", weights_only=True, mmap=True).items()


def tensorizer() -> Callable[[Path], Tensors]:
    from tensorizer import TensorDeserializer

    def load(path: Path) -> Iterator[tuple[str, Any]]:
        with TensorDeserializer(str(path), device="cpu", num_readers=2) as tensors:
            yield from tensors.items()

    return load


def gguf() -> Callable[[Path], Tensors]:
    """Views of a mapping."""
    from gguf import GGUFReader

    return lambda path: [(one.name, one.data) for one in GGUFReader(str(path)).tensors]


@dataclass(frozen=True)
class Way:
    """How a loader is called, and what it needs."""

    start: Callable[[], Callable[[Path], Tensors]]
    """Imports all that it needs, and returns the load that is timed."""
    package: str
    """Whose version says what was measured; nothing of what Python has itself."""
    needs: tuple[str, ...] = ()
    """Modules besides."""
    file: str = "safetensors"
    """The format that it reads."""
    torch: bool = False
    """It gives torch's tensors."""
    streams: bool = False
    """A tensor is gone when the next one comes."""
    note: str = ""
    """What it can't do, or what its figures don't say."""


WAYS = {
    "dmafile": Way(dmafile, "dmafile", ("numpy", "ml_dtypes")),
    "safetensors, mmap": Way(safetensors_mmap, "safetensors", ("numpy", "ml_dtypes")),
    "safetensors for torch, mmap": Way(
        safetensors_torch,
        "safetensors",
        ("torch",),
        torch=True,
        note="the page cache is its memory",
    ),
    "safetensors, pread": Way(safetensors_pread, "safetensors", ("numpy", "ml_dtypes")),
    "read()": Way(read, "numpy"),
    "fastsafetensors": Way(fastsafetensors, "fastsafetensors", ("torch",), torch=True),
    "Run:ai Model Streamer, streamed": Way(
        runai,
        "runai-model-streamer",
        ("torch",),
        torch=True,
        streams=True,
        note="keeps no tensor: each is touched, and its memory used again",
    ),
    "Run:ai Model Streamer": Way(runai_kept, "runai-model-streamer", ("torch",), torch=True),
    "torch.load": Way(torch_load, "torch", file="pt", torch=True),
    "torch.load, mmap": Way(
        torch_mmap, "torch", file="pt", torch=True, note="the page cache is its memory"
    ),
    "tensorizer": Way(tensorizer, "tensorizer", ("torch",), file="tensors", torch=True),
    "gguf": Way(gguf, "gguf", file="gguf", note="the page cache is its memory"),
}


def held() -> Callable[[Path], Tensors]:
    """FILE is `held:NAME`."""
    import dmafile.numpy

    return lambda path: dmafile.numpy.load_file(path).items()


def held_torch() -> Callable[[Path], Tensors]:
    import dmafile.torch

    return lambda path: dmafile.torch.load_file(path).items()


def taken() -> Callable[[Path], Tensors]:
    """Whole files, of which no header is read; FILE is `held:NAME`."""
    import dmafile
    import numpy as np

    def load(path: Path) -> Tensors:
        files = dmafile.take(str(path).removeprefix("held:")).files
        return [(one.name, np.frombuffer(memoryview(one.buffer), np.uint8)) for one in files]

    return load


def shared() -> Callable[[Path], Tensors]:
    """Whole files, of which no header is read."""
    import dmafile
    import numpy as np

    def load(path: Path) -> Tensors:
        files = dmafile.shared(path, wait=600).files
        return [(one.name, np.frombuffer(memoryview(one.buffer), np.uint8)) for one in files]

    return load


HELD = {
    "dmafile.take": Way(taken, "dmafile", ("numpy",)),
    "dmafile.numpy, held:": Way(held, "dmafile", ("numpy", "ml_dtypes")),
    "dmafile.torch, held:": Way(held_torch, "dmafile", ("torch",), torch=True),
    "dmafile.shared": Way(shared, "dmafile", ("numpy",)),
}
"""What another process has in memory; shown by `bench.holding`."""


def touched(tensors: Iterable[Any]) -> int:
    """Reads a byte of every page."""
    import numpy as np

    return sum(int(one[::PAGE].sum(dtype=np.uint64)) for one in tensors)


def digest(tensors: Iterable[tuple[str, Any]]) -> str:
    """Of all names and bytes, in the order of the names."""
    found = hashlib.blake2b()
    for name, one in sorted(tensors, key=lambda pair: pair[0]):
        found.update(name.encode() + b"\0" + one.tobytes())
    return found.hexdigest()


def busy() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def read_bytes() -> int:
    """What this process has had read from the disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(one.split()[1]) for one in lines if one.startswith("read_bytes:"))


def faults() -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


def wait(load: Callable[[Path], Tensors], path: Path, raw: Callable[[Any], Any]) -> None:
    """Loads and touches at the first line of its standard input, and keeps it until the second."""
    print("imported", flush=True)
    sys.stdin.readline()
    read, faulted, started = read_bytes(), faults(), time.perf_counter()
    loaded = list(load(path))
    ready = time.perf_counter() - started
    touched(raw(tensor) for _, tensor in loaded)
    seconds = time.perf_counter() - started
    said = {"ready": ready, "touched": seconds, "faults": faults() - faulted}
    print(json.dumps({**said, "read": read_bytes() - read}), flush=True)
    sys.stdin.readline()


def main() -> None:
    way, path, check = {**WAYS, **HELD}[sys.argv[1]], Path(sys.argv[2]), "check=1" in sys.argv[3:]
    raw = bytes_of_tensor if way.torch else bytes_of_array
    load = way.start()
    if "wait=1" in sys.argv[3:]:
        wait(load, path, raw)
        return
    started, cpu = time.perf_counter(), busy()
    loaded = load(path)
    if not check and not way.streams:
        # All of them are there at once.
        loaded = list(loaded)
    if check:
        kept = [(name, raw(tensor).copy()) for name, tensor in loaded]
        report: dict[str, Any] = {"digest": digest(kept)}
    else:
        report = {"touched": touched(raw(tensor) for _, tensor in loaded)}
    seconds, spent = time.perf_counter() - started, busy() - cpu
    print(
        json.dumps({"create": 0.0, "fill": seconds, "close": 0.0, "cpu": spent, "report": report})
    )


if __name__ == "__main__":
    main()
