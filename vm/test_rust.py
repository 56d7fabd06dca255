"""The engine's own tests, on kernels that have what the host lacks."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from vm import kernels
from vm.fixtures import build, vm
from vm.kernels import ROOT


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the programs that `cargo test` runs, by the names of their sources."""
    folder = tmp_path_factory.mktemp("tests")
    for line in map(json.loads, build("--message-format=json").splitlines()):
        ours = line.get("manifest_path") == str(ROOT / "engine" / "Cargo.toml")
        if ours and line.get("executable") and line["profile"]["test"]:
            # Without what a debugger reads, there is little to fetch from the host.
            output = folder / line["target"]["name"]
            subprocess.run(["strip", "-o", output, line["executable"]], check=True)
    return folder


def passes(program: Path, *options: str) -> None:
    script = f"cp {program} /tmp/test && cd /mnt && DMAFILE_TEST_DIR=/mnt exec /tmp/test"
    result = vm("--memory=3G", "--fs=ext4", "--timeout=1800", *options, "--", "sh", "-c", script)
    said = (result.stdout + result.stderr).decode(errors="replace")
    assert result.returncode == 0 and "test result: ok." in said, said
    assert "SKIP: no dma-bufs" not in said, said


@pytest.mark.usefixtures("ready")
def test_dma_bufs(built: Path) -> None:
    passes(built / "dmabuf")


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("name", ["dmafile", "buffer", "cancel", "leaks", "model", "pages"])
@pytest.mark.parametrize("kernel", sorted(kernels.STOCK))
@pytest.mark.skipif(not os.environ.get("MATRIX"), reason="all on all kernels: make vm-test")
def test_the_engine(built: Path, kernel: str, name: str) -> None:
    passes(built / name, f"--kernel={kernel}")
