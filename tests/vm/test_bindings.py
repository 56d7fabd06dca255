"""dma-bufs through C and Python, on a stock kernel."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

from tests.vm.programs import library
from vm.fixtures import vm
from vm.host import ROOT


def exercise(folder: Path) -> Path:
    """The C program of crates/capi/tests, linked statically with the library."""
    program = folder / "exercise"
    words: list[str | Path] = ["cc", "-std=c99", "-pthread", '-DVERSION=""']
    words += [f"-I{ROOT}/crates/capi/include", "-o", program, "-s"]
    words += [ROOT / "crates" / "capi" / "tests" / "exercise.c", library()]
    words += ["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl"]
    subprocess.run(words, check=True)
    return program


@pytest.mark.usefixtures("ready")
def test_c_and_python_return_all_dma_bufs_and_sync_cpu_access(tmp_path: Path) -> None:
    package = importlib.util.find_spec("dmafile")
    if package is None or package.origin is None:
        pytest.skip("the package dmafile is not installed (make extension)")
    program = exercise(tmp_path)
    # In the machine, the package is where the program copies it to.
    python = ("env", "PYTHONPATH=/tmp/package", "python3", "-S", "-m", "tests.vm.inside.bindings")
    words = (program, Path(package.origin).parent, "/mnt")
    result = vm("--fs=ext4", "--", *python, *words)
    assert result.returncode == 0, result.stderr.decode()
    assert b"C and Python checked" in result.stdout
