"""Tests of the engine, on kernels with features that the host may lack."""

import os
from pathlib import Path

import pytest

from tests.vm.programs import passes
from vm import kernels


@pytest.mark.usefixtures("ready")
def test_the_dma_buf_tests_of_the_engine_pass(built: Path) -> None:
    passes(built / "dmabuf")


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("name", ["dmafile", "buffer", "cancel", "leaks", "model", "pages"])
@pytest.mark.parametrize("kernel", [*kernels.STOCK, kernels.NEWEST])
@pytest.mark.skipif(not os.environ.get("MATRIX"), reason="make test-all PARTS=matrix")
def test_the_tests_of_the_engine_pass(built: Path, kernel: str, name: str) -> None:
    passes(built / name, f"--kernel={kernel}")
