"""Measures tables, prints them, and writes the results."""

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
"""Each is a module of that name: job() lists the candidates, results() makes the tables."""
INTERRUPTED = 130


def module(name: str) -> Any:
    assert name in TABLES
    return importlib.import_module(f"bench.seconds.{name}")


def run_all(
    names: Sequence[str], place: Place, out: Path, seed: int, rounds: int | None, *, page: bool
) -> int:
    """Returns the exit status. With `page`, an HTML report is written next to the results."""
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
    print(f"\nAll runs: {out.resolve()}")
    if page:
        traces = timeline(place) if "quick" in measured and not (interrupted or failed) else {}
        # Imported only now: this process's memory counts in the peak of its children (getrusage).
        from bench.seconds import report

        path = report.write(report.Report(about, seed, measured, found, advice, traces), out)
        print(f"Report: {path.resolve()}")
    return INTERRUPTED if interrupted else int(failed)


def tables(run: runs.Run) -> dict[str, runs.Rows]:
    """The tables of a stored run, by the names of their files."""
    return {
        result.name: (result.head, result.rows)
        for name, measured in of_run(run).items()
        for result in module(name).results(measured)
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


def timeline(place: Place) -> dict[str, Any]:
    """Runs another load with a trace."""
    size = quick.large(place)
    file, trace = quick.file_of(place, size), place.scratch / "trace.json"
    prepare(file, size)
    command = [*place.program, "load", str(file), "--quiet", f"--trace={trace}"]
    try:
        run(command, place.scratch / "said")
    except Failed:
        return {}
    return {"dmafile load --to memfd, cold": json.loads(trace.read_text())}
