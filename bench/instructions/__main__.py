"""Counts instructions in QEMU: `.venv/bin/python -m bench.instructions stock`.

stock    every method of loading a file, on Debian's 6.12: docs/instructions.md,
         kernel/docs/module.md. For a column of ratios on the newest kernel, run this with
         --kernel newest before.
saves    saves from a dma-buf of dmafile.ko, and from a memfd, to the disk: docs/saving.md
"""

from collections.abc import Sequence

from bench import documents
from bench.arguments import add_keep, parser_of
from bench.candidates import on_stock
from bench.instructions import saves, tables
from bench.instructions.measure import MIB, as_run, measure
from vm import kernels

KERNELS = {"6.12": tables.STOCK, kernels.NEWEST: tables.NEWEST}
"""Names of the results of `stock`, by kernel."""


def main(words: Sequence[str] | None = None) -> None:
    parser = parser_of("bench.instructions", __doc__)
    parser.add_argument("what", choices=("stock", "saves"))
    parser.add_argument("--mib", type=int, default=64, help="size of the file [64]")
    parser.add_argument(
        "--kernel", choices=KERNELS, default="6.12", help="kernel for `stock`, as for vm/run [6.12]"
    )
    add_keep(parser)
    args = parser.parse_args(words)
    if args.what == "saves":
        run = saves.measured(args.mib, args.rounds, args.seed)
        documents.finish(run, saves.NAME, saves.tables(run), kept=args.keep)
        return
    lines = on_stock()
    print(f"{len(lines)} candidates, {args.rounds} rounds and a warm-up round", flush=True)
    run = as_run(
        tables.STOCK,
        measure(
            lines,
            size=args.mib * MIB,
            rounds=args.rounds,
            seed=args.seed,
            timeout=6 * 3600,
            kernel=args.kernel,
        ),
    )
    # The newest kernel has no table of its own.
    kept = args.keep and args.kernel == "6.12"
    documents.finish(run, KERNELS[args.kernel], tables.tables(run), kept=kept)


if __name__ == "__main__":
    main()
