"""Programs that are built on the host and run in a machine: the command, its helpers, engine tests.

The fixtures here are available to all tests through conftest.py in the root.
"""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from vm.compiled import static
from vm.fixtures import Result, vm
from vm.host import ROOT, need

INSIDE = Path(__file__).parent / "inside"
WITH = ("--features", "dmafile-cli/bpf,dmafile-cli/remote,dmafile-python/remote")
"""As in the Makefile: otherwise all is built twice."""
TARGET = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target").absolute()


def build(*words: str) -> str:
    """Builds the whole workspace, as `make test` does; a single crate would get other features."""
    command = ["cargo", "test", "--no-run", "--quiet", "--locked", "--workspace", *WITH, *words]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


@dataclass(frozen=True)
class Programs:
    """Programs that are built on the host for the machine."""

    dmafile: Path
    helpers: Path

    def run(self, name: str, *words: str, options: tuple[str, ...] = ()) -> Result:
        """Runs one of the programs of tests/vm/inside in a machine."""
        # Without site-packages, which are on the host and take longer to import than a load takes.
        python = ("python3", "-E", "-S", "-m", f"tests.vm.inside.{name}")
        return vm("--memory=3G", *options, "--", *python, self.dmafile, self.helpers, *words)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """The command as built by `cargo test`, and static helpers, so that few bytes must be read."""
    build()
    folder = tmp_path_factory.mktemp("programs")
    # Most of a debug build is debug information.
    built = TARGET / "debug" / "dmafile"
    subprocess.run(["strip", "-o", folder / "dmafile", built], check=True)
    helpers = folder / "helpers"
    helpers.mkdir()
    for name in ("importer", "maker", "pinner", "reader", "syncs"):
        static(INSIDE / f"{name}.c", helpers, "-Wextra")
    return Programs(folder / "dmafile", helpers)


def library() -> Path:
    """The C library as built by `cargo test`; only `cargo build` puts it one folder higher."""
    artifacts = map(json.loads, build("--message-format=json").splitlines())
    files = [Path(name) for artifact in artifacts for name in artifact.get("filenames", ())]
    [found] = [file for file in files if file.match("libdmafile_capi-*.a")]
    return found


@pytest.fixture(scope="module")
def callers(programs: Programs) -> None:
    """Additional helpers, which call the C library."""
    archive = library()
    for name in ("parts", "recorder"):
        words: list[str | Path] = ["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-static"]
        words += [f"-I{ROOT}/crates/capi/include", "-pthread", "-s", "-o", programs.helpers / name]
        words += [INSIDE / f"{name}.c", archive, "-lm"]
        # The linker warns of user and host lookups in static programs, which are not used.
        subprocess.run(words, check=True, stderr=subprocess.PIPE)


@pytest.fixture(scope="module")
def tools(ready: None) -> None:
    """Tools that make disks fail and make images."""
    need("dmsetup", "command", "-v", "dmsetup")
    need("squashfs-tools", "command", "-v", "mksquashfs")


@pytest.fixture(scope="module")
def servers(ready: None) -> None:
    """A FUSE server."""
    need("bindfs", "command", "-v", "bindfs")
    need("iproute2", "command", "-v", "ip")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the programs that `cargo test` runs, by the names of their sources."""
    folder = tmp_path_factory.mktemp("tests")
    for line in map(json.loads, build("--message-format=json").splitlines()):
        ours = line.get("manifest_path") == str(ROOT / "crates" / "dmafile" / "Cargo.toml")
        if ours and line.get("executable") and line["profile"]["test"]:
            # Without debug information, little must be read from the host.
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
