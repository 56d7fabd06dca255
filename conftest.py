"""Loads the fixtures that tests in several folders share, and marks slow tests."""

import pytest

pytest_plugins = ["vm.fixtures", "tests.vm.programs"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: for `make test-all`, not for `make test`")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that boot machines are slow, except for the one that `make test` has."""
    for item in items:
        if "ready" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
