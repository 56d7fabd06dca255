"""Tensors in GPU memory, with a double of the driver and without PyTorch."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dmafile
import numpy as np
import pytest
import safetensors.numpy
from double import NOTHING, Double, the_double

from conftest import file_sha256, sha256, write

RING = (1 << 18, 4)
cuda: Any = pytest.importorskip("dmafile.cuda")


@pytest.fixture(scope="module")
def driver() -> Double:
    return the_double()


@pytest.fixture
def double(driver: Double) -> Iterator[Double]:
    driver.reset()
    yield driver
    assert driver.left() == NOTHING


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    path = folder / "cuda.safetensors"
    random = np.random.default_rng(5)
    arrays: dict[str, Any] = {f"large.{n}": random.random((300 + n, 777)) for n in range(4)}
    arrays |= {f"small.{n}": random.integers(0, 255, n, dtype=np.uint8) for n in range(1, 40)}
    arrays |= {"half": random.random((7, 9)).astype(np.float16), "empty": np.zeros((0, 3))}
    arrays |= {"scalar": np.array(2.5), "flags": np.array([True, False, True])}
    safetensors.numpy.save_file(arrays, path)
    return path


def back(tensor: Any) -> bytes:
    return bytes(tensor._memory.copy_back(tensor._at, tensor.nbytes))


@pytest.mark.parametrize("device", [0, 1, "cuda:1"])
@pytest.mark.parametrize("chosen", [None, ["large.*"], ["small.7", "half", "large.3"]])
def test_tensors_equal_the_written_ones(
    double: Double, model: Path, device: Any, chosen: Any
) -> None:
    want = safetensors.numpy.load_file(model)
    got = cuda.load(model, device, tensors=chosen, ring=RING)
    names = {name for name, array in want.items() if array.size}
    if chosen is None:
        assert got.keys() == names
    for name, tensor in got.items():
        assert tensor.shape == want[name].shape
        assert back(tensor) == want[name].tobytes(), name
        # Aligned to the size of an element.
        assert tensor.address % want[name].itemsize == 0
        assert tensor.device == f"cuda:{str(device)[-1]}"


def test_a_digest_is_that_of_the_file(double: Double, model: Path) -> None:
    cuda.load(model, ring=RING, verify=f"sha256={file_sha256(model)}")
    with pytest.raises(dmafile.Error, match="EBADMSG"):
        cuda.load(model, ring=RING, verify="sha256=" + "0" * 64)


def test_progress_is_reported_and_its_exception_ends_the_load(double: Double, model: Path) -> None:
    told: list[tuple[int, int]] = []
    cuda.load(model, ring=RING, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (model.stat().st_size,) * 2

    def broken(done: int, total: int) -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        cuda.load(model, ring=RING, progress=broken)


def test_ctrl_c_ends_a_load_without_leaks(double: Double, slow: Path, folder: Path) -> None:
    path = folder / "slow.safetensors"
    header = b'{"t":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}'
    size = slow.stat().st_size
    header = (header % (size, size)).ljust(248)
    write(path, len(header).to_bytes(8, "little") + header + slow.read_bytes())
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        # One page per read takes longer than the timer on any disk.
        with pytest.raises(KeyboardInterrupt):
            for _ in range(1000):
                cuda.load(path, ring=RING, method="read", io="direct", block=4096)
    finally:
        timer.join()
        path.unlink()


def test_dlpack_exports_have_the_device(double: Double, model: Path) -> None:
    tensors = cuda.load(model, 1, ring=RING)
    half = tensors["half"]
    assert half.__dlpack_device__() == (2, 1)
    for version, name in [(None, "dltensor"), ((1, 0), "dltensor_versioned")]:
        capsule = half.__dlpack__(max_version=version)
        assert f'"{name}"' in repr(capsule)
        del capsule
    with pytest.raises(BufferError, match="copied"):
        half.__dlpack__(copy=True)
    with pytest.raises(BufferError):
        half.__dlpack__(dl_device=(1, 0))
    # A capsule keeps the memory alive, like a tensor.
    capsule = half.__dlpack__()
    del tensors, half
    assert double.left().memory == 1
    del capsule


def test_a_driver_error_is_one_message(double: Double, model: Path) -> None:
    double.fail("cuMemAlloc_v2", 1, 2)
    with pytest.raises(dmafile.Error, match="ENOMEM") as error:
        cuda.load(model, ring=RING)
    assert "\n" not in str(error.value)
    with pytest.raises(dmafile.Error, match="ENODEV"):
        cuda.load(model, 9, ring=RING)
    with pytest.raises(dmafile.UsageError, match="neither cuda:N nor hip:N"):
        cuda.load(model, "gpu", ring=RING)
    with pytest.raises(dmafile.UsageError, match="out of range"):
        cuda.load(model, ring=(1 << 20, 1))
    with pytest.raises(dmafile.UsageError, match="cufile' is refused"):
        cuda.load(model, method="cufile")


def test_buffers_are_pinned(double: Double, file: Path) -> None:
    with dmafile.load(file, to="cuda-host") as buffer:
        assert (buffer.kind, buffer.pinned) == ("memfd", "cuda:0")
        assert sha256(memoryview(buffer)) == file_sha256(file)
        counts, _ = double.counts()
        assert counts[7] == -(-file.stat().st_size // 4096) * 4096
    assert double.left() == NOTHING
    buffer = dmafile.load(file)
    view = memoryview(buffer)
    buffer.pin("cuda:1")
    assert buffer.pinned == "cuda:1"
    with pytest.raises(dmafile.Error, match="EBUSY"):
        buffer.pin()
    buffer.unpin()
    assert buffer.pinned is None
    buffer.pin()
    view.release()
    buffer.close()
    assert double.left() == NOTHING


def test_a_killed_process_leaves_the_memory_that_others_pin(
    double: Double, file: Path, tmp_path: Path
) -> None:
    at = tmp_path / "socket"
    program = """
import signal, sys, dmafile
from double import the_double

the_double().reset()
with dmafile.hold(sys.argv[1], name="x", at=sys.argv[2], writable=True):
    held = dmafile.take("x", at=sys.argv[2])
    held.files[0].buffer.pin()
    print("pinned", flush=True)
    signal.pause()
"""
    command = [sys.executable, "-c", program, str(file), str(at)]
    paths = {"PYTHONPATH": str(Path(__file__).parent)}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | paths)
    try:
        assert child.stdout and child.stdout.readline() == "pinned\n"
        buffer = dmafile.take("x", at=at).files[0].buffer
        buffer.pin()
    finally:
        child.kill()
        child.wait()
    assert buffer.pinned == "cuda:0" and double.left().registered == 1
    assert sha256(memoryview(buffer)) == file_sha256(file)
    # Its own pins are independent: they can be made again.
    buffer.unpin()
    buffer.pin("cuda:1")
    assert sha256(memoryview(buffer)) == file_sha256(file)
    buffer.close()


def test_a_missing_driver_is_an_error(python: Any, model: Path) -> None:
    program = """
import sys, dmafile, dmafile.cuda
try:
    dmafile.cuda.load(sys.argv[1])
except dmafile.Error as error:
    print(error)
"""
    done = python(program, model)
    if done.stdout:
        assert done.stdout.startswith("cannot use the device: cuda:0: "), done
        assert "(ENODEV); install the driver" in done.stdout
    else:
        pytest.skip("there is a GPU here")
