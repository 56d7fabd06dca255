"""Tensors in GPU memory, with a double of the driver and without PyTorch."""

import ctypes
import json
import math
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
from double import NOTHING, RING, Double, the_double

from conftest import HERE, SLOWLY, Run, eventually, file_sha256, open_files, sha256, write

cuda: Any = pytest.importorskip("dmafile.cuda")


@pytest.fixture(scope="module", params=[False, True], ids=["cuda", "hip"])
def driver(request: pytest.FixtureRequest) -> Double:
    return the_double(hip=request.param)


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


@pytest.mark.parametrize("device", [0, 1, ":1"])
@pytest.mark.parametrize("chosen", [None, ["large.*"], ["small.7", "half", "large.3"]])
def test_tensors_equal_the_written_ones(
    double: Double, model: Path, device: Any, chosen: Any
) -> None:
    want = safetensors.numpy.load_file(model)
    number = int(str(device)[-1])
    # A number is that of a device of CUDA.
    if device == ":1" or double.api == "hip":
        device = f"{double.api}:{number}"
    got = cuda.load(model, device, tensors=chosen, ring=RING)
    names = {name for name, array in want.items() if array.size}
    if chosen is None:
        assert got.keys() == names
    for name, tensor in got.items():
        assert tensor.shape == want[name].shape
        assert back(tensor) == want[name].tobytes(), name
        # Aligned to the size of an element.
        assert tensor.address % want[name].itemsize == 0
        assert tensor.device == f"{double.api}:{number}"


def test_a_digest_is_that_of_the_file(double: Double, model: Path) -> None:
    cuda.load(model, double.api, ring=RING, verify=f"sha256={file_sha256(model)}")
    with pytest.raises(dmafile.Error, match="EBADMSG"):
        cuda.load(model, double.api, ring=RING, verify="sha256=" + "0" * 64)


def test_progress_is_reported_and_its_exception_ends_the_load(double: Double, model: Path) -> None:
    told: list[tuple[int, int]] = []
    cuda.load(model, double.api, ring=RING, progress=lambda *now: told.append(now))
    assert told[-1] == (model.stat().st_size,) * 2

    def broken(done: int, total: int) -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        cuda.load(model, double.api, ring=RING, progress=broken)


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
                cuda.load(path, double.api, ring=RING, **SLOWLY)
    finally:
        timer.join()
        path.unlink()


FORK = f"""
import os, sys, warnings, dmafile, dmafile.cuda
warnings.simplefilter("ignore")
sys.path.append({str(HERE)!r})
from double import NOTHING, RING, the_double

double = the_double(hip=sys.argv[2] == "hip")
double.reset()
child = None

def fork(done, total):
    global child
    if child is None:
        child = os.fork()

try:
    slowly = {{"method": "read", "io": "direct", "block": 4096}}
    tensors = dmafile.cuda.load(sys.argv[1], sys.argv[2], ring=RING, progress=fork, **slowly)
except RuntimeError as error:
    assert child == 0 and "forked" in str(error), error
    try:
        dmafile.cuda.load(sys.argv[1], sys.argv[2], ring=RING)
    except dmafile.Error as error:
        sys.exit("ENODEV" not in str(error))
assert child, "it went on in the child"
_, status = os.waitpid(child, 0)
for name, tensor in tensors.items():
    print(name, tensor._memory.copy_back(tensor._at, tensor.nbytes).hex())
del tensors, tensor
sys.exit(double.left() != NOTHING or os.waitstatus_to_exitcode(status))
"""

FORK_PINNED = f"""
import os, sys, warnings, dmafile
warnings.simplefilter("ignore")
sys.path.insert(0, {str(HERE)!r})
from conftest import SLOWLY, sha256
from double import NOTHING, the_double

double = the_double(hip=sys.argv[2] == "hip")
double.reset()
pinned, child = False, None

def fork(done, total):
    global pinned, child
    # Not in the call that pins: the double holds its lock then.
    if pinned and child is None:
        child = os.fork()
    pinned = pinned or child is None and double.left().registered == 1

try:
    buffer = dmafile.load(sys.argv[1], to=f"{{sys.argv[2]}}-host", progress=fork, **SLOWLY)
except RuntimeError as error:
    assert child == 0 and "forked" in str(error), error
    try:
        dmafile.load(sys.argv[1], to=f"{{sys.argv[2]}}-host")
    except dmafile.Error as error:
        sys.exit("ENODEV" not in str(error))
assert child, "it went on in the child, or ended before it was pinned"
_, status = os.waitpid(child, 0)
print(sha256(memoryview(buffer)))
buffer.close()
sys.exit(double.left() != NOTHING or os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize("api", ["cuda", "hip"])
def test_a_child_that_is_forked_during_a_load_into_pinned_memory_cannot_continue_it(
    slow: Path, python: Run, api: str
) -> None:
    done = python(FORK_PINNED, slow, api)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{file_sha256(slow)}\n"


def test_ctrl_c_ends_a_load_into_pinned_memory_without_leaks(double: Double, slow: Path) -> None:
    def memfds() -> int:
        return Path("/proc/self/maps").read_text().count("/memfd:")

    def interrupt() -> None:
        # The memory is pinned while most of the file has not been read yet.
        eventually(lambda: double.left().registered == 1)
        os.kill(os.getpid(), signal.SIGINT)

    before = open_files(), memfds()
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            dmafile.load(slow, to=f"{double.api}-host", **SLOWLY).close()
    thread.join()
    assert double.left() == NOTHING
    assert (open_files(), memfds()) == before


KILLED = f"""
import os, signal, sys, dmafile
sys.path.insert(0, {str(HERE)!r})
from conftest import SLOWLY
from double import the_double

double = the_double(hip=sys.argv[2] == "hip")
double.reset()

def kill(done, total):
    if double.left().registered == 1:
        os.kill(os.getpid(), signal.SIGKILL)

while True:
    dmafile.load(sys.argv[1], to=f"{{sys.argv[2]}}-host", progress=kill, **SLOWLY).close()
"""


def test_a_process_that_is_killed_during_a_load_leaves_nothing(double: Double, slow: Path) -> None:
    before = {one.name for one in slow.parent.iterdir()}
    with dmafile.load(slow, to=f"{double.api}-host") as buffer:
        command = [sys.executable, "-c", KILLED, str(slow), double.api]
        done = subprocess.run(command, timeout=60)
        assert done.returncode == -signal.SIGKILL
        # The pins of this process are independent of the others'.
        assert double.left().registered == 1
        assert sha256(memoryview(buffer)) == file_sha256(slow)
    assert {one.name for one in slow.parent.iterdir()} == before
    assert double.left() == NOTHING


@pytest.mark.parametrize("api", ["cuda", "hip"])
def test_a_child_that_is_forked_during_a_load_cannot_continue_it(
    model: Path, python: Run, api: str
) -> None:
    done = python(FORK, model, api)
    assert (done.returncode, done.stderr) == (0, "")
    want = safetensors.numpy.load_file(model)
    got = dict(line.split() for line in done.stdout.splitlines())
    assert got == {name: array.tobytes().hex() for name, array in want.items() if array.size}


class DLTensor(ctypes.Structure):
    """As in dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", DLTensor),
    )


def described(capsule: Any, versioned: bool) -> dict[str, Any]:
    """What a capsule says about its tensor."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = pointer(capsule, b"dltensor_versioned" if versioned else b"dltensor")
    if versioned:
        managed = DLManagedTensorVersioned.from_address(address)
        assert (tuple(managed.version), managed.flags) == ((1, 0), 0)
    one = managed.dl_tensor if versioned else DLTensor.from_address(address)
    return {
        "address": one.data + one.byte_offset,
        "device": tuple(one.device),
        "dtype": (one.code, one.bits, one.lanes),
        "shape": tuple(one.shape[: one.ndim]),
        "strides": tuple(one.strides[: one.ndim]),
    }


# The codes of dlpack.h: 0 int, 1 uint, 2 float, 4 bfloat, 5 complex, 6 bool, 10 to 14 float8.
DLPACK = {
    "BOOL": (6, 8), "U8": (1, 8), "I8": (0, 8), "U16": (1, 16), "I16": (0, 16), "U32": (1, 32),
    "I32": (0, 32), "U64": (1, 64), "I64": (0, 64), "F16": (2, 16), "BF16": (4, 16),
    "F32": (2, 32), "F64": (2, 64), "C64": (5, 64), "F8_E4M3": (10, 8), "F8_E4M3FNUZ": (11, 8),
    "F8_E5M2": (12, 8), "F8_E5M2FNUZ": (13, 8), "F8_E8M0": (14, 8),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cuda:1", "hip:1"])
def test_dlpack_exports_describe_the_tensor(double: Double, folder: Path, device: str) -> None:
    if device == "hip:1":
        the_double(hip=True).reset()
    path, header, at = folder / "dlpack.safetensors", {}, 0
    shapes: list[tuple[int, ...]] = [(3, 5, 2), (4,), ()]
    strides = {(3, 5, 2): (10, 2, 1), (4,): (1,), (): (), (2, 3): (3, 1), (3,): (1,)}
    for dtype, (_, bits) in DLPACK.items():
        for shape in shapes:
            nbytes = math.prod(shape) * bits // 8
            offsets = [at, at + nbytes]
            header[f"{dtype}{shape}"] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            at += nbytes
    header["F4"] = {"dtype": "F4", "shape": (2, 6), "data_offsets": [at, at + 6]}
    header["F6"] = {"dtype": "F6_E2M3", "shape": (4,), "data_offsets": [at + 6, at + 9]}
    at += 9
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + os.urandom(at))
    tensors = cuda.load(path, device, ring=RING)
    assert tensors.keys() == header.keys()
    # DLPack has no such types: as packed bytes.
    assert [(tensors[name].dtype, tensors[name].shape) for name in ("F4", "F6")] == [
        ("F4", (2, 3)),
        ("U8", (3,)),
    ]
    for tensor in tensors.values():
        assert tensor.__dlpack_device__() == (2 if device == "cuda:1" else 10, 1)
        for versioned in (False, True):
            capsule = tensor.__dlpack__(max_version=(1, 0) if versioned else None)
            assert described(capsule, versioned) == {
                "address": tensor.address,
                "device": tensor.__dlpack_device__(),
                "dtype": (*DLPACK.get(tensor.dtype, (1, 8)), 1),
                "shape": tensor.shape,
                # In elements, as of a contiguous array.
                "strides": strides[tensor.shape],
            }
    del tensors, tensor, capsule
    assert the_double(hip=device == "hip:1").left() == NOTHING


def test_dlpack_exports_have_the_device(double: Double, model: Path) -> None:
    tensors = cuda.load(model, f"{double.api}:1", ring=RING)
    half = tensors["half"]
    assert half.__dlpack_device__() == (2 if double.api == "cuda" else 10, 1)
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
    double.fail("cuMemAlloc_v2" if double.api == "cuda" else "hipMalloc", 1, 2)
    with pytest.raises(dmafile.Error, match="ENOMEM") as error:
        cuda.load(model, double.api, ring=RING)
    assert "\n" not in str(error.value)
    with pytest.raises(dmafile.Error, match="ENODEV"):
        cuda.load(model, f"{double.api}:9", ring=RING)
    with pytest.raises(dmafile.UsageError, match="neither cuda:N nor hip:N"):
        cuda.load(model, "gpu", ring=RING)
    with pytest.raises(dmafile.UsageError, match="out of range"):
        cuda.load(model, ring=(1 << 20, 1))
    # Which of the two depends on the machine.
    why = (
        r"'cufile' is refused: (the module nvidia_fs is not loaded, without which cuFile copies as "
        r"the ring does|this version loads into a device through its ring alone)"
    )
    with pytest.raises(dmafile.UsageError, match=why):
        cuda.load(model, method="cufile")


def test_buffers_are_pinned(double: Double, file: Path) -> None:
    with dmafile.load(file, to=f"{double.api}-host") as buffer:
        assert (buffer.kind, buffer.pinned) == ("memfd", f"{double.api}:0")
        assert sha256(memoryview(buffer)) == file_sha256(file)
        counts, _ = double.counts()
        assert counts[7] == -(-file.stat().st_size // 4096) * 4096
    assert double.left() == NOTHING
    buffer = dmafile.load(file)
    view = memoryview(buffer)
    buffer.pin(f"{double.api}:1")
    assert buffer.pinned == f"{double.api}:1"
    with pytest.raises(dmafile.Error, match="EBUSY"):
        buffer.pin(double.api)
    buffer.unpin()
    assert buffer.pinned is None
    buffer.pin(double.api)
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

the_double(hip=sys.argv[3] == "hip").reset()
with dmafile.hold(sys.argv[1], name="x", at=sys.argv[2], writable=True):
    held = dmafile.take("x", at=sys.argv[2])
    held.files[0].buffer.pin(sys.argv[3])
    print("pinned", flush=True)
    signal.pause()
"""
    command = [sys.executable, "-c", program, str(file), str(at), double.api]
    paths = {"PYTHONPATH": str(Path(__file__).parent)}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | paths)
    try:
        assert child.stdout and child.stdout.readline() == "pinned\n"
        buffer = dmafile.take("x", at=at).files[0].buffer
        buffer.pin(double.api)
    finally:
        child.kill()
        child.wait()
    assert buffer.pinned == f"{double.api}:0" and double.left().registered == 1
    assert sha256(memoryview(buffer)) == file_sha256(file)
    # Its own pins are independent: they can be made again.
    buffer.unpin()
    buffer.pin(f"{double.api}:1")
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
