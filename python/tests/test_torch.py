"""Tensors for PyTorch, which is too large for every checkout: without it, these tests are skipped
with a message."""

import gc
import os
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import dmafile
import pytest

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
np: Any = pytest.importorskip("numpy")
pytest.importorskip("safetensors.torch")


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
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and bool((left.cpu() == right.cpu()).all())
    )


def test_tensors_equal_those_of_safetensors(model: Path, device: str) -> None:
    import safetensors.torch

    ours, theirs = dmafile.torch.load_file(model, device), safetensors.torch.load_file(model)
    assert ours.keys() == theirs.keys()
    with dmafile.open_tensors(model, framework="torch") as lazy:
        for name, tensor in theirs.items():
            assert same(ours[name], tensor), name
            assert same(lazy.get_tensor(name), tensor), name
        part = lazy.get_slice("large")
        assert same(part[10:20, 3], theirs["large"][10:20, 3])
        assert same(part[20:30:3], theirs["large"][20:30:3])


def test_tensors_are_views_that_keep_the_buffer_alive(model: Path, device: str) -> None:
    loaded = dmafile.torch.load_file(model, device, tensors=["large", "scalar"])
    large = loaded["large"]
    del loaded
    gc.collect()
    want = dmafile.numpy.load_file(model, tensors="large")["large"]
    assert np.array_equal(large.cpu().numpy(), want)
    large += 1
    assert np.array_equal(large.cpu().numpy(), want + 1)


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
            assert dmafile.holds(socket=holder.socket)[0]["takers"] > 0
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


def some_of_each(seed: int) -> dict[str, Any]:
    """Tensors of random types and shapes."""
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
    return tensors


def bits(tensor: Any) -> Any:
    """Its bytes, also for types that PyTorch cannot compare."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).cpu()


def read_both_ways(path: Path, device: str) -> list[dict[str, Any]]:
    return [
        dmafile.torch.load_file(path, device),
        dict(dmafile.torch.stream(path, device=device, budget=100_000)),
    ]


@pytest.mark.parametrize("seed", range(12))
def test_files_are_read_as_written(folder: Path, device: str, seed: int) -> None:
    import safetensors.torch

    path, tensors = folder / "random", some_of_each(seed)
    safetensors.torch.save_file(tensors, path)
    for read in read_both_ways(path, device):
        assert read.keys() == tensors.keys()
        for name, tensor in tensors.items():
            got = read[name]
            assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape), name
            assert torch.equal(bits(got), bits(tensor)), name
            assert got.data_ptr() % got.element_size() == 0


def test_gguf_files_are_read_as_written(folder: Path, device: str) -> None:
    path, noise = folder / "torch.gguf", np.random.default_rng(9)
    # Their numbers in GGUF, and their sizes; Q4_0 has blocks of 32 elements in 18 bytes.
    kinds = {"float32": (0, 4), "float16": (1, 2), "bfloat16": (30, 2), "int8": (24, 1)}
    kinds["Q4_0"] = (2, 18)
    header, data, want = b"GGUF" + struct.pack("<IQQ", 3, 2 * len(kinds), 0), b"", {}
    for index, (kind, (code, size)) in enumerate([*kinds.items()] * 2):
        name, rows, columns = f"{index}.{kind}", 3 + index, 1 + 90 * index
        header += struct.pack("<Q", len(name)) + name.encode()
        elements = columns * 32 if kind == "Q4_0" else columns
        header += struct.pack("<IQQIQ", 2, elements, rows, code, len(data))
        raw = noise.bytes(rows * columns * size)
        data += raw + bytes(-len(raw) % 32)
        want[name] = raw
    path.write_bytes(header + bytes(-len(header) % 32) + data)
    for read in read_both_ways(path, device):
        assert list(read) == list(want)
        for name, raw in want.items():
            number, kind = name.split(".")
            assert bits(read[name]).numpy().tobytes() == raw, name
            assert read[name].dtype == getattr(torch, kind, torch.uint8)
            assert read[name].shape[0] == 3 + int(number)


@pytest.mark.parametrize("seed", range(12))
def test_files_equal_those_that_safetensors_writes(folder: Path, seed: int) -> None:
    import safetensors.torch

    tensors = some_of_each(seed)
    metadata = {"format": "pt"} if tensors and seed % 4 else None
    ours, theirs = folder / "ours", folder / "theirs"
    safetensors.torch.save_file(tensors, theirs, metadata)
    report = dmafile.torch.save_file(tensors, ours, metadata)
    subprocess.run(["cmp", ours, theirs], check=True)
    assert report["bytes"] == theirs.stat().st_size
    assert dmafile.torch.save(tensors, metadata) == theirs.read_bytes()


def test_every_dtype_of_safetensors_is_saved_and_read(folder: Path, device: str) -> None:
    import safetensors.torch

    here = [dtype for dtype in DTYPES if hasattr(torch, dtype)]
    tensors = {dtype: some(dtype, (3, 5)) for dtype in here}
    tensors |= {f"{dtype}, scalar": some(dtype, ()) for dtype in here}
    tensors |= {f"{dtype}, empty": some(dtype, (0, 4)) for dtype in here}
    ours, theirs = folder / "ours", folder / "theirs"
    safetensors.torch.save_file(tensors, theirs)
    dmafile.torch.save_file(tensors, ours)
    subprocess.run(["cmp", ours, theirs], check=True)
    for read in read_both_ways(ours, device):
        assert read.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape), name
            assert torch.equal(bits(read[name]), bits(tensor)), name


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
