"""Measures tables, prints them, and writes what was measured."""

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import runs
from bench.seconds import facts, quick
from bench.seconds.process import Failed, run
from bench.seconds.rounds import Measured, as_run, measure, of_run
from bench.seconds.state import prepare
from bench.seconds.tables import Job, Place, Result
from bench.words import table

TABLES = ("quick", "limit", "scale", "peers", "extras", "saves")
"""Each is made by the module of that name: job(), what is to run, and results(), of what ran."""
INTERRUPTED = 130


def module(name: str) -> Any:
    assert name in TABLES
    return importlib.import_module(f"bench.seconds.{name}")


def run_all(
    names: Sequence[str], place: Place, out: Path, seed: int, rounds: int | None, *, page: bool
) -> int:
    """What this program ends with. With `page`, a report to look at lies beside the results."""
    about = facts.described(place.program, place.folder, place.scratch)
    for name, text in about.items():
        print(f"{name}: {text}")
    print(f"seed: {seed}", flush=True)
    measured: dict[str, Measured] = {}
    found: list[Result] = []
    for name in names:
        job: Job = module(name).job(place, rounds)
        measured[name] = one = Measured(seed, missing=list(job.missing))
        measure_job(job, one, place)
        found += (made := module(name).results(one))
        for result in made:
            print(f"\n{result.title}\n\n{table(result.head, result.rows)}\n")
            for note in result.notes:
                print(note)
        if one.interrupted or one.failed:
            break
    advice = [quick.advice(measured["quick"])] if "quick" in measured else []
    for text in advice:
        print(f"\n{text}")
    interrupted = any(one.interrupted for one in measured.values())
    failed = any(one.failed for one in measured.values())
    as_run(about, seed, measured).write(out)
    for result in found:
        runs.write_csv(out / f"{result.name}.csv", (result.head, result.rows))
    print(f"\nEvery run: {out.resolve()}")
    if page:
        traces = timeline(place) if "quick" in measured and not (interrupted or failed) else {}
        # Only now: what this process holds counts as what those that it starts hold (getrusage).
        from bench.seconds import report

        path = report.write(report.Report(about, seed, measured, found, advice, traces), out)
        print(f"Report: {path.resolve()}")
    return INTERRUPTED if interrupted else int(failed)


def tables(run: runs.Run) -> dict[str, runs.Rows]:
    """Those of a run that was kept, by the names of their files."""
    return {
        result.name: (result.head, result.rows)
        for name, measured in of_run(run).items()
        for result in module(name).results(measured)
    }


def measure_job(job: Job, measured: Measured, place: Place) -> None:
    """Fills in what was measured, until the end or Ctrl-C."""
    try:
        for _ in measure(job.cells, measured, place.scratch, job.rounds, job.same):
            pass
    except KeyboardInterrupt:
        measured.interrupted = True
        print("\ninterrupted: what follows was measured until then", file=sys.stderr)
    except SystemExit as why:
        # It takes nothing away from what was measured.
        measured.failed = str(why)
        print(f"\nbench: cannot measure on: {why}", file=sys.stderr)


def timeline(place: Place) -> dict[str, Any]:
    """One more load, which writes down what it does when."""
    size = quick.large(place)
    file, trace = quick.file_of(place, size), place.scratch / "trace.json"
    prepare(file, size)
    command = [*place.program, "load", str(file), "--quiet", f"--trace={trace}"]
    try:
        run(command, place.scratch / "said")
    except Failed:
        return {}
    return {"dmafile load --to memfd, cold": json.loads(trace.read_text())}
