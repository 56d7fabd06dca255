"""Tensors of safetensors and GGUF files as NumPy arrays."""

from collections.abc import Callable, Mapping
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from . import _dmafile
from ._errors import make
from ._hold import HeldModel, held_name
from ._load import ModelPath, Options, check_empty, open_model
from ._progress import Callback, callback
from ._safetensors import (
    Row,
    TensorSpec,
    described,
    deserialize,
    name_of,
    parts,
    serialize,
    serialize_file,
    write,
)
from ._save import HasBytes, Path, SaveOptions
from ._stream import Placed, Tensors, chosen
from ._tensors import check_backend, safe_open

__all__ = [
    "TensorSpec",
    "deserialize",
    "load",
    "load_file",
    "safe_open",
    "save",
    "save_file",
    "serialize",
    "serialize_file",
]


_ML_DTYPES = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}


class _Dtypes(dict[str, "np.dtype[Any]"]):
    """NumPy's dtypes by their names in files; those of ml_dtypes are imported on first use."""

    def __missing__(self, name: str) -> "np.dtype[Any]":
        if name not in _ML_DTYPES:
            raise TypeError(f"no NumPy dtype is known for {name} tensors")
        try:
            import ml_dtypes
        except ImportError as error:
            raise ImportError(
                f"{name} arrays need the package ml_dtypes; run: pip install ml_dtypes",
                name="ml_dtypes",
            ) from error
        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, _ML_DTYPES[name]))
        self[name] = dtype
        return dtype


_DTYPES = _Dtypes(
    BOOL=np.dtype("?"),
    U8=np.dtype("u1"),
    I8=np.dtype("i1"),
    U16=np.dtype("<u2"),
    I16=np.dtype("<i2"),
    U32=np.dtype("<u4"),
    I32=np.dtype("<i4"),
    U64=np.dtype("<u8"),
    I64=np.dtype("<i8"),
    F16=np.dtype("<f2"),
    F32=np.dtype("<f4"),
    F64=np.dtype("<f8"),
    C64=np.dtype("<c8"),
    # A byte with two elements.
    F4=np.dtype("u1"),
)


def load_file(
    filename: ModelPath,
    *,
    backend: str = "mmap",
    tensors: Tensors = None,
    verify: str | None = None,
    progress: Callback | bool | None = None,
    **options: Unpack[Options],
) -> dict[str, NDArray[Any]]:
    """Loads the tensors of a model as arrays: writable views of one private buffer, in huge pages
    if available.

    The arrays keep the buffer alive: it is freed with the last of them.

    Types that are stored in blocks of several elements (GGUF's quantised ones) or are narrower than
    a byte become arrays of uint8: the bytes of each row. BF16 and the 8-bit floating point types
    need the package `ml_dtypes`.

    Args:
        filename: A safetensors or GGUF file, a `*.safetensors.index.json`, the first file of a
            split GGUF, or a folder with one of these; or a list of all files of one model.
            `held:NAME` is the model that another process holds under that name, `held:NAME@SOCKET`
            at the socket with that path: read-only views of its memory, which exists as long as any
            array does.
        backend: `mmap` or `pread`, as in safetensors. Accepted, but has no effect.
        tensors: Names, globs (`*.layers.0.*`) or `re:` and a regular expression; or a function that
            returns for each name whether to load it. Only selected tensors are read and take
            memory; all tensors if None.
        verify, progress: As in `dmafile.load`. A digest covers a whole file, so selected tensors
            cannot be verified; nor can a model whose tensors are all empty (ENODATA).
        options: As in `dmafile.load`: `pages`, `method`, `io`, `allocation`, `chunk`, `block`,
            `queue_depth`, `check_memory`.

    Returns:
        The arrays by name, in the order of their bytes in the file.

    Raises:
        SafetensorError: The files are not a valid model (EBADMSG).
        Error: As `dmafile.load`; ENOENT (FileNotFoundError) for a missing file, and for a pattern
            that matches no tensor.
        ImportError: A dtype needs `ml_dtypes`, which is missing; nothing has been loaded then.
    """
    check_backend(backend)
    name = held_name(filename)
    if name is not None:
        held = HeldModel.taken(name, {**options, "verify": verify}, private=False)
        return {
            name: _array(held.at(at, nbytes) if nbytes else None, dtype, shape)
            for name, dtype, shape, at, nbytes in chosen(held, tensors)[1]
        }
    model = open_model(filename)
    patterns, table = chosen(model, tensors)
    if not any(row[4] for row in table):
        check_empty(filename, options, verify)
        return _views(None, table)

    def load() -> _dmafile.Buffer:
        with callback(progress) as tell:
            return model.load(patterns, {**options, "verify": verify}, tell)

    return _views(load, table)


def _views(
    load: Callable[[], _dmafile.Buffer] | None, table: list[Placed]
) -> dict[str, NDArray[Any]]:
    """The loaded bytes as arrays; `load` is None if there are none."""
    dtypes = {name: _DTYPES[name] for name in {row[1] for row in table}}
    array, empty = np.ndarray, np.empty
    if load is None:
        return {name: empty(shape, dtypes[dtype]) for name, dtype, shape, _, _ in table}
    # One export for all: a view of a view is cheaper, and keeps the export alive, too.
    whole = np.frombuffer(memoryview(load()), np.uint8)
    return {
        name: array(shape, dtypes[dtype], whole, at) if nbytes else empty(shape, dtypes[dtype])
        for name, dtype, shape, at, nbytes in table
    }


def load(data: HasBytes) -> dict[str, NDArray[Any]]:
    """Returns the tensors of a file in memory as arrays, each with separate memory.

    Args:
        data: The bytes of a safetensors file: `bytes`, or any object with the buffer protocol.

    Raises:
        SafetensorError: It is not a valid file (EBADMSG).
        ImportError: A dtype needs `ml_dtypes`, which is missing.
    """
    view, rows = described(data, viewed=True)
    return {
        name: _array(bytearray(view[at : at + nbytes]) if nbytes else None, dtype, shape)
        for name, dtype, shape, at, nbytes in rows
    }


def _array(
    buffer: _dmafile.Buffer | bytearray | memoryview | None, dtype: str, shape: tuple[int, ...]
) -> NDArray[Any]:
    """The whole of a buffer as one array; None for an array without elements."""
    if buffer is None:
        return np.empty(shape, _DTYPES[dtype])
    return np.frombuffer(memoryview(buffer), _DTYPES[dtype]).reshape(shape)


def _check(dtype: str) -> None:
    """Raises an error if no array type matches a dtype."""
    _ = _DTYPES[dtype]


def _device(device: object) -> None:
    """NumPy arrays can only be in CPU memory."""
    if device not in (None, "cpu"):
        raise make("request", None, f"device: NumPy arrays cannot be on {device!r}; use cpu")


def _put(array: Any, device: None) -> NDArray[Any]:
    """Indexing an array may return a scalar, which becomes an array here."""
    return np.asarray(array)


def save_file(
    tensor_dict: Mapping[str, NDArray[Any]],
    filename: Path,
    metadata: Mapping[str, str] | None = None,
    **options: Unpack[SaveOptions],
) -> dict[str, Any]:
    """Saves arrays as a safetensors file; returns the report.

    The disk reads an array of 128 KiB or more from its own memory if its address and its offset in
    the file are equally aligned. Other arrays are copied through a small buffer, block by block.

    The bytes are those that `safetensors.numpy.save_file` writes, with two exceptions: several
    metadata entries keep their order, and the elements of arrays that are not C-contiguous are
    written in C order instead of their order in memory. These arrays, and big-endian ones, are
    copied first. The file is replaced completely or not at all, and is on the disk when this
    returns.

    Args:
        tensor_dict: The arrays by name.
        filename: The file.
        metadata: Strings by name, for the header.
        options: As in `dmafile.save`: `method`, `io`, `block`, `queue_depth`, `verify`, `sync`,
            `progress`.

    Raises:
        TypeError: A name or a metadata value is not a string; or the format does not support the
            type of an array (then also a SafetensorError).
        SafetensorError: The header would be above 100 MB, which no reader accepts (also a
            ValueError); or the save failed, as in `dmafile.save`.
    """
    return write(_rows(tensor_dict), filename, metadata, options)


def save(
    tensor_dict: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Returns what `save_file` writes, as bytes."""
    return b"".join(parts(_rows(tensor_dict), metadata))


def _rows(tensor_dict: Mapping[str, NDArray[Any]]) -> list[Row]:
    """What to save of the arrays."""
    return [_row(name, array) for name, array in tensor_dict.items()]


def _row(name: str, array: NDArray[Any]) -> Row:
    dtype = name_of(array.dtype.name)
    shape = array.shape
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    # The types of ml_dtypes do not support the buffer protocol; uint8 does.
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return name, dtype, shape, flat.data if flat.nbytes else memoryview(b"")
