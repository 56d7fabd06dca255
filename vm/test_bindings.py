"""dma-bufs by way of C and Python, on a stock kernel."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

from vm.fixtures import TARGET, build, vm
from vm.kernels import ROOT

INSIDE = Path(__file__).parent / "inside" / "bindings.py"


def exercise(folder: Path) -> Path:
    """The C program of capi/tests, with the library in it."""
    build()
    program = folder / "exercise"
    words: list[str | Path] = ["cc", "-std=c99", "-pthread", '-DVERSION=""']
    words += [f"-I{ROOT}/capi/include", "-o", program, "-s"]
    words += [ROOT / "capi" / "tests" / "exercise.c", TARGET / "debug" / "libdmafile_capi.a"]
    words += ["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl"]
    subprocess.run(words, check=True)
    return program


@pytest.mark.usefixtures("ready")
def test_c_and_python_see_all_dma_bufs_and_announce_what_they_read(tmp_path: Path) -> None:
    package = importlib.util.find_spec("dmafile")
    if package is None or package.origin is None:
        pytest.skip("the package dmafile is not installed (make extension)")
    program = exercise(tmp_path)
    words = (INSIDE, program, Path(package.origin).parent, "/mnt")
    result = vm("--fs=ext4", "--", "python3", "-I", "-S", *words)
    assert result.returncode == 0, result.stderr.decode()
    assert b"C and Python checked" in result.stdout
