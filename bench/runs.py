"""Folders of results: a description of the machine, a line for each sample, and tables as CSV.

A benchmark writes all of it to .bench, which git ignores. What documents show is kept in `results`,
without the samples.
"""

import csv
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RAW = ROOT / ".bench"
RESULTS = ROOT / "bench" / "results"
KEPT = (RESULTS, ROOT / "kernel" / "bench" / "results")
"""The runs that documents show, each in a folder DATE-NAME; only the newest of each NAME."""
MACHINE, RUNS = "machine.json", "runs.jsonl"

Rows = tuple[Sequence[str], Sequence[Sequence[str]]]
"""A table: its header, and its rows."""


@dataclass(frozen=True)
class Run:
    """The contents of a folder in .bench, without the tables."""

    machine: Mapping[str, Any]
    """What was measured, on which machine and with which version. `bench` names the benchmark, and
    `about` is a sentence for documents."""
    samples: Sequence[Mapping[str, Any]]

    def write(self, folder: Path, tables: Mapping[str, Rows]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MACHINE).write_text(as_json(self.machine, indent=1))
        (folder / RUNS).write_text("".join(as_json(one) for one in self.samples))
        for name, rows in tables.items():
            write_csv(folder / f"{name}.csv", rows)

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


def read_csv(path: Path) -> Rows:
    with path.open(newline="") as file:
        head, *lines = csv.reader(file)
    return head, lines


def kept(name: str) -> Path:
    """The folder of the run that documents refer to by NAME."""
    found = [one for folder in KEPT for one in folder.iterdir() if named(one) == name]
    assert len(found) == 1, f"{name}: {len(found)} runs in the results; delete the older ones"
    return found[0]


def latest(name: str) -> Run | None:
    """The newest run of that name in .bench."""
    found = [one for one in RAW.glob("*") if named(one) == name]
    return Run.read(max(found)) if found else None


def named(folder: Path) -> str | None:
    """The name of a folder of results, without the date."""
    match = re.fullmatch(r"\d{4}-\d\d-\d\d-(.+)", folder.name)
    return match[1] if match else None
