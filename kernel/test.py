"""Tests the kernel part, one kernel after another (`make -C kernel test`).

python3 -m kernel.test [KERNEL...] [-- ARGUMENTS OF PYTEST]

A kernel that has passed at this commit is not tested again, so a run that was interrupted goes on
where it stopped. At the end the results are printed, each with its commit.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vm.host import ROOT

KERNELS = ("6.1", "6.12", "newest", "series-6.12", "series-7.3")
"""All kernels that tests are for; small ones count as the series of their version."""
RESULTS = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "kernel-test"
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
    """Runs the tests of a kernel, unless they have passed at this commit. Returns the result."""
    file = RESULTS / f"{kernel}.json"
    if file.exists() and not more and "with changes" not in commit:
        before = json.loads(file.read_text())
        if before["commit"] == commit:
            return str(before["result"])
    print(f"kernel-test: {kernel}", flush=True)
    start = time.monotonic()
    command = [sys.executable, "-m", "pytest", "--quiet", "-rs", "--durations=0"]
    command += ["--durations-min=5", "--numprocesses=2", "--dist=load", "--maxschedchunk=1"]
    settings = {**os.environ, "MATRIX": "1", "CI": "true", "KERNEL": kernel}
    done = subprocess.run(
        [*command, *more, *TESTS], cwd=ROOT, env=settings, stdout=subprocess.PIPE, text=True
    )
    print(done.stdout, flush=True)
    took = (time.monotonic() - start) / 3600
    last = done.stdout.strip().splitlines()[-1:] or [""]
    how = "passed" if done.returncode == 0 else "FAILED"
    result = f"{how} at {commit} in {took:.1f} hours ({last[0]})"
    if how == "passed" and not more:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"commit": commit, "result": result}))
    return result


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
