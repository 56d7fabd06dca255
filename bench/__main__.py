"""`make bench`: the arguments, and what follows from them."""

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
"""Where files and results are unless told; git ignores it."""


def candidate(text: str) -> tuple[str, str]:
    name, separator, words = text.partition("=")
    if not name or not separator or not all("=" in word for word in words.split()):
        raise argparse.ArgumentTypeError(f"wanted NAME=WORD=VALUE..., got {text!r}")
    return name, f"load {words}"


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench", description="Measure ways of loading on this machine, side by side."
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=HERE,
        help="where the files lie that are read: the disk measured [.bench, in the tree]",
    )
    parser.add_argument("--out", type=Path, help="the folder of the results [.bench/DATE]")
    parser.add_argument(
        "--keep",
        metavar="NAME",
        help=f"the same in {RESULTS.relative_to(ROOT)}, in place of an older run of that name",
    )
    parser.add_argument(
        "--report", action="store_true", help="write a page with pictures beside the results"
    )
    parser.add_argument(
        "--table", choices=TABLES, action="append", help="which table (repeat for more) [quick]"
    )
    parser.add_argument(
        "--most",
        type=int,
        metavar="MIB",
        help="no file of more MiB, but a table's smallest [by disk and memory]",
    )
    parser.add_argument("--rounds", type=int, help="at least 5")
    parser.add_argument(
        "--candidate",
        type=candidate,
        action="append",
        default=[],
        metavar="NAME=WORDS",
        help="one more load, as in '4k=to=memfd pages=4k' (quick)",
    )
    parser.add_argument("--seed", type=int, help="of the order of the runs [drawn]")
    parser.add_argument("--program", help="dmafile's command [that of PATH, or of this Python]")
    parser.add_argument("--profile", default="release", help="Cargo's, of what is measured")
    args = parser.parse_args(words)
    if args.rounds is not None and args.rounds < 5:
        parser.error("--rounds: at least 5, fewer show no spread")
    if args.out and args.keep:
        parser.error("--out and --keep cannot be combined")
    return args


def program(named: str | None) -> list[str]:
    """dmafile's command. As a module it isn't looked for in the current folder."""
    found = named or shutil.which("dmafile")
    return [found] if found else [sys.executable, "-P", "-m", "dmafile"]


@contextlib.contextmanager
def folders(args: argparse.Namespace) -> Iterator[tuple[Path, Path]]:
    """Where the files lie, which stay for the next time; and where what programs say goes."""
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
