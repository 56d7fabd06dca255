"""Crashes of the machine during saves, snapshots and recordings.

The checks are in tests/vm/inside/crashes.py.
"""

import itertools
import os

import pytest

from tests.vm.programs import Programs
from vm.fixtures import Result

matrix = pytest.mark.skipif(not os.environ.get("MATRIX"), reason="make test-all PARTS=matrix")
KEPT = {"crash_saves": "bbb", "crash_snapshots": "b" * 9, "crash_recordings": "b" * 11}
"""All syncs of a command are made, each after a sync by another program."""
SYSTEMS = ("ext4", "xfs", "btrfs", "f2fs")
COUNT = int(os.environ.get("COUNT", "200"))
"""The number of states between flushes, for each file system."""
LEFT_OUT = [
    # In a save: the sync of the file before it is renamed.
    ("crash_saves", "ext4", "xbk"),
    # In a save: the syncs after that, including that of the folder.
    ("crash_saves", "ext4", "kss"),
    # In a save: the sync of the file after it is renamed.
    ("crash_saves", "btrfs", "ksk"),
    # In a snapshot: the syncs of a source.
    ("crash_snapshots", "ext4", "xsb" + 6 * "b"),
    # In a snapshot: the syncs of the manifest after it is renamed, and of the folder.
    ("crash_snapshots", "ext4", 6 * "b" + "kss"),
    # In a recording: the syncs of the new file.
    ("crash_recordings", "ext4", "ss"),
    # In a recording: the sync of records before the index lists them.
    ("crash_recordings", "ext4", "bbsb"),
    # In a recording: the sync of the index.
    ("crash_recordings", "ext4", "bbbs"),
]


def wrong(result: Result, count: int) -> int:
    """The number of wrong states of the disk, of more than COUNT."""
    said = (result.stdout + result.stderr).decode()
    assert result.returncode == 0, said
    print(said)
    last = said.splitlines()[-1].split()
    assert last[3:6:2] == ["states,", "wrong"] and int(last[2]) > count, said
    return int(last[4])


def crash(programs: Programs, scenario: str, count: int, plan: str, fs: str) -> int:
    options = ("--kernel=6.12",)
    done = programs.run("crashes", scenario, str(count), plan, fs, options=options)
    return wrong(done, count)


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
def test_a_missing_sync_is_detected(programs: Programs, scenario: str, fs: str, plan: str) -> None:
    assert crash(programs, scenario, 10, plan, fs) > 0
