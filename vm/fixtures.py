"""What tests that boot machines share: fixtures (conftest.py hands them to all) and a few calls."""

import os
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

from vm import kernels, machine
from vm.host import ROOT, Unavailable

TARGET = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target").absolute()
FILE_SYSTEMS = ("ext4", "xfs", "btrfs", "f2fs", "overlayfs", "tmpfs")
MOUNTS = ("/mnt", *(f"/mnt{number}" for number in range(2, len(FILE_SYSTEMS) + 1)))

PATIENCE = "--timeout=14400"
"""What cuts a machine that hangs, and nothing else: the longest test takes most of an hour, and the
host may have more to do."""

Result = subprocess.CompletedProcess[bytes]


@pytest.fixture(scope="session")
def ready() -> None:
    """Skips where there is nothing to boot; where nothing may go untested, fails instead."""
    try:
        machine.prepare(FILE_SYSTEMS)
        kernels.virtme_run()
        for name in kernels.STOCK:
            kernels.find(name)
    except Unavailable as error:
        missing(error)


@pytest.fixture(scope="session")
def counting(ready: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The same, where instructions are to be counted."""
    try:
        machine.build_counter(tmp_path_factory.mktemp("counter") / "counter.so")
    except Unavailable as error:
        missing(error)


def missing(error: Unavailable) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(str(error))
    pytest.skip(f"no virtual machine: {error}")


def build(*words: str) -> str:
    """Has Cargo build everything, as `make test` has already: of one crate, features are others."""
    command = ["cargo", "test", "--no-run", "--quiet", "--locked", "--workspace", *words]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def vm(*words: str | Path) -> Result:
    """Calls vm/run with the root of this tree as its current folder."""
    command = [str(ROOT / "vm" / "run"), PATIENCE, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, stdin=subprocess.DEVNULL)


def passed(result: Result, end: str) -> None:
    """The program came to its end, and nothing complained."""
    printed, complaints = result.stdout.decode(), result.stderr.decode()
    said = printed + complaints
    assert result.returncode == 0, said
    assert printed and end in printed.splitlines()[-1], said
    # vm/run installs, fetches or builds what it needs the first time, and says so; so does
    # Debian's debconf. Neither is a complaint.
    news = (
        "need: installing ",
        "debconf: ",
        "vm: fetching ",
        "vm: making ",
        "vm: building ",
        "vm: the machine died while it booted",
    )
    assert all(line.startswith(news) for line in complaints.splitlines()), said
    print(said)
