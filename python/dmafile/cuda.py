"""Tensors in the memory of a GPU, without PyTorch: for CuPy, JAX, and other libraries with DLPack.

Tested on an NVIDIA H100; for AMD's driver only with a test double.
"""

from dataclasses import dataclass
from typing import Any, Unpack

from . import _dmafile
from ._device import Layout, Ring
from ._device import load as _load
from ._load import ModelPath, Options, check_empty, open_model
from ._progress import Callback
from ._stream import Tensors, chosen

__all__ = ["Tensor", "load"]

_SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F4": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2}
_SIZES |= {"U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8}


@dataclass(frozen=True)
class Tensor:
    """A tensor in the memory of a GPU, for `cupy.from_dlpack`, `jax.dlpack.from_dlpack` and others.

    All tensors of a load share one block of memory. It is freed with the last of these tensors and
    of the arrays that were made from them.
    """

    dtype: str
    """The name of the type in the file, such as `BF16`; `U8` for types that consist of blocks."""
    shape: tuple[int, ...]
    nbytes: int
    device: str
    """`cuda:N` or `hip:N`."""
    address: int
    """The device address of the first byte, for calls of the device's libraries."""
    _memory: _dmafile.DeviceMemory
    _at: int

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule. All bytes are in place, so no `stream` has to wait for them.

        Raises:
            BufferError: The consumer requests a copy or another device, or DLPack has no such type.
        """
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError(f"the memory is on {self.device}, and is not copied")
        versioned = max_version is not None and max_version[0] >= 1
        return self._memory.dlpack(self._at, self.dtype, list(self.shape), versioned)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._memory.dlpack_device()


def load(
    filename: ModelPath,
    device: int | str = 0,
    *,
    tensors: Tensors = None,
    verify: str | None = None,
    progress: Callback | bool | None = None,
    ring: Ring = None,
    **options: Unpack[Options],
) -> dict[str, Tensor]:
    """Loads the tensors of a model into the memory of a GPU, through a ring of pinned memory.

    Args:
        filename, tensors, verify, progress, options: As in `dmafile.numpy.load_file`, except that
            `held:NAME` is not supported. `pages` applies to the ring.
        device: The number of a GPU of NVIDIA's driver; or `cuda:N`; or `hip:N` for AMD's driver.
        ring: Size of the ring in host memory, in bytes, and number of slots (2 to 1024). With None,
            64 MiB and 16 slots.

    Returns:
        The tensors by name, in the order of their bytes in the files, without empty tensors.

    Raises:
        Error: As `dmafile.numpy.load_file`; ENODEV if there is no driver or no such device; ENOMEM
            if the device is out of memory; otherwise the driver's error.
    """
    model = open_model(filename)
    patterns, rows = chosen(model, tensors)
    layout = Layout(rows, lambda dtype: _SIZES.get(dtype, 1))
    if not layout.nbytes:
        check_empty(filename, options, verify)
        return {}
    where = f"cuda:{device}" if isinstance(device, int) else device
    memory = _dmafile.DeviceMemory(where, layout.nbytes)
    _load(model, patterns, layout, memory, (where, None, ring), verify, progress, options)
    return {
        name: Tensor(dtype, shape, nbytes, memory.device, memory.address + at, memory, at)
        for name, dtype, shape, _, nbytes in rows
        if (at := layout.offsets.get(name)) is not None
    }
