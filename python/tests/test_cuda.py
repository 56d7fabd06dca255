"""Tensors in GPU memory, without PyTorch; with a double of the driver, or with a real one."""

import ctypes
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import dmafile
import pytest
from double import KINDS, LAST, NOTHING, REAL, RING, Double, the_double

from conftest import (
    HERE,
    SLOWLY,
    Run,
    Tensors,
    eventually,
    file_sha256,
    open_files,
    sha256,
    write,
    write_safetensors,
)

cuda: Any = pytest.importorskip("dmafile.cuda")


@pytest.fixture(scope="module", params=KINDS)
def driver(request: pytest.FixtureRequest) -> Double:
    return the_double(hip=request.param == "hip")


@pytest.fixture
def double(driver: Double) -> Iterator[Double]:
    driver.reset()
    yield driver
    assert driver.left() == NOTHING


# The codes of dlpack.h: 0 int, 1 uint, 2 float, 4 bfloat, 5 complex, 6 bool, 10 to 14 float8.
DLPACK = {
    "BOOL": (6, 8), "U8": (1, 8), "I8": (0, 8), "U16": (1, 16), "I16": (0, 16), "U32": (1, 32),
    "I32": (0, 32), "U64": (1, 64), "I64": (0, 64), "F16": (2, 16), "BF16": (4, 16),
    "F32": (2, 32), "F64": (2, 64), "C64": (5, 64), "F8_E4M3": (10, 8), "F8_E4M3FNUZ": (11, 8),
    "F8_E5M2": (12, 8), "F8_E5M2FNUZ": (13, 8), "F8_E8M0": (14, 8),
}  # fmt: skip


def filled(shapes: dict[str, tuple[str, tuple[int, ...]]]) -> Tensors:
    """Tensors of random bytes."""
    noise = random.Random(5)
    return {
        name: (dtype, shape, noise.randbytes(math.prod(shape) * DLPACK[dtype][1] // 8))
        for name, (dtype, shape) in shapes.items()
    }


# After an odd number of bytes, the next tensor is not aligned in the file.
TENSORS = filled(
    {f"large.{n}": ("F64", (300 + n, 777)) for n in range(4)}
    | {f"small.{n}": ("U8", (n,)) for n in range(1, 40, 2)}
    | {f"half.{n}": ("F16", (n, 9)) for n in range(1, 20)}
    | {"empty": ("F64", (0, 3)), "scalar": ("F64", ()), "flags": ("BOOL", (3,))}
)


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write_safetensors(folder / "cuda.safetensors", TENSORS)


def back(tensor: Any) -> bytes:
    return bytes(tensor._memory.copy_back(tensor._at, tensor.nbytes))


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("chosen", [None, ["large.*"], ["small.7", "half.5", "large.3"]])
def test_tensors_equal_the_written_ones(
    double: Double, model: Path, number: int, chosen: Any
) -> None:
    got = cuda.load(model, double.device(number), tensors=chosen, ring=RING)
    if chosen is None:
        assert got.keys() == {name for name, (_, _, data) in TENSORS.items() if data}
    for name, tensor in got.items():
        dtype, shape, data = TENSORS[name]
        assert (tensor.dtype, tensor.shape) == (dtype, shape)
        assert back(tensor) == data, name
        # Aligned to the size of an element.
        assert tensor.address % (DLPACK[dtype][1] // 8) == 0
        assert tensor.device == double.device(number)


@pytest.mark.skipif("cuda" not in KINDS, reason="numbers are devices of NVIDIA's driver")
def test_a_number_is_a_device(model: Path) -> None:
    the_double().reset()
    for number in range(LAST + 1):
        tensor = cuda.load(model, number, tensors="half.3", ring=RING)["half.3"]
        assert (tensor.device, back(tensor)) == (f"cuda:{number}", TENSORS["half.3"][2])


def test_a_digest_is_that_of_the_file(double: Double, model: Path) -> None:
    cuda.load(model, double.device(0), ring=RING, verify=f"sha256={file_sha256(model)}")
    with pytest.raises(dmafile.Error, match="EBADMSG"):
        cuda.load(model, double.device(0), ring=RING, verify="sha256=" + "0" * 64)


def test_progress_is_reported_and_its_exception_ends_the_load(double: Double, model: Path) -> None:
    told: list[tuple[int, int]] = []
    load = partial(cuda.load, model, double.device(0), ring=RING)
    load(progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (model.stat().st_size,) * 2

    def broken(done: int, total: int) -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        load(progress=broken)


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
                cuda.load(path, double.device(0), ring=RING, **SLOWLY)
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
    slowly = {{"method": "threads", "io": "direct", "block": 4096, "queue_depth": 1}}
    tensors = dmafile.cuda.load(sys.argv[1], double.device(0), ring=RING, progress=fork, **slowly)
except RuntimeError as error:
    assert child == 0 and "forked" in str(error), error
    try:
        dmafile.cuda.load(sys.argv[1], double.device(0), ring=RING)
    except dmafile.Error as error:
        # Without what a driver does when a process exits.
        os._exit("ENODEV" not in str(error))
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
child = None

def fork(done, total):
    global child
    if child is None and double.left().registered == 1:
        child = os.fork()

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


@pytest.mark.slow
@pytest.mark.skipif(REAL, reason="only the double says when memory is pinned")
@pytest.mark.parametrize("api", KINDS)
def test_a_child_that_is_forked_during_a_load_into_pinned_memory_cannot_continue_it(
    slow: Path, python: Run, api: str
) -> None:
    done = python(FORK_PINNED, slow, api)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{file_sha256(slow)}\n"


@pytest.mark.skipif(REAL, reason="only the double says when memory is pinned")
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
        while thread.is_alive():
            dmafile.load(slow, to=f"{double.api}-host", **SLOWLY).close()
        # The signal may be on its way.
        time.sleep(1)
    thread.join()
    assert double.left() == NOTHING
    assert (open_files(), memfds()) == before


@pytest.mark.parametrize("api", KINDS)
def test_a_child_that_is_forked_during_a_load_cannot_continue_it(
    model: Path, python: Run, api: str
) -> None:
    done = python(FORK, model, api)
    assert (done.returncode, done.stderr) == (0, "")
    got = dict(line.split() for line in done.stdout.splitlines())
    assert got == {name: data.hex() for name, (_, _, data) in TENSORS.items() if data}


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


def test_dlpack_exports_describe_the_tensor(double: Double, folder: Path) -> None:
    shapes: list[tuple[int, ...]] = [(3, 5, 2), (4,), ()]
    strides = {(3, 5, 2): (10, 2, 1), (4,): (1,), (): (), (2, 3): (3, 1), (3,): (1,)}
    made = filled({f"{dtype}{shape}": (dtype, shape) for dtype in DLPACK for shape in shapes})
    made["F4"] = ("F4", (2, 6), bytes(6))
    made["F6"] = ("F6_E2M3", (4,), bytes(3))
    path = write_safetensors(folder / "dlpack.safetensors", made)
    tensors = cuda.load(path, double.device(1), ring=RING)
    assert tensors.keys() == made.keys()
    # DLPack has no such types: as packed bytes.
    assert [(tensors[name].dtype, tensors[name].shape) for name in ("F4", "F6")] == [
        ("F4", (2, 3)),
        ("U8", (3,)),
    ]
    for tensor in tensors.values():
        assert tensor.__dlpack_device__() == (2 if double.api == "cuda" else 10, LAST)
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


def test_dlpack_exports_have_the_device(double: Double, model: Path) -> None:
    tensors = cuda.load(model, double.device(1), ring=RING)
    half = tensors["half.5"]
    assert half.__dlpack_device__() == (2 if double.api == "cuda" else 10, LAST)
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
    assert REAL or double.left().memory == 1
    del capsule


def test_a_driver_error_is_one_message(double: Double, model: Path) -> None:
    double.fail("cuMemAlloc_v2" if double.api == "cuda" else "hipMalloc", 1, 2)
    with pytest.raises(dmafile.Error, match="ENOMEM") as error:
        cuda.load(model, double.device(0), ring=RING)
    assert "\n" not in str(error.value)


def test_invalid_arguments_are_errors(double: Double, model: Path) -> None:
    with pytest.raises(dmafile.Error, match="ENODEV"):
        cuda.load(model, f"{double.api}:99", ring=RING)
    with pytest.raises(dmafile.UsageError, match="neither cuda:N nor hip:N"):
        cuda.load(model, "gpu", ring=RING)
    with pytest.raises(dmafile.UsageError, match="out of range"):
        cuda.load(model, double.device(0), ring=(1 << 20, 1))
    # Which of the two depends on the machine.
    why = (
        r"'cufile' is refused: (the module nvidia_fs is not loaded, without which cuFile copies as "
        r"the ring does|this version supports loading into a device only through its ring)"
    )
    with pytest.raises(dmafile.UsageError, match=why):
        cuda.load(model, double.device(0), method="cufile")


def test_buffers_are_pinned(double: Double, file: Path) -> None:
    with dmafile.load(file, to=f"{double.api}-host") as buffer:
        assert (buffer.kind, buffer.pinned) == ("memfd", double.device(0))
        assert sha256(memoryview(buffer)) == file_sha256(file)
        if not REAL:
            counts, _ = double.counts()
            assert counts[7] == -(-file.stat().st_size // 4096) * 4096
    assert double.left() == NOTHING
    buffer = dmafile.load(file)
    view = memoryview(buffer)
    buffer.pin(double.device(1))
    assert buffer.pinned == double.device(1)
    with pytest.raises(dmafile.Error, match="EBUSY"):
        buffer.pin(double.device(0))
    buffer.unpin()
    assert buffer.pinned is None
    buffer.pin(double.device(0))
    view.release()
    buffer.close()
    assert double.left() == NOTHING


def test_a_killed_process_leaves_the_memory_that_others_pin(
    double: Double, file: Path, tmp_path: Path
) -> None:
    at = tmp_path / "socket"
    program = f"""
import signal, sys, dmafile
sys.path.append({str(HERE)!r})
from double import the_double

double = the_double(hip=sys.argv[3] == "hip")
double.reset()
with dmafile.hold(sys.argv[1], name="x", socket=sys.argv[2], writable=True):
    held = dmafile.take("x", socket=sys.argv[2])
    held.files[0].buffer.pin(double.device(0))
    print("pinned", flush=True)
    signal.pause()
"""
    command = [sys.executable, "-c", program, str(file), str(at), double.api]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout and child.stdout.readline() == "pinned\n"
        buffer = dmafile.take("x", socket=at).files[0].buffer
        buffer.pin(double.device(0))
    finally:
        child.kill()
        child.wait()
    assert buffer.pinned == double.device(0)
    assert REAL or double.left().registered == 1
    assert sha256(memoryview(buffer)) == file_sha256(file)
    # Its own pins are independent: they can be made again.
    buffer.unpin()
    buffer.pin(double.device(1))
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
