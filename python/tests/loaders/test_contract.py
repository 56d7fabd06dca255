"""The checks of contract.py, with a source of this test instead of a wheel."""

import ast
import hashlib
from typing import Any

import pytest

from loaders.contract import EXPECTED, Call, Has, Moved, Same, Says

SOURCE = """
from elsewhere import taken
LIMIT = 3

class Loader:
    field: int = 0

    def __init__(self, config, *, strict=True):
        self.config = config

    def read(self, source, prefix="", **more):
        return open(source)
"""
FUNCTION = "def read(self, source, prefix='', **more):\n    return open(source)"
DIGEST = hashlib.sha256(ast.unparse(ast.parse(FUNCTION)).encode()).hexdigest()[:16]

HOLDS = [
    Call("it.py", "Loader.read", "source"),
    Call("it.py", "Loader.read", "source prefix other"),
    Call("it.py", "Loader.__init__", "config strict"),
    Has("it.py", "", "taken LIMIT Loader"),
    Has("it.py", "Loader", "field config read"),
    Says("it.py", "Loader.read", "return open(source)"),
    Same("it.py", "Loader.read", DIGEST),
]
MOVED = [
    (Call("other.py", "Loader.read", "source"), "there is no other.py"),
    (Call("it.py", "Loader.write", "source"), "there is no Loader.write"),
    (Call("it.py", "Loader.read", "prefix"), "needs source"),
    (Call("it.py", "Loader.read", "prefix source"), "another order"),
    (Call("it.py", "Loader.__init__", "config lenient"), "no argument lenient"),
    (Has("it.py", "", "LIMITS"), "has no LIMITS"),
    (Has("it.py", "Loader", "field gone"), "has no gone"),
    (Says("it.py", "Loader.read", "mmap"), "no longer says"),
    (Same("it.py", "Loader.read", "0"), f"but {DIGEST}"),
]


def read(file: str) -> str:
    return {"it.py": SOURCE}[file]


@pytest.mark.parametrize("expected", HOLDS)
def test_a_matching_expectation_raises_nothing(expected: Any) -> None:
    expected.check(read)


@pytest.mark.parametrize("expected,text", MOVED)
def test_a_changed_source_is_named(expected: Any, text: str) -> None:
    with pytest.raises(Moved, match=text):
        expected.check(read)


def test_every_package_has_a_contract() -> None:
    assert set(EXPECTED) == {"vllm", "sglang", "transformers", "torch"}
