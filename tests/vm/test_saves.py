"""Saves on stock kernels: all bytes, from every kind of memory, and failures.

Each test boots once. The checks are in saves.py, save_edges.py, save_faults.py and fences.py of
tests/vm/inside.
"""

import os

import pytest

from tests.vm.programs import Programs
from vm import kernels
from vm.fixtures import FILE_SYSTEMS, MOUNTS, passed

SYSTEMS = ("ext4", "xfs", "btrfs", "f2fs")
matrix = pytest.mark.skipif(not os.environ.get("MATRIX"), reason="make test-all PARTS=matrix")
KERNELS = ["6.12", pytest.param("6.1", marks=matrix), pytest.param(kernels.NEWEST, marks=matrix)]


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("kernel", KERNELS)
def test_memory_is_saved_whole_to_every_file_system(programs: Programs, kernel: str) -> None:
    kinds = ("memfd",) if kernel == "6.1" else ("memfd", "udmabuf", "heap:system")
    options = (f"--kernel={kernel}", *(f"--fs={fs}" for fs in FILE_SYSTEMS))
    passed(programs.run("saves", "ways", *kinds, "--", *MOUNTS, options=options), "saves checked")


@pytest.mark.usefixtures("ready")
def test_dma_bufs_of_dmafile_ko_are_saved_without_a_copy(programs: Programs) -> None:
    options = ("--kernel=6.12", "--module", "--fs=ext4", "--fs=btrfs")
    words = ("ways", "module", "--", "/mnt", "/mnt2")
    passed(programs.run("saves", *words, options=options), "saves checked")


@pytest.mark.usefixtures("ready")
def test_a_failing_disk_leaves_the_old_file(programs: Programs) -> None:
    options = ("--kernel=6.12", "--fs=ext4")
    passed(programs.run("saves", "faults", options=options), "saves checked")


@pytest.mark.usefixtures("ready", "callers")
def test_saves_wait_until_devices_have_written(programs: Programs) -> None:
    options = ("--kernel=6.12", "--fs=ext4")
    passed(programs.run("fences", "/mnt", options=options), "saves checked")


@matrix
@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("kernel", ["6.12", "6.1", kernels.NEWEST])
def test_every_size_is_saved_to_every_offset(programs: Programs, kernel: str) -> None:
    module = ("--module",) if kernel == "6.12" else ()
    made = () if kernel == "6.1" else ("udmabuf", "heap:system")
    kinds = ("memfd", "hugetlb", "thp", *made, *("module",)[: len(module)], "sparse")
    disks = (*(f"--fs={fs}" for fs in FILE_SYSTEMS), "--fs=raw", "--disk-size=512M")
    words = ("edges", *kinds, "--", *MOUNTS)
    options = (f"--kernel={kernel}", *module, *disks)
    passed(programs.run("save_edges", *words, options=options), "saves checked")


@matrix
@pytest.mark.usefixtures("ready")
def test_files_larger_than_memory_are_saved(programs: Programs) -> None:
    options = ("--kernel=6.12", "--memory=1G", "--fs=ext4", "--disk-size=4G")
    passed(programs.run("save_edges", "larger", "/mnt", options=options), "saves checked")


@pytest.mark.usefixtures("tools", "callers")
@pytest.mark.parametrize(
    "words",
    [
        ("short",),
        pytest.param(("full", *SYSTEMS), marks=matrix),
        pytest.param(("broken", "ext4", "xfs", "f2fs"), marks=matrix),
        pytest.param(("meanwhile", "/mnt"), marks=matrix),
    ],
    ids=lambda words: words[0],
)
def test_a_failed_save_leaves_the_old_data(programs: Programs, words: tuple[str, ...]) -> None:
    # Btrfs prints a warning (WARN) when it gives up, which would count as a kernel complaint.
    options = ("--kernel=6.12", "--fs=ext4")
    passed(programs.run("save_faults", *words, options=options), "faults checked")
