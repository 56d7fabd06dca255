"""Four takers of one hold: dmafile, the safetensors package, llama.cpp and a C program.
The files are read from the disk once, are in memory once, and outlive their holder."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from test_c import built
from test_paths import language_model

from conftest import write

# Each program prints as JSON what it has found and how much it has read from the disk for it; after
# a line on stdin, it looks again. Libraries are imported before.
COMMON = """
import hashlib, json, sys

def disk():
    lines = open("/proc/self/io").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))

def say(look):
    before = disk()
    print(json.dumps([look(), disk() - before]), flush=True)
    if sys.stdin.readline():
        print(json.dumps([look(), 0]), flush=True)
"""
HOLDER = """
import dmafile
before = disk()
holder = dmafile.hold(sys.argv[3:], name="both", socket=sys.argv[1], folder=sys.argv[2])
print(disk() - before, flush=True)
sys.stdin.read()
"""
DMAFILE = """
import dmafile
held = dmafile.take("both", socket=sys.argv[1])
say(lambda: [hashlib.sha256(memoryview(one.buffer)).hexdigest() for one in held])
"""
SAFETENSORS = """
import numpy, safetensors
opened = []
def look():
    # It stays mapped.
    opened.extend(() if opened else [safetensors.safe_open(sys.argv[1], framework="np")])
    get = opened[0].get_tensor
    names = sorted(opened[0].keys())
    return {name: hashlib.sha256(get(name).tobytes()).hexdigest() for name in names}
say(look)
"""
LLAMA = """
import xllamacpp
started = []
def look():
    if not started:
        params = xllamacpp.CommonParams()
        params.model.path = sys.argv[1]
        params.n_ctx, params.n_parallel, params.warmup, params.cpuparams.n_threads = 64, 1, False, 1
        started.append(xllamacpp.Server(params))
    asked = {"prompt": "hello", "max_tokens": 4, "temperature": 0.0, "cache_prompt": False}
    answer = started[0].handle_completions(asked)
    answer = answer if isinstance(answer, dict) else json.loads(answer)
    return answer["choices"][0]["text"]
say(look)
"""
MIB = 1 << 20


class Program:
    """One of the programs above, which waits after it has looked."""

    def __init__(self, program: str, *args: object) -> None:
        command = [sys.executable, "-c", COMMON + program, *map(str, args)]
        pipe = subprocess.PIPE
        self.child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def line(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline()

    def again(self) -> str:
        assert self.child.stdin is not None
        self.child.stdin.write("\n")
        self.child.stdin.flush()
        return self.line()

    def end(self) -> None:
        self.child.kill()
        self.child.communicate()


@pytest.fixture(scope="module")
def files(folder: Path) -> Iterator[list[Path]]:
    """80 MiB of tensors, and a language model of about the same size."""
    place = folder / "both"
    place.mkdir()
    random = np.random.default_rng(23)
    tensors = {f"layer.{number}": random.standard_normal((1024, 2048)) for number in range(5)}
    one = write(place / "tensors.safetensors", safetensors.numpy.save(tensors))
    other = language_model(place / "llama.gguf", width=768, inner=2048)
    yield [one, other]
    for path in (one, other):
        path.unlink()


def drop(files: list[Path]) -> None:
    """Drops files from the page cache."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def pss(pid: int) -> int:
    """The proportional share (Pss) of a process in its mappings of memfds, in bytes."""
    found, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            inside = "/memfd:" in line
        elif inside and words[0] == "Pss:":
            found += int(words[1]) * 1024
    return found


def test_four_kinds_of_programs_share_one_hold(files: list[Path], folder: Path) -> None:
    pytest.importorskip("xllamacpp", reason="pip install --no-deps xllamacpp")
    tensors, llama = files
    size = sum(path.stat().st_size for path in files)
    command = built(folder, "take")
    # What each program finds in the files themselves; this also reads the libraries into memory.
    wanted = []
    for program, path in ((SAFETENSORS, tensors), (LLAMA, llama)):
        plain = Program(program, path)
        wanted.append(json.loads(plain.line())[0])
        plain.end()
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    shell = subprocess.run(["sha256sum", *files], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in shell.stdout.splitlines()] == digests
    drop(files)
    with tempfile.TemporaryDirectory(prefix="dmafile-") as name:
        at, links = Path(name) / "socket", Path(name) / "links"
        holder = Program(HOLDER, at, links, *files)
        programs = [holder]
        try:
            read = int(holder.line())
            takers = [
                Program(DMAFILE, at),
                Program(SAFETENSORS, links / tensors.name),
                Program(LLAMA, links / llama.name),
            ]
            programs += takers
            answers = [json.loads(taker.line()) for taker in takers]
            assert [answer[0] for answer in answers] == [digests, *wanted]
            read += sum(answer[1] for answer in answers)
            in_c = subprocess.Popen(
                [command, "both", "--socket", at, "--cat"], stdout=subprocess.PIPE
            )
            assert in_c.stdout is not None
            # It waits in write(2) for the rest.
            first = in_c.stdout.read(size - MIB)
            io = Path(f"/proc/{in_c.pid}/io").read_text().splitlines()
            read += next(int(one.split()[1]) for one in io if one.startswith("read_bytes:"))
            assert read <= 1.01 * size, (read, size)
            pids = [*(one.child.pid for one in programs), in_c.pid]
            shares = [pss(pid) for pid in pids]
            assert 0.9 * size < sum(shares) <= 1.02 * size, (shares, size)
            holder.child.kill()
            holder.child.wait()
            again = [json.loads(taker.again())[0] for taker in takers]
            assert again == [digests, *wanted]
            both = hashlib.sha256(first + in_c.stdout.read()).hexdigest()
            assert in_c.wait(timeout=60) == 0
        finally:
            for one in programs:
                one.end()
        with pytest.raises(FileNotFoundError):
            (links / tensors.name).open("rb")
    whole = subprocess.run(["cat", *files], capture_output=True, check=True).stdout
    assert both == hashlib.sha256(whole).hexdigest()
