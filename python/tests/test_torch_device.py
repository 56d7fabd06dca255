"""Tensors for PyTorch on a GPU. The driver is a double, and tensors of the CPU stand for those of
the GPU, so that PyTorch's own work on a GPU is not tested; or both are real."""

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dmafile
import pytest
from double import LAST, NOTHING, REAL, Double, only_the_double, stand_in, the_double

from conftest import file_sha256

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
safetensors: Any = pytest.importorskip("safetensors.torch")

DRIVER = dmafile.torch._driver
GPU = f"cuda:{LAST}"


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    path = folder / "gpu.safetensors"
    generator = torch.Generator().manual_seed(3)
    tensors = {f"large.{n}": torch.randn((300 + n, 777), generator=generator) for n in range(5)}
    # After an odd number of bytes, the next tensor is not aligned in the file.
    tensors |= {f"odd.{n}": torch.full((n,), n, dtype=torch.uint8) for n in range(1, 20, 2)}
    tensors |= {f"half.{n}": torch.full((n,), n, dtype=torch.bfloat16) for n in range(1, 20)}
    tensors |= {"empty": torch.zeros((0, 3)), "scalar": torch.tensor(2.5)}
    safetensors.save_file(tensors, path, {"format": "pt"})
    return path


def same(left: Any, right: Any) -> bool:
    return bool(left.dtype == right.dtype and torch.equal(left.cpu(), right))


@pytest.mark.parametrize("chosen", [None, ["large.*"], ["odd.3", "half.*", "empty"]])
def test_tensors_equal_those_of_safetensors(gpu: Double, model: Path, chosen: Any) -> None:
    want = safetensors.load_file(model)
    reports: list[Any] = []
    got = dmafile.torch.load_file(model, GPU, tensors=chosen, report=reports.append)
    if chosen is None:
        assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert same(tensor, want[name]), name
        assert tensor.data_ptr() % tensor.dtype.itemsize == 0
    # All tensors are views of one block, except for empty ones.
    assert len({tensor.untyped_storage().data_ptr() for tensor in got.values()}) <= 2
    assert reports[0]["ranks"][0]["disk"] > 0


@pytest.mark.parametrize("budget", [1, 100_000, 3 << 20, 1 << 30])
@pytest.mark.parametrize("chosen", [None, ["large.*", "half.3"]])
def test_a_stream_returns_each_tensor_once(
    gpu: Double, model: Path, budget: int, chosen: Any
) -> None:
    want = safetensors.load_file(model)
    names = []
    for name, tensor in dmafile.torch.stream(model, device=GPU, tensors=chosen, budget=budget):
        assert same(tensor, want[name]), name
        names.append(name)
    assert len(names) == len(set(names))
    if chosen is None:
        assert set(names) == want.keys()


def test_closing_a_stream_early_leaks_nothing(gpu: Double, model: Path) -> None:
    for number in range(4):
        tensors = dmafile.torch.stream(model, device=GPU, budget=500_000)
        for _ in range(number):
            next(tensors)
        tensors.close()
        assert gpu.left() == NOTHING
    tensors = dmafile.torch.stream(model, device=GPU, budget=500_000)
    next(tensors)
    del tensors
    gc.collect()


def test_digests_are_compared(gpu: Double, model: Path) -> None:
    digest = f"sha256={file_sha256(model)}"
    dmafile.torch.load_file(model, GPU, verify=digest)
    assert len(list(dmafile.torch.stream(model, device=GPU, verify=digest))) == 36
    wrong = "sha256=" + "0" * 64
    with pytest.raises(dmafile.Error, match="EBADMSG"):
        dmafile.torch.load_file(model, GPU, verify=wrong)
    count = 0
    with pytest.raises(dmafile.Error, match="already returned contain wrong data") as error:
        for _ in dmafile.torch.stream(model, device=GPU, verify=wrong):
            count += 1
    assert count == 36
    assert error.value.errno == 74


def test_a_driver_error_is_raised(gpu: Double, model: Path) -> None:
    for call in ["cuMemHostRegister_v2", "cuMemcpyHtoDAsync_v2", "cuEventRecord"]:
        gpu.fail(call, 2 if call == "cuEventRecord" else 1, 999)
        with pytest.raises(dmafile.Error, match=f"{call} failed: "):
            dmafile.torch.load_file(model, GPU)
        gpu.reset()
        gpu.fail(call, 1, 999)
        with pytest.raises(dmafile.Error, match=f"{call} failed: "):
            list(dmafile.torch.stream(model, device=GPU))
        gpu.reset()


def test_an_exception_in_the_loop_leaks_nothing(gpu: Double, model: Path) -> None:
    with pytest.raises(ValueError, match="mine"):
        for _ in dmafile.torch.stream(model, device=GPU, budget=300_000):
            raise ValueError("mine")
    gc.collect()


def test_blocks_come_from_the_stream_that_is_current_at_the_call(
    gpu: Double, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Any] = []
    recorded: list[tuple[int, Any]] = []

    def allocated(nbytes: int, where: Any) -> Any:
        used.append(torch.cuda.current_stream(where))
        return torch.empty(nbytes, dtype=torch.uint8, device=where)

    def record(block: Any, stream: Any) -> None:
        recorded.append((block.untyped_storage().data_ptr(), stream))

    monkeypatch.setattr(dmafile.torch, "_allocated", allocated)
    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    first = torch.cuda.current_stream(torch.device(GPU))
    other = torch.cuda.Stream(GPU) if REAL else SimpleNamespace(cuda_stream=1)
    list(dmafile.torch.stream(model, device=GPU, budget=500_000))
    assert len(used) > 3 and not recorded
    tensors = dmafile.torch.stream(model, device=GPU, tensors=["large.*"], budget=500_000)
    with torch.cuda.stream(other):
        for _, tensor in tensors:
            # Its memory is not reused before what this stream does with it has ended.
            assert recorded[-1] == (tensor.untyped_storage().data_ptr(), other)
    assert all(stream == first for stream in used)


def test_a_device_that_the_driver_lacks_is_left_to_pytorch(
    gpu: Double, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if REAL:
        only_the_double("lacks a device that PyTorch has")
    want = safetensors.load_file(model)
    copied: list[Any] = []

    def to(tensor: Any, where: Any) -> Any:
        copied.append(where)
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(dmafile.torch, "_driver", DRIVER)
    for load in (
        dmafile.torch.load_file,
        lambda *how: dict(dmafile.torch.stream(how[0], device=how[1])),
    ):
        with pytest.warns(
            RuntimeWarning, match=r"cuda:9: .*\(ENODEV\).*copied from the memory of the host"
        ) as warned:
            got = load(model, "cuda:9")
        assert all(same(tensor, want[name]) for name, tensor in got.items())
        assert copied == [torch.device("cuda:9")] * len(want)
        # It names the line of the caller.
        assert [one.filename for one in warned] == [__file__]
        copied.clear()


def test_pytorch_for_amd_loads_by_its_driver(
    monkeypatch: pytest.MonkeyPatch, gpu: Double, model: Path
) -> None:
    if REAL:
        only_the_double("is there for both vendors")
    hip = the_double(hip=True)
    hip.reset()
    stand_in(hip, monkeypatch)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    want = safetensors.load_file(model)
    for got in (
        dmafile.torch.load_file(model, GPU),
        dict(dmafile.torch.stream(model, device=GPU)),
    ):
        assert got.keys() == want.keys()
        assert all(same(tensor, want[name]) for name, tensor in got.items())
    copies = 6
    assert hip.counts()[0][copies] and not gpu.counts()[0][copies]
    assert hip.left() == NOTHING
