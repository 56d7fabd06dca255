"""Options that benchmarks share, and what they stand for."""

import argparse
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.runs import RAW


def rounds(text: str) -> int:
    if (number := int(text)) < 5:
        raise argparse.ArgumentTypeError("must be at least 5, because fewer show no spread")
    return number


def parser_of(name: str, about: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(
        prog=name, description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=rounds, default=5, help="number of rounds, at least 5 [5]")
    parser.add_argument("--seed", type=int, default=1, help="seed for the order of the runs [1]")
    return parser


def add_keep(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--keep",
        action="store_true",
        help="write tables to the results and the documents, too [only to .bench]",
    )


def add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dir",
        type=Path,
        default=RAW,
        help="a folder on the disk to measure, for the files that are read [.bench]",
    )
    parser.add_argument(
        "--program", help="path of the command dmafile [from PATH, else this Python's]"
    )


def program(named: str | None) -> list[str]:
    """The command dmafile. With -P, Python does not look for the module in the current folder."""
    found = named or shutil.which("dmafile")
    return [found] if found else [sys.executable, "-P", "-m", "dmafile"]


@contextlib.contextmanager
def folders(place: Path) -> Iterator[tuple[Path, Path]]:
    """The folder with the files, which are kept for later runs, and one for programs' output."""
    files = place / ".dmafile-bench"
    files.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dmafile-bench-") as scratch:
        yield files, Path(scratch)
