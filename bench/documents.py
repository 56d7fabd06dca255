"""Writes tables of results into the documents: `python -m bench.documents`.

A document has `<!-- table: RUN/NAME -->` and `<!-- end -->` around a table. The table is made from
the samples of the run in bench/results/DATE-RUN, and is also written there as NAME.csv. `RUN/about`
stands for a description of the measurement.
"""

import re
from pathlib import Path

from bench import dropping, holding, loading_weights, overlap, ranks, ring, runs
from bench.instructions import pins, premap, saves, series
from bench.instructions import tables as stock
from bench.instructions.measure import Measured
from bench.runs import RESULTS, ROOT, Rows, Run
from bench.seconds import run as seconds
from bench.words import table, with_tables

DOCUMENTS = (
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("kernel/docs/*.md")),
)
MAKERS = {
    "seconds": seconds.tables,
    "instructions": stock.tables,
    "series": series.tables,
    "by-size": series.tables_by_size,
    "premap": premap.tables,
    "pins": pins.tables,
    "saves": saves.tables,
    "holding": holding.tables,
    "overlap": overlap.tables,
    "dropping": dropping.tables,
    "ranks": ranks.tables,
    "weights": loading_weights.tables,
    "ring": ring.tables,
}
"""Functions that make the tables, by `bench` of a run's machine.json."""
SENTENCES = {"premap": premap.about, "pins": pins.about}
"""Functions for `RUN/about`, for benchmarks that do not only measure loads."""


def rows_of(name: str) -> Rows:
    """The table of that name, made from the samples."""
    folder, wanted = name.split("/")
    run = Run.read(runs.kept(folder))
    rows = MAKERS[run.machine["bench"]](run).get(wanted)
    assert rows is not None, f"{name}: no such table"
    return rows


def about(folder: str) -> str:
    run = Run.read(runs.kept(folder))
    if said := SENTENCES.get(run.machine["bench"]):
        return said(run)
    ways = [one for one in run.samples if one.get("part", "ways") == "ways"]
    return stock.about(Measured.of(run.machine["machine"], ways))


def made(name: str) -> str:
    """The text for that name in a document."""
    folder, wanted = name.split("/")
    if wanted == "about":
        return about(folder)
    return table(*rows_of(name))


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
    """Writes all tables, to the documents and as CSV next to the samples."""
    names = quoted()
    for name in names:
        runs.write_csv(path_of(name), rows_of(name))
    shown = {path_of(name) for name in names}
    for path in RESULTS.glob("*/*.csv"):
        if path not in shown:
            path.unlink()
    for document in DOCUMENTS:
        document.write_text(with_tables(document.read_text(), made))


def keep(folder: Path, date: str, name: str) -> Path:
    """Copies the run in a folder to the results, and updates the documents."""
    return written(Run.read(folder), date, name, shown=True)


def written(run: Run, date: str, name: str, shown: bool) -> Path:
    """Writes a run to the results and updates the documents, or writes it to .bench."""
    if shown:
        folder = runs.keep(run, date, name)
        update()
    else:
        folder = ROOT / ".bench" / f"{date}-{name}"
        run.write(folder)
    return folder


if __name__ == "__main__":
    update()
