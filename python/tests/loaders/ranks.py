"""Ranks that save and load checkpoints: ranks.py FOLDER COUNT:TASK COUNT:TASK ..."""

import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import dmafile.checkpoint
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

PLACES = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "wide": [Shard(1)],
    "half": [Shard(0)],
    "same": [Replicate()],
    "scalar": [Replicate()],
    "middle": [Shard(1)],
    "few": [Shard(0)],
}


def whole() -> dict[str, Any]:
    """The tensors, with rows and columns that 3 and 4 ranks cannot divide evenly."""
    generator = torch.Generator().manual_seed(5)

    def noise(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    return {
        "rows": noise(4099, 1000),
        "columns": noise(1000, 1031),
        "wide": noise(10, 400_001),
        "half": noise(4001, 300).to(torch.bfloat16),
        "same": noise(301, 77),
        "scalar": noise(1)[0],
        "middle": noise(5, 400, 31),
        "few": noise(2, 3),
    }


def state(mesh: Any, like: Any) -> dict[str, Any]:
    tensors = {
        name: distribute_tensor(like(tensor), mesh, PLACES[name])
        for name, tensor in whole().items()
    }
    return tensors | {"step": 7, "names": ["a", "b"], "plain": like(torch.arange(1000))}


def check(loaded: dict[str, Any]) -> None:
    for name, tensor in whole().items():
        assert torch.equal(loaded[name].full_tensor(), tensor), name
    assert (loaded["step"], loaded["names"]) == (7, ["a", "b"])
    assert torch.equal(loaded["plain"], torch.arange(1000))


def bytes_read() -> int:
    first = Path("/proc/self/io").read_text().splitlines()[0]
    return int(first.removeprefix("rchar: "))


def load(folder: Path, mesh: Any) -> None:
    loaded = state(mesh, torch.zeros_like) | {"step": 0, "names": []}
    dcp.load(loaded, storage_reader=dmafile.checkpoint.StorageReader(folder))
    check(loaded)
    loaded = state(mesh, torch.zeros_like) | {"step": 0, "names": []}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(folder))
    check(loaded)
    # For tensors that are divided by rows or not divided, only the needed bytes are read.
    rows = ("rows", "half", "same", "wide")
    loaded = {name: one for name, one in state(mesh, torch.zeros_like).items() if name in rows}
    wanted = sum(tensor.to_local().nbytes for tensor in loaded.values())
    before = bytes_read()
    dcp.load(loaded, storage_reader=dmafile.checkpoint.StorageReader(folder))
    read = bytes_read() - before - (folder / ".metadata").stat().st_size
    assert read <= 1.02 * wanted, (read, wanted)


def load_model(folder: Path, mesh: Any) -> None:
    """A safetensors model, compared with another reader of torch."""
    loaded = state(mesh, torch.zeros_like)
    loaded = {name: loaded[name] for name in PLACES}
    theirs = {name: torch.zeros_like(tensor) for name, tensor in loaded.items()}
    dcp.load(loaded, storage_reader=dmafile.checkpoint.StorageReader(folder))
    dcp.load(theirs, storage_reader=HuggingFaceStorageReader(str(folder)))
    for name, tensor in whole().items():
        assert torch.equal(loaded[name].full_tensor(), tensor), name
        assert torch.equal(loaded[name].to_local(), theirs[name].to_local()), name


def rank(number: int, count: int, task: str, folder: Path, store: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=count)
    mesh = init_device_mesh("cpu", (count,))
    match task:
        case "save":
            tensors = state(mesh, lambda tensor: tensor)
            dcp.save(tensors, storage_writer=dmafile.checkpoint.StorageWriter(folder))
        case "save-theirs":
            tensors = state(mesh, lambda tensor: tensor)
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder))
        case "load":
            load(folder, mesh)
        case "load-model":
            load_model(folder, mesh)
        case _:
            raise ValueError(task)
    dist.destroy_process_group()


def main(folder: Path, tasks: list[str]) -> None:
    for task in tasks:
        count = int(task.partition(":")[0])
        # Forked, because importing PyTorch takes longer than the test.
        with tempfile.TemporaryDirectory() as store:
            started = []
            for number in range(count):
                child = os.fork()
                if child == 0:
                    try:
                        rank(number, count, task.partition(":")[2], folder, Path(store) / "store")
                    except BaseException:
                        traceback.print_exc()
                        os._exit(1)
                    os._exit(0)
                started.append(child)
            ended = [os.waitpid(child, 0)[1] for child in started]
        if any(ended):
            sys.exit(f"{task}: {ended}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
