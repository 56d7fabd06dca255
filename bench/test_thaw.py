"""Tests of what the benchmark of thaws computes."""

import random

from bench import thaw
from bench.runs import Run
from bench.seconds.files import MIB


def test_large_objects_are_scaled_to_the_memory() -> None:
    found = thaw.sizes(12 << 30, random.Random(1))
    assert len(found) == 2700 and abs(sum(found) - (12 << 30)) < 2 * MIB
    assert min(found) >= 4096 and max(found) <= 2 << 30
    # The others alone are more.
    less = thaw.sizes(1 << 30, random.Random(1))
    assert less[:2650] == found[:2650] and set(less[2650:]) == {MIB}


def test_the_best_job_of_fio_is_compared() -> None:
    ways = [thaw.OURS, thaw.DIRECT, thaw.BUFFERED, thaw.EACH, thaw.TOUCH]
    seconds = dict.fromkeys((*ways, *(thaw.fio(*job) for job in thaw.JOBS)), 4.0)
    seconds |= {thaw.OURS: 2.0, thaw.TOUCH: 1.0, thaw.fio("4m", 8): 3.0}
    samples = [
        {"way": name, "round": number, "seconds": time}
        for number in range(1, 6)
        for name, time in seconds.items()
    ]
    _, rows = thaw.tables(Run({"machine": {"bytes": 8_000_000_000}}, samples))["thaw"]
    both = "fio, 4M × 8, and then touching as much memory"
    found = {row[0]: (row[2].split(" ")[0], row[3]) for row in rows}
    assert found[thaw.OURS] == ("4.00", "1.00") and found[both] == ("2.00", "2.00")
    assert found[thaw.fio("4m", 8)] == ("2.67", "1.50") and len(rows) == 7
