"""Loads on stock kernels: all bytes, importers of dma-bufs, limits and faults.

Each test boots once. The checks are in the program of the same name in tests/vm/inside, which runs
in the machine; if one fails, it ends with that assertion.
"""

import os
import subprocess
from pathlib import Path

import pytest

from tests.vm.programs import Programs
from vm import kernels
from vm.fixtures import FILE_SYSTEMS, MOUNTS, passed

KINDS = ("udmabuf", "heap:system")
"""The kinds of dma-bufs on 6.12 and on newer kernels."""

matrix = pytest.mark.skipif(not os.environ.get("MATRIX"), reason="make test-all PARTS=matrix")
NEWEST = pytest.param(kernels.NEWEST, marks=matrix)
both = pytest.mark.parametrize("kernel", ["6.12", NEWEST])
WHOLE = [
    *(("6.12", fs) for fs in FILE_SYSTEMS),
    *((kernels.NEWEST, fs) for fs in FILE_SYSTEMS[:3]),
]


@pytest.mark.usefixtures("ready")
@both
def test_files_are_loaded_whole_into_dma_bufs(programs: Programs, kernel: str) -> None:
    options = (f"--kernel={kernel}", *(f"--fs={fs}" for fs in FILE_SYSTEMS))
    words = ("short", *KINDS, "fd", "--", *MOUNTS)
    passed(programs.run("matrix", *words, options=options), "loads checked")


@matrix
@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("kind", [*KINDS, "fd"])
@pytest.mark.parametrize(("kernel", "fs"), WHOLE)
def test_every_method_loads_from_every_file_system(
    programs: Programs, kernel: str, fs: str, kind: str
) -> None:
    options = (f"--kernel={kernel}", f"--fs={fs}")
    passed(programs.run("matrix", "whole", kind, "--", "/mnt", options=options), "loads checked")


@pytest.mark.usefixtures("ready")
@both
def test_importers_get_the_bytes_of_the_file(programs: Programs, kernel: str) -> None:
    options = (f"--kernel={kernel}", "--fs=ext4")
    passed(programs.run("importers", "/mnt", *KINDS, options=options), "imports checked")


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("kernel", ["6.12", pytest.param("6.1", marks=matrix), NEWEST])
def test_memory_of_a_killed_holder_can_be_imported(programs: Programs, kernel: str) -> None:
    kinds = () if kernel == "6.1" else KINDS
    options = (f"--kernel={kernel}", "--fs=ext4")
    passed(programs.run("held", "/mnt", *kinds, options=options), "imports checked")


@pytest.mark.usefixtures("ready")
def test_a_service_keeps_its_memory_over_restarts(programs: Programs) -> None:
    options = ("--kernel=6.12", "--fs=ext4")
    passed(programs.run("services", "/mnt", options=options), "starts checked")


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("kernel", ["6.12", pytest.param("6.1", marks=matrix), NEWEST])
def test_an_ordinary_user_can_load_within_the_limits(programs: Programs, kernel: str) -> None:
    kinds = () if kernel == "6.1" else KINDS
    options = (f"--kernel={kernel}", "--fs=ext4")
    passed(programs.run("users", "/mnt", *kinds, options=options), "cases checked")


@pytest.mark.usefixtures("tools")
@both
def test_faults_are_one_line_and_leak_nothing(
    programs: Programs, kernel: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(bytes(range(256)) * (16 << 10))
    squash = ["mksquashfs", str(tmp_path / "file"), str(tmp_path / "image"), "-quiet"]
    subprocess.run(squash, check=True, stdout=subprocess.DEVNULL)
    words = (str(tmp_path / "image"), "/mnt", "/mnt2", *KINDS)
    options = (f"--kernel={kernel}", "--fs=ext4", "--fs=ext4")
    passed(programs.run("faults", *words, options=options), "faults checked")


@pytest.mark.usefixtures("servers")
@both
@pytest.mark.parametrize(
    "part",
    [
        "nfs",
        "fuse",
        "9p",
        "virtiofs",
        pytest.param("overlay", marks=matrix),
    ],
)
def test_files_on_a_server_are_loaded_whole_or_not_at_all(
    programs: Programs, kernel: str, part: str
) -> None:
    options = (f"--kernel={kernel}", "--fs=ext4", "--fs=9p", "--fs=virtiofs")
    words = (part, "--", "/mnt", "/mnt2", "/mnt3")
    passed(programs.run("mounts", *words, options=options), "cases checked")


@pytest.mark.usefixtures("ready")
@both
def test_objects_are_loaded_over_a_network_that_loses_packets_and_goes_away(
    programs: Programs, kernel: str
) -> None:
    passed(programs.run("network", options=(f"--kernel={kernel}",)), "cases checked")


@pytest.mark.usefixtures("ready")
def test_memory_is_on_the_numa_node_of_the_caller(programs: Programs) -> None:
    options = ("--fs=ext4", "--nodes=2")
    passed(programs.run("nodes", "/mnt", options=options), "loads checked")


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize(
    ("kernel", "does"), [("6.12", "fills"), pytest.param(kernels.NEWEST, "drops", marks=matrix)]
)
def test_buffered_loads_leave_the_page_cache_unchanged_if_the_kernel_can(
    programs: Programs, kernel: str, does: str
) -> None:
    options = (f"--kernel={kernel}", "--fs=ext4")
    passed(programs.run("page_cache", "/mnt", does, options=options), "loads checked")
