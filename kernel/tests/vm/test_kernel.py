"""Tests of building and loading the kernel part. test_module.py tests what dmafile.ko does."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kernel import lint
from kernel.tests.vm import test_module
from vm import kernels, ko, machine, roots
from vm.fixtures import FILE_SYSTEMS, passed, vm
from vm.host import ROOT, Unavailable, call, need

HERE = Path(__file__).parent

programs = test_module.programs

pytestmark = [
    pytest.mark.skipif(not os.environ.get("MATRIX"), reason="make kernel-test"),
    pytest.mark.usefixtures("ready"),
]


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the module's sources that a test may change."""
    copy = tmp_path / "kernel"
    for part in ko.PARTS:
        shutil.copytree(ko.SOURCES / part, copy / part)
    monkeypatch.setattr(ko, "SOURCES", copy)
    return copy


# Built


def test_a_module_is_built_once_for_the_same_sources(sources: Path) -> None:
    kernel = kernels.find("6.12")
    built = ko.find(kernel)
    before = built.stat()
    assert ko.find(kernel) == built
    assert built.stat() == before
    with (sources / "uapi" / "dmafile.h").open("a") as file:
        file.write("/* one more line */\n")
    assert ko.find(kernel) != built
    left = {path.name for path in sources.rglob("*")} - {path.name for path in tree().rglob("*")}
    assert not left, "building writes nothing beside the sources"


def tree() -> Path:
    return ROOT / "kernel"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("static int unused;", "module/stats.c:.*unused"),
        ("#error no", "module/stats.c:.*#error no"),
        ("void no_such_symbol(void); void f(void); void f(void) { no_such_symbol(); }", "no_such"),
    ],
)
def test_a_warning_an_error_or_an_unknown_symbol_fails_the_build(
    sources: Path, line: str, said: str
) -> None:
    with (sources / "module" / "stats.c").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(Unavailable, match=said):
        ko.find(kernels.find("6.12"))


MATCHES = "/* Compiles. */\n"
DOES_NOT = "#error no\n"


@pytest.mark.parametrize(
    ("kernel", "probe", "text", "said"),
    [
        ("6.12", "control", DOES_NOT, "cannot compile this kernel's headers"),
        (kernels.NEWEST, "namespace_string", DOES_NOT, "MODULE_IMPORT_NS"),
        ("6.12", "started_write", DOES_NOT, "does vfs_iocb_iter_write"),
        ("6.1", "started_write", MATCHES, "does vfs_iocb_iter_write"),
        ("6.12", "kiocb_write", DOES_NOT, "freeze protection"),
        ("6.12", "uring_sqe", DOES_NOT, "struct io_uring_cmd"),
        (kernels.NEWEST, "uring_sqe_typed", DOES_NOT, "struct io_uring_cmd"),
    ],
)
def test_an_unsupported_kernel_fails_the_build_with_a_message(
    sources: Path, kernel: str, probe: str, text: str, said: str
) -> None:
    """The build must fail, and not fall back to the interface of the oldest or newest kernel."""
    (sources / "module" / "probe" / f"{probe}.c").write_text(text)
    with pytest.raises(Unavailable, match=f"dmafile: .*{said}"):
        ko.find(kernels.find(kernel))


OTHER_NAMES = """
#define kiocb_start_write others_start_write
#define kiocb_end_write others_end_write
"""


def test_dmafile_ko_takes_freeze_protection_where_the_kernel_does_not(
    sources: Path, programs: Path
) -> None:
    """Linux 6.1 before 6.1.119 lacks these functions, but Debian no longer has headers of it.

    So the test renames the functions of the kernel.
    """
    (sources / "module" / "probe" / "kiocb_write.c").write_text(DOES_NOT)
    compat = sources / "module" / "compat.h"
    includes = '#include "dmafile.h"\n'
    assert compat.read_text().count(includes) == 1
    compat.write_text(compat.read_text().replace(includes, includes + OTHER_NAMES))
    built = ko.find(kernels.find("6.1"))
    python = ("python3", "-E", "-S", "-m", "kernel.tests.vm.inside.ko", programs, "midway", "/mnt")
    words = ("sh", "-c", 'insmod "$0" && exec "$@"', built, *python)
    passed(vm("--kernel=6.1", "--fs=ext4", "--", *words), "programs ran")


def test_modules_cannot_be_built_for_an_image_alone(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"Module\.symvers"):
        ko.find(kernels.Kernel(tmp_path / "bzImage"))


# Checked


def test_lint_is_clean() -> None:
    command = [sys.executable, "-m", "kernel.lint"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        # Only sparse checks address spaces, and only W=1 reports unused constants.
        ("int f(int __user *p); int f(int __user *p) { return *p; }", "noderef"),
        ("static const int lonely = 1;", "lonely"),
    ],
)
def test_lint_finds_errors_that_a_build_does_not(sources: Path, line: str, said: str) -> None:
    with (sources / "module" / "stats.c").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(Unavailable, match=said):
        lint.warnings(kernels.find("6.12").build)


def test_lint_finds_wrong_style(sources: Path) -> None:
    with (sources / "uapi" / "dmafile.h").open("a") as file:
        file.write("extern int f( int a );\n")
    assert "dmafile.h" in lint.style()


# Installed


@pytest.mark.parametrize("kernel", [*kernels.STOCK, kernels.NEWEST])
def test_dkms_builds_the_installed_source(kernel: str, tmp_path: Path) -> None:
    need("dkms", "command", "-v", "dkms")
    stage, state = tmp_path / "stage", tmp_path / "state"
    make = ["make", "-C", str(ROOT / "kernel"), f"DESTDIR={stage}", "PREFIX=/usr"]
    subprocess.run([*make, "install"], check=True, capture_output=True)
    version = call(["make", "-s", "-C", str(ROOT / "kernel"), "version"]).strip()
    found = kernels.find(kernel)
    release = found.image.name.removeprefix("vmlinuz-")
    state.mkdir()
    words = ["-m", "dmafile", "-v", version, "-k", release, "--kernelsourcedir", str(found.build)]
    words += ["--dkmstree", str(state), "--sourcetree", str(stage / "usr" / "src")]
    # The root of a release other than the host's has DKMS as well.
    with roots.build_prefix(found.build, tmp_path) as before:
        command = [*before, "dkms", "build", *words]
        result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "bad exit status" not in result.stdout + result.stderr
    [built] = state.glob(f"dmafile/{version}/{release}/*/module/dmafile.ko")
    loads = vm("--kernel", kernel, "--", "sh", "-c", f"insmod {built} && ls /dev/dmafile")
    assert loads.stdout == b"/dev/dmafile\n", loads.stderr
    subprocess.run([*make, "uninstall"], check=True, capture_output=True)
    assert [path for path in stage.rglob("*") if path.is_file()] == []


# Loaded

FACTS = """
uname -r
stat -c '%a %u %g' /dev/dmafile
cat /sys/module/dmafile/parameters/max_buffer_mb
! : <>/dev/dmafile || echo opened
"""


@pytest.mark.parametrize("kernel", [*kernels.STOCK, kernels.NEWEST])
def test_a_member_of_the_group_opens_the_node(kernel: str) -> None:
    words = ["--module-options=max_buffer_mb=7", "--as-member"]
    result = vm("--kernel", kernel, *words, "--", "sh", "-c", FACTS)
    release, node, parameter, opened = result.stdout.decode().splitlines()
    assert release == kernels.find(kernel).image.name.removeprefix("vmlinuz-")
    assert node == f"660 0 {machine.MEMBERS}"
    assert parameter == "7"
    assert opened == "opened"
    assert result.returncode == 0


UDEV = """
echo dmafile:x:2001: | cat /etc/group - >/tmp/group && mount --bind /tmp/group /etc/group
mkdir -p /run/udev/rules.d && cp "$1" /run/udev/rules.d
chgrp 0 /dev/dmafile && chmod 600 /dev/dmafile
/lib/systemd/systemd-udevd --daemon
udevadm trigger --subsystem-match=misc && udevadm settle
stat -c '%a %u %g' /dev/dmafile
"""


def test_udev_gives_the_node_to_the_group() -> None:
    need("udev", "test", "-e", "/lib/systemd/systemd-udevd")
    rules = str(ROOT / "kernel" / "dkms" / "60-dmafile.rules")
    result = vm("--module", "--", "sh", "-c", UDEV, "sh", rules)
    assert result.stdout == b"660 0 2001\n", result.stderr


def test_a_user_outside_the_group_cannot_open_the_node() -> None:
    result = vm("--module", "--as-user", "--", "sh", "-c", ": <>/dev/dmafile")
    assert result.returncode == 2
    assert b"Permission denied" in result.stderr


RMMOD = """#!/bin/sh
/sbin/rmmod "$@"
[ -e /sys/module/dmafile ] || echo "<4>gone" >/dev/kmsg
"""


def test_the_module_is_unloaded_at_the_end(tmp_path: Path) -> None:
    """So that leaks on unloading are detected. A leaked buffer keeps the module loaded."""
    # The kernel does not log that a module was unloaded, and the machine is powered off right after
    # that. So the guest gets an rmmod, first in its PATH, that checks and logs this.
    script = 'printf %s "$1" >/run/vm/rmmod && chmod 755 /run/vm/rmmod'
    log = tmp_path / "log"
    result = vm("--module", "--kernel-log", log, "--", "sh", "-c", script, "sh", RMMOD)
    assert result.returncode == 0, result.stderr
    assert b"gone" in log.read_bytes()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("max_buffer_mb=much", b"`much' invalid for parameter `max_buffer_mb'"),
        ("max_bufer_mb=7", b"no parameter `max_bufer_mb`"),
    ],
)
def test_a_module_that_does_not_load_ends_the_run(options: str, said: bytes) -> None:
    result = vm("--module-options", options, "--", "echo", "ran")
    assert result.returncode == machine.NO_GUEST
    assert result.stdout == b""
    assert b"vm: the guest could not be set up" in result.stderr
    assert said in result.stderr


# Small kernels


def test_base_has_the_interfaces_of_stock_kernels(small_base: str) -> None:
    disks = [f"--fs={fs}" for fs in FILE_SYSTEMS]
    mounts = ["/mnt", *(f"/mnt{number}" for number in range(2, len(FILE_SYSTEMS) + 1))]
    script = """
        modprobe vgem
        ls /dev/udmabuf /dev/dma_heap/system /dev/dmafile /dev/dri/card0
        modprobe vivid n_devs=1 && ls /dev/video0
        for mount; do echo bytes >$mount/file && cat $mount/file; done
    """
    words = ["--kernel", small_base, "--module", *disks]
    result = vm(*words, "--", "sh", "-c", script, "sh", *mounts)
    assert result.returncode == 0, result.stderr
    assert result.stderr == b""
    said = result.stdout.decode().splitlines()
    assert len(said) == 5 + len(mounts)
    assert said[5:] == ["bytes"] * len(mounts)


@pytest.fixture(params=["base-6.12", "base-6.12-debug"])
def small_base(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    kernels.find(name)
    return name


@pytest.mark.parametrize(
    ("faults", "found"),
    [
        # The order matters: the first report disables lockdep.
        (
            ("locks", "sleep", "freed"),
            (
                b"WARNING: possible circular locking dependency",
                b"BUG: sleeping function called from invalid context",
                b"BUG: KASAN: slab-use-after-free",
            ),
        ),
        (("leak",), (b"kmemleak: new suspected memory leaks", b'comm "insmod"')),
    ],
)
def test_base_debug_finds_bugs(
    faults: Sequence[str], found: Sequence[bytes], tmp_path: Path
) -> None:
    kernel = kernels.find("base-6.12-debug")
    faulty = ko.other(HERE / "faulty", kernel.build, tmp_path)
    load = f"insmod {faulty} fault=$fault && rmmod faulty"
    script = f"for fault; do {load} || exit; done"
    log = tmp_path / "log"
    words: list[str | Path] = ["--kernel=base-6.12-debug", "--kernel-log", log]
    result = vm(*words, "--", "sh", "-c", script, "sh", *faults)
    assert result.returncode == machine.COMPLAINT, result.stderr
    for one in found:
        assert one in log.read_bytes(), log.read_text()
