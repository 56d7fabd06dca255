"""Measures tables of seconds: `python -m bench TABLE...`."""

import argparse
import datetime
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import documents, ways
from bench.arguments import add_place, folders, program, rounds
from bench.runs import RAW, RESULTS, ROOT
from bench.seconds.run import TABLES, run_all
from bench.seconds.tables import Place


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench", description="Compare loads and saves on this machine."
    )
    parser.add_argument("tables", nargs="+", choices=TABLES)
    add_place(parser)
    parser.add_argument("--out", type=Path, help="folder for the results [.bench/DATE]")
    parser.add_argument(
        "--keep",
        metavar="NAME",
        help=f"write to {RESULTS.relative_to(ROOT)}, and replace an older run of that name",
    )
    parser.add_argument(
        "--most",
        type=int,
        metavar="MIB",
        help="largest file size; a table's smallest file is always used [by disk and memory]",
    )
    parser.add_argument("--rounds", type=rounds, help="number of rounds, at least 5")
    parser.add_argument("--seed", type=int, help="seed for the order of the runs [random]")
    parser.add_argument(
        "--profile",
        default="release",
        help="Cargo profile of the library that is measured [release]",
    )
    args = parser.parse_args(words)
    if args.out and args.keep:
        parser.error("--out and --keep cannot be combined")
    return args


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1_000_000)
    now = datetime.datetime.now().astimezone()
    out = args.out or RAW / now.strftime("%Y-%m-%dT%H%M%S")
    with folders(args.dir) as (files, scratch):
        most = args.most and args.most << 20
        there = ways.build(scratch, args.profile)
        place = Place(program(args.program), there, files, scratch, most)
        status = run_all(args.tables, place, out, seed, args.rounds)
    if args.keep and status == 0:
        print(f"Kept: {documents.keep(out, f'{now:%Y-%m-%d}', args.keep)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
