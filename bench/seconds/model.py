"""Writes a safetensors file with the tensors of an 8B llama-style model, scaled down to 2 GiB.

It has all 291 tensors with their usual names, in BF16. Their sizes are 3/8 of Llama 3 8B's, the
vocabulary is 1/4. The file is written without the library, which needs all bytes in memory at once.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from bench.seconds.files import make_file

BF16_BYTES = 2


@dataclass(frozen=True)
class Shape:
    """The sizes that determine every tensor's shape."""

    layers: int = 32
    hidden: int = 1536
    key_value: int = 384  # narrower than hidden: four query heads share one key and value head
    intermediate: int = 5376
    vocabulary: int = 32064


def tensors(shape: Shape) -> Iterator[tuple[str, list[int]]]:
    """Every tensor's name and shape."""
    hidden, key_value, intermediate = shape.hidden, shape.key_value, shape.intermediate
    yield "model.embed_tokens.weight", [shape.vocabulary, hidden]
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", [hidden]
        yield f"{prefix}.self_attn.q_proj.weight", [hidden, hidden]
        yield f"{prefix}.self_attn.k_proj.weight", [key_value, hidden]
        yield f"{prefix}.self_attn.v_proj.weight", [key_value, hidden]
        yield f"{prefix}.self_attn.o_proj.weight", [hidden, hidden]
        yield f"{prefix}.post_attention_layernorm.weight", [hidden]
        yield f"{prefix}.mlp.gate_proj.weight", [intermediate, hidden]
        yield f"{prefix}.mlp.up_proj.weight", [intermediate, hidden]
        yield f"{prefix}.mlp.down_proj.weight", [hidden, intermediate]
    yield "model.norm.weight", [hidden]
    yield "lm_head.weight", [shape.vocabulary, hidden]


def header(shape: Shape) -> tuple[bytes, int]:
    """The safetensors header of the model, and the number of bytes of data after it."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dimensions in tensors(shape):
        start, end = end, end + prod(dimensions) * BF16_BYTES
        table[name] = {"dtype": "BF16", "shape": dimensions, "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def make_model(path: Path, shape: Shape, seconds: float = math.inf) -> None:
    """Writes the model unless it exists. Raises Slow if it takes longer than SECONDS."""
    make_file(path, *header(shape), seconds)
