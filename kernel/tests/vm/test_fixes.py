"""Tests of the topic `fixes`: each program of kernel/tests/fixes shows a bug of stock kernels, and
passes on the kernels with the patches."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kernel.tests.vm.test_module import SOURCES, matrix
from vm import machine, small
from vm.compiled import static
from vm.fixtures import vm
from vm.host import call, need

PROGRAMS = SOURCES / "fixes"
BUGS = {
    "sync": ("800",),
    "charge": (),
    "reserve": ("200",),
    "limit": (),
    "direct": ("/tmp/disk/file",),
    "chunk": ("/mnt/file",),
    "absent": ("/tmp/disk/file",),
}
"""The programs and their arguments."""
DISKS = {
    "direct": 'mkfs.vfat "$RAW" >/dev/null && mount -t vfat "$RAW" /tmp/disk',
    "absent": "mount -t affs -o loop /tmp/disk.image /tmp/disk",
}
"""How /tmp/disk is mounted, for those that need it."""
OF_7_3 = ("chunk", "absent")
"""Bugs that came after Linux 6.12."""
DETECTED = {"direction": machine.COMPLAINT, "fail": 1}
"""Those that only a kernel with error checkers shows, of 6.12, and how they end."""

RUN = """
program=$1 image=$2 mount=$3; shift 3
modprobe -q vfat
modprobe -q affs
mkdir /tmp/disk
cp "$image" /tmp/disk.image
eval "$mount"
# A write that never ends is one of the bugs.
timeout 300 "$program" "$@"
"""


@pytest.fixture(scope="module")
def folder(ready: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    need("dosfstools", "command", "-v", "mkfs.vfat")
    place = tmp_path_factory.mktemp("fixes")
    for source in PROGRAMS.glob("*.c"):
        static(source, place, "-Wextra")
    call([sys.executable, str(PROGRAMS / "mkofs.py"), str(place / "disk.image")])
    return place


def run(folder: Path, kernel: str, bug: str, words: Sequence[str]) -> int:
    machine = (f"--kernel={kernel}", "--parallel", "--append=init_on_alloc=0")
    disks = ("--fs=ext4", "--fs=raw", "--disk-size=512M")
    files = (folder / bug, folder / "disk.image", DISKS.get(bug, ":"))
    result = vm(*machine, *disks, "--", "sh", "-c", RUN, "sh", *files, *words)
    print(result.stdout.decode(), result.stderr.decode())
    return result.returncode


CASES = [
    *((kernel, bug) for kernel in ("6.12", "series-6.12") for bug in BUGS if bug not in OF_7_3),
    *((kernel, bug) for kernel in ("newest", "series-7.3") for bug in BUGS),
]


@matrix
@pytest.mark.parametrize(("kernel", "bug"), CASES)
def test_a_bug_of_stock_kernels(folder: Path, kernel: str, bug: str) -> None:
    status = run(folder, kernel, bug, BUGS[bug])
    # On affs the write also warns. 2 is a program that could not look.
    stock = machine.COMPLAINT if bug == "absent" else 1
    assert status == (0 if kernel.startswith("series") else stock)


@matrix
@pytest.mark.parametrize("kernel", ["base-6.12-debug", "series-6.12-debug"])
@pytest.mark.parametrize("bug", DETECTED)
def test_a_bug_that_error_checkers_show(folder: Path, kernel: str, bug: str) -> None:
    status = run(folder, kernel, bug, ())
    assert status == (0 if small.parse(kernel).patched else DETECTED[bug])
