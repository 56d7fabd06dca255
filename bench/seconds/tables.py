"""Types for the modules that measure tables: their input, their jobs and their results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.seconds.rounds import Cell


@dataclass(frozen=True)
class Place:
    """The folders, programs and limits of a measurement."""

    program: Sequence[str]
    """dmafile's command."""
    ways: Path
    """The program built from ways.c."""
    folder: Path
    """A folder on the disk that is measured."""
    scratch: Path
    most: int | None = None
    """The maximum size of a file, in bytes."""
    more: Mapping[str, str] = field(default_factory=dict)
    """Additional candidates by name, each a line of ways.c."""


@dataclass(frozen=True)
class Bars:
    """A chart: one bar for each row, with its spread, or bars stacked from parts."""

    title: str
    unit: str
    rows: Sequence[tuple[str, Sequence[float]]]
    """Names, and the values of all rounds."""
    parts: Sequence[tuple[str, Sequence[float]]] = ()
    """For stacked bars: parts by name, with a value for each row."""
    more_is_better: bool = True


@dataclass(frozen=True)
class Result:
    """A table, its charts and notes."""

    name: str
    """The name of its files."""
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    charts: Sequence[Bars] = field(default_factory=list)


@dataclass(frozen=True)
class Job:
    """The measurements that the tables of a module need."""

    cells: Sequence[Cell]
    rounds: int
    missing: Sequence[str] = ()
    """Candidates that are not installed, and how to install them."""
    same: Mapping[str, Any] = field(default_factory=dict)
    """Values that every candidate's report must have when it checks the bytes."""
