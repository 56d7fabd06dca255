"""What a table asks for, and what it makes of the answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .rounds import Cell, Measured


@dataclass(frozen=True)
class Place:
    """Where, and with which command, things are measured."""

    program: Sequence[str]
    """dmafile's command."""
    folder: Path
    """On the disk that is measured."""
    scratch: Path
    most: int | None = None
    """Bytes that a file may have."""
    least: int = 0
    """Bytes that a file must have, in the table of heaps."""
    more: Mapping[str, str] = field(default_factory=dict)
    """Ways of dmafile's that the reader wants to see, too, as way.py says them."""


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
    """What is to be measured for some tables."""

    cells: Sequence[Cell]
    rounds: int
    results: Callable[[Measured], list[Result]]
    advice: Callable[[Measured], str] | None = None
    """The recommendation that follows."""
    same: Mapping[str, Any] = field(default_factory=dict)
    """What every candidate's report has to say when it checks the bytes."""
