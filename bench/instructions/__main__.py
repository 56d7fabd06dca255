"""Counts instructions in QEMU: `make vm-bench`, `make series-cost`, `make premap-cost`,
`make pins-cost`, `make save-cost`.

stock    every method of loading a file, on Debian's 6.12: docs/instructions.md, docs/kernel.md;
         --kernel newest adds a column for the newest kernel, and has separate results
series   what the series of kernel/linux-6.12 changes: docs/series.md
by-size  the rows of a published table at its sizes, up to 3 GiB, on the kernel of the series
premap   reads into buffers that are mapped for each request, and once, on the same kernel
saves    saves from a dma-buf of dmafile.ko, and from a memfd, to the disk: docs/saving.md
pins     the cost of tracking pins, on and off, on the same kernel, and on that kernel without the
         tracker
"""

import argparse
import datetime
from collections.abc import Sequence

from bench import documents, runs
from bench.candidates import on_stock
from bench.instructions import pins, premap, saves, series
from bench.instructions.measure import MIB, as_run, measure
from bench.instructions.tables import NEWEST, STOCK
from bench.runs import RESULTS, ROOT, Run
from bench.words import table
from vm import kernels

NAMES = {
    "stock": STOCK,
    "series": "series",
    "by-size": "series-by-size",
    "premap": "premap",
    "saves": saves.NAME,
    "pins": "pins",
}
"""Names of the results."""
KERNELS = {"6.12": STOCK, kernels.NEWEST: NEWEST}
"""Names of the results of `stock`, by kernel."""


def rounds(text: str) -> int:
    if (number := int(text)) < 5:
        raise argparse.ArgumentTypeError("must be at least 5, because fewer show no spread")
    return number


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="instructions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=NAMES)
    parser.add_argument(
        "--kernel", choices=KERNELS, default="6.12", help="kernel for `stock`, as for vm/run [6.12]"
    )
    parser.add_argument("--mib", type=int, default=64, help="size of the file [64]")
    parser.add_argument("--rounds", type=rounds, default=5, help="number of rounds, at least 5 [5]")
    parser.add_argument("--seed", type=int, default=1, help="seed for the order of the runs [1]")
    parser.add_argument(
        "--keep",
        action="store_true",
        help=f"write to {RESULTS.relative_to(ROOT)} and the documents [to .bench]",
    )
    return parser.parse_args(words)


def run(args: argparse.Namespace) -> Run:
    if args.what == "series":
        return series.measured(args.mib * MIB, args.rounds, args.seed)
    if args.what == "premap":
        return premap.measured(args.rounds)
    if args.what == "saves":
        return saves.measured(args.mib, args.rounds, args.seed)
    if args.what == "pins":
        return pins.measured(args.rounds, args.seed)
    if args.what == "by-size":
        return series.measured_by_size(args.rounds, args.seed)
    lines = on_stock()
    print(f"{len(lines)} candidates, {args.rounds} rounds and a warm-up round", flush=True)
    measured = measure(
        lines,
        size=args.mib * MIB,
        rounds=args.rounds,
        seed=args.seed,
        timeout=6 * 3600,
        kernel=args.kernel,
    )
    return as_run(STOCK, measured)


def main(words: Sequence[str] | None = None) -> None:
    args = arguments(words)
    measured = run(args)
    name = KERNELS[args.kernel] if args.what == "stock" else NAMES[args.what]
    date = datetime.date.today().isoformat()
    tables = documents.MAKERS[measured.machine["bench"]](measured)
    for title, rows in tables.items():
        print(f"\n{title}\n\n{table(*rows)}")
    folder = documents.written(measured, date, name, args.keep)
    if not args.keep:
        for title, rows in tables.items():
            runs.write_csv(folder / f"{title}.csv", rows)
    print(f"\nAll runs: {folder}")


if __name__ == "__main__":
    main()
