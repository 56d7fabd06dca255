"""Loads into dma-bufs of dmafile.ko on stock kernels, like test_loads.py for other dma-bufs.

Each test boots once. The checks are in the program of the same name in tests/vm/inside.
"""

import os
import subprocess
from pathlib import Path

import pytest

from tests.vm.programs import Programs, passes
from vm import kernels
from vm.fixtures import FILE_SYSTEMS, MOUNTS, passed

OTHERS = {
    "6.12": ("udmabuf", "heap:system"),
    "6.1": (),
    kernels.NEWEST: ("udmabuf", "heap:system"),
}
"""The other kinds of dma-bufs of each kernel, the better one first."""

matrix = pytest.mark.skipif(not os.environ.get("MATRIX"), reason="make test-all PARTS=matrix")
each = pytest.mark.parametrize("kernel", OTHERS)


@matrix
@pytest.mark.usefixtures("ready")
@each
def test_a_dma_buf_is_allocated_and_read_in_one_call(programs: Programs, kernel: str) -> None:
    options = ("--module", f"--kernel={kernel}", "--fs=ext4")
    passed(programs.run("fused", "/mnt", *OTHERS[kernel], options=options), "loads checked")


@matrix
@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("fs", FILE_SYSTEMS)
def test_every_method_loads_from_every_file_system(programs: Programs, fs: str) -> None:
    options = ("--module", f"--fs={fs}")
    words = ("whole", "module", "fd", "--", "/mnt")
    passed(programs.run("matrix", *words, options=options), "loads checked")


@matrix
@pytest.mark.usefixtures("ready")
@each
def test_a_few_methods_load_from_all_file_systems(programs: Programs, kernel: str) -> None:
    disks = tuple(f"--fs={fs}" for fs in FILE_SYSTEMS)
    options = ("--module", f"--kernel={kernel}", *disks)
    words = ("short", "module", "fd", "--", *MOUNTS)
    passed(programs.run("matrix", *words, options=options), "loads checked")


@matrix
@pytest.mark.usefixtures("ready")
@each
def test_importers_get_the_bytes_of_the_file(programs: Programs, kernel: str) -> None:
    options = ("--module", f"--kernel={kernel}", "--fs=ext4")
    passed(programs.run("importers", "/mnt", "module", options=options), "imports checked")


@matrix
@pytest.mark.usefixtures("ready")
@each
def test_memory_of_a_killed_holder_can_be_imported(programs: Programs, kernel: str) -> None:
    options = ("--module", f"--kernel={kernel}", "--fs=ext4")
    passed(programs.run("held", "/mnt", "module", options=options), "imports checked")


@matrix
@pytest.mark.usefixtures("ready")
@each
def test_an_ordinary_user_can_load_within_the_limits(programs: Programs, kernel: str) -> None:
    options = ("--module", f"--kernel={kernel}", "--fs=ext4")
    words = ("/mnt", *OTHERS[kernel], "module")
    passed(programs.run("users", *words, options=options), "cases checked")


@matrix
@pytest.mark.usefixtures("tools")
@each
def test_faults_are_one_line_and_leak_nothing(
    programs: Programs, kernel: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(bytes(range(256)) * (16 << 10))
    squash = ["mksquashfs", str(tmp_path / "file"), str(tmp_path / "image"), "-quiet"]
    subprocess.run(squash, check=True, stdout=subprocess.DEVNULL)
    options = ("--module", f"--kernel={kernel}", "--fs=ext4", "--fs=ext4")
    words = (str(tmp_path / "image"), "/mnt", "/mnt2", "module")
    passed(programs.run("faults", *words, options=options), "faults checked")


@matrix
@pytest.mark.usefixtures("ready")
def test_the_dma_buf_tests_of_the_engine_pass(built: Path) -> None:
    passes(built / "dmabuf", "--module")
