"""Costs of loads other than moving bytes: start-up, checksums, many tensors."""

import json
import statistics
from pathlib import Path

from bench.candidates import CHECKSUMS, NO_CHECKSUM
from bench.seconds.commands import Candidate, Output, script, way
from bench.seconds.quick import ROUNDS, SIZES, file_of, room, seconds
from bench.seconds.rounds import Cell, Measured
from bench.seconds.tables import Job, Place, Result
from bench.words import decided, ratio, size_text, spread

TENSORS = 10_000
MANY = f"{TENSORS} tensors"
TINY = 4096
START = {
    "dmafile --version": "--version",
    "dmafile load, 4 KiB": "load FILE --quiet",
}
"""Arguments of the command, by row."""


def job(place: Place, rounds: int | None) -> Job:
    size = next((size for size in SIZES if size <= room(place)), SIZES[-1])
    file, tiny, many = file_of(place, size), file_of(place, TINY), many_tensors(place.folder)
    every = [way(place.ways, name, file, line) for name, line in CHECKSUMS.items()]
    for name, words in START.items():
        command = [*place.program, *words.replace("FILE", str(tiny)).split()]
        every.append(Candidate(name, f"dmafile {words}", tiny, TINY, command, no_output, checks=""))
    size = many.stat().st_size
    every.append(Candidate(MANY, "many.py FILE", many, size, script("many.py", str(many))))
    return Job([Cell(one) for one in every], rounds or ROUNDS)


def results(measured: Measured) -> list[Result]:
    return [checksums(measured), others(measured)]


def no_output(_: Path) -> Output:
    return Output(0.0, 0.0)


def many_tensors(folder: Path) -> Path:
    """A file with as many tensors as a large mixture-of-experts model, of 64 bytes each."""
    path = folder / f"{TENSORS}-tensors.safetensors"
    entries: dict[str, object] = {}
    for number in range(TENSORS):
        name = f"model.layers.{number // 256}.mlp.experts.{number % 256}.down_proj.weight"
        start = number * 64
        entries[name] = {"dtype": "F32", "shape": [4, 4], "data_offsets": [start, start + 64]}
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(64 * TENSORS))
    return path


def checksums(measured: Measured) -> Result:
    size = max((one.size for one in measured.samples if one.candidate == NO_CHECKSUM), default=0)
    plain = seconds(measured.of(NO_CHECKSUM, size))
    lines = []
    for name in CHECKSUMS:
        runs = seconds(measured.of(name, size))
        if runs and plain:
            cost = f"{100 * (ratio(runs, plain) - 1):+.0f} %"
            certain = name == NO_CHECKSUM or decided(runs, plain)
            lines.append([name, spread(runs), cost if certain else f"{cost}, undecided"])
    return Result(
        "checksums", f"Checksums, {size_text(size)}, cold", ["", "seconds", "cost"], lines
    )


def others(measured: Measured) -> Result:
    lines = []
    for name in START:
        if runs := measured.of(name, TINY):
            lines.append(
                [f"{name}, whole process", f"{spread([1e3 * r.wall for r in runs], 1)} ms"]
            )
    if runs := [one for one in measured.samples if one.candidate == MANY]:
        opened = [1e3 * one.phases["create"] for one in runs]
        each = [1e6 * one.phases["fill"] / TENSORS for one in runs]
        lines.append([f"{MANY}: to open", f"{spread(opened, 1)} ms"])
        lines.append([f"{MANY}: an array of each", f"{statistics.median(each):.2f} µs"])
    return Result("start", "Start, and many tensors", ["", "time"], lines)
