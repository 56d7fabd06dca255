"""The command, the C library and the engine's tests on Debian's arm64 kernels, with base pages of
4 and of 16 KiB."""

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.vm.programs import INSIDE
from vm import arm64
from vm.host import ROOT, call, environment, need

pytestmark = pytest.mark.skipif(not os.environ.get("ARM64"), reason="make test-all PARTS=arm64")

VERSION = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
TRIPLE = "aarch64-unknown-linux-gnu"
GNU = "aarch64-linux-gnu"
TESTS = (
    # The tests beside the code.
    "dmafile",
    "buffer",
    "cache",
    "cancel",
    "hold",
    "leaks",
    "matrix",
    "model",
    "pages",
    "record",
    "save",
    "shared",
    "snapshot",
    "through",
    "verify",
)

NEED_MORE = (
    "those_of_the_header",
    "documented_reader",
    "many_records_fill_many_blocks",
    "files_are_rotated_by_size_and_read",
    "holes_in_shards_stay_holes",
    "every_source_of_every_size_is_loaded_again",
)
"""Tests that need a C compiler, Python, or options that busybox's programs do not have."""

LOADS = """
set -e
head -c 12345678 /dev/urandom >file
sync
want=$(sha256sum <file)
for to in memfd udmabuf; do
    for method in auto uring threads bounce; do
        echo 3 >/proc/sys/vm/drop_caches
        dmafile load file --to $to --method $method --quiet -- reader >read
        # A dma-buf ends at a page boundary.
        got=$(tail -n +2 read | head -c 12345678 | sha256sum)
        test "$got" = "$want" || { echo "$to by $method: other bytes"; exit 1; }
    done
done
dmafile save file copy
test "$(sha256sum <copy)" = "$want"
"""

CHECKS = ("exercise", "record", "save", "stream")
"""Programs of crates/capi/tests."""

CALLS = """
set -e
head -c 3150295 /dev/urandom >file
sync
want=$(sha256sum <file)
for method in auto uring threads; do
    check-exercise all file $method
    for kind in memfd anon udmabuf; do
        got=$(check-exercise cat file $method $kind | sha256sum)
        test "$got" = "$want" || { echo "$kind by $method: other bytes"; exit 1; }
    done
done
check-stream checks file
test "$(check-stream cat file | sha256sum)" = "$want"
mkdir saves
check-save $PWD/saves
check-record recording
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the command, a reader, checks of the C library, and the engine's tests."""
    need(f"gcc-{GNU}", "command", "-v", f"{GNU}-gcc")
    need("libc6-dev-arm64-cross", "test", "-e", f"/usr/{GNU}/include/stdio.h")
    folder = tmp_path_factory.mktemp("arm64")
    linker = f"CARGO_TARGET_{TRIPLE.upper().replace('-', '_')}_LINKER"
    command = ["cargo", "test", "--no-run", "--locked", f"--target={TRIPLE}"]
    command += [f"--package={name}" for name in ("dmafile", "dmafile-cli", "dmafile-capi")]
    command += ["--message-format=json"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**environment(), linker: f"{GNU}-gcc"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    archives = []
    for line in map(json.loads, done.stdout.splitlines()):
        target = line.get("target", {})
        archives += [
            name for name in line.get("filenames", []) if re.search(r"libdmafile_capi.*\.a$", name)
        ]
        if not line.get("executable"):
            continue
        if target["kind"] == ["bin"] and not line["profile"]["test"]:
            call([f"{GNU}-strip", "-o", str(folder / "dmafile"), line["executable"]])
        elif line["profile"]["test"] and str(ROOT / "crates" / "dmafile") in target["src_path"]:
            name = folder / f"test-{target['name']}"
            call([f"{GNU}-strip", "-o", str(name), line["executable"]])
    compiler = [f"{GNU}-gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-static"]
    call([*compiler, "-o", str(folder / "reader"), str(INSIDE / "reader.c")])
    [archive] = archives
    compiler += ["-pthread", f"-I{ROOT}/crates/capi/include", f'-DVERSION="{VERSION}"']
    for check in CHECKS:
        source = ROOT / "crates/capi/tests" / f"{check}.c"
        command = [*compiler, "-s", "-o", str(folder / f"check-{check}"), str(source)]
        # The linker warns of user and host lookups in static programs, which are not used.
        subprocess.run([*command, archive, "-lm"], check=True, stderr=subprocess.PIPE)
    return folder


@pytest.mark.parametrize("pages", arm64.IMAGES)
def test_the_command_loads_and_saves_every_byte(built: Path, pages: str, tmp_path: Path) -> None:
    arm64.run(arm64.find(pages), [built / "dmafile", built / "reader"], LOADS, tmp_path)


@pytest.mark.parametrize("pages", arm64.IMAGES)
def test_c_programs_load_and_save_every_byte(built: Path, pages: str, tmp_path: Path) -> None:
    programs = [built / f"check-{name}" for name in CHECKS]
    arm64.run(arm64.find(pages), programs, CALLS, tmp_path)


@pytest.mark.parametrize("pages", arm64.IMAGES)
@pytest.mark.parametrize("name", TESTS)
def test_the_tests_of_the_engine_pass(built: Path, pages: str, name: str, tmp_path: Path) -> None:
    skipped = "".join(f" --skip {one}" for one in NEED_MORE)
    script = f"DMAFILE_TEST_DIR=/mnt TMPDIR=/mnt test-{name}{skipped} 2>&1"
    said = arm64.run(arm64.find(pages), [built / f"test-{name}"], script, tmp_path)
    assert "test result: ok." in said, said
