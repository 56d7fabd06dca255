"""Writes tables of results into the documents: `python -m bench.documents`.

A document has `<!-- table: RUN/NAME -->` and `<!-- end -->` around a table, which is NAME.csv in
results/DATE-RUN. `RUN/about` stands for a description of the measurement.
"""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from bench import runs
from bench.runs import KEPT, MACHINE, RAW, RESULTS, ROOT, Rows, Run
from bench.words import table, with_tables

PLACES = ("docs", "kernel/docs")
DOCUMENTS = (
    ROOT / "README.md",
    *(page for place in PLACES for page in sorted((ROOT / place).glob("*.md"))),
)


def made(name: str) -> str:
    """The text for that name in a document."""
    folder, wanted = name.split("/")
    if wanted == "about":
        said: str = json.loads((runs.kept(folder) / MACHINE).read_text())["about"]
        return said
    return table(*runs.read_csv(path_of(name)))


def quoted() -> list[str]:
    """The names of all tables that documents show, each once."""
    found = [
        name
        for document in DOCUMENTS
        for name in re.findall(r"<!-- table: (\S+) -->", document.read_text())
        if not name.endswith("/about")
    ]
    return list(dict.fromkeys(found))


def path_of(name: str) -> Path:
    folder, wanted = name.split("/")
    return runs.kept(folder) / f"{wanted}.csv"


def update() -> None:
    """Writes all tables to the documents, and deletes those that none shows."""
    shown = {path_of(name) for name in quoted()}
    for folder in KEPT:
        for path in folder.glob("*/*.csv"):
            if path not in shown:
                path.unlink()
    for document in DOCUMENTS:
        document.write_text(with_tables(document.read_text(), made))


def keep(folder: Path, date: str, name: str, results: Path = RESULTS) -> Path:
    """Copies a run to the results without its samples, replaces an older one of that name, and
    updates the documents."""
    for old in results.iterdir():
        if runs.named(old) == name:
            shutil.rmtree(old)
    place = results / f"{date}-{name}"
    place.mkdir()
    for path in (folder / MACHINE, *folder.glob("*.csv")):
        shutil.copy(path, place)
    update()
    return place


def finish(
    run: Run,
    name: str,
    tables: Mapping[str, Rows],
    *,
    kept: bool,
    results: Path = RESULTS,
) -> None:
    """Prints the tables of a run, and writes it to .bench, and to the results if it is KEPT."""
    for title, rows in tables.items():
        print(f"\n{title}\n\n{table(*rows)}")
    date = run.machine["machine"]["date"][:10]
    folder = RAW / f"{date}-{name}"
    run.write(folder, tables)
    print(f"\nAll runs: {folder}")
    if kept:
        print(f"Kept: {keep(folder, date, name, results)}")


if __name__ == "__main__":
    update()
