#!/usr/bin/env python3
"""Puts measured tables into the documents that show them: `python3 bench/tables.py` writes them.

A document has `<!-- table: FOLDER/NAME -->` and `<!-- end -->` around a table: that of
bench/results/FOLDER/NAME.csv, which `dmafile bench --out` has written.
"""

import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
from dmafile_bench.words import table, with_tables

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "measuring.md")


def made(name: str) -> str | None:
    """The table of that name, or None where it isn't one of these."""
    path = RESULTS / f"{name}.csv"
    if "/" not in name:
        return None
    with path.open(newline="") as file:
        head, *rows = csv.reader(file)
    return table(head, rows)


def main() -> None:
    for document in DOCUMENTS:
        document.write_text(with_tables(document.read_text(), made))


if __name__ == "__main__":
    main()
