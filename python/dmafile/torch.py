"""Tensors of safetensors and GGUF files as PyTorch tensors."""

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, TypeAlias, Unpack

import torch

from . import _dmafile
from ._load import ModelPath, Options, check_empty, open_model
from ._progress import Callback, callback
from ._stream import Batch, Row, Tensors, chosen
from ._stream import stream as _parts

__all__ = ["load_file", "stream"]

# PyTorch is not there to type-check against.
_Tensor: TypeAlias = Any
_View: TypeAlias = Callable[[memoryview | None, int, Row], _Tensor]

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
    filename: ModelPath,
    device: Any = "cpu",
    *,
    tensors: Tensors = None,
    verify: str | None = None,
    progress: Callback | bool | None = None,
    **options: Unpack[Options],
) -> dict[str, _Tensor]:
    """As `dmafile.numpy.load_file`, for PyTorch: on the CPU the tensors are views of one private
    buffer that they keep alive; for another `device` each is copied there.
    """
    where = _device(device)
    model = open_model(filename)
    patterns, rows = chosen(model, tensors)
    view = _viewer(rows)
    # PyTorch gives the export back and keeps only the object: so it gets one that is an export.
    whole: memoryview | None = None
    if any(row[4] for row in rows):
        with callback(progress) as tell:
            whole = memoryview(model.load(patterns, {**options, "verify": verify}, tell))
    else:
        check_empty(filename, options, verify)
    loaded = {row[0]: view(whole, 0, row) for row in rows}
    if where.type != "cpu":
        loaded = {name: tensor.to(where) for name, tensor in loaded.items()}
    return loaded


def stream(
    path: ModelPath,
    *,
    device: Any = "cpu",
    tensors: Tensors = None,
    budget: int = 1 << 30,
    verify: str | None = None,
    progress: Callback | bool | None = None,
    **options: Unpack[Options],
) -> Generator[tuple[str, _Tensor], None, None]:
    """Gives the tensors of a model one after the other, each once its bytes are there, while later
    ones are being read.

    >>> for name, tensor in dmafile.torch.stream("model/", tensors=parameters.__contains__):
    ...     parameters[name].copy_(tensor)

    On the CPU the tensors are writable views of private buffers of at most 64 MiB, or of one
    tensor: a buffer is given back when the last tensor in it goes, so whoever keeps all tensors
    keeps the memory of all. For another `device` each is copied there.

    Leaving the loop early, and `close()`, cancel what is being read and give its memory back.

    Args:
        path, tensors: As in `dmafile.numpy.load_file`.
        device: Where the tensors are wanted.
        budget: At most so many bytes, 1 or more, have been or are being read and are not consumed:
            a part of the file counts until the tensor behind its last one is asked for. A tensor
            that is larger is read alone.
        verify: As in `dmafile.load`. The digest of a file is known at its end only: where it
            differs the error is raised *after the last tensor* (EBADMSG), and says that tensors
            have been given out. Chosen tensors cannot be verified.
        progress: As in `dmafile.load`, called where the next tensor is waited for.
        options: As in `dmafile.numpy.load_file`.

    Returns:
        A generator of names and tensors, in the order of their bytes in the files.

    Raises:
        Error: As `dmafile.numpy.load_file`: at once for what the arguments and headers tell, while
            it is iterated for all else.
    """
    where = _device(device)
    rows, parts = _parts(open_model(path), tensors, budget, verify, progress, options)
    return _each(_viewer(rows), parts, where)


def _each(
    view: _View, parts: Generator[Batch, None, None], where: Any
) -> Generator[tuple[str, _Tensor], None, None]:
    with closing(parts):
        for buffer, start, rows in parts:
            whole = None if buffer is None else memoryview(buffer)
            for row in rows:
                yield row[0], view(whole, start, row).to(where)
            # Not to be kept while the next one is waited for.
            del buffer, whole


def _viewer(rows: list[Row]) -> _View:
    """What makes a tensor of memory, what its first byte is, and a row; raises a TypeError where
    this PyTorch has no tensors for one of them."""
    dtypes = {name: _dtype(name) for name in {row[1] for row in rows}}
    sizes = {name: torch.empty(0, dtype=dtype).element_size() for name, dtype in dtypes.items()}
    frombuffer = torch.frombuffer

    def view(whole: memoryview | None, start: int, row: Row) -> _Tensor:
        _, name, shape, at, nbytes = row
        dtype = dtypes[name]
        if not nbytes:
            return torch.empty(shape, dtype=dtype)
        count = nbytes // sizes[name]
        return frombuffer(whole, dtype=dtype, count=count, offset=at - start).view(shape)

    return view


def _device(device: Any) -> Any:
    """A device that this PyTorch lacks is an error before anything is read."""
    where = torch.device(device)
    torch.empty(0, device=where)
    return where


def _dtype(name: str) -> Any:
    dtype = getattr(torch, _DTYPES.get(name, ""), None)
    if dtype is None:
        raise TypeError(f"this PyTorch has no dtype for {name} tensors")
    return dtype


def _array(
    buffer: _dmafile.Buffer | bytearray | None, dtype: str, shape: tuple[int, ...]
) -> _Tensor:
    """The whole of a buffer as one tensor; None for a tensor without elements."""
    if buffer is None:
        return torch.empty(shape, dtype=_dtype(dtype))
    return torch.frombuffer(memoryview(buffer), dtype=_dtype(dtype)).view(shape)


def _check(dtype: str) -> None:
    """Raises where no tensor can show a dtype."""
    _dtype(dtype)
