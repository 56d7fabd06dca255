"""Tests of how patches are kept, in a small tree in place of Linux. kernel/tests tests the real."""

import shutil
import subprocess
from pathlib import Path

import pytest

from vm import debian, series
from vm.host import Unavailable

AUTHOR = ["-c", "user.name=A", "-c", "user.email=a@example.org"]


def git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *AUTHOR, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source that the patches apply to; a folder in place of kernel/."""
    source = tmp_path / "linux-source-6.12_1" / "source"
    source.mkdir(parents=True)
    (source / "fs.c").write_text("".join(f"line {number}\n" for number in range(20)))
    monkeypatch.setattr(debian, "linux_source", lambda version: source)
    monkeypatch.setattr(series, "linux_source", lambda version: source)
    monkeypatch.setattr(series, "SERIES", tmp_path / "kernel")
    (tmp_path / "kernel").mkdir()
    return source


def test_branches_and_patches_are_the_same(linux: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    series.repository("6.12", tree)
    for topic, base, line in (
        ("fixes", "stock", 1),
        ("heap-read", "fixes", 10),
        ("memory-copy", "heap-read", 15),
        ("pins", "fixes", 18),
    ):
        git(tree, "checkout", "-q", "-b", topic, base)
        file = tree / "fs.c"
        file.write_text(file.read_text().replace(f"line {line}\n", f"{topic}\n"))
        git(tree, "commit", "-q", "-a", "-m", f"fs: {topic}\n\nWhy.")
    cover = tmp_path / "kernel" / "linux-6.12" / "pins" / series.COVER
    cover.parent.mkdir(parents=True)
    cover.write_text("a letter\n")
    written = series.save("6.12", tree)
    assert [path.parent.name for path in written] == ["fixes", "heap-read", "memory-copy", "pins"]
    assert cover.read_text() == "a letter\n"
    assert series.patches("6.12") == written
    assert series.message(written[0]) == "fs: fixes\n\nWhy."

    other = tmp_path / "other"
    series.repository("6.12", other)
    for topic in ("fixes", "memory-copy", "pins"):
        assert git(other, "show", f"{topic}:fs.c") == git(tree, "show", f"{topic}:fs.c"), topic
    before = [path.read_text() for path in written]
    assert [path.read_text() for path in series.save("6.12", other)] == before

    # A patch whose commit is gone goes, too.
    git(other, "checkout", "-q", "stock")
    git(other, "branch", "-q", "-f", "pins", "fixes")
    assert [path.parent.name for path in series.save("6.12", other)][-1] == "memory-copy"


def test_a_patch_applies_only_where_its_context_is(linux: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    series.repository("6.12", tree)
    git(tree, "checkout", "-q", "-b", "fixes", "stock")
    (tree / "fs.c").write_text((tree / "fs.c").read_text().replace("line 9\n", "nine\n"))
    git(tree, "commit", "-q", "-a", "-m", "fs: count\n\nWhy.")
    [patch] = series.save("6.12", tree)
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "fs.c").write_text("first\n" + (linux / "fs.c").read_text())
    series.apply(patch, moved)
    assert "nine\n" in (moved / "fs.c").read_text()
    (moved / "fs.c").write_text((linux / "fs.c").read_text().replace("line 7\n", "7\n"))
    with pytest.raises(Unavailable, match=r"fixes/0001-fs-count\.patch does not apply"):
        series.apply(patch, moved)


def test_a_topic_is_applied_with_what_it_needs(
    linux: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (linux / "Makefile").write_text("VERSION = 6\nPATCHLEVEL = 12\nSUBLEVEL = 117\n")
    (linux / "Kbuild").write_text("")
    tree = tmp_path / "tree"
    series.repository("6.12", tree)
    for topic, base, line in (("fixes", "stock", 1), ("heap-read", "fixes", 10)):
        git(tree, "checkout", "-q", "-b", topic, base)
        file = tree / "fs.c"
        file.write_text(file.read_text().replace(f"line {line}\n", f"{topic}\n"))
        git(tree, "commit", "-q", "-a", "-m", f"fs: {topic}\n\nWhy.")
    series.save("6.12", tree)

    plain = tmp_path / "plain"
    shutil.copytree(linux, plain)
    series.apply_to(plain, ["heap-read"])
    assert (plain / "fs.c").read_text() == (tree / "fs.c").read_text()

    for key in ("NAME", "EMAIL"):
        monkeypatch.setenv(f"GIT_COMMITTER_{key}", "b@example.org")
    git(tree, "checkout", "-q", "--detach", "stock")
    series.apply_to(tree, [])
    subjects = git(tree, "log", "--format=%s", "stock..").splitlines()
    assert subjects == ["fs: heap-read", "fs: fixes"]

    with pytest.raises(Unavailable, match=r"pins: not a topic of 6\.12: fixes, heap-read"):
        series.apply_to(plain, ["pins"])
    with pytest.raises(Unavailable, match=r"no Linux 6\.12 or 7\.3"):
        series.apply_to(tmp_path, [])
