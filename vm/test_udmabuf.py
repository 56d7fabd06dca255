"""`--to udmabuf` on stock kernels: byte for byte, or refused with the remedy."""

import subprocess
from pathlib import Path

import pytest
from test_run import TARGET, ready, vm

__all__ = ["ready"]

INSIDE = Path(__file__).parent / "inside" / "udmabuf.py"


@pytest.fixture(scope="module")
def dmafile() -> Path:
    """The command, as `cargo test` has built it."""
    command = ["cargo", "build", "--quiet", "--locked", "--package", "dmafile-cli"]
    subprocess.run(command, cwd=Path(__file__).parents[1], check=True)
    return TARGET / "debug" / "dmafile"


@pytest.mark.usefixtures("ready")
def test_files_come_into_udmabufs_whole(dmafile: Path) -> None:
    result = vm("--memory=3G", "--fs=ext4", "--", "python3", INSIDE, dmafile, "/mnt")
    assert result.returncode == 0, result.stderr.decode()
    assert b"loads checked" in result.stdout


@pytest.mark.usefixtures("ready")
def test_a_kernel_without_udmabuf_says_so(dmafile: Path) -> None:
    result = vm("--kernel=6.1", "--fs=ext4", "--", "python3", INSIDE, dmafile, "/mnt")
    assert result.returncode == 0, result.stderr.decode()
    assert b"refused, as it should be" in result.stdout
