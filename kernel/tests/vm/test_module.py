"""Tests of dmafile.ko in virtual machines, on all supported kernels: data, errors and faults.

Each part boots one machine. The checks are in the programs of kernel/tests, and in
kernel/tests/vm/inside/ko.py, which runs them in the machine.
"""

import os
from pathlib import Path

import pytest

from vm import kernels, ko
from vm.compiled import static
from vm.fixtures import FILE_SYSTEMS, MOUNTS, Result, passed, vm
from vm.host import ROOT, need

HERE = Path(__file__).parent
SOURCES = HERE.parent
IMPORTER = ROOT / "tests" / "vm" / "inside" / "importer.c"

KERNELS = (*kernels.STOCK, kernels.NEWEST, "base-6.12-debug")
matrix = pytest.mark.skipif(not os.environ.get("MATRIX"), reason="make kernel-test")


@pytest.fixture(scope="module")
def programs(ready: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of kernel/tests, statically linked: machines have no libraries."""
    for package, command in (("dmsetup", "dmsetup"), ("xfsprogs", "mkfs.xfs")):
        need(package, "command", "-v", command)
    return compiled(tmp_path_factory.mktemp("programs"))


def compiled(folder: Path, *flags: str) -> Path:
    for source in (*sorted(SOURCES.glob("*.c")), IMPORTER):
        static(source, folder, "-Wextra", f"-I{ROOT / 'kernel' / 'uapi'}", *flags)
    return folder


def inside(
    programs: Path, part: str, *folders: str, options: tuple[str, ...] = (), script: str = "ko"
) -> Result:
    python = ("python3", "-E", "-S", "-m", f"kernel.tests.vm.inside.{script}")
    return vm("--module", *options, "--", *python, programs, part, *folders)


@matrix
def test_bytes_and_refusals(programs: Path) -> None:
    passed(inside(programs, "short", "/mnt", options=("--fs=ext4",)), "programs ran")


@matrix
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("group", [FILE_SYSTEMS[:3], FILE_SYSTEMS[3:]], ids="-".join)
def test_every_byte(programs: Path, kernel: str, group: tuple[str, ...]) -> None:
    options = (f"--kernel={kernel}", *(f"--fs={fs}" for fs in group))
    result = inside(programs, "every_byte", *MOUNTS[: len(group)], options=options)
    passed(result, "programs ran")


@matrix
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_call(programs: Path, kernel: str) -> None:
    # To find races, the CPUs must run in parallel.
    options = (f"--kernel={kernel}", "--parallel", "--fs=ext4")
    passed(inside(programs, "calls", "/mnt", options=options), "programs ran")


@matrix
@pytest.mark.parametrize("kernel", KERNELS[:-1])
def test_every_call_behind_an_iommu(programs: Path, kernel: str) -> None:
    options = (f"--kernel={kernel}", "--fs=ext4", "--iommu=intel")
    passed(inside(programs, "calls", "/mnt", options=options), "programs ran")


@matrix
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("iommu", ["off", "swiotlb"])
def test_every_device(programs: Path, kernel: str, iommu: str, tmp_path: Path) -> None:
    device = ko.other(HERE / "testdev", kernels.find(kernel).build, tmp_path)
    options = (f"--kernel={kernel}", "--fs=ext4", f"--iommu={iommu}")
    passed(inside(programs, "devices", "/mnt", str(device), options=options), "programs ran")


@matrix
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_fault(programs: Path, kernel: str) -> None:
    options = (f"--kernel={kernel}", "--fs=ext4")
    passed(inside(programs, "breakage", "/mnt", options=options), "programs ran")
