"""Tests of kernel/test.py, which runs the tests of one kernel after another."""

from pathlib import Path

import pytest

from kernel import test as runner


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of tests in place of those of the kernels."""
    monkeypatch.setattr(runner, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    tests = tmp_path / "test_it.py"
    monkeypatch.setattr(runner, "TESTS", (str(tests),))
    return tests


def test_a_kernel_that_has_passed_is_not_tested_again(file: Path) -> None:
    file.write_text("def test() -> None:\n    pass\n")
    first = runner.test("6.12", "abc", [])
    assert first.startswith("passed at abc in ") and "1 passed" in first
    file.write_text("def test() -> None:\n    raise AssertionError\n")
    assert runner.test("6.12", "abc", []) == first
    for other in (("6.1", "abc"), ("6.12", "def"), ("6.12", "abc with changes")):
        assert runner.test(*other, []).startswith("FAILED at "), other


def test_a_failure_and_a_selection_are_not_kept(file: Path) -> None:
    file.write_text("def test_a() -> None:\n    pass\ndef test_b() -> None:\n    assert 0\n")
    assert runner.test("6.12", "abc", []).startswith("FAILED at abc")
    assert runner.test("6.12", "abc", ["-k", "test_a"]).startswith("passed at abc")
    assert runner.test("6.12", "abc", []).startswith("FAILED at abc")
