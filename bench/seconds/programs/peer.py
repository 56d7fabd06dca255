"""Loads all tensors of a model with one loader, and touches every 4 KiB of them.

The loader is called as its documentation recommends, in a separate process.

    peer.py WAY FILE [check=1]

Prints one JSON object: `fill`, the seconds from before the load until after the last touch, and CPU
seconds, both without imports; with check=1 also a `report` with a digest of all names and bytes.
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
    """The bytes of a NumPy array, as an array of bytes."""
    import numpy as np

    return array.reshape(-1).view(np.uint8)


def bytes_of_tensor(tensor: Any) -> Any:
    """The bytes of a torch tensor, as a NumPy array of bytes."""
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
    """Tensors as they arrive, in memory that is reused for the next ones."""
    from runai_model_streamer import SafetensorsStreamer

    def load(path: Path) -> Iterator[tuple[str, Any]]:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(path))
            yield from streamer.get_tensors()

    return load


def runai_kept() -> Callable[[Path], Tensors]:
    """The same, with a copy of each tensor."""
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
    """Views of a memory mapping."""
    from gguf import GGUFReader

    return lambda path: [(one.name, one.data) for one in GGUFReader(str(path)).tensors]


@dataclass(frozen=True)
class Way:
    """How a loader is called, and the packages that it needs."""

    start: Callable[[], Callable[[Path], Tensors]]
    """Imports its packages, and returns the function that is timed."""
    package: str
    """The package whose version is shown."""
    needs: tuple[str, ...] = ()
    """Additional modules that it needs."""
    file: str = "safetensors"
    """The format that it reads."""
    torch: bool = False
    """Whether it returns torch tensors."""
    streams: bool = False
    """Whether the next tensor overwrites the memory of this one."""
    note: str = ""
    """A limitation of the loader, or a note on its figures."""


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
        note="keeps no tensor: each is touched, and its memory reused",
    ),
    "Run:ai Model Streamer": Way(runai_kept, "runai-model-streamer", ("torch",), torch=True),
    "torch.load": Way(torch_load, "torch", file="pt", torch=True),
    "torch.load, mmap": Way(
        torch_mmap, "torch", file="pt", torch=True, note="the page cache is its memory"
    ),
    "tensorizer": Way(tensorizer, "tensorizer", ("torch",), file="tensors", torch=True),
    "gguf": Way(gguf, "gguf", file="gguf", note="the page cache is its memory"),
}


def touched(tensors: Iterable[Any]) -> int:
    """Reads one byte of every page."""
    import numpy as np

    return sum(int(one[::PAGE].sum(dtype=np.uint64)) for one in tensors)


def digest(tensors: Iterable[tuple[str, Any]]) -> str:
    """A digest of all names and bytes, in the order of the names."""
    found = hashlib.blake2b()
    for name, one in sorted(tensors, key=lambda pair: pair[0]):
        found.update(name.encode() + b"\0" + one.tobytes())
    return found.hexdigest()


def busy() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    way, path, check = WAYS[sys.argv[1]], Path(sys.argv[2]), "check=1" in sys.argv[3:]
    raw = bytes_of_tensor if way.torch else bytes_of_array
    load = way.start()
    started, cpu = time.perf_counter(), busy()
    loaded = load(path)
    if not check and not way.streams:
        # All tensors must be in memory at the same time.
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
