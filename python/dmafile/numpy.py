"""Tensors of safetensors and GGUF files as NumPy arrays."""

from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from . import _dmafile
from ._hold import HeldModel, held_name
from ._load import ModelPath, Options, check_empty, open_model
from ._progress import Callback, callback
from ._safetensors import Row, name_of, parts, serialize, serialize_file
from ._save import Path, SaveOptions
from ._save import save as _save
from ._stream import Tensors, chosen

__all__ = ["load_file", "save", "save_file", "serialize", "serialize_file"]


_ML_DTYPES = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}


class _Dtypes(dict[str, "np.dtype[Any]"]):
    """NumPy's dtypes by the names in files; those of ml_dtypes once they are asked for."""

    def __missing__(self, name: str) -> "np.dtype[Any]":
        if name not in _ML_DTYPES:
            raise TypeError(f"no NumPy dtype is known for {name} tensors")
        try:
            import ml_dtypes
        except ImportError as error:
            raise ImportError(
                f"{name} arrays need the package ml_dtypes; type: pip install ml_dtypes",
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
)


def load_file(
    path: ModelPath,
    *,
    tensors: Tensors = None,
    verify: str | None = None,
    progress: Callback | bool | None = None,
    **options: Unpack[Options],
) -> dict[str, NDArray[Any]]:
    """Loads the tensors of a model as arrays: writable views of one private buffer, in huge pages
    where they can be had.

    The arrays keep the buffer alive: it is given back when the last of them goes.

    Types that come in blocks of several elements (GGUF's quantised ones) or are narrower than a
    byte are arrays of uint8: the bytes of each row. BF16 and the 8-bit floating point types need
    the package `ml_dtypes`.

    Args:
        path: A safetensors or GGUF file, a `*.safetensors.index.json`, the first file of a split
            GGUF, or a folder with one of these; or a list of files, all of one model. `held:NAME`
            is the model that another process holds under that name: read-only views of its memory,
            which stays as long as an array does.
        tensors: Names, globs (`*.layers.0.*`) or `re:` and a regular expression; or a function that
            says of each name whether it is wanted. Only what is chosen is read and takes memory;
            all tensors if None.
        verify, progress: As in `dmafile.load`. Chosen tensors cannot be verified: a digest is a
            file's. Nor can tensors that are all empty (ENODATA).
        options: As in `dmafile.load`: `pages`, `method`, `io`, `allocation`, `gather`, `block`,
            `queue_depth`, `memory_check`.

    Returns:
        The arrays by name, in the order of their bytes in the file.

    Raises:
        Error: As `dmafile.load`; EBADMSG for files that are no sound model, ENOENT
            (FileNotFoundError) for a pattern that names no tensor.
        ImportError: A dtype needs `ml_dtypes`, which is missing; nothing has been loaded then.
    """
    name = held_name(path)
    if name is not None:
        held = HeldModel.taken(name, {**options, "verify": verify}, private=False)
        return {
            name: _array(held.at(at, nbytes) if nbytes else None, dtype, shape)
            for name, dtype, shape, at, nbytes in chosen(held, tensors)[1]
        }
    model = open_model(path)
    patterns, table = chosen(model, tensors)
    dtypes = {name: _DTYPES[name] for name in {row[1] for row in table}}
    if not any(row[4] for row in table):
        check_empty(path, options, verify)
        return {name: np.empty(shape, dtypes[dtype]) for name, dtype, shape, _, _ in table}
    with callback(progress) as tell:
        buffer = model.load(patterns, {**options, "verify": verify}, tell)
    # One export for all: a view of a view costs less, and keeps it alive as well.
    whole = np.frombuffer(memoryview(buffer), np.uint8)
    array, empty = np.ndarray, np.empty
    return {
        name: array(shape, dtypes[dtype], whole, at) if nbytes else empty(shape, dtypes[dtype])
        for name, dtype, shape, at, nbytes in table
    }


def _array(
    buffer: _dmafile.Buffer | bytearray | memoryview | None, dtype: str, shape: tuple[int, ...]
) -> NDArray[Any]:
    """The whole of a buffer as one array; None for an array without elements."""
    if buffer is None:
        return np.empty(shape, _DTYPES[dtype])
    return np.frombuffer(memoryview(buffer), _DTYPES[dtype]).reshape(shape)


def _check(dtype: str) -> None:
    """Raises where no array can show a dtype."""
    _ = _DTYPES[dtype]


def save_file(
    tensors: Mapping[str, NDArray[Any]],
    filename: Path,
    metadata: Mapping[str, str] | None = None,
    **options: Unpack[SaveOptions],
) -> dict[str, Any]:
    """Saves arrays as a safetensors file, straight out of their memory; returns the report.

    The bytes are those that `safetensors.numpy.save_file` writes, except that metadata of several
    entries stays in its order, and that arrays which are not C-contiguous are written as their
    elements, in C order, and not as they lie in memory: these, and big-endian ones, are copied
    first. The file is replaced whole or not at all, and on the disk when this returns.

    Args:
        tensors: The arrays by name.
        filename: The file.
        metadata: Texts by name, for the header.
        options: As in `dmafile.save`: `method`, `io`, `block`, `queue_depth`, `verify`, `sync`,
            `progress`.

    Raises:
        TypeError: An array has a type that the format does not know.
        Error: As `dmafile.save`.
    """
    return _save(_parts(tensors, metadata), filename, **options)


def save(tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None) -> bytes:
    """What `save_file` writes, as bytes."""
    return b"".join(_parts(tensors, metadata))


def _parts(
    tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None
) -> list[memoryview]:
    """The header, and the bytes of each array where they are."""
    return parts([_row(name, array) for name, array in tensors.items()], metadata)


def _row(name: str, array: NDArray[Any]) -> Row:
    dtype = name_of(array.dtype.name)
    shape = array.shape
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    # The types of ml_dtypes have no buffer protocol: bytes have.
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return name, dtype, shape, flat.data if flat.nbytes else memoryview(b"")
