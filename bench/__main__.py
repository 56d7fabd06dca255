"""`dmafile bench`: the arguments, and what follows from them."""

import argparse
import contextlib
import datetime
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from .published import HEAP_SIZES

TABLES = ("quick", "heap", "copy", "limit", "scale", "peers", "extras")
"""Each is made by the module of that name."""
LARGEST = max(HEAP_SIZES) >> 20
LACKS = "needs {}, which `pip install 'dmafile[bench]'` brings"


def way(text: str) -> tuple[str, str]:
    name, separator, words = text.partition("=")
    if not name or not separator or not all("=" in word for word in words.split()):
        raise argparse.ArgumentTypeError(f"wanted NAME=WORD=VALUE..., got {text!r}")
    return name, words


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dmafile bench",
        description="Measure the ways of loading on this machine, side by side.",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path.cwd(),
        help="where the files lie that are read: the disk measured [the current folder]",
    )
    parser.add_argument("--out", type=Path, help="the report's folder [dmafile-bench-DATE]")
    parser.add_argument(
        "--table", choices=TABLES, action="append", help="which table (repeat for more) [quick]"
    )
    parser.add_argument(
        "--most",
        type=int,
        metavar="MIB",
        help="no file of more MiB, but a table's smallest [by disk and memory]",
    )
    parser.add_argument(
        "--least",
        type=int,
        default=0,
        metavar="MIB",
        help=f"no file of fewer MiB, 0 to {LARGEST} (heap)",
    )
    parser.add_argument("--rounds", type=int, help="at least 5")
    parser.add_argument(
        "--candidate",
        type=way,
        action="append",
        default=[],
        metavar="NAME=WORDS",
        help="a way of dmafile's to measure, too, as in '4k=to=memfd pages=4k' (quick)",
    )
    parser.add_argument("--seed", type=int, help="of the order of the runs [drawn]")
    parser.add_argument(
        "--program", default=os.environ.get("DMAFILE_PROGRAM"), help=argparse.SUPPRESS
    )
    args = parser.parse_args(words)
    if args.rounds is not None and args.rounds < 5:
        parser.error("--rounds: at least 5, fewer show no spread")
    if not 0 <= args.least <= LARGEST:
        parser.error(f"--least: 0 to {LARGEST}, the largest of the table of heaps")
    return args


def program(named: str | None) -> list[str]:
    """dmafile's command: the one that started this, that of PATH, or this Python's own."""
    found = named or shutil.which("dmafile")
    return [found] if found else [sys.executable, "-m", "dmafile"]


@contextlib.contextmanager
def folders(args: argparse.Namespace) -> Iterator[tuple[Path, Path]]:
    """Where the files lie, which stay for the next time; and where what programs say goes."""
    files = args.dir / ".dmafile-bench"
    files.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dmafile-bench-") as scratch:
        yield files, Path(scratch)


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    try:
        from . import bench
        from .tables import Place
    except ModuleNotFoundError as error:
        print(f"dmafile: cannot measure: bench: {LACKS.format(error.name)}", file=sys.stderr)
        return 1
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1_000_000)
    now = datetime.datetime.now().astimezone().strftime("%Y-%m-%dT%H%M%S")
    out = args.out or Path(f"dmafile-bench-{now}")
    with folders(args) as (files, scratch):
        most, more = args.most and args.most << 20, dict(args.candidate)
        place = Place(program(args.program), files, scratch, most, args.least << 20, more)
        return bench.run_all(args.table or TABLES[:1], place, out, seed, args.rounds)


if __name__ == "__main__":
    sys.exit(main())
