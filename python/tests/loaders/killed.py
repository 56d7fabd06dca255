"""Saves checkpoints repeatedly in a child that is killed at random moments: killed.py FOLDER TIMES.

Then the folder has a whole checkpoint: the last one that the child has reported, or the next.
"""

import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import dmafile.checkpoint
import torch
import torch.distributed.checkpoint as dcp

# Warnings of torch about saving without ranks.
warnings.filterwarnings("ignore")
SHAPES = {"large": (24 << 20,), "small": (1000,), "square": (512, 512), "empty": (0, 3)}


def state(number: int) -> dict[str, Any]:
    return {
        name: torch.full(shape, number % 256, dtype=torch.uint8) for name, shape in SHAPES.items()
    } | {"number": number}


def save(folder: Path, number: int, say: int) -> None:
    while True:
        writer = dmafile.checkpoint.StorageWriter(folder)
        dcp.save(state(number), storage_writer=writer, no_dist=True)
        os.write(say, number.to_bytes(8, "little"))
        number += 1


def loaded(folder: Path, reader: type[Any]) -> int:
    """The number of the checkpoint; asserts that all its tensors have that number."""
    tensors = state(0) | {"number": 0}
    dcp.load(tensors, storage_reader=reader(folder), no_dist=True)
    number = int(tensors.pop("number"))
    for name, tensor in tensors.items():
        assert bool((tensor == number % 256).all()), (name, number)
    return number


def main(folder: Path, times: int) -> None:
    number, chance = 1, random.Random()
    for _ in range(times):
        listen, say = os.pipe()
        child = os.fork()
        if child == 0:
            save(folder, number, say)
        os.close(say)
        # Wait for the first checkpoint.
        said = os.read(listen, 8) if number == 1 else b""
        time.sleep(chance.uniform(0, 0.3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(listen, 8):
            said = more
        os.close(listen)
        last = int.from_bytes(said, "little") if said else number - 1
        ours = loaded(folder, dmafile.checkpoint.StorageReader)
        assert ours in (last, last + 1), (ours, last)
        assert loaded(folder, dcp.FileSystemReader) == ours
        number = ours + 1
    # The next save removes what killed saves have left.
    dcp.save(state(number), storage_writer=dmafile.checkpoint.StorageWriter(folder), no_dist=True)
    assert loaded(folder, dmafile.checkpoint.StorageReader) == number
    print(len(list(folder.iterdir())), number, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
