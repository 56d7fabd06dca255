"""Measures, and tells."""

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import machine, quick
from .process import Failed, run
from .rounds import Measured, measure
from .state import prepare
from .tables import Job, Place, Result
from .words import table

INTERRUPTED = 130


def run_all(names: Sequence[str], place: Place, out: Path, seed: int, rounds: int | None) -> int:
    about = machine.described(place.program, place.folder, place.scratch)
    for name, text in about.items():
        print(f"{name}: {text}")
    print(f"seed: {seed}", flush=True)
    measured: dict[str, Measured] = {}
    results: list[Result] = []
    advice = []
    for name in names:
        job: Job = importlib.import_module(f".{name}", __package__).job(place, rounds)
        measured[name] = one = Measured(seed)
        measure_job(job, one, place)
        results += (made := job.results(one))
        for result in made:
            print(f"\n{result.title}\n\n{table(result.head, result.rows)}")
            for note in result.notes:
                print(note)
        if job.advice:
            advice.append(job.advice(one))
            print(f"\n{advice[-1]}")
        if one.interrupted or one.failed:
            break
    interrupted = any(one.interrupted for one in measured.values())
    failed = any(one.failed for one in measured.values())
    traces = timeline(place) if "quick" in measured and not (interrupted or failed) else {}
    # Only now: what this process holds counts as what those that it starts hold (getrusage).
    from . import report

    page = report.write(report.Report(about, seed, measured, results, advice, traces), out)
    print(f"\nReport: {page.resolve()}")
    return INTERRUPTED if interrupted else int(failed)


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
        print(f"\ndmafile: cannot measure on: {why}", file=sys.stderr)


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
