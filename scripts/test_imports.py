"""What the tree's Python modules import of each other."""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAY_USE = {
    "bench": {"vm"},
    "demo": {"bench"},
    "kernel": {"bench", "tests", "vm"},
    "scripts": set(),
    "tests": {"vm"},
    "vm": set(),
}
"""The other folders that each may import."""
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in MAY_USE
    for path in (ROOT / folder).rglob("*.py")
}


def imported(path: Path) -> Iterator[str]:
    """The modules of this tree that a module imports, in functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                within = f"{node.module}.{name.name}"
                if within in MODULES:
                    yield within
                elif node.module in MODULES:
                    yield node.module


IMPORTS = {name: set(imported(path)) for name, path in MODULES.items()}


def test_no_module_imports_itself_by_way_of_others() -> None:
    graphlib.TopologicalSorter(IMPORTS).prepare()


def test_folders_import_only_the_folders_below_them() -> None:
    for name, others in IMPORTS.items():
        here, *_ = name.split(".")
        assert {other.split(".")[0] for other in others} <= {here, *MAY_USE[here]}, name
