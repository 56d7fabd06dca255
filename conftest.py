"""Loads the fixtures that tests in several folders share, and marks slow tests."""

import os
from pathlib import Path

import pytest

from kernel.test import Passed, kernel_of

pytest_plugins = ["vm.fixtures", "tests.vm.programs"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: for `make test-all`, not for `make test`")
    # Workers of xdist report to the process that started them, which alone keeps what passed.
    if (file := os.environ.get("PASSED")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Passed(Path(file)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that boot machines are slow, except for the one that `make test` has. KERNEL selects
    the tests of one kernel, and PASSED names those that need not run again, for kernel/test.py."""
    for item in items:
        if "ready" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
    if wanted := os.environ.get("KERNEL"):
        passed = {}
        if file := os.environ.get("PASSED"):
            # Later ones would be another list in a worker that replaces one that has died.
            passed = Passed(Path(file)).times(int(os.environ["PASSED_BEFORE"]))
        others = [it for it in items if kernel_of(it) != wanted or it.nodeid in passed]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
