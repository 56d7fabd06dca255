"""For the tests of all folders: what those share that boot machines."""

pytest_plugins = ["vm.fixtures", "tests.vm.programs"]
