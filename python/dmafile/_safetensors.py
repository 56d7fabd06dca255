"""Writing the safetensors format."""

import ctypes
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypedDict, Unpack

from . import _dmafile
from ._errors import Error, as_safetensors, make
from ._save import HasBytes, Path, SaveOptions, bytes_of
from ._save import save as _save
from ._stream import Placed

# Bits per element. The order is that of the bytes in a file: by type, then by name.
_BITS = {
    "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F32": 32, "U32": 32, "I32": 32, "BF16": 16,
    "F16": 16, "U16": 16, "I16": 16, "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8, "F8_E8M0": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "I8": 8, "U8": 8, "F4": 4, "BOOL": 8,
}  # fmt: skip
_RANK = {name: rank for rank, name in enumerate(_BITS)}

NAMES = {
    "bool": "BOOL",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
}
"""The format's names of the types of NumPy, ml_dtypes and PyTorch."""
_PACKED = "float4_e2m1fn_x2"
"""PyTorch's type for a byte that contains two elements of the format."""
_LARGEST_HEADER = 100_000_000
"""The size in bytes of the largest header that this package and safetensors read."""


class Tensor(TypedDict):
    """A tensor for `serialize`: its type (`float32`, or `F32`), shape and bytes."""

    dtype: str
    shape: Iterable[int]
    data: HasBytes


class HasAddress(Protocol):
    """The same, by address: a `TensorSpec` of this package or of safetensors."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Iterable[int]: ...
    @property
    def data_ptr(self) -> int: ...
    @property
    def data_len(self) -> int: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorSpec:
    """A tensor for `serialize` and `serialize_file`, in memory that the caller keeps alive until
    they return.

    Args:
        dtype: The type of its elements: `float32`, `bfloat16`, ..., or the format's name.
        shape: The sizes of its dimensions; for `float4_e2m1fn_x2` in bytes of two elements each.
        data_ptr: The address of its first byte.
        data_len: Its size in bytes.

    Raises:
        SafetensorError: The format does not support `dtype` (also a TypeError).
    """

    dtype: str
    """The format's name of the type: `F32`."""
    shape: Sequence[int]
    """The sizes of its dimensions, as a list."""
    data_ptr: int
    data_len: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", list(shape_of(self.dtype, self.shape)))
        object.__setattr__(self, "dtype", name_of(self.dtype))


Tensors: TypeAlias = Mapping[str, Tensor | HasAddress]
Row: TypeAlias = tuple[str, str, tuple[int, ...], memoryview]
"""Name, type as the format spells it, shape, bytes."""


def at_address(address: int, nbytes: int) -> memoryview:
    """Memory at an address; the caller keeps it alive."""
    if not nbytes:
        return memoryview(b"")
    view = ctypes.pythonapi.PyMemoryView_FromMemory
    view.restype = ctypes.py_object
    view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
    read_only = 0x100
    made: memoryview = view(address, nbytes, read_only)
    return made


def name_of(dtype: str) -> str:
    """The format's name of a type; raises an error if it has none."""
    name = NAMES.get(dtype, dtype)
    if name not in _BITS:
        raise make("dtype", None, f"safetensors files have no type for {dtype}")
    return name


def shape_of(dtype: str, shape: Iterable[int]) -> tuple[int, ...]:
    """The format's shape for a tensor of a PyTorch type."""
    shape = tuple(shape)
    return (*shape[:-1], 2 * shape[-1]) if dtype == _PACKED and shape else shape


def parts(rows: Iterable[Row], metadata: Mapping[str, str] | None) -> list[memoryview]:
    """The parts of a file: its header, and the bytes of each tensor in place, in order.

    Metadata is written in its own order.
    """
    header: dict[str, object] = {}
    if metadata is not None:
        for key, value in metadata.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise TypeError(f"metadata: {key!r} and its value must be strings")
        header["__metadata__"] = dict(metadata)
    rows = list(rows)
    for name, *_ in rows:
        if not isinstance(name, str):
            raise TypeError(f"the name of a tensor must be a string: {name!r}")
    at = 0
    datas = []
    for name, dtype, shape, data in sorted(rows, key=lambda one: (_RANK[one[1]], one[0])):
        if name == "__metadata__":
            raise ValueError(f"{name}: no tensor can have the name of the metadata")
        if name in header:
            raise ValueError(f"{name}: two tensors have this name")
        bits, nbytes = _BITS[dtype] * math.prod(shape), data.nbytes
        if bits != 8 * nbytes:
            wrong = f"{name}: {nbytes} bytes are not a {dtype} of shape {list(shape)}"
            raise make("size", None, wrong)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, at + nbytes)}
        datas.append(data)
        at += nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LARGEST_HEADER:
        wrong = f"the header would have {len(text)} bytes, and no reader accepts more than 100 MB"
        raise make("size", None, f"cannot save: {wrong}; shorten names or metadata")
    head = len(text).to_bytes(8, "little") + text
    try:
        # What is saved must be readable, so the reader decides.
        _dmafile.table(head, len(head) + at, False)
    except Error as error:
        why = str(error).removesuffix(f"; {error.remedy}")
        raise make("size", None, f"cannot save: no reader would load this: {why}") from None
    return [memoryview(head), *datas]


def write(
    rows: Iterable[Row], filename: Path, metadata: Mapping[str, str] | None, options: SaveOptions
) -> dict[str, Any]:
    """Saves a file with these tensors."""
    try:
        return _save(parts(rows, metadata), filename, **options)
    except Error as error:
        raise as_safetensors(error) from None


def _row(name: str, tensor: Tensor | HasAddress) -> Row:
    spec: Any = tensor
    try:
        if isinstance(tensor, Mapping):
            dtype, shape, data = spec["dtype"], spec["shape"], bytes_of(spec["data"])
        else:
            dtype, shape = spec.dtype, spec.shape
            data = at_address(spec.data_ptr, spec.data_len)
    except (KeyError, AttributeError) as error:
        text = f"{name}: its description lacks {error}; give dtype, shape and data, or a TensorSpec"
        raise TypeError(text) from None
    return name, name_of(dtype), shape_of(dtype, shape), data


def serialize(tensor_dict: Tensors, metadata: Mapping[str, str] | None = None) -> bytes:
    """Returns what `serialize_file` writes, as bytes."""
    return b"".join(parts([_row(name, one) for name, one in tensor_dict.items()], metadata))


def serialize_file(
    tensor_dict: Tensors,
    filename: Path,
    metadata: Mapping[str, str] | None = None,
    **options: Unpack[SaveOptions],
) -> dict[str, Any]:
    """Saves tensors that are given as bytes as a safetensors file; returns the report.

    The disk reads a tensor of 128 KiB or more from its own memory if its address and its offset in
    the file are equally aligned. Other tensors are copied through a small buffer, block by block.

    The bytes are those that `safetensors.serialize_file` writes, except that several metadata
    entries keep their order. The file is replaced completely or not at all, and is on the disk when
    this returns.

    Args:
        tensor_dict: By name, a `TensorSpec` of this package or of safetensors; or a dictionary of
            `dtype` (`float32`, `bfloat16`, `float8_e4m3fn` and similar, or the format's name:
            `F32`), `shape`, and `data`: an object with the buffer protocol, C-contiguous,
            little-endian.
        filename: The file.
        metadata: Strings by name, for the header.
        options: As in `dmafile.save`: `method`, `io`, `block`, `queue_depth`, `verify`, `sync`,
            `progress`.

    Raises:
        TypeError: A name or a metadata value is not a string, a description is incomplete, or the
            format does not support a `dtype` (then also a SafetensorError).
        SafetensorError: The number of bytes of a tensor does not match its type and shape, or no
            reader would load the file: its header is above 100 MB, a shape is negative (also a
            ValueError); or the save failed, as in `dmafile.save`.
    """
    rows = [_row(name, one) for name, one in tensor_dict.items()]
    return write(rows, filename, metadata, options)


def described(data: HasBytes, *, viewed: bool) -> tuple[memoryview, list[Placed]]:
    """The bytes of a file in memory, and its tensors."""
    view = bytes_of(data)
    length = int.from_bytes(view[:8], "little")
    head = bytes(view[: 8 + min(length, _LARGEST_HEADER)])
    return view, _dmafile.table(head, view.nbytes, viewed)


def deserialize(bytes: HasBytes) -> list[tuple[str, dict[str, Any]]]:
    """Returns the tensors of a safetensors file in memory: by name, `dtype`, `shape` and `data`, a
    separate bytearray.

    Raises a `SafetensorError` (EBADMSG) for an invalid file.
    """
    view, rows = described(bytes, viewed=False)
    return [
        (name, {"shape": list(shape), "dtype": dtype, "data": bytearray(view[at : at + nbytes])})
        for name, dtype, shape, at, nbytes in rows
    ]
