"""Tensors of safetensors and GGUF files as PyTorch tensors."""

import os
from collections.abc import Iterable
from typing import Any, TypeAlias, Unpack

import torch

from . import _dmafile
from ._hold import HeldModel, held_name
from ._load import Options, StrPath, check_empty
from ._progress import Callback, callback

__all__ = ["load_file"]

# PyTorch is not there to type-check against.
_Tensor: TypeAlias = Any

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}


def load_file(
    path: StrPath,
    *,
    device: Any = "cpu",
    tensors: Iterable[str] | None = None,
    verify: str | None = None,
    progress: Callback | bool | None = None,
    **options: Unpack[Options],
) -> dict[str, _Tensor]:
    """As `dmafile.numpy.load_file`, for PyTorch: on the CPU the tensors are views of one private
    buffer that they keep alive; for another `device` each is copied there.

    Tensors of `held:NAME` are views of the held memory that can be written to: what is written
    stays in this process, in pages of its own. Memory that others can change
    (`hold(writable=True)`, dma-bufs) is refused (EPERM).
    """
    where = torch.device(device)
    # A device that this PyTorch lacks is an error before anything is read.
    torch.empty(0, device=where)
    patterns = [tensors] if isinstance(tensors, str) else tensors
    patterns = None if patterns is None else list(patterns)
    name = held_name(path)
    if name is not None:
        held = HeldModel(name, {**options, "verify": verify}, private=True)
        return {
            name: _array(held.at(at, nbytes) if nbytes else None, dtype, shape).to(where)
            for name, dtype, shape, at, nbytes in held.table(patterns)
        }
    model = _dmafile.Model(os.fsdecode(path))
    table = model.table(patterns)
    dtypes = {name: _dtype(name) for name in {row[1] for row in table}}
    sizes = {name: torch.empty(0, dtype=dtype).element_size() for name, dtype in dtypes.items()}
    # PyTorch gives the export back and keeps only the object: so it gets one that is an export.
    whole: memoryview | None = None
    if any(row[4] for row in table):
        with callback(progress) as tell:
            whole = memoryview(model.load(patterns, {**options, "verify": verify}, tell))
    else:
        check_empty(path, options, verify)
    view = torch.frombuffer
    loaded = {
        name: view(whole, dtype=dtypes[dtype], count=nbytes // sizes[dtype], offset=at).view(shape)
        if nbytes
        else torch.empty(shape, dtype=dtypes[dtype])
        for name, dtype, shape, at, nbytes in table
    }
    if where.type != "cpu":
        loaded = {name: tensor.to(where) for name, tensor in loaded.items()}
    return loaded


def _dtype(name: str) -> Any:
    dtype = getattr(torch, _DTYPES.get(name, ""), None)
    if dtype is None:
        raise TypeError(f"this PyTorch has no dtype for {name} tensors")
    return dtype


def _array(
    buffer: _dmafile.Buffer | bytearray | memoryview | None, dtype: str, shape: tuple[int, ...]
) -> _Tensor:
    """The whole of a buffer as one tensor; None for a tensor without elements."""
    if buffer is None:
        return torch.empty(shape, dtype=_dtype(dtype))
    return torch.frombuffer(memoryview(buffer), dtype=_dtype(dtype)).view(shape)


def _check(dtype: str) -> None:
    """Raises where no tensor can show a dtype."""
    _dtype(dtype)
