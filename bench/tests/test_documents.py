"""What the documents show is what was measured."""

from pathlib import Path

import pytest
from dmafile_bench.words import with_tables
from tables import DOCUMENTS, made


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tables_are_those_of_the_results(document: Path) -> None:
    text = document.read_text()
    names: list[str] = []

    def noted(name: str) -> str | None:
        names.append(name)
        return made(name)

    assert with_tables(text, noted) == text, "run bench/tables.py"
    assert any("/" in name for name in names), "it shows nothing of bench/results"
