"""The safetensors format, as it is written."""

import json
from collections.abc import Iterable, Mapping

# The order of the bytes in a file: by type, the widest first, then by name.
_ORDER = [
    "U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "F8_E5M2FNUZ",
    "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL",
]  # fmt: skip
_RANK = {name: rank for rank, name in enumerate(_ORDER)}


def layout(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]],
    metadata: Mapping[str, str] | None,
) -> tuple[bytes, list[str]]:
    """The header of a file, and the names in the order of their bytes behind it.

    A tensor is its name, its type as the format spells it, its shape, and how many bytes it has.
    Metadata is written in the order that it has.
    """
    header: dict[str, object] = {}
    if metadata is not None:
        for key, value in metadata.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise TypeError(f"metadata: {key!r} and its value have to be strings")
        header["__metadata__"] = dict(metadata)
    at = 0
    names = []
    for name, dtype, shape, nbytes in sorted(tensors, key=lambda one: (_RANK[one[1]], one[0])):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, at + nbytes)}
        names.append(name)
        at += nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, names
