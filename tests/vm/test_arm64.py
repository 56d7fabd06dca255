"""The command and the engine's tests on Debian's arm64 kernels, with pages of 4 and of 16 KiB."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.vm.programs import INSIDE
from vm import arm64
from vm.host import ROOT, call, environment, need

pytestmark = pytest.mark.skipif(not os.environ.get("ARM64"), reason="make arm64-test")

TRIPLE = "aarch64-unknown-linux-gnu"
GNU = "aarch64-linux-gnu"
TESTS = (
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

LOADS = """
set -e
head -c 12345678 /dev/urandom >file
sync
want=$(sha256sum <file)
for to in memfd udmabuf; do
    for method in auto uring threads bounce read mmap; do
        echo 3 >/proc/sys/vm/drop_caches
        dmafile load file --to $to --method $method --quiet -- reader >read || test $method = mmap
        # A dma-buf ends at a page boundary.
        got=$(tail -n +2 read | head -c 12345678 | sha256sum)
        test "$got" = "$want" || { echo "$to by $method: other bytes"; exit 1; }
    done
done
dmafile save --from file copy
test "$(sha256sum <copy)" = "$want"
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the command, a reader, and the engine's tests."""
    need(f"gcc-{GNU}", "command", "-v", f"{GNU}-gcc")
    folder = tmp_path_factory.mktemp("arm64")
    linker = f"CARGO_TARGET_{TRIPLE.upper().replace('-', '_')}_LINKER"
    command = ["cargo", "test", "--no-run", "--locked", f"--target={TRIPLE}"]
    command += ["--package=dmafile", "--package=dmafile-cli", "--message-format=json"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**environment(), linker: f"{GNU}-gcc"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for line in map(json.loads, done.stdout.splitlines()):
        target = line.get("target", {})
        if not line.get("executable"):
            continue
        if target["kind"] == ["bin"] and not line["profile"]["test"]:
            call([f"{GNU}-strip", "-o", str(folder / "dmafile"), line["executable"]])
        elif target["kind"] == ["test"] and str(ROOT / "engine") in target["src_path"]:
            name = folder / f"test-{target['name']}"
            call([f"{GNU}-strip", "-o", str(name), line["executable"]])
    flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-static"]
    call([f"{GNU}-gcc", *flags, "-o", str(folder / "reader"), str(INSIDE / "reader.c")])
    return folder


@pytest.mark.parametrize("pages", arm64.IMAGES)
def test_the_command_loads_and_saves_every_byte(built: Path, pages: str, tmp_path: Path) -> None:
    arm64.run(arm64.find(pages), [built / "dmafile", built / "reader"], LOADS, tmp_path)


@pytest.mark.parametrize("pages", arm64.IMAGES)
@pytest.mark.parametrize("name", TESTS)
def test_the_tests_of_the_engine_pass(built: Path, pages: str, name: str, tmp_path: Path) -> None:
    script = f"DMAFILE_TEST_DIR=/mnt test-{name} 2>&1"
    said = arm64.run(arm64.find(pages), [built / f"test-{name}"], script, tmp_path)
    assert "test result: ok." in said, said
