"""`bench.quick` and `bench.ranks`: their tables."""

from bench import quick, ranks
from bench.runs import Run


def test_a_run_of_the_command_makes_tables() -> None:
    def line(state: str, what: str, seconds: float, ratio: float | None) -> dict[str, object]:
        def three(middle: float) -> dict[str, float]:
            return {"median": middle, "min": middle / 2, "max": middle * 2}

        times = {"seconds": three(seconds), "cpu_seconds": three(seconds / 4)}
        found = {"ratio": ratio and three(ratio), "undecided": bool(ratio)}
        return {"state": state, "way": what, "what": what, **times, **found, "cached_after": None}

    lines = [
        line("cold", "dmafile", 0.5, None),
        line("cold", "read()", 1, 2),
        line("warm", "read()", 1, 2),
    ]
    peaks = (None, (1 << 30) + (5 << 20), 1)
    samples = [
        {"state": one["state"], "way": one["way"], "peak_bytes": peak}
        for one, peak in zip(lines, peaks, strict=True)
    ]
    found = quick.tables(Run({}, [{"bytes": 1 << 30, "table": lines, "samples": samples}]))
    assert list(found) == ["quick-1024MiB-cold", "quick-1024MiB-warm"]
    assert found["quick-1024MiB-cold"][1] == [
        ["dmafile", "0.500 [0.250–1.000]", "2.15", "0.116", "0", "?", ""],
        ["read()", "1.000 [0.500–2.000]", "1.07", "0.233", "5", "?", "2.00 [1.00–4.00], undecided"],
    ]


def test_the_table_of_ranks_is_made_of_samples() -> None:
    own = {"size": 10, "read": 10, "cpu": 1, "cached_after": 0}
    samples = [
        {**own, "way": "a loader", "ours": False, "all": 4 * n, "memory": 40} for n in (1, 2)
    ] + [{**own, "way": "mine", "ours": True, "all": n, "memory": 10} for n in (1, 2)]
    _, rows = ranks.tables(Run({}, samples))["ranks"]
    one, four = "1.00 [1.00–1.00]", "4.00 [4.00–4.00]"
    assert rows == [
        ["mine", "1.50 [1.00–2.00]", one, one, one, "", ""],
        ["a loader", "6.00 [4.00–8.00]", one, four, one, "4.00", "0.25"],
    ]
