"""Charts of tables and of a load, by Matplotlib."""

import io
import re
import statistics
from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from bench.seconds.tables import Bars

# Colours for dmafile, other loaders, and parts of a bar; they differ in brightness, too.
OURS, OTHERS = "#0b6e99", "#b9c3c9"
PARTS = ("#0b6e99", "#f2a541", "#7a9e3a", "#c8553d", "#6c6f93", "#b9c3c9")
WIDTH = 8.0

mpl.rcParams.update(
    {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        # Text stays text, so that it can be searched and copied.
        "svg.fonttype": "none",
        # The same figures give the same file.
        "svg.hashsalt": "dmafile",
    }
)


def bars(chart: Bars) -> Figure:
    """One bar for each row, with a line from minimum to maximum; or bars stacked from parts."""
    names = [name for name, _ in chart.rows]
    figure = Figure(figsize=(WIDTH, 0.9 + 0.42 * len(names)), layout="constrained")
    axes = figure.subplots()
    places = list(range(len(names)))
    if chart.parts:
        starts = [0.0] * len(names)
        for (part, figures), colour in zip(chart.parts, PARTS, strict=False):
            axes.barh(places, figures, left=starts, color=colour, label=part, height=0.7)
            starts = [start + more for start, more in zip(starts, figures, strict=True)]
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    else:
        for place, (name, figures) in enumerate(chart.rows):
            middle = statistics.median(figures)
            colour = OURS if name.startswith("dmafile") else OTHERS
            axes.barh(place, middle, color=colour, height=0.7)
            axes.plot([min(figures), max(figures)], [place, place], color="black", linewidth=1)
            axes.annotate(
                f"{middle:.3g}",
                (max(figures), place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
            )
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlabel(f"{chart.unit} ({'more' if chart.more_is_better else 'less'} is better)")
    axes.set_title(chart.title, loc="left", fontsize=11)
    axes.margins(x=0.12)
    return figure


def timeline(trace: Mapping[str, Any], title: str) -> Figure:
    """A timeline of one load, with a row for each kind of work."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event["name"] not in ("open", "plan"):
            spans.setdefault(event["name"], []).append((event["ts"] / 1e6, event["dur"] / 1e6))
    figure = Figure(figsize=(WIDTH, 0.9 + 0.42 * len(spans)), layout="constrained")
    axes = figure.subplots()
    for place, (name, when) in enumerate(spans.items()):
        colour = PARTS[place % len(PARTS)]
        axes.broken_barh(when, (place - 0.35, 0.7), color=colour, alpha=0.6, linewidth=0)
        axes.plot([], [], color=colour, label=name)
    axes.set_yticks(list(range(len(spans))), list(spans))
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(title, loc="left", fontsize=11)
    return figure


def as_svg(figure: Figure) -> str:
    """SVG to embed in a page: without the XML header, and scaled to the width of the page."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    return re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
