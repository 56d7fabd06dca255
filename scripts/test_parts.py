"""Which parts of `make test-all` run, and when they end, in a repository of two parts."""

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts import parts
from scripts.parts import PARTS, Part, Record, changed, in_turn, run_all, run_in_time

ROOT = Path(__file__).resolve().parent.parent


def part(name: str, command: str = ":", minutes: float = 1, needs: Sequence[str] = ()) -> Part:
    return Part(name, "", minutes, command, (f"{name}/",), needs)


A, B = part("a"), part("b")


class Repository:
    """A repository with a file for each part."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.git("init", "--quiet", "--initial-branch=main")
        (folder / "Cargo.toml").write_text('rust-version = "1"\n')
        for name in ("a", "b"):
            (folder / name).mkdir()
            self.commit(name)

    def git(self, *words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        command = ["git", *who, *words]
        return subprocess.check_output(command, cwd=self.folder, text=True).strip()

    def commit(self, name: str) -> None:
        """A commit that changes a file of this part."""
        with (self.folder / name / "file").open("a") as file:
            file.write("line\n")
        self.git("add", ".")
        self.git("commit", "--quiet", f"--message={name}")

    def merge(self, name: str) -> None:
        """A merge of a branch that changes a file of this part."""
        self.git("checkout", "--quiet", "-b", "branch")
        self.commit(name)
        self.git("checkout", "--quiet", "main")
        self.git("merge", "--quiet", "--no-ff", "--no-edit", "branch")
        self.git("branch", "--quiet", "--delete", "branch")

    def record(self) -> Record:
        return Record(self.folder / ".git" / "parts.json")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    return Repository(tmp_path)


def names(some: Sequence[Part]) -> list[str]:
    return [one.name for one in some]


def test_every_part_has_its_own_name_and_files_that_exist() -> None:
    assert len({one.name for one in PARTS}) == len(PARTS)
    for one in PARTS:
        assert all((ROOT / path).exists() for path in one.paths), one


def test_a_part_whose_files_changed_since_it_passed_comes_first(repository: Repository) -> None:
    for one in (A, B):
        repository.record().add(one)
    assert names(in_turn([B, A], repository.record())) == ["a", "b"]
    repository.commit("b")
    assert names(in_turn([A, B], repository.record())) == ["b", "a"]
    # It passed at a commit that is not here.
    known = json.loads(repository.record().path.read_text())
    known["a"][0] = "0" * 40
    repository.record().path.write_text(json.dumps(known))
    repository.record().add(B)
    assert names(in_turn([B, A], repository.record())) == ["a", "b"]


def test_without_a_record_the_last_merge_and_later_commits_count(repository: Repository) -> None:
    assert changed(None) is None
    repository.merge("b")
    assert changed(None) == ["b/file"]
    repository.commit("a")
    assert changed(None) == ["a/file", "b/file"]


def test_only_a_clean_tree_is_recorded(repository: Repository) -> None:
    (repository.folder / "a/file").write_text("changed\n")
    repository.record().add(A)
    assert repository.record().commit(A) is None
    repository.git("checkout", "--quiet", ".")
    repository.record().add(A)
    assert repository.record().commit(A) == repository.git("rev-parse", "HEAD")


def test_what_lacks_something_is_skipped(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    one = part("a", "false", needs=("true", "exit 3"))
    assert run_all([one, B], repository.record()) == 0
    said = capsys.readouterr().out
    assert "a: skipped: not possible here: exit 3" in said
    assert "b: passed" in said
    assert repository.record().commit(A) is None
    assert repository.record().commit(B) is not None


def test_a_failure_is_the_status(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = part("a", "exit 3")
    assert run_all([failing, B], repository.record()) == 1
    assert "a: FAILED" in (said := capsys.readouterr().out) and "b: passed" in said
    assert run_in_time([failing, B], repository.record(), 0) == 1
    assert repository.record().commit(A) is None


def test_what_does_not_fit_into_the_hour_is_left_out(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    long = part("a", "exit 3", minutes=50)
    assert run_in_time([long, B], repository.record(), used=20 * 60) == 0
    said = capsys.readouterr().out
    # The machine is slower than usual, by what `make test` took.
    assert "a: left out: no time for 125 minutes" in said and "b: passed" in said


def test_at_the_limit_a_part_and_what_it_started_are_ended(
    repository: Repository, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "LIMIT", 1)
    endless = part("a", "sleep 3600 & echo $! >pid; sleep 3600")
    assert run_in_time([endless], repository.record(), used=0) == 0
    assert "a: ended: the time is over" in capsys.readouterr().out
    # On a slow machine it may be ended before it has started anything.
    note = repository.folder / "pid"
    pid = note.read_text().strip() if note.exists() else ""
    while pid and not ended(pid):
        time.sleep(0.01)
    assert repository.record().commit(A) is None


def ended(pid: str) -> bool:
    """Whether the process is gone, or only its status is left."""
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
