"""Other libraries use the memory of a load without a copy; skipped if they are not installed."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

COMMAND = Path(sys.executable).parent / "dmafile"

# As in docs/consumers.md: OpenVINO only accepts a writable array.
TENSOR = """
import mmap, os
import numpy as np
import openvino as ov
import openvino.opset13 as ops

map = mmap.mmap(int(os.environ["DMAFILE_FD"]), int(os.environ["DMAFILE_BYTES"]))
array = np.frombuffer(map, np.float32).reshape(-1, 64)
tensor = ov.Tensor(array, shared_memory=True)
parameter = ops.parameter(array.shape, np.float32)
twice = ops.matmul(parameter, ops.constant(2 * np.eye(64, dtype=np.float32)), False, False)
# Elsewhere the plug-in may choose a shorter type.
exact = {"INFERENCE_PRECISION_HINT": "f32"}
request = ov.compile_model(ov.Model([twice], [parameter]), "CPU", exact).create_infer_request()
request.set_input_tensor(tensor)
assert request.get_input_tensor().data.ctypes.data == array.ctypes.data
request.infer()
assert np.array_equal(request.get_output_tensor().data, 2 * array)
# It is the same memory: what changes there is what the next inference takes.
array[:] += 1
request.infer()
assert np.array_equal(request.get_output_tensor().data, 2 * array)
print("read in place")
"""

WEIGHTS = """
import sys
import numpy as np
import openvino as ov

model = ov.Core().read_model(sys.argv[1], sys.argv[2])
values = np.linspace(0, 1, 64, dtype=np.float32)[None]
print(ov.compile_model(model, "CPU")([values])[0].tobytes().hex())
with open("/proc/self/maps") as maps:
    print(sorted(line.split()[1] for line in maps if "weights.bin" in line))
"""


def printed(*words: object) -> str:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_openvino_reads_the_memory_without_a_copy(folder: Path) -> None:
    pytest.importorskip("openvino", reason="pip install openvino")
    file = folder / "input.bin"
    np.random.default_rng(11).standard_normal((1000, 64)).astype(np.float32).tofile(file)
    command = (sys.executable, "-c", TENSOR)
    assert printed(COMMAND, "load", file, "--quiet", "--", *command) == "read in place\n"


def test_openvino_maps_weights_by_path(folder: Path) -> None:
    ov = pytest.importorskip("openvino", reason="pip install openvino")
    import openvino.opset13 as ops

    weights = np.random.default_rng(12).standard_normal((64, 4096)).astype(np.float32)
    parameter = ops.parameter([1, 64], np.float32)
    model = ov.Model([ops.matmul(parameter, ops.constant(weights), False, False)], [parameter])
    ov.save_model(model, folder / "weights.xml", compress_to_fp16=False)
    described, file = folder / "weights.xml", folder / "weights.bin"
    command = (sys.executable, "-c", WEIGHTS, described)
    plain = printed(*command, file)
    # A shared mapping, first of the file and then of the memory.
    assert plain.endswith("['r--s']\n")
    assert printed(COMMAND, "load", file, "--quiet", "--", *command, "{}") == plain
