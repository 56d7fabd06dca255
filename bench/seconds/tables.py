"""What a table asks for, and what it makes of the answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.seconds.rounds import Cell


@dataclass(frozen=True)
class Place:
    """Where, and with which command, things are measured."""

    program: Sequence[str]
    """dmafile's command."""
    ways: Path
    """ways.c, built."""
    folder: Path
    """On the disk that is measured."""
    scratch: Path
    most: int | None = None
    """Bytes that a file may have."""
    more: Mapping[str, str] = field(default_factory=dict)
    """More candidates by name, each a line of ways.c."""


@dataclass(frozen=True)
class Bars:
    """A chart: one bar a row, with its spread; or several parts one on the other."""

    title: str
    unit: str
    rows: Sequence[tuple[str, Sequence[float]]]
    """Names, and what each round gave."""
    parts: Sequence[tuple[str, Sequence[float]]] = ()
    """Instead of them: parts by name, a figure for each of the rows."""
    more_is_better: bool = True


@dataclass(frozen=True)
class Result:
    """A table, its charts, and what follows from it."""

    name: str
    """Of its files."""
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    charts: Sequence[Bars] = field(default_factory=list)


@dataclass(frozen=True)
class Job:
    """What is to be measured for the tables of a module."""

    cells: Sequence[Cell]
    rounds: int
    missing: Sequence[str] = ()
    """What isn't here to be measured, and how to get it."""
    same: Mapping[str, Any] = field(default_factory=dict)
    """What every candidate's report has to say when it checks the bytes."""
