"""Folders of results: a description of the machine, a line for each sample, and tables as CSV."""

import csv
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.words import table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
"""The runs that documents show, each in a folder DATE-NAME; only the newest of each NAME."""
MACHINE, RUNS = "machine.json", "runs.jsonl"

Rows = tuple[Sequence[str], Sequence[Sequence[str]]]
"""A table: its header, and its rows."""


@dataclass(frozen=True)
class Run:
    """The contents of such a folder."""

    machine: Mapping[str, Any]
    """What was measured, on which machine and with which version. `bench` names the benchmark."""
    samples: Sequence[Mapping[str, Any]]

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MACHINE).write_text(as_json(self.machine, indent=1))
        (folder / RUNS).write_text("".join(as_json(one) for one in self.samples))

    @classmethod
    def read(cls, folder: Path) -> "Run":
        lines = (folder / RUNS).read_text().splitlines()
        return cls(json.loads((folder / MACHINE).read_text()), [json.loads(one) for one in lines])


def as_json(what: Mapping[str, Any], indent: int | None = None) -> str:
    return json.dumps(what, ensure_ascii=False, indent=indent) + "\n"


def write_csv(path: Path, rows: Rows) -> None:
    head, lines = rows
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([head, *lines])


def kept(name: str) -> Path:
    """The folder of the run that documents refer to by NAME."""
    found = [one for one in RESULTS.iterdir() if named(one) == name]
    assert len(found) == 1, f"{name}: {len(found)} runs in {RESULTS}; delete the older ones"
    return found[0]


def is_kept(name: str) -> bool:
    return any(named(one) == name for one in RESULTS.iterdir())


def named(folder: Path) -> str | None:
    """The name of a folder of results, without the date."""
    match = re.fullmatch(r"\d{4}-\d\d-\d\d-(.+)", folder.name)
    return match[1] if match else None


def keep(run: Run, date: str, name: str) -> Path:
    """Writes a run to the results, and replaces an older one of that name."""
    for old in RESULTS.iterdir():
        if named(old) == name:
            shutil.rmtree(old)
    folder = RESULTS / f"{date}-{name}"
    run.write(folder)
    return folder


def finish(run: Run, tables: Mapping[str, Rows], keep: bool) -> None:
    """Prints the tables of a run, and writes it to the results or to .bench."""
    for rows in tables.values():
        print(f"\n{table(*rows)}")
    # Imported here because documents imports the modules that call this function.
    from bench import documents

    date, name = run.machine["machine"]["date"][:10], run.machine["bench"]
    print(f"\nAll runs: {documents.written(run, date, name, keep)}")
