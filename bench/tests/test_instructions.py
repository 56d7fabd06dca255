"""What a load costs in instructions, held against other ways in the same machine.

The limits are ratios, whose spread docs/instructions.md shows; whoever has a reason to change what
a load does measures again (`make vm-bench ARGS=--keep`) and may move a limit.
"""

import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from vm.instructions import (
    DOCS,
    GATES,
    MODULE_GATES,
    READ_INTO_ITS_MAPPING,
    RW,
    Candidate,
    Gate,
    Measured,
    candidates,
    measure,
    newest,
    pair,
)
from vm.instructions import show as shown


@pytest.fixture(scope="module")
def measured(counting: None) -> Measured:
    """One machine, and as few rounds as have a median; of what `cargo test` builds, whose own code,
    optimized too, is a small part of what is counted."""
    return measure(lines_of(GATES), rounds=3, profile="dev", module=False)


@pytest.fixture(scope="module")
def with_module(counting: None) -> Measured:
    return measure([*lines_of(MODULE_GATES), RW, READ_INTO_ITS_MAPPING], rounds=3, profile="dev")


def lines_of(gates: Sequence[Gate]) -> list[str]:
    """What they compare, each once."""
    return list(dict.fromkeys(line for gate in gates for line in (gate.candidate, gate.against)))


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.name)
def test_a_load_takes_no_more_than_it_should(gate: Gate, measured: Measured) -> None:
    holds(gate, measured)


@pytest.mark.parametrize("gate", MODULE_GATES, ids=lambda gate: gate.name)
@pytest.mark.skipif(not os.environ.get("MATRIX"), reason="make kernel-test")
def test_the_module_takes_no_more_than_it_should(gate: Gate, with_module: Measured) -> None:
    holds(gate, with_module)


@pytest.mark.skipif(not os.environ.get("MATRIX"), reason="make kernel-test")
def test_to_fill_a_buffer_takes_a_sixteenth_of_a_read_into_its_mapping(
    with_module: Measured,
) -> None:
    ours, theirs = (with_module.candidates[one].runs for one in (RW, READ_INTO_ITS_MAPPING))
    ratios = [sum(one[1]) / sum(other[1]) for one, other in zip(ours, theirs, strict=True)]
    assert statistics.median(ratios) < 1 / 16, ratios


def holds(gate: Gate, measured: Measured) -> None:
    for line in (gate.candidate, gate.against):
        assert measured.candidates[line].refused is None, measured.candidates[line].refused
    ratios = measured.ratios(gate.candidate, gate.against)
    assert statistics.median(ratios) < gate.limit, ratios


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.name)
def test_the_document_shows_what_was_measured(doc: Path) -> None:
    text = doc.read_text()
    assert shown(text, newest()) == text, "make vm-bench ARGS=--show"


def test_all_that_there_is_was_measured() -> None:
    assert list(newest().candidates) == candidates()


@pytest.mark.parametrize("gate", [*GATES, *MODULE_GATES], ids=lambda gate: gate.name)
def test_limits_are_as_wide_as_the_spread_asks_for(gate: Gate) -> None:
    ratios = newest().ratios(gate.candidate, gate.against)
    middle = statistics.median(ratios)
    assert max(ratios) < gate.limit < 1.25 * middle, ratios


def test_marks_find_their_runs() -> None:
    lines = ["make to=one", "make to=two"]
    said = ["ran 1 0", "refused 1 no: there is none", "ran 0 0", "ran 0 1"]
    marks = ["254 9 9", "0 10 10", "1 10 11"]
    marks += ["0 20 20", "1 21 22", "2 21 22", "3 21 25"]
    marks += ["0 30 30", "1 35 36", "2 36 36", "3 36 37", "255 99 99"]
    every = pair(lines, said, marks)
    assert every["make to=one"] == Candidate("make to=one", runs=[[(5, 6), (1, 0), (0, 1)]])
    assert every["make to=two"] == Candidate("make to=two", refused="no: there is none")


@pytest.mark.parametrize("marks", [["0 1 1"], ["0 1 1", "1 1 1", "2 1 1", "3 1 1", "0 2 2"]])
def test_marks_that_do_not_fit_are_an_error(marks: list[str]) -> None:
    with pytest.raises(AssertionError, match=r"marks|more was counted"):
        pair(["make to=one"], ["ran 0 1"], marks)
