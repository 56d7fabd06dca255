"""Tests the kernel part, one kernel after another (`make -C kernel test`).

python3 -m kernel.test [KERNEL...] [-- ARGUMENTS OF PYTEST]

Tests that have passed at this commit are not run again, so a run that was interrupted goes on where
it stopped; in a tree with changes, all are run. At the end the results are printed, each with its
commit.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vm.host import ROOT

KERNELS = ("6.1", "6.12", "newest", "series-6.12", "series-7.3")
"""All kernels that tests are for; small ones count as the series of their version."""
RESULTS = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "kernel-test"
NO_TESTS = int(pytest.ExitCode.NO_TESTS_COLLECTED)
OF_SERIES = ("test_patches", "test_series", "test_pins")
"""Files with tests of the patches."""
TESTS = (
    "kernel",
    "tests/vm/test_module_loads.py",
    "tests/vm/test_pins.py",
    "bench/instructions",
)


def main() -> None:
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    names, more = sys.argv[1:end] or list(KERNELS), sys.argv[end + 1 :]
    if unknown := set(names) - set(KERNELS):
        sys.exit(f"kernel-test: {' '.join(unknown)}: not one of {', '.join(KERNELS)}")
    commit = git("rev-parse", "--short=12", "HEAD").strip()
    if git("status", "--porcelain"):
        commit += " with changes"
    said = {name: test(name, commit, more) for name in names}
    for name, result in said.items():
        print(f"kernel-test: {name}: {result}")
    sys.exit(any("passed at" not in result for result in said.values()))


def test(kernel: str, commit: str, more: list[str]) -> str:
    """Runs the tests of a kernel that have not passed at this commit. Returns the result."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    kept = RESULTS / f"{kernel}-{commit}"
    for old in RESULTS.glob(f"{kernel}-*"):
        if old != kept or "with changes" in commit:
            old.unlink()
    before = len(Passed(kept).times())
    # pytest itself shows them at the end, which is hours away.
    print(f"kernel-test: {kernel}; failures are written to {failures(kept)}", flush=True)
    command = [sys.executable, "-m", "pytest", "--quiet", "-rs", "--durations=0"]
    command += ["--durations-min=5", "--numprocesses=2", "--dist=load", "--maxschedchunk=1"]
    settings = {**os.environ, "MATRIX": "1", "CI": "true", "KERNEL": kernel}
    settings |= {"PASSED": str(kept), "PASSED_BEFORE": str(before)}
    started = [*command, *more, *TESTS]
    with subprocess.Popen(
        started, cwd=ROOT, env=settings, stdout=subprocess.PIPE, text=True
    ) as run:
        last = ""
        for line in run.stdout or ():
            print(line, end="", flush=True)
            last = line.strip() or last
    times = Passed(kept).times()
    # All have passed before.
    is_done = run.returncode == 0 or (run.returncode == NO_TESTS and before and not more)
    how = "passed" if is_done else "FAILED"
    which = " ".join([commit, *more])
    hours = sum(times.values()) / 3600
    return f"{how} at {which}: {len(times)} passed in {hours:.1f} hours of tests (at last: {last})"


def failures(kept: Path) -> Path:
    return kept.with_name(f"{kept.name}.failures")


class Passed:
    """Keeps which tests have passed, as a plugin of pytest: a line of seconds and name for each."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.spent: dict[str, float] = {}
        self.called: set[str] = set()

    def times(self, most: int | None = None) -> dict[str, float]:
        """The seconds by test; of the first ones only, as they were at some time."""
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        words = [line.split("\t", 1) for line in lines if line.count("\t")]
        return {name: float(seconds) for seconds, name in words[:most]}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid
        self.spent[name] = self.spent.get(name, 0) + report.duration
        if report.failed:
            with failures(self.file).open("a") as file:
                file.write(f"{name}, {report.when}:\n{report.longreprtext}\n\n")
        if report.when == "call" and report.passed:
            self.called.add(name)
        if report.when == "teardown" and report.passed and name in self.called:
            with self.file.open("a") as file:
                file.write(f"{self.spent[name]:.0f}\t{name}\n")


def kernel_of(item: pytest.Item) -> str:
    """Which of KERNELS a test is for, by its parameters, or by its file."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    if "version" in parameters:
        return f"series-{parameters['version']}"
    default = "series-6.12" if item.path.stem in OF_SERIES else "6.12"
    kind, version, *_ = (*str(parameters.get("kernel", default)).split("-"), "")
    if kind in ("base", "series"):
        # The module's tests are on small kernels, too.
        return version if (kind, version) == ("base", "6.12") else f"series-{version}"
    return kind


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


if __name__ == "__main__":
    main()
