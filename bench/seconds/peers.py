"""Loads tensors by dmafile and by other installed loaders: `--table peers`."""

import hashlib
import importlib.metadata
import importlib.util
import json
import statistics
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.seconds.commands import Candidate, script
from bench.seconds.files import MIB
from bench.seconds.model import Shape, header, make_model
from bench.seconds.programs.peer import WAYS, Way
from bench.seconds.rounds import Cell, Measured, Sample, seconds
from bench.seconds.tables import ROUNDS, Job, Place, Result
from bench.words import compared, ratio, spread

OURS = "dmafile"
SCALES = (1536, 768, 384, 96)
"""Hidden sizes of the models: 2 GiB, 0.6 GiB, 0.2 GiB, 20 MiB."""


def job(place: Place, rounds: int | None) -> Job:
    source = model(place)
    notes = [
        f"{name}: {way.note}" for name, way in WAYS.items() if way.note and not to_install(way)
    ]
    notes += [
        f"{name}: not installed ({why})" for name, way in WAYS.items() if (why := to_install(way))
    ]
    cells = []
    for name, way in WAYS.items():
        if to_install(way):
            continue
        file = converted(source, way.file)
        command = script("peer.py", name, str(file))
        size = file.stat().st_size
        candidate = Candidate(label(name), f"peer.py {name}", file, size, command)
        cells += [Cell(candidate), Cell(candidate, warm=True)]
    return Job(cells, rounds or ROUNDS, notes, {"digest": digest(source)})


def results(measured: Measured) -> list[Result]:
    return [result(measured, warm) for warm in (False, True)]


def model(place: Place) -> Path:
    for hidden in SCALES:
        shape = Shape(
            hidden=hidden,
            key_value=384 * hidden // SCALES[0],
            intermediate=5376 * hidden // SCALES[0],
        )
        path = place.folder / f"llama-style-{hidden}.safetensors"
        # The model is written in four formats.
        if path.exists() or 5 * header(shape)[1] <= place.room():
            break
    make_model(path, shape)
    return path


def to_install(way: Way) -> str:
    """How to install what is missing for a loader; empty if nothing is."""
    try:
        importlib.metadata.version(way.package)
    except importlib.metadata.PackageNotFoundError:
        return f"pip install {way.package}"
    missing = [name for name in way.needs if importlib.util.find_spec(name) is None]
    return f"pip install {' '.join(missing)}" if missing else ""


def label(name: str) -> str:
    way = WAYS[name]
    return f"{name} {importlib.metadata.version(way.package)}" if way.package != "numpy" else name


def digest(path: Path) -> str:
    """A digest of all names and bytes of a safetensors file, read by read()."""
    found = hashlib.blake2b()
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name in sorted(header):
            start, end = header[name]["data_offsets"]
            file.seek(8 + length + start)
            found.update(name.encode() + b"\0" + file.read(end - start))
    return found.hexdigest()


def converted(source: Path, to: str) -> Path:
    """The same tensors in another format, written by that format's library."""
    path = source.with_suffix(f".{to}")
    if to != "safetensors" and not path.exists():
        # In a separate process, because the peak memory of later runs would include this process's.
        subprocess.run(script("convert.py", str(source), str(path)), check=True)
    return path


def result(measured: Measured, warm: bool) -> Result:
    runs: Mapping[str, list[Sample]] = {
        name: found
        for name in measured.candidates
        if (found := [one for one in measured.samples if (one.candidate, one.warm) == (name, warm)])
    }
    mine = next((name for name in runs if name.startswith(f"{OURS} ")), None)
    lines = []
    for name, found in runs.items():
        beside = ["", ""]
        if mine and name != mine:
            less = ratio([one.own_cpu for one in runs[mine]], [one.own_cpu for one in found])
            beside = [compared(seconds(found), seconds(runs[mine])), f"{less:.2f}"]
        size = found[0].size
        lines.append(
            [
                name,
                spread(seconds(found)),
                f"{size / statistics.median(seconds(found)) / 1e9:.2f}",
                spread([one.own_cpu for one in found]),
                f"{max(0, max(one.peak for one in found) - size) / MIB:,.0f}",
                f"{max(one.cached_after for one in found) / MIB:,.0f}",
                *beside,
            ]
        )
    state = "in the page cache" if warm else "cold"
    title = f"Tensors, {state}"
    notes = list(measured.missing)
    for size in {size for _, size in measured.refused}:
        notes += measured.refusals(size)
    head = ["", "seconds", "GB/s", "CPU s", "extra MiB", "MiB cached after"]
    return Result(
        f"peers-{'warm' if warm else 'cold'}",
        title,
        [*head, "dmafile is faster", "dmafile's CPU to its"],
        lines,
        notes,
    )
