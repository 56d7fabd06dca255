"""Tensors for PyTorch, which is too large for every checkout: without it, these tests are skipped
with a message."""

import gc
import os
import subprocess
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


def test_tensors_equal_those_of_safetensors(model: Path) -> None:
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


def test_torch_imports_a_buffer_by_dlpack(model: Path) -> None:
    buffer = dmafile.load(model, to="anon")
    tensor = torch.from_dlpack(buffer)
    assert tensor.dtype == torch.uint8 and tensor.shape == (buffer.nbytes,)
    with pytest.raises(BufferError):
        buffer.close()
    del tensor
    buffer.close()


@pytest.mark.filterwarnings("error")
def test_writes_to_held_tensors_are_private(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


DTYPES = [
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16",
    "bfloat16", "float32", "float64", "complex64", "float8_e4m3fn", "float8_e4m3fnuz",
    "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip


def some(dtype: str, shape: tuple[int, ...]) -> Any:
    """A tensor with random bits (for a bool, 0 or 1)."""
    if dtype == "bool":
        return torch.randint(0, 2, shape).bool()
    kind = getattr(torch, dtype)
    size = torch.empty(0, dtype=kind).element_size()
    noise = torch.randint(0, 256, (*shape, size), dtype=torch.uint8)
    return noise.view(kind).reshape(shape)


@pytest.mark.parametrize("seed", range(12))
def test_files_equal_those_that_safetensors_writes(folder: Path, seed: int) -> None:
    import safetensors.torch

    random = np.random.default_rng(seed)
    tensors = {}
    for index in range(int(random.integers(0, 24))):
        dtype = DTYPES[int(random.integers(len(DTYPES)))]
        if hasattr(torch, dtype):
            shape = tuple(int(n) for n in random.integers(0, 30, int(random.integers(0, 4))))
            tensors[f"layer.{index}"] = some(dtype, shape)
    if seed % 2:
        large = some("bfloat16", (1000, 513 + seed))
        # Contiguous parts of one storage.
        tensors["first"], tensors["rest"] = large[:300], large[300:]
        tensors["weight"] = torch.nn.Parameter(some("float32", (5, 7)))
        if hasattr(torch, "float4_e2m1fn_x2"):
            packed = some("uint8", (3, 4)).view(torch.float4_e2m1fn_x2)
            tensors["packed"] = packed
    metadata = {"format": "pt"} if tensors and seed % 4 else None
    ours, theirs = folder / "ours", folder / "theirs"
    safetensors.torch.save_file(tensors, theirs, metadata)
    report = dmafile.torch.save_file(tensors, ours, metadata)
    subprocess.run(["cmp", ours, theirs], check=True)
    assert report["bytes"] == theirs.stat().st_size
    assert dmafile.torch.save(tensors, metadata) == theirs.read_bytes()


def test_every_dtype_of_safetensors_is_saved(folder: Path) -> None:
    import safetensors.torch

    here = [dtype for dtype in DTYPES if hasattr(torch, dtype)]
    tensors = {dtype: some(dtype, (3, 5)) for dtype in here}
    tensors |= {f"{dtype}, scalar": some(dtype, ()) for dtype in here}
    tensors |= {f"{dtype}, empty": some(dtype, (0, 4)) for dtype in here}
    ours, theirs = folder / "ours", folder / "theirs"
    safetensors.torch.save_file(tensors, theirs)
    dmafile.torch.save_file(tensors, ours)
    subprocess.run(["cmp", ours, theirs], check=True)


def test_invalid_tensors_are_refused_as_by_safetensors(folder: Path) -> None:
    import safetensors.torch

    base = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    cases: dict[str, Any] = {
        "turned": {"x": base.T},
        "stepped": {"x": base[:, ::2]},
        "the same": {"x": base, "y": base},
        "a part": {"x": base, "y": base[2:3]},
        "overlap": {"x": base[:4], "y": base[3:]},
        "by another type": {"x": base, "y": base.view(torch.int32)},
        "sparse": {"x": base.to_sparse()},
        "a number": {"x": 1},
        "an array": {"x": base.numpy()},
        "a list": [("x", base)],
    }
    to = folder / "kept"
    to.write_bytes(b"old")
    for name, tensors in cases.items():
        with pytest.raises((ValueError, RuntimeError)) as theirs:
            safetensors.torch.save(tensors)
        with pytest.raises((ValueError, RuntimeError)) as ours:
            dmafile.torch.save_file(tensors, to)
        assert type(ours.value) is type(theirs.value), name
        with pytest.raises(theirs.type):
            dmafile.torch.save(tensors)
    with pytest.raises(TypeError, match="no type for complex128"):
        dmafile.torch.save_file({"x": torch.zeros(1, dtype=torch.complex128)}, to)
    with pytest.raises(NotImplementedError):
        dmafile.torch.save_file({"x": torch.zeros(1, device="meta")}, to)
    # These tensors share no bytes.
    dmafile.torch.save({"x": base[:3], "y": base[3:], "none": base[3:3]})
    assert to.read_bytes() == b"old"


def test_lazily_conjugated_tensors_are_saved(folder: Path) -> None:
    import safetensors.torch

    numbers = torch.view_as_complex(torch.randn(7, 2))
    to = folder / "views"
    tensors = {"turned": numbers.conj(), "as they are": numbers.clone()}
    dmafile.torch.save_file(tensors, to)
    loaded = safetensors.torch.load_file(to)
    assert all(same(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_save_does_not_copy_all_tensors_into_memory(folder: Path) -> None:
    tensors = {str(index): torch.ones(4 << 20, dtype=torch.int32) for index in range(4)}
    # Resets the peak (proc(5)).
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    report = dmafile.torch.save_file(tensors, folder / "large")
    assert report["bytes"] > 64 << 20
    # A ring of 8 blocks, and memory of Python and the allocator.
    assert peak() - before < 24 << 20


def peak() -> int:
    """The peak memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
