"""Crashes of the machine in the middle of saves: the old file or the new one.

What is checked, and how, is in tests/vm/inside/crashes.py.
"""

import os

import pytest

from tests.vm.programs import Programs
from vm.fixtures import Result

matrix = pytest.mark.skipif(not os.environ.get("MATRIX"), reason="make vm-test")
KEPT = "bbb"
"""Every sync of a save is made, each after a sync by another program."""


def wrong(result: Result) -> int:
    """In how many states of the disk something was wrong."""
    said = (result.stdout + result.stderr).decode()
    assert result.returncode == 0, said
    print(said)
    last = said.splitlines()[-1].split()
    assert last[3:6:2] == ["states,", "wrong"] and int(last[2]) > 20, said
    return int(last[4])


def crash(programs: Programs, count: int, plan: str, fs: str) -> int:
    options = ("--kernel=6.12",)
    return wrong(programs.run("crashes", "crash_saves", str(count), plan, fs, options=options))


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize(
    ("fs", "count"),
    [
        pytest.param("ext4", 10),
        *(pytest.param(fs, 200, marks=matrix) for fs in ("ext4", "xfs", "btrfs", "f2fs")),
    ],
)
def test_a_crash_leaves_the_old_file_or_the_new_one(
    programs: Programs, fs: str, count: int
) -> None:
    assert crash(programs, count, KEPT, fs) == 0


@matrix
@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize("plan", ["xbk", "kss"])
def test_a_sync_that_is_left_out_is_found(programs: Programs, plan: str) -> None:
    """The file's before it takes its place; what follows that, the folder's among it."""
    assert crash(programs, 10, plan, "ext4") > 0
