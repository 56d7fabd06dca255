"""Loads the fixtures that tests in several folders share."""

pytest_plugins = ["vm.fixtures", "tests.vm.programs"]
