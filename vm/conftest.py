"""How much of the matrix is run: `make test` takes a part of it, `make vm-test` all."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--matrix",
        action="store_true",
        help="loads of every kind by every method from every file system, each with each",
    )
