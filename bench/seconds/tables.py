"""Types for the modules that measure tables: their input, their jobs and their results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.seconds.files import make_file
from bench.seconds.memory import room
from bench.seconds.rounds import Cell

ROUNDS = 5
"""Unless the command line says otherwise."""


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

    def room(self) -> int:
        """The maximum size of a file."""
        there = room(self.folder)
        return there if self.most is None else min(there, self.most)

    def file_of(self, size: int) -> Path:
        """The file of that size, made unless it exists."""
        file = self.folder / f"{size // 1024}KiB.noise"
        make_file(file, b"", size)
        return file


@dataclass(frozen=True)
class Result:
    """A table and its notes."""

    name: str
    """The name of its file."""
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Job:
    """The measurements that the tables of a module need."""

    cells: Sequence[Cell]
    rounds: int
    missing: Sequence[str] = ()
    """Candidates that are not installed, and how to install them."""
    same: Mapping[str, Any] = field(default_factory=dict)
    """Values that every candidate's report must have when it checks the bytes."""
