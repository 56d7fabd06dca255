"""The instructions of a load, compared with other methods in the same machine.

The limits are ratios; docs/instructions.md shows their spread. If a load changes for a good reason,
measure again (`.venv/bin/python -m bench.instructions stock --keep`); a limit may change then.
"""

import json
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest

from bench import runs
from bench.candidates import (
    ALLOC_READ,
    FROM_MEMORY,
    FROM_MODULE,
    GATES,
    MODULE,
    MODULE_GATES,
    NORMAL,
    READ_INTO_ITS_MAPPING,
    RW,
    TO_DISK_GOAL,
    Gate,
    load,
    on_stock,
)
from bench.instructions import saves
from bench.instructions.measure import MIB, Candidate, Measured, measure, pair, step
from bench.instructions.tables import Tables, above_zeroing, release
from bench.runs import Run
from vm import kernels


@pytest.fixture(scope="module")
def measured(counting: None) -> Measured:
    """One machine, and the fewest rounds with a median. Measures the build of `cargo test`, which
    is optimized too; code of dmafile is a small part of the counted instructions."""
    return measure(lines_of(GATES), rounds=3, profile="dev", module=False)


@pytest.fixture(scope="module", params=[*kernels.STOCK, kernels.NEWEST])
def with_module(counting: None, request: pytest.FixtureRequest) -> Measured:
    lines = list(dict.fromkeys([*lines_of(MODULE_GATES), RW, READ_INTO_ITS_MAPPING]))
    return measure(lines, rounds=3, profile="dev", kernel=request.param)


OF_LATER_KERNELS = (NORMAL, load("udmabuf", "thp", "uring", "direct"))
"""Candidates that Debian's 6.1 refuses, because it offers user space neither heaps nor udmabufs."""


def lines_of(gates: Sequence[Gate]) -> list[str]:
    """The lines that the gates compare, each once."""
    return list(dict.fromkeys(line for gate in gates for line in (gate.candidate, gate.against)))


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.name)
def test_a_load_stays_below_its_instruction_limit(gate: Gate, measured: Measured) -> None:
    check_gate(gate, measured)


@pytest.mark.parametrize("gate", MODULE_GATES, ids=lambda gate: gate.name)
@pytest.mark.skipif(not os.environ.get("MATRIX"), reason="make kernel-test")
def test_dmafile_ko_stays_below_its_instruction_limit(gate: Gate, with_module: Measured) -> None:
    if with_module.about["guest"].startswith("6.1.") and gate.against in OF_LATER_KERNELS:
        refused = with_module.candidates[gate.against].refused
        assert refused is not None, "Debian's 6.1 now has heaps"
        return
    check_gate(gate, with_module)


@pytest.mark.skipif(not os.environ.get("MATRIX"), reason="make kernel-test")
def test_filling_a_buffer_takes_less_than_1_16_of_a_read_into_its_mapping(
    with_module: Measured,
) -> None:
    ratios = with_module.ratios(RW, READ_INTO_ITS_MAPPING, step("fill"))
    assert statistics.median(ratios) < 1 / 16, ratios


@pytest.mark.skipif(not os.environ.get("MATRIX"), reason="make kernel-test")
def test_dmafile_ko_takes_less_than_1_7_of_a_normal_load_beyond_zeroing(
    with_module: Measured,
) -> None:
    """On every kernel. On Debian's 6.1, which has no heaps, this is the normal load."""
    ratios = above_zeroing(with_module, ALLOC_READ, READ_INTO_ITS_MAPPING)
    assert statistics.median(ratios) < 1 / 7, ratios


@pytest.mark.skipif(not os.environ.get("MATRIX"), reason="make kernel-test")
@pytest.mark.usefixtures("counting")
def test_a_save_from_dmafile_ko_takes_at_most_1_16_of_a_write() -> None:
    run = saves.measured(mib=64, rounds=3, seed=1, profile="dev")
    measured = Measured.of(run.machine["machine"], run.samples)
    assert not [one.refused for one in measured.candidates.values() if one.refused]
    assert statistics.median(saves.ratios(measured)) <= TO_DISK_GOAL[2]


def check_gate(gate: Gate, measured: Measured) -> None:
    for line in (gate.candidate, gate.against):
        assert measured.candidates[line].refused is None, measured.candidates[line].refused
    ratios = measured.ratios(gate.candidate, gate.against)
    assert statistics.median(ratios) < limit(gate, measured), ratios


def limit(gate: Gate, measured: Measured) -> float:
    line = release(measured).rpartition(".")[0]
    return gate.limit if line in kernels.STOCK or gate.newest is None else gate.newest


@pytest.mark.parametrize(
    ("table", "names"),
    [
        ("instructions/gates", [gate.name for gate in GATES]),
        ("instructions/module-gates", [gate.name for gate in MODULE_GATES]),
        ("instructions/module", list(MODULE)),
        ("save-instructions/module", list(FROM_MODULE)),
        ("save-instructions/memory", list(FROM_MEMORY)),
    ],
)
def test_every_candidate_was_measured(table: str, names: list[str]) -> None:
    assert [row[0] for row in shown(table)] == names


def shown(table: str) -> Sequence[Sequence[str]]:
    """The rows of a table that documents show."""
    folder, name = table.split("/")
    _, rows = runs.read_csv(runs.kept(folder) / f"{name}.csv")
    return rows


def counted(lines: Sequence[str], rounds: int = 2) -> Measured:
    """A measurement with arbitrary counts, each different."""
    every = {}
    for number, line in enumerate(lines, 1):
        counts = [[(number, 10_000_000 + number + at)] * 3 for at in range(rounds)]
        every[line] = Candidate(line, runs=[[*run] for run in counts])
    return Measured(64 * MIB, {"guest": "6.12.117+deb12-amd64"}, every)


def test_the_newest_kernel_has_its_own_column() -> None:
    here = counted(on_stock())
    newest = replace(
        here,
        about={"guest": "7.3.4+deb13-amd64"},
        candidates={**here.candidates, RW: Candidate(RW, refused="dmafile: no; load it")},
    )
    head, rows = Tables(here, newest).goals()
    assert list(head) == ["", "at most", "measured here", "on Linux 7.3.4"]
    assert [there for *_, one, there in rows[:-1] if there != one] == []
    assert rows[-1][-1] == "refused"
    assert Tables(newest).refused()[1] == [["no", "module", "rw direct", "1"]]
    for name in (name.replace("-", "_") for name in Tables.NAMES):
        (head, rows), (before, _) = (
            getattr(Tables(here, newest), name)(),
            getattr(Tables(here), name)(),
        )
        assert {len(row) for row in rows} <= {len(head)}
        assert len(head) - len(before) == (name not in ("blocks", "refused")), name


def test_a_table_of_saves_ends_with_its_baseline() -> None:
    found = saves.tables(Run({"machine": {}}, list(counted(saves.lines()).samples())))
    assert found["module"][1][-1][1:] == ["156", "1.000 [1.000–1.000]"]
    [goal] = found["goal"][1]
    assert goal[1:] == ["1/16", "1.000 [1.000–1.000]", "no"]


def test_a_measurement_is_written_and_read_back() -> None:
    """With reasons, reports and rounds."""
    lines = ["load to=memfd", "copy to=heap method=read io=direct"]
    runs = [[(1, 2), (3, 4), (5, 6)], [(2, 2), (3, 4), (5, 7)]]
    ran = Candidate(lines[0], report={"method": "uring"}, runs=[[*run] for run in runs])
    refused = Candidate(lines[1], refused="heap: no")
    one = Measured(3 * MIB, {"date": "today"}, dict(zip(lines, (ran, refused), strict=True)))
    again = Measured.of(one.about, json.loads(json.dumps(list(one.samples(part="ways")))))
    assert again == one and again.rounds == 2
    assert again.per_mib(lines[0], step("fill")) == [7 / 3000, 7 / 3000]


@pytest.mark.parametrize("gate", [*GATES, *MODULE_GATES], ids=lambda gate: gate.name)
def test_limits_are_slightly_above_the_measured_ratios(gate: Gate) -> None:
    """On the newest kernel, too, if it has a limit of its own."""
    every = [*shown("instructions/gates"), *shown("instructions/module-gates")]
    *_, here, newest = next(row for row in every if row[0] == gate.name)
    for limit, text in ((gate.limit, here), (gate.newest, newest)):
        if limit is not None:
            middle, _, most = map(float, re.findall(r"[\d.]+", text))
            assert most < limit < 1.25 * middle


def test_marks_are_matched_to_their_runs() -> None:
    lines = ["make to=one", "make to=two"]
    said = ["ran 1 0", "refused 1 no: there is none", "ran 0 0", "ran 0 1"]
    marks = ["254 9 9", "0 10 10", "1 10 11"]
    marks += ["0 20 20", "1 21 22", "2 21 22", "3 21 25"]
    marks += ["0 30 30", "1 35 36", "2 36 36", "3 36 37", "255 99 99"]
    every = pair(lines, said, marks)
    assert every["make to=one"] == Candidate("make to=one", runs=[[(5, 6), (1, 0), (0, 1)]])
    assert every["make to=two"] == Candidate("make to=two", refused="no: there is none")


@pytest.mark.parametrize("marks", [["0 1 1"], ["0 1 1", "1 1 1", "2 1 1", "3 1 1", "0 2 2"]])
def test_marks_that_do_not_match_are_an_error(marks: list[str]) -> None:
    with pytest.raises(AssertionError, match=r"marks|more marks than runs"):
        pair(["make to=one"], ["ran 0 1"], marks)
