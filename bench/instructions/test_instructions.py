"""The instructions of a load, compared with other methods in the same machine.

The limits are ratios; docs/instructions.md shows their spread. If a load changes for a good reason,
measure again (`make vm-bench ARGS=--keep`); a limit may change then.
"""

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

from bench import runs
from bench.candidates import (
    ALLOC_READ,
    GATES,
    HEAP_OURS,
    HEAP_SIZES,
    MODULE_GATES,
    NORMAL,
    READ_INTO_ITS_MAPPING,
    RW,
    TO_DISK_GOAL,
    Gate,
    by_size,
    load,
    on_series,
    on_stock,
)
from bench.instructions import pins, saves
from bench.instructions.measure import MIB, Candidate, Measured, measure, pair, step
from bench.instructions.series import measured_by_size, tables_by_size
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


def shown(name: str, **only: str) -> Measured:
    """The measurement that the documents show."""
    run = Run.read(runs.kept(name))
    lines = [one for one in run.samples if only.items() <= one.items()]
    return Measured.of(run.machine["machine"], lines)


def test_every_candidate_was_measured() -> None:
    assert set(on_stock()) <= set(shown("instructions").candidates)
    assert set(on_series()) <= set(shown("series", part="ways").candidates)
    by = Run.read(runs.kept("series-by-size")).samples
    assert {(one["candidate"], one["size"]) for one in by} == set(product(by_size(), HEAP_SIZES))


def test_the_newest_kernel_has_its_own_column() -> None:
    here = shown("instructions")
    newest = replace(
        here,
        about={**here.about, "guest": "7.3.4+deb13-amd64"},
        candidates={**here.candidates, RW: Candidate(RW, refused="no")},
    )
    head, rows = Tables(here, newest).goals()
    assert list(head) == ["", "at most", "measured here", "on Linux 7.3.4"]
    assert [there for *_, one, there in rows[:-1] if there != one] == []
    assert rows[-1][-1] == "refused"
    for name in Tables.NAMES:
        (head, rows), (before, _) = (
            getattr(Tables(here, newest), name)(),
            getattr(Tables(here), name)(),
        )
        assert {len(row) for row in rows} == {len(head)}
        assert len(head) - len(before) == (name not in ("blocks", "refused")), name


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


@pytest.mark.skipif(not os.environ.get("MATRIX"), reason="make kernel-test")
@pytest.mark.usefixtures("counting")
def test_published_rows_run_at_their_sizes() -> None:
    """On a stock kernel, which refuses the rows of the patched heap."""
    run = measured_by_size(rounds=2, seed=1, sizes=HEAP_SIZES[:2], kernel="6.12")
    head, rows = tables_by_size(run)["published"]
    assert head == ["", "512 KiB", "published", "8 MiB", "published"]
    first, *others = rows
    assert first == ["normal: heap, mmap, read()", *["1.00"] * 4]
    for name, small, _, large, _ in others:
        stock = name in ("udmabuf, read(), buffered", "udmabuf, read(), direct", *HEAP_OURS)
        assert ("refused" not in (small, large)) == stock, (name, small, large)


@pytest.mark.parametrize("gate", [*GATES, *MODULE_GATES], ids=lambda gate: gate.name)
def test_limits_are_slightly_above_the_measured_ratios(gate: Gate) -> None:
    kept = [shown("instructions")]
    if gate.newest is not None:
        kept.append(shown("instructions-newest"))
    for measured in kept:
        ratios = measured.ratios(gate.candidate, gate.against)
        assert max(ratios) < limit(gate, measured) < 1.25 * statistics.median(ratios), ratios


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


PINNING = ["register page", "gup PIN_FAST 4k 1"]


@pytest.fixture
def two_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "JOBS", {job: [job] for job in PINNING})


@pytest.mark.usefixtures("two_jobs")
def test_pins_are_counted_by_marks_and_by_the_clock() -> None:
    """Per operation, for each round except the first."""
    warm = ["timed gup PIN_FAST 4k 1 10 90", "marked register page 4 2"]
    later = ["marked register page 4 3", "timed gup PIN_FAST 4k 1 10 75"]
    counted = [(0, 400), (10, 410), *((at, at + each) for at, each in ((20, 8), (30, 4), (40, 80)))]
    marks = ["254 0 0"]
    for begin, end in counted:
        marks += [f"0 {begin} 5", f"1 {end} 5"]
    assert list(pins.paired([*warm, *later], [*marks, "255 9 9"])) == [
        {"job": "register page", "round": 1, "instructions": 2},
        {"job": "gup PIN_FAST 4k 1", "round": 1, "instructions": 7.5},
    ]


@pytest.mark.usefixtures("two_jobs")
@pytest.mark.parametrize(
    ("said", "marks", "why"),
    [
        (["marked register page 1 1"], ["0 1 1", "1 1 1"], "PIN_FAST"),
        (["marked register page 1 1"], ["1 1 1", "0 1 1"], "register page"),
        (["marked register pages 1 1"], ["0 1 1", "1 1 1"], "register pages"),
        (["timed gup PIN_FAST 4k 1 1 1"], ["0 1 1", "1 1 1"], "more marks than runs"),
    ],
)
def test_pin_counts_that_do_not_match_are_an_error(
    said: list[str], marks: list[str], why: str
) -> None:
    with pytest.raises(AssertionError, match=why):
        list(pins.paired(said, marks))


def test_the_memory_of_the_tracker_is_read_from_the_kernel() -> None:
    log = "[    0.06] allocated 12582912 bytes of page_ext\n"
    on = {"total": 100, "described": 44, "page_ext": 12288}
    assert pins.memory(pins.ON, "machine on 100 11", log) == on
    assert pins.memory(pins.OFF, "machine off 100 11", "") == {**on, "page_ext": 0}
    for state, tracked in ((pins.ON, "off"), (pins.OFF, "on"), (pins.WITHOUT, "on")):
        with pytest.raises(AssertionError, match=f"{state}: tracking of pins is {tracked}"):
            pins.memory(state, f"machine {tracked} 100 11", log)


def test_every_pinning_operation_was_measured() -> None:
    run = Run.read(runs.kept("pins"))
    found = {(one["state"], one.get("job")) for one in run.samples}
    assert found == set(product(pins.STATES, [None, *pins.JOBS]))


@pytest.mark.parametrize("limit", pins.LIMITS, ids=lambda one: f"{one.state}, {one.what}")
def test_pin_costs_are_within_limits_or_a_known_miss(limit: pins.Limit) -> None:
    run = Run.read(runs.kept("pins"))
    here = pins.ratio(run, limit.state, limit.job)
    assert here <= limit.allowed
    assert limit.missed is None or limit.most < here, "the limit is met by now"


@pytest.mark.skipif(not os.environ.get("MATRIX"), reason="make kernel-test")
@pytest.mark.usefixtures("counting")
def test_the_cost_of_tracking_pins_is_within_its_limits() -> None:
    """Compared with the same kernel with the tracker off, so that no other kernel is needed. The
    location of memory changes a read by up to 1 % from boot to boot."""
    run = pins.measured(rounds=3, seed=1, states=(pins.OFF, pins.ON))
    ratios = {
        one.what: (pins.ratio(run, pins.ON, one.job, pins.OFF), one.allowed)
        for one in pins.LIMITS
        if one.state == pins.ON
    }
    assert [what for what, (here, most) in ratios.items() if here > 1.01 * most] == [], ratios
    [off, on] = [one["page_ext"] for one in run.samples if "page_ext" in one]
    assert (off, on) == (0, pins.MEMORY * 1024 // 4 * 24 // 1024)
