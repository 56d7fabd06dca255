"""Servers of other projects on a held model are frozen, and thawed several times: the next answers
are what they would have been, replicas have the weights once, and nothing of the model is read.

$MODEL_MIB is about the size of the model (64); docs/restart.md has results of 2048. $SERVING_PYTHON
has the packages, if they are not in this Python.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.freeze.test_freeze import DMAFILE, HERE, bytes_in, eventually, inode_of
from vm.host import ROOT

MIB = 1 << 20
MODEL_MIB = int(os.environ.get("MODEL_MIB", "64"))
REPLICAS = 10
PYTHON = os.environ.get("SERVING_PYTHON", sys.executable)
NEEDS = {"llama": ["xllamacpp", "gguf"], "torch": ["torch"], "transformers": ["transformers"]}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="criu needs root"),
]

LLAMA = """
import sys
from pathlib import Path
sys.path.insert(0, "python/tests")
from test_paths import language_model
# 8 matrices of width x width, and 6 of width x 3 width, of 4 bytes each.
width = int(((int(sys.argv[2]) << 18) / 26) ** 0.5) // 64 * 64
language_model(Path(sys.argv[1]), width, 3 * width)
"""
TORCH = """
import sys
import torch
from safetensors.torch import save_file
torch.manual_seed(3)
rows = (int(sys.argv[2]) << 18) // 8 // 2048
save_file({f"layer.{n}": torch.randn(rows, 2048) / 50 for n in range(8)}, sys.argv[1])
"""
TRANSFORMERS = """
import json, os, sys
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(3)
one = LlamaForCausalLM(LlamaConfig(**json.loads(os.environ["CONFIG"])))
save_file({name: value.contiguous() for name, value in one.state_dict().items()}, sys.argv[1])
"""
VLLM = """
import sys
from pathlib import Path
sys.path.insert(0, "python/tests")
from loaders import tiny
tiny.tokenizer(tiny.llama(Path(sys.argv[1]), hidden=1024))
"""
MAKERS = {"llama": LLAMA, "torch": TORCH, "transformers": TRANSFORMERS}


def config() -> str:
    # Per layer 4 matrices of width x width, and 3 of width x 3 width; 4 bytes each.
    width = int((MODEL_MIB * MIB / 4 / 13 / 4) ** 0.5) // 64 * 64
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 64}
    return json.dumps({**sizes, **heads, "vocab_size": 256, "tie_word_embeddings": False})


ENV = {**os.environ, "CONFIG": config(), "OMP_NUM_THREADS": "1", "PYTHONPATH": "."}


class Server:
    """A running server, and how to ask it."""

    def __init__(self, io: Path, seen: int) -> None:
        self.answers, self.seen = io / "answers", seen
        self.asks = os.open(io / "asks", os.O_RDWR | os.O_CLOEXEC)

    def ask(self) -> list[object]:
        os.write(self.asks, b"\n")
        answer: list[object] = json.loads(self.line())
        return answer

    def line(self) -> str:
        found: list[str] = []

        def comes() -> bool:
            found[:] = self.answers.read_text().splitlines(keepends=True)
            return len(found) > self.seen and found[self.seen].endswith("\n")

        eventually(comes)
        self.seen += 1
        return found[self.seen - 1]


@pytest.fixture(params=NEEDS)
def held(request: pytest.FixtureRequest, place: Path) -> Iterator[tuple[str, Path, int]]:
    """A kind of server, its model, which is held at PLACE/socket, and the holder."""
    kind = request.param
    names = ",".join(NEEDS[kind])
    if subprocess.run([PYTHON, "-c", f"import {names}"], capture_output=True).returncode:
        pytest.skip(f"needs {names}")
    model = place / ("model.gguf" if kind == "llama" else "model.safetensors")
    words = [PYTHON, "-c", MAKERS[kind], str(model), str(MODEL_MIB)]
    subprocess.run(words, env=ENV, check=True, cwd=ROOT)
    assert 0.8 < model.stat().st_size / MIB / MODEL_MIB < 1.25, model.stat().st_size
    hold = [str(DMAFILE), "hold", str(model), "--name=weights", f"--socket={place}/socket"]
    holder = subprocess.Popen([*hold, "--verify=sha256"], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline()
        yield kind, model, holder.pid
    finally:
        holder.kill()
        holder.wait()


def start(kind: str, place: Path, path: str) -> tuple[subprocess.Popen[bytes], Server]:
    """Starts a server on what is held, vLLM on PLACE/model."""
    io = place / "io"
    io.mkdir()
    os.mkfifo(io / "asks")
    at = f"{place}/socket"
    serve = [PYTHON, str(HERE / "serving.py"), kind]
    if kind == "llama":
        serve = [str(DMAFILE), "take", "weights", f"--socket={at}", "--", *serve, "{}"]
    else:
        serve.append(str(place / "model") if kind == "vllm" else f"held:weights@{at}")
    env = {**ENV, "PATH": path, "PYTHONPATH": str(ROOT / "python")}
    with (io / "answers").open("wb") as said, (io / "errors").open("wb") as errors:
        asks = os.open(io / "asks", os.O_RDWR)
        process = subprocess.Popen(
            serve, stdin=asks, stdout=said, stderr=errors, start_new_session=True, env=env
        )
        os.close(asks)
    server = Server(io, 0)
    try:
        while server.line() != "ready\n":
            pass
    except AssertionError:
        process.kill()
        raise AssertionError((io / "errors").read_text()[-3000:]) from None
    return process, server


def freeze(
    process: "subprocess.Popen[bytes]", place: Path, path: str, *words: str
) -> dict[str, object]:
    """Freezes a server, which runs on; skips the test if this criu cannot."""
    done = subprocess.run(
        [str(DMAFILE), "freeze", "--leave-running", "--json", *words, str(process.pid), "images"],
        cwd=place,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    if "need criu 4.2 for TCP sockets" in done.stderr:
        process.kill()
        process.wait()
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    frozen: dict[str, object] = json.loads(done.stdout)
    return frozen


def thawed(
    place: Path, path: str, number: int, files: Mapping[str, bytes]
) -> "subprocess.Popen[bytes]":
    """Thaws a replica with its own files in PLACE/io, in namespaces of its own: all have the same
    process ID, and llama.cpp's the same port.
    """
    own = place / f"io-{number}"
    own.mkdir()
    for name, data in files.items():
        (own / name).write_bytes(data)
    os.mkfifo(own / "asks")
    script = f"ip link set lo up; mount --bind io-{number} io && exec {DMAFILE} thaw images"
    unshare = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    env = {**os.environ, "PATH": path}
    return subprocess.Popen([*unshare, "sh", "-c", script], cwd=place, env=env)


def replicas(pid: int) -> list[int]:
    """The processes that have this ID in a PID namespace of their own."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            ids = re.search(r"(?m)^NSpid:\t(\d+)\t(\d+)$", status.read_text())
            if ids and int(ids[2]) == pid:
                found.append(int(ids[1]))
    return found


def of_model(pid: int) -> Counter[str]:
    """What a process has in its mappings of the model, in bytes, by the names in smaps."""
    sums: Counter[str] = Counter()
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-", line):
            inside = "/memfd:model." in line
        elif inside and line.endswith(" kB"):
            name, size, _ = line.split()
            sums[name] += int(size) * 1024
    return sums


def not_weights(pid: int) -> int:
    """The bytes that a process has changed, without those of the model."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"(?m)^Private_Dirty: +(\d+) kB", text)
    assert found
    return int(found[1]) * 1024 - of_model(pid)["Private_Dirty:"]


def evict(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sectors_read(place: Path) -> int:
    device = place.stat().st_dev
    path = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat"
    return int(Path(path).read_text().split()[2])


def test_a_server_goes_on_where_it_was(held: tuple[str, Path, int], place: Path, path: str) -> None:
    kind, model, holder = held
    size = model.stat().st_size
    process, server = start(kind, place, path)
    for _ in range(2):
        server.ask()
    # criu refuses files whose size has changed.
    files = {name: (place / "io" / name).read_bytes() for name in ("answers", "errors")}
    private = not_weights(process.pid)
    frozen = freeze(process, place, path, f"--socket={place}/socket")
    assert frozen["bytes_held"] == size and frozen["holds"] == ["weights"], frozen
    # What it would have answered.
    want = [server.ask() for _ in range(3)]
    process.kill()
    process.wait()
    images = bytes_in(place / "images")
    print(f"{kind}: model {size}, not weights {private}, images {images}")
    assert images < 1.05 * private + 16 * MIB
    running, reads = [], []
    try:
        for number in range(REPLICAS):
            evict(place)
            begun = sectors_read(place)
            running.append(thawed(place, path, number, files))
            replica = Server(place / f"io-{number}", server.seen - 3)
            first = replica.ask()
            reads.append((sectors_read(place) - begun) * 512)
            assert [first, replica.ask(), replica.ask()] == want, number
        # Other programs may have read from the disk, too.
        print(f"read by a thaw and the first answer: {min(reads)} to {max(reads)} bytes")
        pids = replicas(process.pid)
        assert len(pids) == REPLICAS
        # It is the holder's memory, not memory that one of them has loaded.
        links = Path(f"/proc/{holder}/fd").iterdir()
        models = [link for link in links if "/memfd:model." in str(link.readlink())]
        [inode] = {model.stat().st_ino for model in models}
        assert all(inode_of(pid, "model.") == {str(inode)} for pid in pids)
        shares = [of_model(pid) for pid in (*pids, holder)]
        own = max(share["Private_Dirty:"] + share["Private_Clean:"] for share in shares)
        total = sum(share["Pss:"] for share in shares)
        print(f"in the model's mappings: private at most {own}, sum of Pss {total}")
        assert own <= 0.01 * size + MIB
        assert total <= 1.05 * size
    finally:
        for one in running:
            one.kill()
            one.wait()


def test_vllm_goes_on_where_it_was(place: Path, path: str) -> None:
    """It copies its weights into memory of its own, which is in the images."""
    if subprocess.run([PYTHON, "-c", "import vllm"], capture_output=True).returncode:
        pytest.skip("needs vllm")
    subprocess.run([PYTHON, "-c", VLLM, str(place / "model")], env=ENV, check=True, cwd=ROOT)
    process, server = start("vllm", place, path)
    for _ in range(2):
        server.ask()
    files = {name: (place / "io" / name).read_bytes() for name in ("answers", "errors")}
    frozen = freeze(process, place, path)
    assert frozen["holds"] == [], frozen
    want = [server.ask() for _ in range(3)]
    process.kill()
    process.wait()
    print(f"images {bytes_in(place / 'images')}")
    running = thawed(place, path, 0, files)
    try:
        replica = Server(place / "io-0", server.seen - 3)
        assert [replica.ask() for _ in range(3)] == want
    finally:
        running.kill()
        running.wait()
