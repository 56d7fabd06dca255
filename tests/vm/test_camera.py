"""The C example records a camera: vivid, a driver that draws its own pictures.

The checks are in tests/vm/inside/camera.py.
"""

import os
import subprocess
from pathlib import Path

import pytest

from tests.vm.programs import library
from vm import kernels
from vm.fixtures import passed, vm
from vm.host import ROOT

matrix = pytest.mark.skipif(not os.environ.get("MATRIX"), reason="make test-all PARTS=matrix")


def example(folder: Path) -> Path:
    """The program of crates/capi/examples, linked statically with the library."""
    program = folder / "record_camera"
    words: list[str | Path] = ["cc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-pthread"]
    words += [f"-I{ROOT}/crates/capi/include", "-o", program, "-s"]
    words += [ROOT / "crates" / "capi" / "examples" / "record_camera.c", library()]
    words += ["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl"]
    subprocess.run(words, check=True)
    return program


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("kernel", ["6.12", pytest.param(kernels.NEWEST, marks=matrix)])
def test_a_camera_is_recorded_frame_by_frame(kernel: str, tmp_path: Path) -> None:
    python = ("python3", "-E", "-S", "-m", "tests.vm.inside.camera")
    options = (f"--kernel={kernel}", "--fs=ext4")
    passed(vm(*options, "--", *python, example(tmp_path), "/mnt"), "frames checked")
