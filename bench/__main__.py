"""The command line of `make bench`."""

import argparse
import contextlib
import datetime
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import ways
from bench.runs import RESULTS, ROOT
from bench.seconds.run import TABLES, run_all
from bench.seconds.tables import Place

HERE = ROOT / ".bench"
"""The default folder for files and results; git ignores it."""


def candidate(text: str) -> tuple[str, str]:
    name, separator, words = text.partition("=")
    if not name or not separator or not all("=" in word for word in words.split()):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=WORD=VALUE...")
    return name, f"load {words}"


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench", description="Compare methods of loading on this machine."
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=HERE,
        help="a folder on the disk to measure, for the files that are read [.bench]",
    )
    parser.add_argument("--out", type=Path, help="folder for the results [.bench/DATE]")
    parser.add_argument(
        "--keep",
        metavar="NAME",
        help=f"write to {RESULTS.relative_to(ROOT)}, and replace an older run of that name",
    )
    parser.add_argument("--report", action="store_true", help="also write an HTML page with charts")
    parser.add_argument(
        "--table", choices=TABLES, action="append", help="table to measure; can be repeated [quick]"
    )
    parser.add_argument(
        "--most",
        type=int,
        metavar="MIB",
        help="largest file size; a table's smallest file is always used [by disk and memory]",
    )
    parser.add_argument("--rounds", type=int, help="number of rounds, at least 5")
    parser.add_argument(
        "--candidate",
        type=candidate,
        action="append",
        default=[],
        metavar="NAME=WORDS",
        help="add a load to the table `quick`, for example '4k=to=memfd pages=4k'",
    )
    parser.add_argument("--seed", type=int, help="seed for the order of the runs [random]")
    parser.add_argument(
        "--program", help="path of the command dmafile [from PATH, else this Python's]"
    )
    parser.add_argument(
        "--profile",
        default="release",
        help="Cargo profile of the library that is measured [release]",
    )
    args = parser.parse_args(words)
    if args.rounds is not None and args.rounds < 5:
        parser.error("--rounds must be at least 5, because fewer show no spread")
    if args.out and args.keep:
        parser.error("--out and --keep cannot be combined")
    return args


def parser_of(name: str, about: str | None) -> argparse.ArgumentParser:
    """The parser of a benchmark of its own, with the options that all of these have."""
    parser = argparse.ArgumentParser(prog=name, description=about)
    parser.add_argument(
        "--dir", type=Path, default=HERE, help="a folder on the disk to measure [.bench]"
    )
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds [%(default)s]")
    parser.add_argument(
        "--seed",
        type=int,
        default=random.SystemRandom().randrange(1_000_000),
        help="seed for the order of the runs [random]",
    )
    parser.add_argument(
        "--program", help="path of the command dmafile [from PATH, else this Python's]"
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help=f"write to {RESULTS.name} and the documents that show them [to .bench]",
    )
    return parser


def program(named: str | None) -> list[str]:
    """The command dmafile. With -P, Python does not look for the module in the current folder."""
    found = named or shutil.which("dmafile")
    return [found] if found else [sys.executable, "-P", "-m", "dmafile"]


@contextlib.contextmanager
def folders(args: argparse.Namespace) -> Iterator[tuple[Path, Path]]:
    """The folder with the files, which are kept for later runs, and one for programs' output."""
    files = args.dir / ".dmafile-bench"
    files.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dmafile-bench-") as scratch:
        yield files, Path(scratch)


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1_000_000)
    now = datetime.datetime.now().astimezone()
    out = args.out or HERE / now.strftime("%Y-%m-%dT%H%M%S")
    with folders(args) as (files, scratch):
        place = Place(
            program(args.program),
            ways.build(scratch, args.profile),
            files,
            scratch,
            args.most and args.most << 20,
            dict(args.candidate),
        )
        tables = args.table or TABLES[:1]
        status = run_all(tables, place, out, seed, args.rounds, page=args.report)
    if args.keep and status == 0:
        from bench.documents import keep

        print(f"Kept: {keep(out, f'{now:%Y-%m-%d}', args.keep)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
