"""Measures tables, prints them, and writes the results."""

import sys
from collections.abc import Sequence
from pathlib import Path

from bench.runs import Rows, Run
from bench.seconds import facts, limit, peers, saves
from bench.seconds.rounds import Measured, as_run, measure, of_run
from bench.seconds.tables import Job, Place
from bench.words import table

TABLES = {"limit": limit, "peers": peers, "saves": saves}
"""By name, each a module: job() lists the candidates, results() makes the tables."""
INTERRUPTED = 130


def run_all(names: Sequence[str], place: Place, out: Path, seed: int, rounds: int | None) -> int:
    """Returns the exit status."""
    about = facts.described(place.program, place.folder, place.scratch)
    for name, text in about.items():
        print(f"{name}: {text}")
    print(f"seed: {seed}", flush=True)
    measured: dict[str, Measured] = {}
    for name in names:
        job = TABLES[name].job(place, rounds)
        measured[name] = one = Measured(seed, missing=list(job.missing))
        measure_job(job, one, place)
        for result in TABLES[name].results(one):
            print(f"\n{result.title}\n\n{table(result.head, result.rows)}\n")
            for note in result.notes:
                print(note)
        if one.interrupted or one.failed:
            break
    run = as_run(about, seed, measured)
    run.write(out, tables(run))
    print(f"\nAll runs: {out.resolve()}")
    if any(one.interrupted for one in measured.values()):
        return INTERRUPTED
    return int(any(one.failed for one in measured.values()))


def tables(run: Run) -> dict[str, Rows]:
    """The tables of a run, by the names of their files."""
    return {
        result.name: (result.head, result.rows)
        for name, measured in of_run(run).items()
        for result in TABLES[name].results(measured)
    }


def measure_job(job: Job, measured: Measured, place: Place) -> None:
    """Runs the job until its end or Ctrl-C, and stores the results in `measured`."""
    try:
        for _ in measure(job.cells, measured, place.scratch, job.rounds, job.same):
            pass
    except KeyboardInterrupt:
        measured.interrupted = True
        print("\ninterrupted: the results so far follow", file=sys.stderr)
    except SystemExit as why:
        # The results so far remain valid.
        measured.failed = str(why)
        print(f"\nbench: the measurement failed: {why}", file=sys.stderr)
