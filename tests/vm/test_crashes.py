"""Crashes of the machine in the middle of saves, snapshots and recordings.

What is checked, and how, is in tests/vm/inside/crashes.py.
"""

import itertools
import os

import pytest

from tests.vm.programs import Programs
from vm.fixtures import Result

matrix = pytest.mark.skipif(not os.environ.get("MATRIX"), reason="make vm-test")
KEPT = {"crash_saves": "bbb", "crash_snapshots": "b" * 9, "crash_recordings": "b" * 11}
"""Every sync of a command is made, each after a sync by another program."""
SYSTEMS = ("ext4", "xfs", "btrfs", "f2fs")
COUNT = int(os.environ.get("COUNT", "200"))
"""States of the disk between flushes, of each file system."""
LEFT_OUT = [
    # Of a save: the file's before it takes its place.
    ("crash_saves", "ext4", "xbk"),
    # What follows that, the folder's among it.
    ("crash_saves", "ext4", "kss"),
    # The file's when it has its name.
    ("crash_saves", "btrfs", "ksk"),
    # Of a snapshot: those of a source.
    ("crash_snapshots", "ext4", "xsb" + 6 * "b"),
    # The manifest's when it has taken the place, and the folder's.
    ("crash_snapshots", "ext4", 6 * "b" + "kss"),
    # Of a recording: those of its file, when it has just come into being.
    ("crash_recordings", "ext4", "ss"),
    # The records' before the index names them.
    ("crash_recordings", "ext4", "bbsb"),
    # The index's.
    ("crash_recordings", "ext4", "bbbs"),
]


def wrong(result: Result) -> int:
    """In how many states of the disk something was wrong."""
    said = (result.stdout + result.stderr).decode()
    assert result.returncode == 0, said
    print(said)
    last = said.splitlines()[-1].split()
    assert last[3:6:2] == ["states,", "wrong"] and int(last[2]) > 20, said
    return int(last[4])


def crash(programs: Programs, scenario: str, count: int, plan: str, fs: str) -> int:
    options = ("--kernel=6.12",)
    return wrong(programs.run("crashes", scenario, str(count), plan, fs, options=options))


@pytest.mark.usefixtures("tools", "callers")
@pytest.mark.parametrize(
    ("scenario", "fs", "count"),
    [
        ("crash_saves", "ext4", 10),
        *(
            pytest.param(scenario, fs, COUNT, marks=matrix)
            for scenario, fs in itertools.product(KEPT, SYSTEMS)
        ),
    ],
)
def test_a_crash_leaves_the_old_or_the_new_data(
    programs: Programs, scenario: str, fs: str, count: int
) -> None:
    assert crash(programs, scenario, count, KEPT[scenario], fs) == 0


@matrix
@pytest.mark.usefixtures("tools", "callers")
@pytest.mark.parametrize(("scenario", "fs", "plan"), LEFT_OUT)
def test_a_missing_sync_is_detected(
    programs: Programs, scenario: str, fs: str, plan: str
) -> None:
    assert crash(programs, scenario, 10, plan, fs) > 0
