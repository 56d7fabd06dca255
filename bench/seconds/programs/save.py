"""Saves tensors in memory to the disk with one package.

The package is called as its documentation recommends, in a separate process.

    save.py WAY NOISE TARGET [check=1]

The tensors are the bytes of NOISE, in a memfd on huge pages, which only root can reserve. Prints
one JSON object: `fill`, the seconds to write the file, and CPU seconds, both without imports. With
check=1 the file is read back, and the exit status is 1 if bytes differ. If it cannot run, the
object has only `refused`.
"""

import json
import mmap
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POOL = Path("/proc/sys/vm/nr_hugepages")
HUGE_PAGE = 2 << 20
PIECES = 64

Tensors = dict[str, Any]
Save = Callable[[Tensors, Path], object]


def to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def dmafile_numpy() -> Save:
    import dmafile.numpy

    return lambda tensors, path: dmafile.numpy.save_file(tensors, path)


def safetensors_numpy() -> Save:
    import safetensors.numpy

    def save(tensors: Tensors, path: Path) -> None:
        safetensors.numpy.save_file(tensors, path)
        to_disk(path)

    return save


def dmafile_torch() -> Save:
    import dmafile.torch

    return lambda tensors, path: dmafile.torch.save_file(tensors, path)


def safetensors_torch() -> Save:
    import safetensors.torch

    def save(tensors: Tensors, path: Path) -> None:
        safetensors.torch.save_file(tensors, path)
        to_disk(path)

    return save


def torch_save() -> Save:
    import torch

    def save(tensors: Tensors, path: Path) -> None:
        torch.save(tensors, path)
        to_disk(path)

    return save


def read_safetensors(path: Path) -> Iterable[Any]:
    import safetensors.numpy

    return [array for _, array in sorted(safetensors.numpy.load_file(path).items())]


def read_torch(path: Path) -> Iterable[Any]:
    import torch

    return [tensor.numpy() for _, tensor in sorted(torch.load(path, weights_only=True).items())]


@dataclass(frozen=True)
class Way:
    """How a package saves tensors, and what it needs."""

    start: Callable[[], Save]
    """Imports its packages, and returns the function that is timed."""
    package: str
    """The package whose version is shown."""
    needs: tuple[str, ...] = ()
    """Additional modules that it needs."""
    torch: bool = False
    """Whether it takes torch tensors."""
    read: Callable[[Path], Iterable[Any]] = read_safetensors


WAYS = {
    "`dmafile.numpy.save_file`": Way(dmafile_numpy, "dmafile", ("numpy", "safetensors")),
    "`safetensors.numpy.save_file`, `fsync()`": Way(safetensors_numpy, "safetensors", ("numpy",)),
    "`dmafile.torch.save_file`": Way(dmafile_torch, "dmafile", ("torch", "safetensors"), True),
    "`safetensors.torch.save_file`, `fsync()`": Way(
        safetensors_torch, "safetensors", ("torch", "numpy"), True
    ),
    "`torch.save`, `fsync()`": Way(torch_save, "torch", ("numpy",), True, read_torch),
}


@contextmanager
def huge_pages(size: int) -> Iterator[None]:
    """Reserves SIZE bytes of additional huge pages, and releases them at the end."""
    before = int(POOL.read_text())
    wanted = before + -(-size // HUGE_PAGE)
    try:
        POOL.write_text(str(wanted))
        if int(POOL.read_text()) < wanted:
            raise OSError(f"{POOL}: cannot reserve {wanted} huge pages")
        yield
    finally:
        POOL.write_text(str(before))


def fill(noise: Path, size: int) -> Any:
    """The bytes of a file, as an array in a memfd on huge pages."""
    import numpy as np

    fd = os.memfd_create("saved", os.MFD_CLOEXEC | os.MFD_HUGETLB)
    os.ftruncate(fd, -(-size // HUGE_PAGE) * HUGE_PAGE)
    view = mmap.mmap(fd, -(-size // HUGE_PAGE) * HUGE_PAGE)
    os.close(fd)
    source = os.open(noise, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    done = 0
    while done < size and (got := os.preadv(source, [memoryview(view)[done:size]], done)):
        done += got
    os.close(source)
    return np.frombuffer(view, np.uint8, size)


def pieces(memory: Any, *, torch: bool) -> Tensors:
    """The memory split into tensors."""
    import numpy as np

    some = np.split(memory.view(np.float32), PIECES)
    if torch:
        import torch as package

        some = [package.from_numpy(one) for one in some]
    return {f"layer.{number:02}": one for number, one in enumerate(some)}


def busy() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measured(way: Way, noise: Path, to: Path, *, check: bool) -> dict[str, Any]:
    import numpy as np

    memory = fill(noise, noise.stat().st_size)
    save, tensors = way.start(), pieces(memory, torch=way.torch)
    to.unlink(missing_ok=True)
    started, cpu = time.perf_counter(), busy()
    save(tensors, to)
    seconds, spent = time.perf_counter() - started, busy() - cpu
    if check:
        found = np.concatenate([one.reshape(-1).view(np.uint8) for one in way.read(to)])
        if not np.array_equal(found, memory):
            sys.exit("wrong bytes")
    return {"create": 0.0, "fill": seconds, "close": 0.0, "cpu": spent, "report": None}


def main() -> None:
    way, noise, to = WAYS[sys.argv[1]], Path(sys.argv[2]), Path(sys.argv[3])
    try:
        with huge_pages(noise.stat().st_size):
            said = measured(way, noise, to, check="check=1" in sys.argv[4:])
    except OSError as error:
        said = {"refused": str(error)}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
