"""What loads take beside moving bytes: start, checksums, many tensors."""

import json
import statistics
from pathlib import Path

from .candidates import Candidate, Said, ours, script
from .quick import ROUNDS, SIZES, file_of, room, seconds
from .rounds import Cell, Measured
from .tables import Job, Place, Result
from .words import decided, ratio, size_text, spread

CHECKSUMS = ("crc32c", "xxh3", "blake3", "sha256")
NONE = "no checksum"
TENSORS = 10_000
MANY = f"{TENSORS} tensors"
TINY = 4096


def job(place: Place, rounds: int | None) -> Job:
    size = next((size for size in SIZES if size <= room(place)), SIZES[-1])
    file, tiny, many = file_of(place, size), file_of(place, TINY), many_tensors(place.folder)
    every = [ours(NONE, file, "to=memfd")]
    every += [ours(name, file, f"to=memfd verify={name}") for name in CHECKSUMS]
    load = [*place.program, "load", str(tiny), "--quiet"]
    for name, command in {
        "dmafile --version": [*place.program, "--version"],
        "dmafile load, 4 KiB": load,
    }.items():
        every.append(Candidate(name, tiny, TINY, command, nothing_said, checks=""))
    every.append(Candidate(MANY, many, many.stat().st_size, script("many.py", str(many))))
    return Job(
        [Cell(one) for one in every],
        rounds or ROUNDS,
        lambda measured: [checksums(measured, size), others(measured, many)],
    )


def nothing_said(_: Path) -> Said:
    return Said(0.0, 0.0)


def many_tensors(folder: Path) -> Path:
    """A file of as many tensors as a large model of experts has, of 64 bytes each."""
    path = folder / f"{TENSORS}-tensors.safetensors"
    entries: dict[str, object] = {}
    for number in range(TENSORS):
        name = f"model.layers.{number // 256}.mlp.experts.{number % 256}.down_proj.weight"
        start = number * 64
        entries[name] = {"dtype": "F32", "shape": [4, 4], "data_offsets": [start, start + 64]}
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(64 * TENSORS))
    return path


def checksums(measured: Measured, size: int) -> Result:
    plain = seconds(measured.of(NONE, size))
    lines = []
    for name in (NONE, *CHECKSUMS):
        runs = seconds(measured.of(name, size))
        if runs and plain:
            cost = f"{100 * (ratio(runs, plain) - 1):+.0f} %"
            certain = name == NONE or decided(runs, plain)
            lines.append([name, spread(runs), cost if certain else f"{cost}, undecided"])
    return Result(
        "checksums", f"Checksums, {size_text(size)}, cold", ["", "seconds", "cost"], lines
    )


def others(measured: Measured, many: Path) -> Result:
    lines = []
    for name in ("dmafile --version", "dmafile load, 4 KiB"):
        if runs := measured.of(name, TINY):
            lines.append(
                [f"{name}, whole process", f"{spread([1e3 * r.wall for r in runs], 1)} ms"]
            )
    if runs := measured.of(MANY, many.stat().st_size):
        opened = [1e3 * one.phases["create"] for one in runs]
        each = [1e6 * one.phases["fill"] / TENSORS for one in runs]
        lines.append([f"{MANY}: to open", f"{spread(opened, 1)} ms"])
        lines.append([f"{MANY}: an array of each", f"{statistics.median(each):.2f} µs"])
    return Result("start", "Start, and many tensors", ["", "time"], lines)
