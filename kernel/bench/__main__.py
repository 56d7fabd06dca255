"""Counts instructions with the series, in QEMU: `make -C kernel bench`.

series   what it changes: small writes, udmabufs, loads, copies (20 minutes)
by-size  the rows of a published table at its sizes, up to 3 GiB (16 GiB of memory)
premap   reads into buffers that are mapped for each request, and once (10 minutes)
pins     the cost of tracking pins, on and off, and on a kernel without the tracker (5 minutes)
recorded the cost of `dmafile pins --record` on Debian's kernels (10 minutes)

The tables are in kernel/docs/costs.md. Kernels that are missing are built first.
"""

from collections.abc import Sequence

from bench import documents
from bench.arguments import add_keep, parser_of
from bench.instructions.measure import MIB
from bench.runs import ROOT, Rows, Run
from kernel.bench import pins, premap, recorded, series
from vm.series import VERSIONS

RESULTS = ROOT / "kernel" / "bench" / "results"


def measured(
    what: str, version: str, size: int, rounds: int, seed: int
) -> tuple[Run, dict[str, Rows]]:
    if what == "premap":
        run = premap.measured(rounds)
        return run, premap.tables(run)
    if what == "pins":
        run = pins.measured(rounds, seed, version=version)
        return run, pins.tables(run)
    if what == "recorded":
        run = recorded.measured(rounds, seed)
        return run, recorded.tables(run)
    if what == "by-size":
        run = series.measured_by_size(rounds, seed)
        return run, series.tables_by_size(run)
    run = series.measured(size, rounds, seed, version)
    return run, series.tables(run)


def main(words: Sequence[str] | None = None) -> None:
    parser = parser_of("kernel.bench", __doc__)
    parser.add_argument("what", choices=("series", "by-size", "premap", "pins", "recorded"))
    parser.add_argument("--mib", type=int, default=64, help="size of the file for `series` [64]")
    add_keep(parser)
    versions = dict.fromkeys(("by-size", "premap", "recorded"), VERSIONS[:1])
    parser.add_argument("--linux", choices=VERSIONS, default=VERSIONS[0], help="[6.12]")
    args = parser.parse_args(words)
    if args.linux not in versions.get(args.what, VERSIONS):
        parser.error(f"{args.what} is measured on Linux {VERSIONS[0]} only")
    run, tables = measured(args.what, args.linux, args.mib * MIB, args.rounds, args.seed)
    name = "series-by-size" if args.what == "by-size" else args.what
    if args.linux != VERSIONS[0]:
        name += f"-{args.linux}"
    documents.finish(run, name, tables, kept=args.keep, results=RESULTS)


if __name__ == "__main__":
    main()
