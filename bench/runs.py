"""What a run leaves: a folder with the machine, a line a sample, and tables as CSV."""

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
"""Runs that documents show, in a folder DATE-NAME each; of a NAME only the newest."""
MACHINE, RUNS = "machine.json", "runs.jsonl"

Rows = tuple[Sequence[str], Sequence[Sequence[str]]]
"""A table: its head, and its rows."""


@dataclass(frozen=True)
class Run:
    """What such a folder holds."""

    machine: Mapping[str, Any]
    """What was measured, where, and by which version; `bench` says by which part of this."""
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
    """The folder of the run that documents mean by this name."""
    found = [one for one in RESULTS.iterdir() if named(one) == name]
    assert len(found) == 1, f"{name}: {len(found)} runs in {RESULTS}; the older ones leave"
    return found[0]


def is_kept(name: str) -> bool:
    return any(named(one) == name for one in RESULTS.iterdir())


def named(folder: Path) -> str | None:
    """Its name without the date."""
    match = re.fullmatch(r"\d{4}-\d\d-\d\d-(.+)", folder.name)
    return match[1] if match else None


def keep(run: Run, date: str, name: str) -> Path:
    """Puts a run where documents find it, in the place of the one before."""
    for old in RESULTS.iterdir():
        if named(old) == name:
            shutil.rmtree(old)
    folder = RESULTS / f"{date}-{name}"
    run.write(folder)
    return folder


def finish(run: Run, tables: Mapping[str, Rows], keep: bool) -> None:
    """Prints the tables of a run, and keeps it: for documents, or in .bench."""
    for rows in tables.values():
        print(f"\n{table(*rows)}")
    # It knows the modules whose runs these are.
    from bench import documents

    date, name = run.machine["machine"]["date"][:10], run.machine["bench"]
    print(f"\nEvery run: {documents.written(run, date, name, keep)}")
