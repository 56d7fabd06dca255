"""Tensors of safetensors and GGUF files as PyTorch tensors."""

from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from typing import Any, TypeAlias, Unpack

import torch

from . import _dmafile
from ._hold import HeldModel, held_name
from ._load import ModelPath, Options, check_empty, open_model
from ._progress import Callback, callback
from ._safetensors import NAMES, Row, at_address, name_of, parts, serialize, serialize_file
from ._save import Path, SaveOptions
from ._save import save as _save
from ._stream import Batch, Placed, Tensors, chosen
from ._stream import stream as _batches

__all__ = ["load_file", "save", "save_file", "serialize", "serialize_file", "stream"]

# PyTorch is not there to type-check against.
_Tensor: TypeAlias = Any
_View: TypeAlias = Callable[[memoryview | None, int, Placed], _Tensor]

_DTYPES = {name: dtype for dtype, name in NAMES.items() if name != "F4"}


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

    Tensors of `held:NAME` and `held:NAME@SOCKET` are views of the held memory that can be written
    to: what is written stays in this process, in pages of its own. Memory that others can change
    (`hold(writable=True)`, dma-bufs) is refused (EPERM).
    """
    where = _device(device)
    name = held_name(filename)
    if name is not None:
        held = HeldModel(name, {**options, "verify": verify}, private=True)
        return {
            name: _array(held.at(at, nbytes) if nbytes else None, dtype, shape).to(where)
            for name, dtype, shape, at, nbytes in chosen(held, tensors)[1]
        }
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
    rows, batches = _batches(open_model(path), tensors, budget, verify, progress, options)
    return _each(_viewer(rows), batches, where)


def _each(
    view: _View, batches: Generator[Batch, None, None], where: Any
) -> Generator[tuple[str, _Tensor], None, None]:
    with closing(batches):
        for buffer, start, rows in batches:
            whole = None if buffer is None else memoryview(buffer)
            for row in rows:
                yield row[0], view(whole, start, row).to(where)
            # Not to be kept while the next one is waited for.
            del buffer, whole


def _viewer(rows: list[Placed]) -> _View:
    """What makes a tensor of memory, what its first byte is, and a row; raises a TypeError where
    this PyTorch has no tensors for one of them."""
    dtypes = {name: _dtype(name) for name in {row[1] for row in rows}}
    sizes = {name: torch.empty(0, dtype=dtype).element_size() for name, dtype in dtypes.items()}
    frombuffer = torch.frombuffer

    def view(whole: memoryview | None, start: int, row: Placed) -> _Tensor:
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
    buffer: _dmafile.Buffer | bytearray | memoryview | None, dtype: str, shape: tuple[int, ...]
) -> _Tensor:
    """The whole of a buffer as one tensor; None for a tensor without elements."""
    if buffer is None:
        return torch.empty(shape, dtype=_dtype(dtype))
    return torch.frombuffer(memoryview(buffer), dtype=_dtype(dtype)).view(shape)


def _check(dtype: str) -> None:
    """Raises where no tensor can show a dtype."""
    _dtype(dtype)


def save_file(
    tensors: Mapping[str, _Tensor],
    filename: Path,
    metadata: Mapping[str, str] | None = None,
    **options: Unpack[SaveOptions],
) -> dict[str, Any]:
    """Saves tensors as a safetensors file, straight out of their memory; returns the report.

    The bytes are those that `safetensors.torch.save_file` writes, except that metadata of several
    entries stays in its order, and that the elements of conjugated and negated views are written as
    they are, and not as they lie in memory: these are copied first, as are tensors of other devices
    to this one's memory. The file is replaced whole or not at all, and on the disk when this
    returns.

    Args:
        tensors: The tensors by name: dense, contiguous, and without memory in common, as there.
        filename: The file.
        metadata: Texts by name, for the header.
        options: As in `dmafile.save`: `method`, `io`, `block`, `queue_depth`, `verify`, `sync`,
            `progress`.

    Raises:
        ValueError: A tensor is none, is sparse, or is not contiguous.
        RuntimeError: Tensors share memory.
        TypeError: The format does not know the type of a tensor.
        Error: As `dmafile.save`.
    """
    kept, rows = _rows(tensors)
    try:
        return _save(parts(rows, metadata), filename, **options)
    finally:
        del kept


def save(tensors: Mapping[str, _Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """What `save_file` writes, as bytes."""
    kept, rows = _rows(tensors)
    try:
        return b"".join(parts(rows, metadata))
    finally:
        del kept


def _rows(tensors: Mapping[str, _Tensor]) -> tuple[list[_Tensor], list[Row]]:
    """What keeps the memory of the tensors alive, and what is saved of them."""
    if not isinstance(tensors, Mapping):
        raise ValueError(f"tensors: wanted a dictionary of tensors, got a {type(tensors).__name__}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name}: it is no tensor but a {type(tensor).__name__}")
        if tensor.layout != torch.strided:
            raise ValueError(f"{name}: it is sparse; save its .to_dense()")
    if shared := _sharing(tensors):
        raise RuntimeError(
            f"tensors share memory: {', '.join(shared)}; save one of them, or .clone() the others"
        )
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: it is not contiguous; save its .contiguous()")
    kept, rows = [], []
    for name, tensor in tensors.items():
        here = tensor.detach().to("cpu").resolve_conj().resolve_neg()
        kept.append(here)
        dtype = name_of(str(here.dtype).removeprefix("torch."))
        shape = tuple(here.shape)
        if dtype == "F4" and shape:
            # Two elements are a byte, and one of PyTorch's.
            shape = (*shape[:-1], 2 * shape[-1])
        data = at_address(here.data_ptr(), here.numel() * here.element_size())
        rows.append((name, dtype, shape, data))
    return kept, rows


def _sharing(tensors: Mapping[str, _Tensor]) -> list[str]:
    """Which tensors have memory in common, in pairs."""
    storages = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.device.type == "meta":
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() and storage.nbytes():
            last = sum(
                (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
            )
            elements = last + 1 if tensor.numel() else 0
            start = tensor.data_ptr()
            end = start + elements * tensor.element_size()
            storages[tensor.device, storage.data_ptr()].append((start, end, name))
    shared = []
    for areas in storages.values():
        areas.sort()
        _, reached, before = areas[0]
        for start, end, name in areas[1:]:
            if start < reached:
                shared.append(f"{name} with {before}")
            if end > reached:
                reached, before = end, name
    return shared
