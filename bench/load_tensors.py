"""Loads every tensor of a safetensors file one way, touches every 4 KiB, and says what it took.

    python3 bench/load_tensors.py WAY FILE

Prints one JSON object: seconds and CPU seconds from before the load to after the last touch,
imports left out, and the sum of the touched bytes, by which ways are compared. Each way is called
as its documentation tells users to.
"""

import json
import resource
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

PAGE = 4096


def touch_arrays(arrays: Iterable[Any]) -> int:
    """Reads a byte of every page of NumPy arrays."""
    import numpy as np

    return sum(
        int(array.reshape(-1).view(np.uint8)[::PAGE].sum(dtype=np.uint64)) for array in arrays
    )


def touch_torch(tensors: Iterable[Any]) -> int:
    """Reads a byte of every page of torch tensors."""
    import torch

    return sum(int(t.reshape(-1).view(torch.uint8)[::PAGE].sum().item()) for t in tensors)


def dmafile() -> Callable[[Path], int]:
    import dmafile.numpy

    return lambda path: touch_arrays(dmafile.numpy.load_file(path).values())


def safetensors_mmap() -> Callable[[Path], int]:
    import ml_dtypes  # noqa: F401  (gives NumPy its bfloat16)
    import safetensors.numpy

    return lambda path: touch_arrays(safetensors.numpy.load_file(path).values())


def safetensors_pread() -> Callable[[Path], int]:
    import ml_dtypes  # noqa: F401
    import safetensors.numpy

    return lambda path: touch_arrays(safetensors.numpy.load_file(path, backend="pread").values())


def read() -> Callable[[Path], int]:
    """Plain read() of the whole file, and views of it."""
    import numpy as np

    def load(path: Path) -> int:
        with path.open("rb", buffering=0) as file:
            memory = np.empty(path.stat().st_size, np.uint8)
            view, done = memory.data, 0
            while got := file.readinto(view[done:]):
                done += got
        data = 8 + int.from_bytes(memory[:8].tobytes(), "little")
        header = json.loads(memory[8:data].tobytes())
        header.pop("__metadata__", None)
        places = (entry["data_offsets"] for entry in header.values())
        return touch_arrays(memory[data + start : data + end] for start, end in places)

    return load


def fastsafetensors() -> Callable[[Path], int]:
    from fastsafetensors import fastsafe_open

    def load(path: Path) -> int:
        with fastsafe_open([str(path)], nogds=True, device="cpu") as file:
            return touch_torch(file.get_tensor(name) for name in file.keys())  # noqa: SIM118

    return load


def runai() -> Callable[[Path], int]:
    from runai_model_streamer import SafetensorsStreamer

    def load(path: Path) -> int:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(path))
            return touch_torch(tensor for _, tensor in streamer.get_tensors())

    return load


WAYS: dict[str, Callable[[], Callable[[Path], int]]] = {
    "dmafile": dmafile,
    "safetensors, mmap": safetensors_mmap,
    "safetensors, pread": safetensors_pread,
    "read()": read,
    "fastsafetensors": fastsafetensors,
    "Run:ai Model Streamer": runai,
}
"""By name: what imports all it needs and returns the load that is timed."""


def busy() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    way, path = sys.argv[1], Path(sys.argv[2])
    load = WAYS[way]()
    started, cpu = time.perf_counter(), busy()
    touched = load(path)
    print(
        json.dumps(
            {
                "seconds": time.perf_counter() - started,
                "cpu": busy() - cpu,
                "touched": touched,
                "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        )
    )


if __name__ == "__main__":
    main()
