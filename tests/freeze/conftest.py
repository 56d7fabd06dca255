"""What tests of freezing need."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.freeze import criu
from tests.vm.programs import TARGET, build
from vm.host import Unavailable


@pytest.fixture(scope="module")
def path() -> Iterator[str]:
    """$PATH with criu."""
    build()
    try:
        yield f"{criu.folder()}:{os.environ['PATH']}"
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=TARGET) as name:
        yield Path(name)
