"""What is built on the host to run in a machine: the command and its helpers, the engine's tests.

Fixtures, that conftest.py in the root hands to all tests, and how to run what they give.
"""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from vm.compiled import static
from vm.fixtures import TARGET, Result, build, vm
from vm.host import ROOT, need

INSIDE = Path(__file__).parent / "inside"


@dataclass(frozen=True)
class Programs:
    """What is built on the host for the machine."""

    dmafile: Path
    helpers: Path

    def run(self, name: str, *words: str, options: tuple[str, ...] = ()) -> Result:
        """Runs one of the programs of tests/vm/inside in a machine."""
        # Without site-packages, which lie on the host and take longer than a load.
        python = ("python3", "-E", "-S", "-m", f"tests.vm.inside.{name}")
        return vm("--memory=3G", *options, "--", *python, self.dmafile, self.helpers, *words)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """The command as `cargo test` has built it, and the helpers, static: few bytes to read."""
    build()
    folder = tmp_path_factory.mktemp("programs")
    # Most of a debug build is what a debugger reads.
    built = TARGET / "debug" / "dmafile"
    subprocess.run(["strip", "-o", folder / "dmafile", built], check=True)
    helpers = folder / "helpers"
    helpers.mkdir()
    for name in ("importer", "maker", "pinner", "reader", "syncs"):
        static(INSIDE / f"{name}.c", helpers, "-Wextra")
    return Programs(folder / "dmafile", helpers)


def library() -> Path:
    """The C library, where `cargo test` leaves it: only `cargo build` puts it one folder higher."""
    artifacts = map(json.loads, build("--message-format=json").splitlines())
    files = [Path(name) for artifact in artifacts for name in artifact.get("filenames", ())]
    [found] = [file for file in files if file.match("libdmafile_capi-*.a")]
    return found


@pytest.fixture(scope="module")
def callers(programs: Programs) -> None:
    """More helpers, which call the C library."""
    archive = library()
    for name in ("parts", "recorder"):
        words: list[str | Path] = ["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-static"]
        words += [f"-I{ROOT}/capi/include", "-pthread", "-s", "-o", programs.helpers / name]
        words += [INSIDE / f"{name}.c", archive, "-lm"]
        # The linker warns of names of users and hosts, which need libraries and are not asked for.
        subprocess.run(words, check=True, stderr=subprocess.PIPE)


@pytest.fixture(scope="module")
def tools(ready: None) -> None:
    """What breaks disks and makes images."""
    need("dmsetup", "command", "-v", "dmsetup")
    need("squashfs-tools", "command", "-v", "mksquashfs")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the programs that `cargo test` runs, by the names of their sources."""
    folder = tmp_path_factory.mktemp("tests")
    for line in map(json.loads, build("--message-format=json").splitlines()):
        ours = line.get("manifest_path") == str(ROOT / "engine" / "Cargo.toml")
        if ours and line.get("executable") and line["profile"]["test"]:
            # Without what a debugger reads, there is little to fetch from the host.
            output = folder / line["target"]["name"]
            subprocess.run(["strip", "-o", output, line["executable"]], check=True)
    return folder


def passes(program: Path, *options: str) -> None:
    """Runs one of the engine's test programs on a disk of a machine."""
    script = f"cp {program} /tmp/test && cd /mnt && DMAFILE_TEST_DIR=/mnt exec /tmp/test"
    result = vm("--memory=3G", "--fs=ext4", *options, "--", "sh", "-c", script)
    said = (result.stdout + result.stderr).decode(errors="replace")
    assert result.returncode == 0 and "test result: ok." in said, said
    assert "SKIP: no dma-bufs" not in said, said
