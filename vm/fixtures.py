"""Fixtures and helpers for tests that boot machines; conftest.py loads the fixtures."""

import os
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

from vm import kernels, machine
from vm.host import ROOT, Unavailable

FILE_SYSTEMS = ("ext4", "xfs", "btrfs", "f2fs", "overlayfs", "tmpfs")
MOUNTS = ("/mnt", *(f"/mnt{number}" for number in range(2, len(FILE_SYSTEMS) + 1)))

PATIENCE = "--timeout=14400"
"""Only ends a machine that hangs: the longest test takes most of an hour, and longer on a busy
host."""

Result = subprocess.CompletedProcess[bytes]


@pytest.fixture(scope="session")
def ready() -> None:
    """Skips the test if machines cannot be booted here; with CI=true it fails instead."""
    try:
        machine.prepare(FILE_SYSTEMS)
        kernels.virtme_run()
        for name in kernels.STOCK:
            kernels.find(name)
    except Unavailable as error:
        missing(error)


@pytest.fixture(scope="session")
def ready_for_one() -> None:
    """The same for one kernel and one file system: less to fetch and to install."""
    try:
        machine.prepare(("ext4",))
        kernels.virtme_run()
        kernels.find("6.12")
    except Unavailable as error:
        missing(error)


@pytest.fixture(scope="session")
def counting(ready: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The same for tests that count instructions."""
    try:
        machine.build_counter(tmp_path_factory.mktemp("counter") / "counter.so")
    except Unavailable as error:
        missing(error)


def missing(error: Unavailable) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(str(error))
    pytest.skip(f"cannot boot a virtual machine: {error}")


def vm(*words: str | Path) -> Result:
    """Runs vm/run in the root of this tree."""
    command = [str(ROOT / "vm" / "run"), PATIENCE, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, stdin=subprocess.DEVNULL)


def passed(result: Result, end: str) -> None:
    """Asserts that the program finished (END is in its last line) and printed no errors."""
    printed, complaints = result.stdout.decode(), result.stderr.decode()
    said = printed + complaints
    assert result.returncode == 0, said
    assert printed and end in printed.splitlines()[-1], said
    # Progress messages are not errors: vm/run reports what it installs, fetches or builds the
    # first time, and debconf prints lines, too.
    news = (
        "need: installing ",
        "debconf: ",
        "vm: fetching ",
        "vm: making ",
        "vm: building ",
        "vm: the machine ended while booting",
    )
    assert all(line.startswith(news) for line in complaints.splitlines()), said
    print(said)
