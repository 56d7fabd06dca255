"""Loads all tensors of a model as one of several ranks, and touches every 4 KiB.

    rank.py WAY FILE...

The ranks find each other by the variables of torchrun: RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT. A rank prints a line when it has joined, and begins when it reads a line. It prints one
JSON object: seconds until the tensors were touched, CPU seconds, and bytes that were read from the
disk. Then it waits for another line.
"""

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PAGE = 4096
Tensors = Iterator[tuple[str, Any]]


def dmafile(files: list[str]) -> Tensors:
    import dmafile.torch
    import torch.distributed as dist

    yield from dmafile.torch.load_file(files, group=dist.group.WORLD).items()


def alone(files: list[str]) -> Tensors:
    """Each rank loads on its own."""
    import dmafile.torch

    yield from dmafile.torch.load_file(files).items()


def safetensors(files: list[str]) -> Tensors:
    import safetensors.torch

    for file in files:
        yield from safetensors.torch.load_file(file).items()


def fastsafetensors(files: list[str]) -> Tensors:
    """Each rank reads its share of the files, and broadcasts it tensor by tensor."""
    import torch
    import torch.distributed as dist
    from fastsafetensors import SafeTensorsFileLoader

    loader = SafeTensorsFileLoader(dist.group.WORLD, torch.device("cpu"), nogds=True)
    ranks = dist.get_world_size()
    loader.add_filenames({rank: files[rank::ranks] for rank in range(ranks)})
    buffer = loader.copy_files_to_device()
    for name in loader.get_keys():
        yield name, buffer.get_tensor(name)


def runai(files: list[str]) -> Tensors:
    """Each rank reads a part and broadcasts it; tensors are in memory that is reused."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files, device="cpu", is_distributed=True)
        for name, tensor in streamer.get_tensors():
            yield name, tensor.clone()


WAYS: dict[str, tuple[Callable[[list[str]], Tensors], str]] = {
    "dmafile.torch, group=": (dmafile, "dmafile"),
    "dmafile.torch in every rank": (alone, "dmafile"),
    "safetensors in every rank": (safetensors, "safetensors"),
    "fastsafetensors, gloo": (fastsafetensors, "fastsafetensors"),
    "Run:ai, distributed": (runai, "runai-model-streamer"),
}
"""The function for each loader, and the package that it needs."""


def used() -> tuple[float, int]:
    """Seconds of CPU, and bytes that were read from the disk."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    lines = Path("/proc/self/io").read_text().splitlines()
    read = next(int(one.split()[1]) for one in lines if one.startswith("read_bytes:"))
    return usage.ru_utime + usage.ru_stime, read


def main() -> None:
    import torch
    import torch.distributed as dist

    load, _ = WAYS[sys.argv[1]]
    dist.init_process_group("gloo")
    dist.barrier()
    print("joined", flush=True)
    sys.stdin.readline()
    (cpu, read), started = used(), time.perf_counter()
    tensors = list(load(sys.argv[2:]))
    for _, tensor in tensors:
        tensor.reshape(-1).view(torch.uint8)[::PAGE].sum()
    seconds = time.perf_counter() - started
    cpu_after, read_after = used()
    said = {"seconds": seconds, "cpu": cpu_after - cpu, "read": read_after - read}
    print(json.dumps(said), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
