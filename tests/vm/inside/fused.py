"""Loads with dmafile.ko, which allocates and reads in one call, and the choice of a dma-buf kind.

    fused.py DMAFILE HELPERS FOLDER [KIND...]   in the machine, as root, with the module loaded;
                                               KIND: other kinds of dma-bufs, the better one first

Fails with an assertion that names the case, or prints the number of cases. At the end, the module
is unloaded, which fails if anything of it is still in use.
"""

import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.vm.inside.loads import BLOB, MIB, File, Loads, setting

SIZE = 6 * MIB + 777
LARGEST = "/sys/module/dmafile/parameters/max_buffer_mb"
NODES = {"udmabuf": "/dev/udmabuf", "heap:system": "/dev/dma_heap/system"}


class Fused:
    def __init__(self, loads: Loads, folder: Path, kinds: Sequence[str]) -> None:
        self.loads, self.folder, self.kinds = loads, folder, kinds

    def choices(self, report: Any) -> dict[str, str]:
        """The reason of each choice, by subject and choice."""
        return {f"{one['about']} {one['choice']}": one["why"] for one in report["reasons"]}

    def steps(self) -> None:
        """Loads in one step by default, or in two on request; the digest is that of the file."""
        file = File.of(self.folder / "file", SIZE)
        digest = hashlib.sha256(file.data).hexdigest()
        for when, mode in (("auto", "direct"), ("before", "direct"), ("in-read", "direct+bounced")):
            words = [f"--allocation={when}", "--io=direct", f"--verify=sha256={digest}"]
            report = self.loads.load(file, "module", *words, "--trace=/tmp/trace.json")
            choices = self.choices(report)
            assert report["method"] == "module" and report["io"] == "direct", report
            # In an existing buffer, a partial block has no spare room around it.
            assert f"mode {mode}" in choices, choices
            assert ("allocation ahead" in choices) == (when == "auto"), choices
            assert report["bytes_direct"] == SIZE and report["verify"]["matched"], report
            hidden, phases = report["hidden"], report["phases"]
            assert 0 < phases["alloc"] < phases["total"], report
            assert (0 < hidden <= phases["alloc"]) == (when == "auto"), report
            names = {event.get("name") for event in events()}
            assert {"dmafile.ko", "verify"} <= names, names
        line = self.loads.refused(
            "load", str(file.path), "--to=module", "--quiet", f"--verify=sha256={'0' * 64}"
        )
        assert "wrong digest" in line and "(EBADMSG)" in line, line

    def cache(self) -> None:
        """A mostly cached file is copied from the page cache; any other is read directly."""
        file = File.of(self.folder / "file", SIZE)
        reader = str(self.loads.helpers / "reader")
        for warm, io in ((SIZE // 4, "direct"), (3 * SIZE // 4, "buffered"), (SIZE, "buffered")):
            file.evict()
            with file.path.open("rb") as some:
                # Without readahead, only the bytes that are read get cached.
                os.posix_fadvise(some.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                assert some.read(warm) == file.data[:warm]
            command = [*self.loads.words(file, "module"), str(file.path)]
            assert command[-2] == reader
            seen, report = self.loads.read(f"{warm} bytes are cached", command)
            assert seen.data[:SIZE] == file.data, f"{warm} bytes are cached: wrong bytes"
            assert report["io"] == io and f"mode {io}" in self.choices(report), (warm, report)
            if io == "direct":
                # The load added nothing to the page cache.
                assert seen.cached <= -(-warm // 4096) + 1, (warm, seen.cached)

    def files(self) -> None:
        """Each file of a model is at its offset."""
        model = self.folder / "model"
        model.mkdir(exist_ok=True)
        for number in range(2):
            tensor = BLOB[number * MIB : 3 * MIB + 5]
            text = {f"t{number}": {"dtype": "U8", "shape": [len(tensor)]}}
            text[f"t{number}"]["data_offsets"] = [0, len(tensor)]
            header = json.dumps(text).encode()
            path = model / f"{number}.safetensors"
            path.write_bytes(struct.pack("<Q", len(header)) + header + tensor)
        words = self.loads.words(File(model, b""), "module")
        seen, report = self.loads.read("a model", words)
        assert report["method"] == "module" and len(report["shards"]) == 2, report
        for shard in report["shards"]:
            path = model / Path(shard["file"]).name
            data, at = path.read_bytes(), report["offset"] + shard["at"]
            assert seen.data[at : at + len(data)] == data, shard

    def limits(self) -> None:
        """Limits of the module and of the process have different errors, and nothing is leaked."""
        file = File.of(self.folder / "file", SIZE)
        back = setting(LARGEST, 1)
        line = self.loads.refused("load", str(file.path), "--to=module", "--quiet")
        back()
        assert "dmafile.ko makes up to 1048576 bytes (EFBIG); " in line, line
        # Enough descriptors for the process, the file and the node, but not for the dma-buf.
        for most in range(6, 20):
            command = ["prlimit", f"--nofile={most}", self.loads.dmafile, "load"]
            command += [str(file.path), "--to=module", "--io=direct", "--quiet"]
            done = subprocess.run(command, capture_output=True, text=True)
            if not done.returncode:
                break
            assert "(EMFILE); raise the limit on open files" in done.stderr, done
        else:
            raise AssertionError("it never had enough descriptors")
        assert most > 6, "it never had too few"

    def best(self) -> None:
        """`dma-buf` selects the best available kind, and gives a reason against the others."""
        file = File.of(self.folder / "file", SIZE)
        against: list[str] = []
        for kind in ("module", *self.kinds):
            report = self.loads.load(file, "dma-buf")
            choices = self.choices(report)
            assert report["kind"] == kind and f"kind {kind}" in choices, report
            # The plan says the same.
            told = self.loads.run("explain", str(file.path), "--to=dma-buf", "--json")
            plan = json.loads(told.stdout)
            assert plan["kind"] == kind, plan
            assert (plan["methods"][0]["method"] == "module") == (kind == "module"), plan
            assert all("(ENOENT)" in choices[f"not {one}"] for one in against), choices
            if kind == "module" and "udmabuf" in self.kinds:
                # The page size can be chosen for a udmabuf, but not for module.
                report = self.loads.load(file, "dma-buf", "--pages=base")
                assert report["kind"] == "udmabuf" and report["pages"] == "base", report
            if kind == "module":
                subprocess.run(["rmmod", "dmafile"], check=True)
            else:
                Path(NODES[kind]).unlink()
            against.append(kind)
        line = self.loads.refused("load", str(file.path), "--to=dma-buf", "--quiet")
        assert "there is no /dev/dmafile (ENOENT)" in line and "modprobe dmafile" in line, line


def events() -> Any:
    trace = json.loads(Path("/tmp/trace.json").read_text())
    return trace["traceEvents"] if isinstance(trace, dict) else trace


def main(dmafile: str, helpers: str, folder: str, *kinds: str) -> None:
    loads = Loads(dmafile, helpers)
    fused = Fused(loads, Path(folder), kinds)
    fused.steps()
    fused.cache()
    fused.files()
    fused.limits()
    fused.best()
    print(f"{loads.count} loads checked")


if __name__ == "__main__":
    main(*sys.argv[1:])
