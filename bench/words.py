"""Figures as text, and tables of them."""

import re
import statistics
from collections.abc import Callable, Sequence

from tabulate import tabulate


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median, minimum and maximum."""
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} [{least:.{digits}f}–{most:.{digits}f}]"


def ratio_text(values: Sequence[float]) -> str:
    return spread(values, digits=3)


def thousands(values: Sequence[float]) -> str:
    """The median of thousands of instructions, with the digits that are significant."""
    middle = statistics.median(values)
    return f"{middle:,.0f}" if abs(middle) >= 99.5 else f"{middle:.1f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table: the first column left-aligned, all others right-aligned."""
    align = ["left", *["right"] * (len(head) - 1)]
    return tabulate(rows, head, tablefmt="pipe", disable_numparse=True, colalign=align)


def with_tables(document: str, made: Callable[[str], str]) -> str:
    """Replaces each table of a document, by its name."""

    def put(match: re.Match[str]) -> str:
        return f"{match[1]}\n\n{made(match[2])}\n\n{match[3]}"

    return re.sub(r"(<!-- table: ([\w/-]+) -->).*?(<!-- end -->)", put, document, flags=re.DOTALL)


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Ratios within each round, because the speed of disks and hosts changes between rounds.

    If the last round was interrupted, one list may be shorter.
    """
    return [a / b for a, b in zip(over, under, strict=False)]


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the ratios within each round."""
    return statistics.median(ratios(over, under))


def decided(over: Sequence[float], under: Sequence[float]) -> bool:
    """True if the same one was larger in every round; otherwise their order is chance."""
    found = ratios(over, under)
    return min(found) > 1 or max(found) < 1


def compared(over: Sequence[float], under: Sequence[float]) -> str:
    """Their ratio, with a note if their order is undecided."""
    text = f"{ratio(over, under):.2f}"
    return text if over == under or decided(over, under) else f"{text}, undecided"


def size_text(size: int) -> str:
    """A size with its unit: 8 MiB, 1 GiB."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} bytes"
