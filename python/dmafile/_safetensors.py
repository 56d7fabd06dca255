"""The safetensors format, as it is written."""

import ctypes
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeAlias, TypedDict, Unpack

from ._save import HasBytes, Path, SaveOptions, bytes_of
from ._save import save as _save

# The bits of an element, in the order of the bytes in a file: by type, then by name.
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
"""What the format calls the types of NumPy, ml_dtypes and PyTorch."""


class Tensor(TypedDict):
    """A tensor for `serialize`: its type (`float32`, or `F32`), its shape, its bytes."""

    dtype: str
    shape: Iterable[int]
    data: HasBytes


class TensorSpec(Protocol):
    """The same as an address: what the safetensors package takes from version 0.8 on."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Iterable[int]: ...
    @property
    def data_ptr(self) -> int: ...
    @property
    def data_len(self) -> int: ...


Tensors: TypeAlias = Mapping[str, Tensor | TensorSpec]
Row: TypeAlias = tuple[str, str, tuple[int, ...], memoryview]
"""Name, type as the format spells it, shape, bytes."""


def at_address(address: int, nbytes: int) -> memoryview:
    """Memory at an address, which the caller keeps alive."""
    if not nbytes:
        return memoryview(b"")
    view = ctypes.pythonapi.PyMemoryView_FromMemory
    view.restype = ctypes.py_object
    view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
    read_only = 0x100
    made: memoryview = view(address, nbytes, read_only)
    return made


def name_of(dtype: str) -> str:
    """What the format calls a type; a TypeError where it has none."""
    name = NAMES.get(dtype, dtype)
    if name not in _BITS:
        raise TypeError(f"safetensors files have no type for {dtype}")
    return name


def parts(rows: Iterable[Row], metadata: Mapping[str, str] | None) -> list[memoryview]:
    """A file: its header, and the bytes of each tensor where they are, in their order.

    Metadata is written in the order that it has.
    """
    header: dict[str, object] = {}
    if metadata is not None:
        for key, value in metadata.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise TypeError(f"metadata: {key!r} and its value have to be strings")
        header["__metadata__"] = dict(metadata)
    rows = list(rows)
    for name, *_ in rows:
        if not isinstance(name, str):
            raise TypeError(f"the name of a tensor has to be a string: {name!r}")
    at = 0
    datas = []
    for name, dtype, shape, data in sorted(rows, key=lambda one: (_RANK[one[1]], one[0])):
        if name == "__metadata__":
            raise ValueError(f"{name}: no tensor can have the name of the metadata")
        bits, nbytes = _BITS[dtype] * math.prod(shape), data.nbytes
        if bits != 8 * nbytes:
            raise ValueError(f"{name}: {nbytes} bytes are no {dtype} of shape {list(shape)}")
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, at + nbytes)}
        datas.append(data)
        at += nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [memoryview(len(text).to_bytes(8, "little") + text), *datas]


def _row(name: str, tensor: Tensor | TensorSpec) -> Row:
    spec: Any = tensor
    if isinstance(tensor, Mapping):
        dtype, shape, data = spec["dtype"], tuple(spec["shape"]), bytes_of(spec["data"])
    else:
        dtype, shape = spec.dtype, tuple(spec.shape)
        data = at_address(spec.data_ptr, spec.data_len)
    if dtype == "float4_e2m1fn_x2" and shape:
        # Two elements are a byte, and one of PyTorch's.
        shape = (*shape[:-1], 2 * shape[-1])
    return name, name_of(dtype), shape, data


def serialize(tensors: Tensors, metadata: Mapping[str, str] | None = None) -> bytes:
    """What `serialize_file` writes, as bytes."""
    rows = [_row(name, tensor) for name, tensor in tensors.items()]
    return b"".join(parts(rows, metadata))


def serialize_file(
    tensors: Tensors,
    filename: Path,
    metadata: Mapping[str, str] | None = None,
    **options: Unpack[SaveOptions],
) -> dict[str, Any]:
    """Saves what is already bytes as a safetensors file, straight out of its memory; returns the
    report.

    The bytes are those that `safetensors.serialize_file` writes, except that metadata of several
    entries stays in its order. The file is replaced whole or not at all, and on the disk when this
    returns.

    Args:
        tensors: By name, a dictionary of `dtype` (`float32`, `bfloat16`, `float8_e4m3fn` and the
            like, or what the format calls it: `F32`), `shape`, and `data`: an object with the
            buffer protocol, C-contiguous, little-endian. Also a `safetensors.TensorSpec`, whose
            memory has to stay until this returns.
        filename: The file.
        metadata: Texts by name, for the header.
        options: As in `dmafile.save`: `method`, `io`, `block`, `queue_depth`, `verify`, `sync`,
            `progress`.

    Raises:
        TypeError: The format does not know a `dtype`, or a text is none.
        ValueError: The bytes of a tensor are not as many as its type and shape say.
        Error: As `dmafile.save`.
    """
    rows = [_row(name, tensor) for name, tensor in tensors.items()]
    return _save(parts(rows, metadata), filename, **options)
