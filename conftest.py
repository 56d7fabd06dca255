"""Loads the fixtures that tests in several folders share, and marks slow tests."""

import os

import pytest

from kernel.test import kernel_of

pytest_plugins = ["vm.fixtures", "tests.vm.programs"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: for `make test-all`, not for `make test`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that boot machines are slow, except for the one that `make test` has. KERNEL selects
    the tests of one kernel, for kernel/test.py."""
    for item in items:
        if "ready" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
    if wanted := os.environ.get("KERNEL"):
        others = [item for item in items if kernel_of(item) != wanted]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if kernel_of(item) == wanted]
