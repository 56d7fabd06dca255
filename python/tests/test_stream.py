"""Streams of tensors for PyTorch; skipped if it is not installed."""

import errno
import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import dmafile
import pytest

from conftest import (
    HERE,
    SLOWLY,
    Run,
    bytes_read,
    eventually,
    file_sha256,
    load_threads,
    open_files,
    write,
)

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
safetensors: Any = pytest.importorskip("safetensors.torch")

MIB = 1 << 20


@pytest.fixture
def streamed(device: str) -> Any:
    """Untyped, so that tests can pass invalid arguments."""
    return partial(dmafile.torch.stream, device=device)


def tensors(seed: int) -> dict[str, Any]:
    """Small, large and empty tensors."""
    generator = torch.Generator().manual_seed(seed)
    made = {
        f"{seed}.large.{number}": torch.randn((500 + 100 * number, 777), generator=generator)
        for number in range(6)
    }
    made |= {f"{seed}.small.{n}": torch.full((n,), n, dtype=torch.bfloat16) for n in range(1, 50)}
    made |= {f"{seed}.empty": torch.zeros((0, 3)), f"{seed}.scalar": torch.tensor(2.5)}
    return made


@pytest.fixture(scope="module")
def shards(folder: Path) -> Path:
    """A model of two shards with an index."""
    where = folder / "shards"
    where.mkdir()
    places: dict[str, str] = {}
    for seed in (1, 2):
        name = f"model-{seed:05}-of-00002.safetensors"
        made = tensors(seed)
        safetensors.save_file(made, where / name, {"format": "pt"})
        places |= dict.fromkeys(made, name)
    index = {"metadata": {}, "weight_map": places}
    (where / "model.safetensors.index.json").write_text(json.dumps(index))
    return where


def files(shards: Path) -> list[Path]:
    return sorted(shards.glob("*.safetensors"))


def order(shards: Path) -> list[str]:
    """The names in the order of their bytes, according to safetensors."""
    names = []
    for file in files(shards):
        with safetensors.safe_open(file, "pt") as reader:
            names += reader.offset_keys()
    return names


def same(left: Any, right: Any) -> bool:
    return bool(left.dtype == right.dtype and torch.equal(left.cpu(), right))


@pytest.mark.parametrize("budget", [1, 100_000, 3 * MIB, 1 << 30])
@pytest.mark.parametrize("path", ["folder", "index", "list"])
def test_every_tensor_is_returned_once_in_file_order(
    streamed: Any, shards: Path, budget: int, path: str
) -> None:
    ways: dict[str, Any] = {
        "folder": shards,
        "index": shards / "model.safetensors.index.json",
        "list": [str(file) for file in files(shards)],
    }
    want = tensors(1) | tensors(2)
    got = list(streamed(ways[path], budget=budget))
    assert [name for name, _ in got] == order(shards)
    for name, tensor in got:
        assert same(tensor, want[name]), name


def test_only_chosen_tensors_are_read(streamed: Any, device: str, shards: Path) -> None:
    want = {"1.large.3", "2.small.7", "2.empty"}
    every = tensors(1) | tensors(2)
    nbytes = sum(every[name].nbytes for name in want)
    list(streamed(shards, tensors="2.small.7"))
    headers = streamed(shards, tensors=lambda name: False)
    for chosen in (sorted(want), want.__contains__):
        before = bytes_read()
        assert list(headers) == []
        stream = streamed(shards, tensors=chosen)
        opened = bytes_read()
        got = dict(stream)
        assert got.keys() == want
        # Direct reads begin and end at blocks.
        assert opened - before < 100_000 and bytes_read() - opened < nbytes + 100_000
    loaded = dmafile.torch.load_file(shards, device, tensors=want.__contains__)
    assert loaded.keys() == want
    for name in want:
        assert same(loaded[name], every[name]) and same(got[name], every[name])
    assert dmafile.torch.load_file(shards, device, tensors=lambda name: False) == {}
    assert dmafile.numpy.load_file(shards, tensors=lambda name: name == "1.scalar").keys() == {
        "1.scalar"
    }


def test_a_function_chooses_by_name_even_if_it_looks_like_a_pattern(
    streamed: Any, device: str, folder: Path
) -> None:
    path = folder / "patterns.safetensors"
    safetensors.save_file({name: torch.ones(3) for name in ("a*", "ab", "re:.*")}, path)
    for wanted in ({"a*"}, {"re:.*"}, {"ab"}):
        assert dict(streamed(path, tensors=wanted.__contains__)).keys() == wanted
        assert dmafile.torch.load_file(path, device, tensors=wanted.__contains__).keys() == wanted


def test_tensors_are_writable_views_that_keep_their_memory(streamed: Any, shards: Path) -> None:
    got = dict(streamed(shards))
    first, second = (name for name in order(shards) if name in ("1.large.0", "1.large.1"))
    kept, beside = got[first], got[second]
    assert beside.data_ptr() - kept.data_ptr() == kept.nbytes, "not adjacent: a copy"
    del got, beside
    gc.collect()
    assert same(kept, tensors(1)[first])
    kept += 1
    assert same(kept, tensors(1)[first] + 1)


# Lets programs in a separate interpreter use a device, their first argument.
BEGIN = f"""
import os, sys, dmafile.torch, pytest, torch
device, *args = sys.argv[1:]
if device != "cpu":
    sys.path.append({str(HERE)!r})
    import double
    double.stand_in(double.the_double(), pytest.MonkeyPatch())
"""

PEAK = """
from pathlib import Path
def peak():
    if device != "cpu" and double.REAL:
        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10
for name, tensor in dmafile.torch.stream(args[1], device=device):
    pass
before = peak()
total = 0
for name, tensor in dmafile.torch.stream(args[0], device=device, budget=int(args[2])):
    total += tensor.nbytes
print(peak() - before, total)
"""


def test_memory_stays_within_the_budget(
    folder: Path, shards: Path, python: Run, device: str
) -> None:
    path, count, nbytes = folder / "many.safetensors", 48, 4 * MIB
    made = {f"{n:02}": torch.full((nbytes,), n, dtype=torch.uint8) for n in range(count)}
    safetensors.save_file(made, path)
    done = python(BEGIN + PEAK, device, path, files(shards)[0], 32 * MIB)
    assert done.returncode == 0, done.stderr
    grown, total = map(int, done.stdout.split())
    assert total == count * nbytes
    # The tensor that the consumer holds keeps its part alive, and huge pages round up.
    assert grown < 64 * MIB, "192 MiB have passed"


def test_closing_a_stream_early_stops_the_reads_and_frees_memory(
    streamed: Any, slow_model: Path
) -> None:
    before, threads = open_files(), threading.active_count()
    stream = streamed(slow_model, budget=64 * MIB, **SLOWLY)
    name, tensor = next(stream)
    assert name == "00"
    read = bytes_read()
    stream.close()
    assert bytes_read() - read < 100 * MIB
    assert torch.equal(tensor, torch.full_like(tensor, 0)), "the tensor changed"
    with pytest.raises(StopIteration):
        next(stream)
    eventually(lambda: not load_threads())
    del stream
    gc.collect()
    eventually(lambda: open_files() == before)
    assert threading.active_count() == threads


@pytest.fixture(scope="module")
def slow_model(folder: Path) -> Path:
    path = folder / "slow.safetensors"
    made = {f"{n:02}": torch.full((8 * MIB,), n, dtype=torch.uint8) for n in range(24)}
    safetensors.save_file(made, path)
    return write(path, path.read_bytes())


FORK = """
import warnings
warnings.simplefilter("ignore")
slowly = {"method": "threads", "io": "direct", "block": 4096, "queue_depth": 1}
stream = dmafile.torch.stream(args[0], device=device, budget=32 << 20, **slowly)
next(stream)
child = os.fork()
if child == 0:
    try:
        list(stream)
    except RuntimeError as error:
        refused = "forked" in str(error)
    else:
        refused = False
    del stream
    # Without what a driver does when a process exits.
    os._exit(not refused)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), 1 + len(list(stream)))
"""


def test_a_forked_child_cannot_continue_a_stream(
    slow_model: Path, python: Run, device: str
) -> None:
    done = python(BEGIN + FORK, device, slow_model)
    assert (done.stdout, done.stderr) == ("0 24\n", "")


def test_ctrl_c_ends_a_stream(streamed: Any, slow_model: Path) -> None:
    stream = streamed(slow_model, budget=64 * MIB, **SLOWLY)
    next(stream)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        for _ in stream:
            pass
        # The stream ended before the timer.
        time.sleep(60)
    timer.join()
    eventually(lambda: not load_threads())


def test_progress_is_reported_to_the_end_and_its_exception_ends_the_stream(
    streamed: Any, shards: Path
) -> None:
    told: list[tuple[int, int]] = []
    list(streamed(shards, progress=lambda *now: told.append(now), budget=MIB))
    assert told == sorted(told) and len({total for _, total in told}) == 1
    assert told[-1][0] == told[-1][1]

    def stop(done: int, total: int) -> None:
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        list(streamed(shards, progress=stop))
    eventually(lambda: not load_threads())


@pytest.mark.parametrize("algorithm", ["sha256", "xxh3"])
def test_a_wrong_digest_is_raised_after_the_last_tensor(
    streamed: Any, shards: Path, algorithm: str
) -> None:
    path = files(shards)[0]
    names = order(shards)
    digest = file_sha256(path)
    if algorithm == "xxh3":
        digest = dmafile.load(path, verify="xxh3").report["verify"]["digest"]  # type: ignore[index]
    wrong = digest[:-1] + ("0" if digest[-1] != "0" else "1")
    for budget in (1, MIB, 1 << 30):
        right = streamed(path, verify=f"{algorithm}={digest}", budget=budget)
        assert len(list(right)) == len(tensors(1))
        got = []
        with pytest.raises(dmafile.Error, match="already returned contain wrong data") as caught:
            for name, _ in streamed(path, verify=f"{algorithm}={wrong}", budget=budget):
                got.append(name)
        assert caught.value.errno == errno.EBADMSG and str(path) in str(caught.value)
        assert got == names[: len(got)] and len(got) == len(tensors(1))
    for options in ({"tensors": "1.scalar"}, {}):
        with pytest.raises(dmafile.UsageError):
            streamed(shards, verify=f"sha256={digest}", **options)


def test_the_digest_of_a_file_without_tensors_is_compared(streamed: Any, folder: Path) -> None:
    path = folder / "none.safetensors"
    safetensors.save_file({}, path, {"format": "pt"})
    digest = file_sha256(path)
    assert list(streamed(path, verify=f"sha256={digest}")) == []
    with pytest.raises(dmafile.Error, match="already returned contain wrong data"):
        list(streamed(path, verify=f"sha256={'0' * 64}"))


def test_files_of_a_hugging_face_cache_are_compared_with_their_names(
    streamed: Any, device: str, folder: Path, shards: Path
) -> None:
    cache = folder / device / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots/1").mkdir(parents=True)
    for file in files(shards):
        blob = cache / "blobs" / file_sha256(file)
        blob.write_bytes(file.read_bytes())
        (cache / "snapshots/1" / file.name).symlink_to(blob)
    assert len(list(streamed(cache / "snapshots/1", verify="sha256"))) > 100
    content = bytearray(blob.read_bytes())
    content[-5] ^= 1
    blob.write_bytes(content)
    with pytest.raises(dmafile.Error, match=blob.name):
        list(streamed(cache / "snapshots/1", verify="sha256"))


def test_a_file_that_shrinks_during_a_stream_is_an_error(
    streamed: Any, folder: Path, shards: Path
) -> None:
    path = folder / "short.safetensors"
    path.write_bytes(files(shards)[0].read_bytes())
    stream = streamed(path, budget=1)
    name, tensor = next(stream)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(dmafile.Error, match="ENODATA"):
        list(stream)
    assert same(tensor, tensors(1)[name])


WRONG: list[tuple[Callable[[Any, Path], Any], type[Exception], str]] = [
    (lambda streamed, path: streamed(path, budget=0), dmafile.UsageError, "budget"),
    (lambda streamed, path: streamed(path, tensors="nothing"), FileNotFoundError, "nothing"),
    (lambda streamed, path: streamed([]), dmafile.Error, "empty"),
    (lambda streamed, path: streamed([*files(path)] * 2), dmafile.Error, "earlier file"),
    (lambda streamed, path: streamed(path / "none"), FileNotFoundError, "none"),
    (lambda streamed, path: streamed(path, method="magic"), dmafile.UsageError, "magic"),
    (lambda streamed, path: streamed(path, to="memfd"), TypeError, "to"),
]


@pytest.mark.parametrize("call,kind,text", WRONG)
def test_invalid_arguments_are_errors_before_the_first_tensor(
    streamed: Any,
    shards: Path,
    call: Callable[[Any, Path], Any],
    kind: type[Exception],
    text: str,
) -> None:
    with pytest.raises(kind, match=text):
        call(streamed, shards)


def test_tensors_are_copied_to_another_device(shards: Path) -> None:
    for name, tensor in dmafile.torch.stream(shards, device="meta"):
        assert (
            tensor.device.type == "meta" and tensor.shape == (tensors(1) | tensors(2))[name].shape
        )
