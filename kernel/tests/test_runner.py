"""Tests of kernel/test.py, which runs the tests of one kernel after another."""

import subprocess
import sys
from pathlib import Path

import pytest

from kernel import test as runner
from vm.host import ROOT

SUITE = """
from pathlib import Path
import pytest

@pytest.fixture
def late():
    yield
    assert not Path("breaks").exists()

@pytest.mark.parametrize("kernel", ["series-6.12", "series-6.12-debug", "6.1"])
def test_passes(kernel): pass

@pytest.mark.parametrize("kernel", ["series-6.12"])
def test_fails(kernel): assert not Path("breaks").exists()

@pytest.mark.parametrize("kernel", ["series-6.12"])
def test_is_skipped(kernel): pytest.skip("without a reason")

@pytest.mark.parametrize("kernel", ["series-6.12"])
def test_leaves_something(kernel, late): pass
"""


@pytest.fixture
def breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that makes tests fail, which are in place of those of the kernels."""
    monkeypatch.setattr(runner, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    tests = tmp_path / "test_it.py"
    monkeypatch.setattr(runner, "TESTS", (tests.name,))
    tests.write_text(SUITE)
    # The one of the tree, from another folder.
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p conftest")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path / "breaks"


def of_series(commit: str, *more: str) -> tuple[str, str]:
    """The result with these words, and what pytest has counted."""
    result, _, last = runner.test("series-6.12", commit, [*more]).partition(" (at last: ")
    return result, last.partition(" in ")[0]


def test_what_has_passed_at_a_commit_is_not_tested_again(breaks: Path) -> None:
    breaks.touch()
    failed = "FAILED at abc: 2 passed in 0.0 hours of tests"
    assert of_series("abc") == (failed, "1 failed, 3 passed, 1 skipped, 1 error")
    assert of_series("abc") == (failed, "1 failed, 1 passed, 1 skipped, 1 error")
    text = (breaks.parent / "results/series-6.12-abc.failures").read_text()
    assert text.count("test_it.py::") == 2
    assert "test_fails[series-6.12], call:" in text and "AssertionError" in text
    breaks.unlink()
    passed = "passed at abc: 4 passed in 0.0 hours of tests"
    assert of_series("abc") == (passed, "2 passed, 1 skipped")
    assert of_series("abc") == (passed, "1 skipped")
    # Those of other kernels are not of interest, and those of other commits are not known.
    assert runner.test("6.1", "abc", []).startswith("passed at abc: 1 passed")
    assert of_series("def")[1] == of_series("abc")[1] == "4 passed, 1 skipped"


def test_a_tree_with_changes_is_tested_again(breaks: Path) -> None:
    for _ in range(2):
        assert of_series("abc with changes")[1] == "4 passed, 1 skipped"


def test_a_selection_is_named_and_must_select_something(breaks: Path) -> None:
    for _ in range(2):
        result, _ = of_series("abc", "-k", "none")
        assert result.startswith("FAILED at abc -k none: ")
        result, counted = of_series("abc", "-k", "test_fails or test_is")
        assert result.startswith("passed at abc -k test_fails or test_is: 1 passed")
    assert counted == "1 skipped"


def test_a_worker_has_the_list_of_the_beginning(
    breaks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that replaces a worker that died, when more have passed."""
    assert of_series("abc")[1] == "4 passed, 1 skipped"
    kept = breaks.parent / "results/series-6.12-abc"
    for name, value in (("KERNEL", "series-6.12"), ("PASSED", kept), ("PASSED_BEFORE", 3)):
        monkeypatch.setenv(name, str(value))
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "test_it.py"]
    done = subprocess.run(words, cwd=breaks.parent, capture_output=True, text=True)
    assert done.stdout.count("test_it.py::") == 2, done
