"""The generated model, read by the safetensors library."""

import json
from math import prod
from pathlib import Path
from typing import Any

import safetensors

from bench.seconds.model import Shape, header, make_model, tensors

TINY = Shape(layers=2, hidden=24, key_value=6, intermediate=84, vocabulary=100)


def test_safetensors_reads_the_generated_model(tmp_path: Path) -> None:
    path = tmp_path / "tiny.safetensors"
    make_model(path, TINY)
    content = path.read_bytes()
    found: dict[str, dict[str, Any]]
    found = dict(safetensors.deserialize(content))  # type: ignore[no-untyped-call]

    assert {name: tensor["shape"] for name, tensor in found.items()} == dict(tensors(TINY))
    assert {tensor["dtype"] for tensor in found.values()} == {"BF16"}
    for tensor in found.values():
        assert len(tensor["data"]) == prod(tensor["shape"]) * 2
    # All numbers are finite: an exponent of ones would be an infinity or a NaN.
    high_bytes = b"".join(tensor["data"][1::2] for tensor in found.values())
    assert all(byte & 0x7F < 0x7F for byte in high_bytes)


def test_names_and_shapes_are_those_of_llama() -> None:
    shapes = dict(tensors(TINY))
    assert len(shapes) == 2 * 9 + 3
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == [100, 24]
    assert shapes["model.norm.weight"] == [24]
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == [24, 24]
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == [6, 24]
    assert shapes["model.layers.1.mlp.gate_proj.weight"] == [84, 24]
    assert shapes["model.layers.1.mlp.down_proj.weight"] == [24, 84]


def test_the_demo_model_is_2_gib_and_starts_aligned() -> None:
    head, data = header(Shape())
    assert 2.0 < data / 2**30 < 2.05
    assert len(head) % 8 == 0
    assert int.from_bytes(head[:8], "little") == len(head) - 8
    assert len(json.loads(head[8:])) == 291 + 1  # and __metadata__
