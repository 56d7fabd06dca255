"""Writes the files of this folder: model files with one invalid detail that a reader may trust.

python3 attacks/make.py [FOLDER]
"""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

U64 = 1 << 64

# Types of values, and of tensors, in GGUF.
U32, BOOL, TEXT, LIST, ANY = 4, 7, 8, 9, 0
Q4_0, I8 = 2, 24


def safetensors(header: object, data: int = 0, length: int | None = None, after: str = "") -> bytes:
    """A file with this header (JSON text, bytes, or a value for JSON) and zeros for data."""
    if not isinstance(header, str | bytes):
        header = json.dumps(header, separators=(",", ":"))
    raw = header if isinstance(header, bytes) else header.encode()
    raw += after.encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(data)


def tensor(
    start: int, end: int, shape: list[int] | None = None, dtype: str = "U8"
) -> dict[str, object]:
    """The entry of a tensor in a safetensors header."""
    return {
        "dtype": dtype,
        "shape": [end - start] if shape is None else shape,
        "data_offsets": [start, end],
    }


def of_safetensors() -> Iterator[tuple[str, bytes]]:
    """The attacks with safetensors files."""
    one = json.dumps(tensor(0, 4))

    yield "length-0", safetensors("", 16)
    yield "length-huge", safetensors({"a": tensor(0, 4)}, 4, length=1 << 63)
    yield "length-wraps", safetensors({"a": tensor(0, 4)}, 4, length=U64 - 8)
    yield "length-past-the-end", safetensors({"a": tensor(0, 4)}, 4, length=4096)

    yield "not-utf8", safetensors(b'{"a\xff":' + one.encode() + b"}", 4)
    yield "deep", safetensors('{"a":' + "[" * 1500 + "]" * 1500 + "}")
    yield "deep-in-a-tensor", safetensors('{"a":' * 500 + "{}" + "}" * 500)
    yield "after-the-json", safetensors({"a": tensor(0, 4)}, 4, after="\0\0")

    yield "name-twice", safetensors(f'{{"a":{one},"a":{json.dumps(tensor(4, 8))}}}', 8)
    yield "name-twice-escaped", safetensors(f'{{"a":{one},"\\u0061":{one}}}', 4)
    yield "field-twice", safetensors('{"a":' + one.replace("{", '{"dtype":"F32",') + "}", 4)
    yield "metadata-twice", safetensors('{"__metadata__":{"k":"1","k":"2"}}')
    yield "metadata-not-text", safetensors({"__metadata__": {"k": 1}})
    yield "message", safetensors({"a": tensor(0, 4, dtype="\x1b[2J\r\n" * 9)}, 4)

    yield "overlap", safetensors({"a": tensor(0, 4), "b": tensor(2, 6)}, 6)
    yield "gap", safetensors({"a": tensor(0, 4), "b": tensor(6, 8)}, 8)
    yield "offsets-reversed", safetensors({"a": tensor(4, 0, [4])}, 4)
    yield "offsets-wrap", safetensors({"a": tensor(U64 - 4, U64 - 1, [3])}, 4)
    yield "data-missing", safetensors({"a": tensor(0, 4)}, 3)
    yield "data-left-over", safetensors({"a": tensor(0, 4)}, 5)

    yield "dtype-unknown", safetensors({"a": tensor(0, 4, dtype="F99")}, 4)
    yield "shape-overflows", safetensors({"a": tensor(0, 0, [1 << 32, 1 << 32])})
    yield "shape-overflows-behind-0", safetensors({"a": tensor(0, 0, [0, 1 << 40, 1 << 40])})
    yield "shape-and-bytes-differ", safetensors({"a": tensor(0, 4, [4], "F32")}, 4)
    yield "half-a-byte", safetensors({"a": tensor(0, 2, [3], "F4")}, 2)


def text(content: str | bytes) -> bytes:
    """A text of GGUF."""
    raw = content if isinstance(content, bytes) else content.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    """A key and its value."""
    return text(key) + struct.pack("<I", kind) + value


def items(kind: int, count: int, values: bytes = b"") -> bytes:
    """The value of a list."""
    return struct.pack("<IQ", kind, count) + values


def described(
    name: str | bytes = "a",
    dims: tuple[int, ...] = (32,),
    kind: int = I8,
    offset: int = 0,
    count: int | None = None,
) -> bytes:
    """The entry of a tensor in a GGUF header, with the fastest varying dimension first."""
    layout = f"<I{len(dims)}QIQ"
    count = len(dims) if count is None else count
    return text(name) + struct.pack(layout, count, *dims, kind, offset)


def gguf(
    *tensors: bytes,
    pairs: tuple[bytes, ...] = (),
    counts: tuple[int, int] | None = None,
    version: int = 3,
    data: int = 64,
) -> bytes:
    """A file with these tensors and zeros for data."""
    counts = (len(tensors), len(pairs)) if counts is None else counts
    header = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(pairs + tensors)
    return header + bytes(-len(header) % 32 + data)


def alignment(value: int) -> tuple[bytes]:
    """The pair that sets the alignment."""
    return (pair("general.alignment", U32, struct.pack("<I", value)),)


def of_gguf() -> Iterator[tuple[str, bytes]]:
    """The attacks with GGUF files."""
    whole = gguf(described(), pairs=(pair("key", TEXT, text("value")),))
    nested = items(ANY, 0)
    for _ in range(100):
        nested = items(LIST, 1, nested)

    yield "version-1", gguf(described(), version=1)
    yield "big-endian", b"GGUF" + struct.pack(">IQQ", 3, 0, 0)
    yield "count-of-tensors", gguf(described(), counts=(1 << 62, 0))
    yield "ends-in-its-counts", whole[:20]
    yield "ends-in-its-metadata", whole[:50]
    yield "ends-in-its-tensors", whole[:64]
    yield "ends-in-its-data", whole[:-33]

    yield "key-length-wraps", gguf(pairs=(struct.pack("<Q", U64 - 1) + b"key",))
    yield "key-twice", gguf(pairs=(pair("key", BOOL, b"\0"), pair("key", BOOL, b"\1")))
    yield "key-not-utf8", gguf(pairs=(pair(b"key\xff", BOOL, b"\0"),))
    yield "value-unknown", gguf(pairs=(pair("key", 13, bytes(8)),))
    yield "list-deep", gguf(pairs=(pair("key", LIST, nested),))
    yield "list-count", gguf(pairs=(pair("key", LIST, items(U32, 1 << 62)),))
    yield "alignment-0", gguf(described(), pairs=alignment(0))
    yield "alignment-24", gguf(described(), pairs=alignment(24))
    yield "alignment-huge", gguf(described(), pairs=alignment(1 << 31))

    yield "name-twice", gguf(described(), described(offset=32))
    yield "name-not-utf8", gguf(described(b"a\xff"))
    yield "dims-many", gguf(described(count=(1 << 32) - 1))
    yield "dims-overflow", gguf(described(dims=(1 << 32, 1 << 32)))
    yield "half-a-block", gguf(described(dims=(48, 2), kind=Q4_0))
    yield "type-unknown", gguf(described(kind=4))
    yield "offset-unaligned", gguf(described(offset=8))
    yield "offset-past-the-end", gguf(described(offset=1 << 40))
    yield "offset-wraps", gguf(described(offset=U64 - 32))
    yield "overlap", gguf(described(dims=(64,)), described("b", offset=32))


def main(folder: Path) -> None:
    """Writes every file into `folder`."""
    for suffix, tricks in (("safetensors", of_safetensors()), ("gguf", of_gguf())):
        for name, content in tricks:
            (folder / f"{name}.{suffix}").write_bytes(content)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent)
