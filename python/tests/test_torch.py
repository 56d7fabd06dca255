"""Tensors for PyTorch. Too large for every checkout: installed by hand, these tests run; else they
are skipped, aloud."""

import gc
import os
import tempfile
from pathlib import Path
from typing import Any

import dmafile
import numpy as np
import pytest

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    import safetensors.torch

    path = folder / "torch.safetensors"
    names = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "bool"]
    here = [name for name in names if hasattr(torch, name)]
    tensors = {name: torch.ones((300, 5)).to(getattr(torch, name)) for name in here}
    tensors["large"] = torch.randn((3000, 128))
    tensors["scalar"], tensors["empty"] = torch.tensor(2.5), torch.zeros((0, 3))
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    return path


def same(left: Any, right: Any) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())


def test_tensors_are_as_written(model: Path) -> None:
    import safetensors.torch

    ours, theirs = dmafile.torch.load_file(model), safetensors.torch.load_file(model)
    assert ours.keys() == theirs.keys()
    with dmafile.open_tensors(model, framework="torch") as lazy:
        for name, tensor in theirs.items():
            assert same(ours[name], tensor), name
            assert same(lazy.get_tensor(name), tensor), name
        part = lazy.get_slice("large")
        assert same(part[10:20, 3], theirs["large"][10:20, 3])
        assert same(part[20:30:3], theirs["large"][20:30:3])


def test_tensors_are_views_that_keep_the_buffer_alive(model: Path) -> None:
    loaded = dmafile.torch.load_file(model, tensors=["large", "scalar"])
    large = loaded["large"]
    del loaded
    gc.collect()
    want = dmafile.numpy.load_file(model, tensors="large")["large"]
    assert np.array_equal(large.numpy(), want)
    large += 1
    assert np.array_equal(large.numpy(), want + 1)


def test_a_buffer_goes_by_dlpack(model: Path) -> None:
    buffer = dmafile.load(model, to="anon")
    tensor = torch.from_dlpack(buffer)
    assert tensor.dtype == torch.uint8 and tensor.shape == (buffer.nbytes,)
    with pytest.raises(BufferError):
        buffer.close()
    del tensor
    buffer.close()


@pytest.mark.filterwarnings("error")
def test_held_tensors_are_views_that_keep_writes_to_themselves(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="dmafile-") as run:
        monkeypatch.setenv("XDG_RUNTIME_DIR", run)
        name = f"torch-{os.getpid()}"
        with dmafile.hold(model, name=name) as holder:
            held = dmafile.torch.load_file(f"held:{name}")
            wanted = dmafile.torch.load_file(model)
            assert list(held) == list(wanted)
            for key, tensor in held.items():
                assert tensor.dtype == wanted[key].dtype and torch.equal(tensor, wanted[key])
            held["float32"][3, 2] = 7
            other = dmafile.torch.load_file(f"held:{name}")
            assert held["float32"][3, 2] == 7 and other["float32"][3, 2] == 1
            with dmafile.open_tensors(f"held:{name}", framework="torch") as opened:
                opened.get_tensor("int64").zero_()
                assert torch.equal(opened.get_slice("int64")[5:9], torch.zeros((4, 5)))
            assert torch.equal(other["int64"], wanted["int64"])
            assert dmafile.holds(at=holder.at)[0]["takers"] > 0
        held = {key: tensor.sum() for key, tensor in held.items() if key == "float32"}
        gc.collect()
        assert held["float32"] == 300 * 5 + 6
