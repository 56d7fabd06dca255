"""Writes an HTML page with charts next to the results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from matplotlib.figure import Figure

from bench.seconds import charts
from bench.seconds.rounds import Measured
from bench.seconds.tables import Result

DPI = 150


@dataclass
class Report:
    """The contents of the page."""

    machine: Mapping[str, str]
    seed: int
    measured: Mapping[str, Measured]
    """The tables, by name."""
    results: Sequence[Result]
    advice: Sequence[str] = ()
    traces: Mapping[str, Any] = field(default_factory=dict)
    """Traces of single loads, by title."""


def write(report: Report, folder: Path) -> Path:
    """Writes the page and its charts; returns the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, list[str]] = {}
    for result in report.results:
        drawn = [
            (f"{result.name}-{number}", charts.bars(one))
            for number, one in enumerate(result.charts, 1)
        ]
        pictures[result.name] = [saved(figure, folder / f"{name}.png") for name, figure in drawn]
    timelines = [
        saved(charts.timeline(trace, title), folder / f"timeline-{number}.png")
        for number, (title, trace) in enumerate(report.traces.items(), 1)
    ]
    # Text from files and programs is escaped.
    template = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True
    ).get_template("report.html.j2")
    page = folder / "report.html"
    page.write_text(
        template.render(
            machine=report.machine,
            seed=report.seed,
            interrupted=any(one.interrupted for one in report.measured.values()),
            failed=[one.failed for one in report.measured.values() if one.failed],
            slow_memory=sum(
                not sample.quick_memory
                for one in report.measured.values()
                for sample in one.samples
            ),
            results=report.results,
            advice=report.advice,
            pictures=pictures,
            timelines=timelines,
        )
    )
    return page


def saved(figure: Figure, path: Path) -> str:
    """Saves a chart as PNG; returns it as SVG for the page."""
    figure.savefig(path, dpi=DPI)
    return charts.as_svg(figure)
