"""Tensors of safetensors and GGUF files as PyTorch tensors."""

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from typing import Any, TypeAlias, Unpack

import torch
import torch.distributed as dist

from . import _device as _device_loads
from . import _dmafile
from ._errors import Error, make
from ._hold import HeldModel, held_name
from ._load import ModelPath, Options, check_empty, open_model
from ._progress import Callback, callback
from ._safetensors import (
    NAMES,
    Row,
    TensorSpec,
    at_address,
    described,
    deserialize,
    name_of,
    parts,
    serialize,
    serialize_file,
    shape_of,
    write,
)
from ._save import HasBytes, Path, SaveOptions
from ._sharing import (
    _end_ptr,
    _find_shared_tensors,
    _is_complete,
    _remove_duplicate_names,
    storage_ptr,
    storage_size,
)
from ._stream import Batch, Placed, Tensors, chosen
from ._stream import stream as _batches
from ._tensors import check_backend, safe_open

# Programs import the names with an underscore from safetensors.
__all__ = [
    "_TYPES",
    "TensorSpec",
    "_end_ptr",
    "_find_shared_tensors",
    "_getdtype",
    "_is_complete",
    "_remove_duplicate_names",
    "deserialize",
    "load",
    "load_file",
    "load_model",
    "safe_open",
    "save",
    "save_file",
    "save_model",
    "serialize",
    "serialize_file",
    "storage_ptr",
    "storage_size",
    "stream",
]

# Type checks run without PyTorch.
_Tensor: TypeAlias = Any
Report: TypeAlias = Callable[[dict[str, Any]], object]
"""Called with the sources of the bytes of a load."""
_View: TypeAlias = Callable[[memoryview | None, int, Placed], _Tensor]

_TYPES = {name: getattr(torch, dtype) for dtype, name in NAMES.items() if hasattr(torch, dtype)}
# Older versions have no such type: use bytes.
_TYPES.setdefault("F4", torch.uint8)


def load_file(
    filename: ModelPath,
    device: Any = "cpu",
    *,
    backend: str = "mmap",
    tensors: Tensors = None,
    verify: str | None = None,
    progress: Callback | bool | None = None,
    group: Any = None,
    report: Report | None = None,
    **options: Unpack[Options],
) -> dict[str, _Tensor]:
    """As `dmafile.numpy.load_file`, for PyTorch: on the CPU the tensors are views of one private
    buffer, which they keep alive. On a GPU they are views of one block of its memory, which is
    loaded through a ring of pinned memory: for CUDA, and for ROCm, with which it has not been
    tested. If the driver cannot be used (a RuntimeWarning gives the reason), and for any other
    `device`, each tensor is copied there.

    Tensors of `held:NAME` and `held:NAME@SOCKET` are writable views of the held memory: writes stay
    in this process (copy-on-write). Memory that others can change (`hold(writable=True)`, dma-bufs)
    is refused (EPERM).

    With a `group` all of its ranks load the same files at the same time, and each byte is read from
    the disk once. The ranks of a node share one memory, as with `dmafile.shared`, and the tensors
    are views of it, as of held memory. The first rank of each node reads its part of the files, and
    sends it to the other nodes (by gloo, whatever the backend of the group is). Ranks are on the
    same node if kernel, mount and PID namespace, user and files are the same. Files under
    `held:NAME` are in memory already, so several ranks take them without a `group`.

    Args:
        filename, tensors, verify, options: As in `dmafile.numpy.load_file`. With a `group`, the
            files, `verify` and `options` must be the same in all ranks. `tensors` may differ: it
            selects what is returned, but whole files are loaded.
        device: The device for the tensors; may differ between ranks.
        progress: As in `dmafile.numpy.load_file`. With a `group`, it is called only in the first
            rank of each node, with the bytes that arrive in the memory of the node.
        group: A process group of torch.distributed, with any backend, that this rank belongs to.
            With None, or a group of one rank, this process loads alone.
        report: Called once, at the end, with the sources of the bytes: a dict with `nodes`, the
            ranks of each node, and `ranks`, for each rank a dict with `rank` (in the world), `disk`
            (bytes of the files that it read), `peers` (bytes that it received from other nodes) and
            `seconds` (from the call to the end).

    Raises:
        Error: As `dmafile.numpy.load_file`. With a `group`, if one rank fails, all ranks do: the
            others raise an error that names that rank and the reason, with its errno; ECONNRESET
            if its process has ended, ETIMEDOUT if the load has not ended within the group's
            timeout, EINVAL if it requests other files or options, or its files have different
            bytes.
        TypeError: This PyTorch has no dtype for a tensor.
    """
    if _is_of_several(group):
        how = (device, tensors, verify, progress, group, report, options, backend)
        return dict(_with_ranks(filename, *how))
    check_backend(backend)
    began = time.monotonic()
    where = _device(device)
    name = held_name(filename)
    if name is not None:
        held = HeldModel.taken(name, {**options, "verify": verify}, private=True)
        return {
            name: _array(held.at(at, nbytes) if nbytes else None, dtype, shape).to(where)
            for name, dtype, shape, at, nbytes in chosen(held, tensors)[1]
        }
    model = open_model(filename)
    patterns, rows = chosen(model, tensors)
    gpu = _driver(where) if any(row[4] for row in rows) else None
    if gpu is not None:
        loaded, nbytes = _on_device(model, patterns, rows, (where, gpu), verify, progress, options)
        if report is not None:
            report(_alone(nbytes, began))
        return loaded
    view = _viewer(rows)
    # PyTorch releases the export and keeps only the object, so it gets an object that is an export
    # itself.
    whole: memoryview | None = None
    if any(row[4] for row in rows):
        with callback(progress) as tell:
            whole = memoryview(model.load(patterns, {**options, "verify": verify}, tell))
    else:
        check_empty(filename, options, verify)
    loaded = {row[0]: view(whole, 0, row) for row in rows}
    if where.type != "cpu":
        loaded = {name: tensor.to(where) for name, tensor in loaded.items()}
    if report is not None:
        report(_alone(whole.nbytes if whole else 0, began))
    return loaded


def _on_device(
    model: _dmafile.Model,
    patterns: list[str] | None,
    rows: list[Placed],
    there: tuple[Any, _device_loads.How],
    verify: str | None,
    progress: Callback | bool | None,
    options: Options,
) -> tuple[dict[str, _Tensor], int]:
    """The tensors as views of one block on a GPU, and how many bytes were loaded."""
    dtypes = {name: _dtype(name) for name in {row[1] for row in rows}}
    layout = _device_loads.Layout(rows, lambda name: int(dtypes[name].itemsize))
    where, how = there
    block = _allocated(layout.nbytes, where)
    memory = _dmafile.DeviceMemory.borrowed(how[0], block.data_ptr(), layout.nbytes)
    said = _device_loads.load(model, patterns, layout, memory, how, verify, progress, options)
    views = {}
    for name, dtype, shape, _, nbytes in rows:
        at = layout.offsets.get(name, 0)
        views[name] = block[at : at + nbytes].view(dtypes[dtype]).view(shape)
    return views, int(said["bytes"])


def _allocated(nbytes: int, where: Any) -> _Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=where)


def _driver(where: Any) -> _device_loads.How | None:
    """How to load to a GPU: its name in the driver, and PyTorch's current stream there. Work
    that is queued on that stream may still use memory that PyTorch's allocator has just returned.
    None for any other device, and if the driver cannot be used."""
    if where.type != "cuda":
        return None
    index = torch.cuda.current_device() if where.index is None else where.index
    name = "hip" if torch.version.hip else "cuda"
    how = f"{name}:{index}", torch.cuda.current_stream(where).cuda_stream, None
    return how if _device_loads.is_usable(how) else None


def _views(load: Callable[[], _dmafile.Buffer] | None, rows: list[Placed]) -> dict[str, _Tensor]:
    """The loaded bytes as tensors; `load` is None if there are none."""
    view = _viewer(rows)
    whole = None if load is None else memoryview(load())
    return {row[0]: view(whole, 0, row) for row in rows}


def load(data: HasBytes) -> dict[str, _Tensor]:
    """Returns the tensors of a file in memory, on the CPU, each with separate memory.

    Args:
        data: The bytes of a safetensors file: `bytes`, or any object with the buffer protocol.

    Raises:
        SafetensorError: It is not a valid file (EBADMSG).
        TypeError: This PyTorch has no dtype for a tensor.
    """
    view, rows = described(data, viewed=True)
    return {
        name: _array(bytearray(view[at : at + nbytes]) if nbytes else None, dtype, shape)
        for name, dtype, shape, at, nbytes in rows
    }


def stream(
    path: ModelPath,
    *,
    device: Any = "cpu",
    tensors: Tensors = None,
    budget: int = 1 << 30,
    verify: str | None = None,
    progress: Callback | bool | None = None,
    group: Any = None,
    report: Report | None = None,
    **options: Unpack[Options],
) -> Generator[tuple[str, _Tensor], None, None]:
    """Yields the tensors of a model one after another, each as soon as its bytes have been read,
    while later ones are being read.

    >>> for name, tensor in dmafile.torch.stream("model/", tensors=parameters.__contains__):
    ...     parameters[name].copy_(tensor)

    On the CPU the tensors are writable views of private buffers, each of at most 64 MiB or with one
    tensor. A buffer is freed with the last tensor in it, so keeping all tensors keeps all memory.
    On a GPU they are views of such blocks of its memory, loaded as by `load_file`; for any other
    `device` each tensor is copied there. These blocks come from the CUDA stream that is current at
    this call; each tensor may be used on the stream that is current when it is requested.

    Leaving the loop early, or `close()`, cancels what is being read and frees its memory.

    Args:
        path, tensors: As in `dmafile.numpy.load_file`.
        device: The device for the tensors.
        budget: Maximum number of bytes, 1 or more, that have been or are being read and are not
            consumed: a part of the file counts until the tensor after its last one is requested. A
            larger tensor is read alone.
        verify: As in `dmafile.load`. The digest of a file is known only at its end: if it differs,
            the error is raised *after the last tensor* (EBADMSG), and says that tensors have
            already been returned. Selected tensors cannot be verified.
        progress: As in `dmafile.load`, called while waiting for the next tensor.
        group, report: As in `load_file`. With a `group` the load starts when the first tensor is
            requested, and tensors are returned when all bytes are in the memory of the node:
            `budget` does not limit it, and a wrong digest is raised before the first tensor.
        options: As in `dmafile.numpy.load_file`.

    Returns:
        A generator of names and tensors, in the order of their bytes in the files.

    Raises:
        Error: As `dmafile.numpy.load_file`: errors in arguments and headers immediately, all others
            during the iteration.
    """
    if _is_of_several(group):
        return _with_ranks(path, device, tensors, verify, progress, group, report, options)
    where = _device(device)
    how = _driver(where)
    if how is not None:
        current = torch.cuda.current_stream(where)

        def allocate(nbytes: int) -> tuple[_Tensor, int]:
            # Copies wait for this stream, whatever the current one is by then.
            with torch.cuda.stream(current):
                block = _allocated(nbytes, where)
            return block, block.data_ptr()

        rows, blocks = _device_loads.stream(
            open_model(path), tensors, allocate, how, budget, verify, progress, options
        )
        return _each_on_device(rows, blocks, where, current, report)
    rows, batches = _batches(open_model(path), tensors, budget, verify, progress, options)
    return _each(_viewer(rows), batches, where, report)


def _each(
    view: _View, batches: Generator[Batch, None, None], where: Any, report: Report | None
) -> Generator[tuple[str, _Tensor], None, None]:
    began, nbytes = time.monotonic(), 0
    with closing(batches):
        for buffer, start, rows in batches:
            whole = None if buffer is None else memoryview(buffer)
            nbytes += whole.nbytes if whole else 0
            for row in rows:
                yield row[0], view(whole, start, row).to(where)
            # Must not stay referenced while waiting for the next one.
            del buffer, whole
    if report is not None:
        report(_alone(nbytes, began))


def _each_on_device(
    rows: list[Placed],
    blocks: Generator[tuple[_Tensor, int, list[Placed]], None, None],
    where: Any,
    current: Any,
    report: Report | None,
) -> Generator[tuple[str, _Tensor], None, None]:
    dtypes = {name: _dtype(name) for name in {row[1] for row in rows}}
    began, total = time.monotonic(), 0
    with closing(blocks):
        for block, start, placed in blocks:
            for name, dtype, shape, at, nbytes in placed:
                if not nbytes:
                    yield name, torch.empty(shape, dtype=dtypes[dtype], device=where)
                    continue
                user = torch.cuda.current_stream(where)
                if user != current:
                    # PyTorch may not reuse the block before the work there has ended.
                    block.record_stream(user)
                part = block[at - start : at - start + nbytes]
                if (at - start) % dtypes[dtype].itemsize:
                    # Elements must be aligned.
                    part = part.clone()
                total += nbytes
                yield name, part.view(dtypes[dtype]).view(shape)
                del part
            # Must not stay referenced while waiting for the next one.
            del block
    if report is not None:
        report(_alone(total, began))


def _with_ranks(
    path: ModelPath,
    device: Any,
    tensors: Tensors,
    verify: str | None,
    progress: Callback | bool | None,
    group: Any,
    report: Report | None,
    options: Options,
    backend: str = "mmap",
) -> Generator[tuple[str, _Tensor], None, None]:
    from ._ranks import Ranks

    with Ranks(group) as ranks:
        check_backend(backend)
        where = _device(device)
        held = ranks.load(path, verify, progress, options)
        views = [
            (name, _array(held.at(at, nbytes) if nbytes else None, dtype, shape))
            for name, dtype, shape, at, nbytes in chosen(held, tensors)[1]
        ]
        said = ranks.finish()
    del held, ranks
    if report is not None:
        report(said)
    for name, tensor in views:
        yield name, tensor.to(where)


def _is_of_several(group: Any) -> bool:
    # -1 in a rank that is not in it.
    return group is not None and dist.get_world_size(group) != 1


def _alone(nbytes: int, began: float) -> dict[str, Any]:
    """The report of a process that loads alone."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    seconds = time.monotonic() - began
    own = {"rank": rank, "disk": nbytes, "peers": 0, "seconds": seconds}
    return {"nodes": [[rank]], "ranks": [own]}


def _viewer(rows: list[Placed]) -> _View:
    """Returns a function that makes a tensor from memory, the offset of its first byte, and a row.
    Raises a TypeError if this PyTorch has no dtype for one of them."""
    dtypes = {name: _dtype(name) for name in {row[1] for row in rows}}
    sizes = {name: dtype.itemsize for name, dtype in dtypes.items()}
    frombuffer = torch.frombuffer

    def view(whole: memoryview | None, start: int, row: Placed) -> _Tensor:
        _, name, shape, at, nbytes = row
        dtype = dtypes[name]
        if not nbytes:
            return torch.empty(shape, dtype=dtype, device="cpu")
        count = nbytes // sizes[name]
        return frombuffer(whole, dtype=dtype, count=count, offset=at - start).view(shape)

    return view


def _device(device: Any) -> Any:
    """Checks the device before anything is read."""
    try:
        where = torch.device("cpu" if device is None else device)
        torch.empty(0, device=where)
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
        why = str(error).partition("\n")[0]
        text = f"device: {device!r} cannot be used: {why}; use cpu, or a PyTorch built for it"
        raise make("device", None, text) from error
    return where


def _put(tensor: _Tensor, device: Any) -> _Tensor:
    return tensor.to(device)


def _getdtype(dtype_str: str) -> Any:
    """PyTorch's type for one of the format; raises a KeyError if this version has none."""
    return _TYPES[dtype_str]


def _dtype(name: str) -> Any:
    dtype = _TYPES.get(name)
    if dtype is None:
        raise TypeError(f"this PyTorch has no dtype for {name} tensors")
    return dtype


def _array(
    buffer: _dmafile.Buffer | bytearray | memoryview | None, dtype: str, shape: tuple[int, ...]
) -> _Tensor:
    """The whole of a buffer as one tensor; None for a tensor without elements."""
    if buffer is None:
        return torch.empty(shape, dtype=_dtype(dtype), device="cpu")
    return torch.frombuffer(memoryview(buffer), dtype=_dtype(dtype)).view(shape)


def _check(dtype: str) -> None:
    """Raises an error if no tensor type matches a dtype."""
    _dtype(dtype)


def save_file(
    tensors: Mapping[str, _Tensor],
    filename: Path,
    metadata: Mapping[str, str] | None = None,
    **options: Unpack[SaveOptions],
) -> dict[str, Any]:
    """Saves tensors as a safetensors file; returns the report.

    The disk reads a tensor of 128 KiB or more from its own memory if its address and its offset in
    the file are equally aligned. Other tensors are copied through a small buffer, block by block.

    The bytes are those that `safetensors.torch.save_file` writes, with two exceptions: several
    metadata entries keep their order, and conjugated and negated views are written with their
    actual elements instead of those in memory. These tensors are copied first, and so are tensors
    on other devices. The file is replaced completely or not at all, and is on the disk when this
    returns.

    Args:
        tensors: The tensors by name: dense, contiguous, and without shared memory, as in
            safetensors.
        filename: The file.
        metadata: Strings by name, for the header.
        options: As in `dmafile.save`: `method`, `io`, `block`, `queue_depth`, `verify`, `sync`,
            `progress`.

    Raises:
        ValueError: A value is not a tensor, or a tensor is sparse or not contiguous.
        RuntimeError: Tensors share memory.
        TypeError: A name or a metadata value is not a string; or the format does not support the
            type of a tensor (then also a SafetensorError).
        SafetensorError: The header would be above 100 MB, which no reader accepts (also a
            ValueError); or the save failed, as in `dmafile.save`.
    """
    kept, rows = _rows(tensors)
    try:
        return write(rows, filename, metadata, options)
    finally:
        del kept


def save(tensors: Mapping[str, _Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Returns what `save_file` writes, as bytes."""
    kept, rows = _rows(tensors)
    try:
        return b"".join(parts(rows, metadata))
    finally:
        del kept


def _rows(tensors: Mapping[str, _Tensor]) -> tuple[list[_Tensor], list[Row]]:
    """Objects that keep the memory of the tensors alive, and what to save of them."""
    if not isinstance(tensors, Mapping):
        raise ValueError(f"tensors: it is a {type(tensors).__name__}, not a dictionary of tensors")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name}: it is a {type(tensor).__name__}, not a tensor")
        if tensor.layout != torch.strided:
            raise ValueError(f"{name}: it is sparse; save its .to_dense()")
    if shared := [sorted(names) for names in _find_shared_tensors(tensors) if len(names) > 1]:
        raise RuntimeError(
            f"tensors share memory: {', '.join(map(' with '.join, shared))}; save one of them, "
            "or .clone() the others, or use save_model"
        )
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: it is not contiguous; save its .contiguous()")
    kept, rows = [], []
    for name, tensor in tensors.items():
        here = tensor.detach().to("cpu").resolve_conj().resolve_neg()
        kept.append(here)
        dtype = str(here.dtype).removeprefix("torch.")
        data = at_address(here.data_ptr(), here.numel() * here.element_size())
        rows.append((name, name_of(dtype), shape_of(dtype, here.shape), data))
    return kept, rows


def save_model(
    model: Any,
    filename: Path,
    metadata: Mapping[str, str] | None = None,
    force_contiguous: bool = True,
    **options: Unpack[SaveOptions],
) -> dict[str, Any]:
    """Saves the tensors of a module, and only one of those that share memory; returns the report.

    As in safetensors, the metadata maps the names of the others to the name of the saved one.
    `load_model` reads such a file.

    Args:
        model: A `torch.nn.Module`.
        filename: The file.
        metadata: Strings by name, for the header. The dictionary is not changed.
        force_contiguous: Whether tensors that are not contiguous are copied first.
        options: As in `save_file`.

    Raises:
        RuntimeError: Tensors are views of memory that none of them covers.
        ValueError: A tensor is sparse, or not contiguous without `force_contiguous`.
        Error: As `save_file`.
    """
    tensors = model.state_dict()
    texts = dict(metadata or {})
    for kept, others in _remove_duplicate_names(tensors).items():
        for name in others:
            texts.setdefault(name, kept)
            del tensors[name]
    if force_contiguous:
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        return save_file(tensors, filename, texts or metadata, **options)
    except ValueError as error:
        if force_contiguous or isinstance(error, Error):
            raise
        raise ValueError(f"{error}, or use save_model(..., force_contiguous=True)") from None


def load_model(
    model: Any,
    filename: ModelPath,
    strict: bool = True,
    device: Any = "cpu",
    *,
    backend: str = "mmap",
    **options: Unpack[Options],
) -> tuple[set[str], list[str]]:
    """Loads a file into the tensors of a module, some of which may share memory.

    Args:
        model: A `torch.nn.Module`.
        filename: A file, or a model, as in `load_file`.
        strict: Whether a tensor that only the file or only the module has is an error.
        device, backend, options: As in `load_file`.

    Returns:
        The names that only the module has, and those that only the file has.

    Raises:
        RuntimeError: With `strict`, the names differ; tensors in both have been loaded. Or the
            shape of a tensor differs.
        Error: As `load_file`.
    """
    tensors = load_file(filename, device, backend=backend, **options)
    shared = _remove_duplicate_names(model.state_dict(), preferred_names=tensors)
    report = model.load_state_dict(tensors, strict=False)
    missing, unexpected = set(report.missing_keys), list(report.unexpected_keys)
    for names in shared.values():
        # Already loaded under the name that was kept.
        unexpected += [name for name in names if name not in missing]
        missing.difference_update(names)
    if strict and (missing or unexpected):
        kinds = (("Missing", missing), ("Unexpected", unexpected))
        told = [
            f"{kind} key(s) in state_dict: " + ", ".join(f'"{name}"' for name in sorted(names))
            for kind, names in kinds
            if names
        ]
        # PyTorch's own message, which programs look for.
        text = f"Error(s) in loading state_dict for {type(model).__name__}: {'; '.join(told)}"
        raise RuntimeError(text)
    return missing, unexpected
