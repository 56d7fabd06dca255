"""The cost of saves, on a stock kernel with dmafile.ko: docs/saving.md."""

import statistics

from bench.candidates import FROM_MEMORY, FROM_MODULE, TO_DISK_GOAL
from bench.instructions.measure import MIB, Measured, as_run, measure, step
from bench.runs import Rows, Run
from bench.words import ratio_text, thousands

NAME = "save-instructions"


def lines() -> list[str]:
    """All candidates, each once."""
    return [*FROM_MODULE.values(), *FROM_MEMORY.values()]


def measured(mib: int, rounds: int, seed: int, profile: str = "release") -> Run:
    one = measure(lines(), size=mib * MIB, rounds=rounds, seed=seed, profile=profile)
    return as_run("saves", one)


def tables(run: Run) -> dict[str, Rows]:
    one = Measured.of(run.machine["machine"], run.samples)
    return {
        "module": table_of(one, FROM_MODULE),
        "memory": table_of(one, FROM_MEMORY),
        "goal": goal(one),
    }


def table_of(one: Measured, every: dict[str, str]) -> Rows:
    """A table whose last row is the baseline."""
    (*_, against) = every.values()
    rows = []
    for name, line in every.items():
        if (refused := one.candidates[line].refused) is not None:
            rows.append([name, f"refused: {refused}", ""])
            continue
        counts = one.per_mib(line, step("fill"))
        rows.append([name, thousands(counts), ratio_text(one.ratios(line, against, step("fill")))])
    return ["", "thousands of instructions per MiB", "to the last"], rows


def ratios(one: Measured) -> list[float]:
    """The ratio of `RW` to the other method, by round."""
    line, against, _ = TO_DISK_GOAL
    return one.ratios(line, against, step("fill"))


def goal(one: Measured) -> Rows:
    found = ratios(one)
    most = TO_DISK_GOAL[2]
    verdict = "yes" if statistics.median(found) <= most else "no"
    row = ["`RW`, direct, to `write()` from its mapping", f"1/{1 / most:.0f}"]
    return ["", "at most", "here", "met"], [[*row, ratio_text(found), verdict]]
