"""Tests of dmafile.ko together with other parts of the system: io_uring, fanotify, FUSE, NFS, ...

Each part boots one machine, and is a function in kernel/tests/vm/inside/surroundings.py.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

from kernel.tests.vm import test_module
from kernel.tests.vm.test_module import HERE, KERNELS, compiled, matrix
from vm import kernels, ko, machine
from vm.fixtures import passed, vm
from vm.host import ROOT, call, need

programs = test_module.programs

STOCK = tuple(kernel for kernel in KERNELS if kernel != "base-6.12-debug")
HEADER = ROOT / "kernel" / "uapi" / "dmafile.h"
WIDE = ("-m32", "-D_FILE_OFFSET_BITS=64")
"""32-bit programs with 64-bit offsets."""


def inside(programs: Path, part: str, *options: str, words: tuple[str, ...] = ()) -> None:
    result = test_module.inside(
        programs, part, "/mnt", *words, options=("--fs=ext4", *options), script="surroundings"
    )
    passed(result, "programs ran")


@matrix
@pytest.mark.parametrize("kernel", KERNELS)
def test_other_kinds_of_requests_and_restricted_files(programs: Path, kernel: str) -> None:
    inside(programs, "requests", f"--kernel={kernel}")


@matrix
@pytest.mark.parametrize("kernel", KERNELS)
def test_32_bit_programs(
    ready: None, tmp_path_factory: pytest.TempPathFactory, kernel: str
) -> None:
    need_32_bits()
    folder = compiled(tmp_path_factory.mktemp("programs-32"), *WIDE)
    inside(folder, "narrow", f"--kernel={kernel}")


def need_32_bits() -> None:
    program = "echo 'int main(void) { return 0; }' | cc -m32 -static -x c -o /dev/null -"
    # The package gcc-multilib excludes compilers for other architectures.
    need(f"gcc-{call(['cc', '-dumpversion']).strip()}-multilib", "sh", "-c", program)


@matrix
def test_structures_have_the_same_layout_for_32_bits(tmp_path: Path) -> None:
    need_32_bits()
    lines = []
    for name, body in re.findall(r"^struct (\w+) \{\n(.*?)^\};", HEADER.read_text(), re.M | re.S):
        lines.append(f'printf("{name} %zu\\n", sizeof(struct {name}));')
        for member in re.findall(r"(\w+);", body):
            place = f"offsetof(struct {name}, {member})"
            lines.append(f'printf("  {member} %zu\\n", {place});')
    assert len(lines) > 40
    for request in re.findall(r"#define (DMAFILE_IOC_(?!MAGIC)\w+)", HEADER.read_text()):
        lines.append(f'printf("{request} %#x\\n", (unsigned int){request});')
    source = tmp_path / "layout.c"
    header = "#include <stddef.h>\n#include <stdio.h>\n#include <dmafile.h>\n"
    source.write_text(f"{header}int main(void)\n{{\n{chr(10).join(lines)}\n}}\n")
    said = []
    for flags in ((), WIDE):
        program = tmp_path / f"layout{len(flags)}"
        call(["cc", *flags, f"-I{HEADER.parent}", "-o", str(program), str(source)])
        said.append(subprocess.run([program], check=True, capture_output=True).stdout)
    assert said[0] == said[1]


@matrix
@pytest.mark.parametrize("kernel", STOCK)
def test_files_on_nfs(programs: Path, kernel: str) -> None:
    inside(programs, "network", f"--kernel={kernel}")


@matrix
@pytest.mark.parametrize("kernel", STOCK)
def test_a_suspend_in_the_middle_of_a_request(programs: Path, kernel: str) -> None:
    inside(programs, "suspended", f"--kernel={kernel}")


@matrix
@pytest.mark.parametrize("kernel", STOCK)
def test_every_allocation_may_fail(programs: Path, kernel: str, tmp_path: Path) -> None:
    device = ko.other(HERE / "testdev", kernels.find(kernel).build, tmp_path)
    inside(programs, "offline", f"--kernel={kernel}", words=(str(device),))


@matrix
@pytest.mark.parametrize("kernel", KERNELS)
def test_full_preemption(programs: Path, kernel: str) -> None:
    inside(programs, "preemptible", f"--kernel={kernel}", "--parallel", "--append=preempt=full")


kcsan = pytest.mark.skipif(not os.environ.get("KCSAN"), reason="KCSAN=1 make kernel-test")


@kcsan
def test_no_data_races(programs: Path) -> None:
    inside(programs, "races", "--kernel=base-6.12-kcsan", "--parallel")


@kcsan
def test_a_data_race_is_found(ready: None, tmp_path: Path) -> None:
    faulty = ko.other(HERE / "faulty", kernels.find("base-6.12-kcsan").build, tmp_path)
    script = f"echo on >/sys/kernel/debug/kcsan && insmod {faulty} fault=race"
    log = tmp_path / "log"
    words: list[str | Path] = ["--kernel=base-6.12-kcsan", "--parallel", "--kernel-log", log]
    result = vm(*words, "--", "sh", "-c", script)
    assert result.returncode == machine.COMPLAINT, result.stderr
    assert re.search(rb"BUG: KCSAN: data-race in .*\[faulty\]", log.read_bytes()), log.read_text()
