"""One process holds files in memory, and others take them."""

import errno
import gc
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dmafile
import numpy as np
import pytest
import safetensors.numpy

from conftest import Run, eventually, file_sha256, sha256, write

Arrays = dict[str, np.ndarray[Any, Any]]

# A lower bound of the bytes of the tensors.
SIZE = 5000 * 256 * 4

TAKE = """
import hashlib, json, sys, dmafile
held = dmafile.take(sys.argv[1], socket=sys.argv[2], wait=60)
print(json.dumps({one.name: hashlib.sha256(memoryview(one.buffer)).hexdigest() for one in held}))
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder for sockets, whose paths must be short."""
    with tempfile.TemporaryDirectory(prefix="dmafile-") as name:
        yield Path(name)


@pytest.fixture
def named(place: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A unique name, and a private folder in which holds are searched."""
    place.joinpath("run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place / "run"))
    return f"test-{os.getpid()}-{place.name}"


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    random = np.random.default_rng(17)
    shapes = {"large": (5000, 256), "small": (3,), "scalar": ()}
    made = {
        name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }
    return {
        **{name: np.asarray(one) for name, one in made.items()},
        "bytes": np.arange(7, dtype="u1"),
    }


@pytest.fixture(scope="module")
def model(folder: Path, arrays: Arrays) -> Path:
    """Two shards and an index."""
    path = folder / "held"
    path.mkdir()
    placed = {}
    for number, names in ((1, ("large", "small")), (2, ("scalar", "bytes"))):
        file = f"model-{number:05}-of-00002.safetensors"
        tensors = {name: arrays[name] for name in names}
        write(path / file, safetensors.numpy.save(tensors, {"format": "np"}))
        placed.update(dict.fromkeys(names, file))
    index = json.dumps({"metadata": {}, "weight_map": placed})
    (path / "model.safetensors.index.json").write_text(index)
    return path


def disk_bytes() -> int:
    """Bytes that this process has read from the disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def test_another_process_takes_held_files(model: Path, place: Path, python: Run) -> None:
    at = place / "socket"
    with dmafile.hold(model, name="model", socket=at, verify="sha256") as holder:
        assert (holder.name, holder.socket, holder.serving) == ("model", at, True)
        done = python(TAKE, "model", at)
        assert done.returncode == 0, done.stderr
        names = sorted(one.name for one in model.glob("*.safetensors"))
        assert json.loads(done.stdout) == {name: file_sha256(model / name) for name in names}
        assert [one["digest"]["digest"] for one in holder.files] == [
            file_sha256(model / name) for name in names
        ]
        before = disk_bytes()
        with dmafile.take("model", socket=at) as held:
            assert held.holder == (os.getpid(), os.geteuid())
            assert [one.name for one in held.files] == names
            assert held.files[0].info["sealed"] and not held.files[0].info["changed"]
            for one in held:
                assert one.buffer.readonly and one.buffer.report is None
                assert file_sha256(f"/proc/{os.getpid()}/fd/{one.buffer.fileno()}") == file_sha256(
                    model / one.name
                )
            assert dmafile.holds(socket=at)[0]["takers"] == 1
        # The interpreter may have read some of its files.
        assert disk_bytes() - before < SIZE / 2
        eventually(lambda: dmafile.holds(socket=at)[0]["takers"] == 0)
    assert not holder.serving and not at.exists()


def test_taken_memory_stays_after_release(model: Path, place: Path) -> None:
    at = place / "socket"
    wanted = file_sha256(model / "model-00002-of-00002.safetensors")
    holder = dmafile.hold(model, name="model", socket=at)
    held = dmafile.take("model", socket=at)
    bytes_of_second = memoryview(held.files[1].buffer)
    with pytest.raises(BufferError):
        held.close()
    del held
    gc.collect()
    # A memoryview keeps the memory, so there is still one taker.
    assert dmafile.holds(socket=at)[0]["takers"] == 1
    dmafile.release("model", socket=at)
    eventually(lambda: not holder.serving)
    assert sha256(bytes_of_second) == wanted


def test_a_hold_or_ctrl_c_ends_a_wait(model: Path, place: Path) -> None:
    at = place / "socket"
    with pytest.raises(FileNotFoundError, match="ENOENT"):
        dmafile.take("late", socket=at)
    taken: list[dmafile.Held] = []
    taker = threading.Thread(target=lambda: taken.append(dmafile.take("late", socket=at, wait=60)))
    taker.start()
    with dmafile.hold(model, name="late", socket=at):
        taker.join()
    assert len(taken[0]) == 2
    program = (
        "import sys, dmafile; print(flush=True); dmafile.take('x', socket=sys.argv[1], wait=None)"
    )
    command = [sys.executable, "-c", program, str(place / "never")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    # Whether it waits already or not yet, the signal ends it.
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=60)
    assert stderr.rstrip().endswith("KeyboardInterrupt"), stderr


@pytest.mark.parametrize("call", ["take('x', wait=None, ", "release('x', ", "holds("])
def test_ctrl_c_ends_the_wait_for_an_answer(place: Path, call: str) -> None:
    at = place / "silent"
    program = f"import sys, dmafile; dmafile.{call}socket=sys.argv[1])"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as holder:
        holder.bind(str(at))
        holder.listen()
        command = [sys.executable, "-c", program, str(at)]
        child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        peer, _ = holder.accept()
        with peer:
            # It has sent its request and never gets an answer.
            assert peer.recv(4096)
            child.send_signal(signal.SIGINT)
            _, stderr = child.communicate(timeout=60)
    assert stderr.rstrip().endswith("KeyboardInterrupt"), stderr


def test_invalid_requests_are_refused(model: Path, place: Path) -> None:
    at = place / "socket"
    for wrong in (
        {"to": "anon"},
        {"name": "a/b"},
        {"group": "no such group"},
        {"group": 1 << 40},
        {"idle": -1.0},
        {"queue_depth": 0},
        {"pages": "large"},
    ):
        with pytest.raises(dmafile.UsageError):
            dmafile.hold(model, **{"name": "x", "socket": at, **wrong})  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        dmafile.hold(model, socket=at, colour="red")  # type: ignore[call-arg]
    with pytest.raises(dmafile.UsageError):
        dmafile.shared([], folder=place / "shared")
    assert not at.exists()
    with (
        dmafile.hold(model, name="x", socket=at, idle=1e300),
        pytest.raises(dmafile.Error) as refused,
    ):
        dmafile.hold(model, name="x", socket=at)
    assert refused.value.errno == errno.EADDRINUSE


LEAKS = """
import gc, os, sys, dmafile
for round in range(51):
    held = dmafile.take(sys.argv[1], socket=sys.argv[2])
    view = memoryview(held.files[0].buffer)
    del held, view
    gc.collect()
    maps = open("/proc/self/maps").read().count("memfd:")
    found = len(os.listdir("/proc/self/fd")), maps
    first = found if round == 0 else first
assert found == first and maps == 0, (found, first)
"""


def test_descriptors_and_mappings_are_released_after_the_last_use(
    model: Path, place: Path, python: Run
) -> None:
    at = place / "socket"
    with dmafile.hold(model, name="model", socket=at):
        done = python(LEAKS, "model", at)
        assert done.returncode == 0, done.stderr


def test_a_forked_child_can_read_and_cannot_stop_the_holder(model: Path, place: Path) -> None:
    at = place / "socket"
    wanted = file_sha256(model / "model-00001-of-00002.safetensors")
    # In a separate process, because this one has threads.
    program = f"""
import hashlib, os, sys, dmafile
holder = dmafile.hold({str(model)!r}, name="model", socket={str(at)!r})
held = dmafile.shared({str(model)!r}, folder={str(place / "shared")!r})
child = os.fork()
if child == 0:
    digest = hashlib.sha256(memoryview(held.files[0].buffer)).hexdigest()
    holder.stop()
    held.close()
    os._exit(0 if digest == {wanted!r} else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert holder.serving
assert len(dmafile.take("model", socket={str(at)!r})) == 2
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr


# A number that no user of the machine has.
STRANGER = 61234

WITHOUT_SESSION = """
import os, stat, sys, dmafile
uid, variable = int(sys.argv[1]), sys.argv[2]
os.environ.pop("XDG_RUNTIME_DIR", None)
if variable:
    os.environ["XDG_RUNTIME_DIR"] = variable
os.setgid(uid)
os.setuid(uid)
# A file that all users can read.
path = "/etc/passwd"
try:
    with dmafile.hold(path, name="there") as holder, dmafile.shared(path) as shared:
        taken = dmafile.take("there")
        wanted = open(path, "rb").read()
        assert bytes(taken.files[0].buffer) == bytes(shared.files[0].buffer) == wanted
        assert [one["socket"] for one in dmafile.holds()] == [str(holder.socket)]
        folder = holder.socket.parent
        found = folder.lstat()
        assert (found.st_uid, stat.filemode(found.st_mode)) == (uid, "drwx------")
        print(folder)
except dmafile.Error as error:
    print(error)
"""


@pytest.fixture
def squatters() -> Iterator[list[Path]]:
    """Where the folder of a user without a session may be, and another folder of that user."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    places = [Path(place) / f"dmafile-{STRANGER}" for place in ("/dev/shm", "/tmp")]
    places.append(Path(f"/tmp/of-{STRANGER}"))

    def clear() -> None:
        for place in places:
            if place.is_symlink():
                place.unlink()
            elif place.exists():
                shutil.rmtree(place)

    clear()
    places[2].mkdir(mode=0o700)
    os.chown(places[2], STRANGER, STRANGER)
    yield places
    clear()


@pytest.mark.parametrize("variable", ["", "/run/user/61234"])
def test_without_a_session_sockets_are_in_a_folder_that_is_named_after_the_user(
    squatters: list[Path], python: Run, variable: str
) -> None:
    *places, own = squatters
    for count, place in enumerate(places):
        done = python(WITHOUT_SESSION, STRANGER, variable)
        assert done.stdout == f"{place}\n", done.stderr
        # What others have put there is not used: a link, or a folder of another user.
        shutil.rmtree(place)
        if count == 0:
            place.symlink_to(own)
        else:
            place.mkdir(mode=0o777)
    done = python(WITHOUT_SESSION, STRANGER, variable)
    assert "set XDG_RUNTIME_DIR to a folder that only you can write to" in done.stdout, done.stderr
    assert not list(own.iterdir())


def test_forks_do_not_keep_memory_from_being_sealed(folder: Path, place: Path, python: Run) -> None:
    path = write(folder / "forked.bin", np.random.default_rng(5).bytes(32 << 20))
    # The children live longer than the loads.
    program = """
import os, signal, sys, threading, dmafile
path, place = sys.argv[1:]
children = []

def fork(done, total):
    # A child that is forked after a load has its buffer.
    if done == total:
        return
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        signal.pause()
    children.append(child)

def forked(load, *args, **options):
    before = len(children)
    slowly = {"method": "threads", "io": "direct", "block": 4096, "queue_depth": 1}
    made = load(*args, progress=fork, **slowly, **options)
    assert len(children) > before
    return made

try:
    held = forked(dmafile.hold, path, name="a", socket=f"{place}/a")
    shared = forked(dmafile.shared, path, folder=f"{place}/b")
    forked(dmafile.load, path).seal()
finally:
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
"""
    done = python(program, path, place)
    assert done.returncode == 0, done.stderr


SHARE = """
import hashlib, os, sys, dmafile
held = dmafile.shared(sys.argv[1], folder=sys.argv[2], wait=60)
digests = [hashlib.sha256(memoryview(one.buffer)).hexdigest() for one in held]
lines = open("/proc/self/io").read().splitlines()
read = [line.split()[1] for line in lines if line.startswith("read_bytes")]
print(held.holder[0] == os.getpid(), *read, *digests, flush=True)
sys.stdin.read(1)
digests_later = [hashlib.sha256(memoryview(one.buffer)).hexdigest() for one in held]
assert digests_later == digests
"""


def test_processes_share_one_load_and_survive_the_loader(folder: Path, place: Path) -> None:
    path = write(folder / "shared.bin", np.random.default_rng(4).bytes(24 << 20))
    wanted, size = file_sha256(path), path.stat().st_size
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = [sys.executable, "-c", SHARE, str(path), str(place / "shared")]

    def start() -> "subprocess.Popen[str]":
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def said(child: "subprocess.Popen[str]") -> list[str]:
        assert child.stdout is not None
        return child.stdout.readline().split()

    children = [start() for _ in range(4)]
    try:
        words = [said(child) for child in children]
        assert [one[2] for one in words] == [wanted] * 4
        loaders = [one[0] for one in words]
        assert loaders.count("True") == 1
        # Python may read its own files from the disk too, but the file is read only once.
        assert sum(int(one[1]) for one in words) < 2 * size
        loader = children[loaders.index("True")]
        loader.kill()
        loader.wait()
        late = start()
        children.append(late)
        words = [said(late)]
        assert words[0][2] == wanted and words[0][0] == "False"
        assert int(words[0][1]) < size
        for child in children:
            if child is not loader:
                child.communicate("x", timeout=60)
                assert child.returncode == 0
    finally:
        for child in children:
            child.kill()
            child.communicate()


def test_numpy_sees_the_held_memory(model: Path, arrays: Arrays, named: str) -> None:
    with dmafile.hold(model, name=named) as holder:
        before = disk_bytes()
        tensors = dmafile.numpy.load_file(f"held:{named}")
        _ = sum(int(array.view(np.uint8).sum()) for array in tensors.values() if array.shape)
        assert disk_bytes() - before < SIZE / 2
        assert list(tensors) == list(dmafile.numpy.load_file(model))
        for name, array in tensors.items():
            assert np.array_equal(array, arrays[name]) and array.shape == arrays[name].shape
            assert not array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            tensors["large"][0, 0] = 1
        assert shared_kib(tensors["large"]) > 4000
        some = dmafile.numpy.load_file(f"held:{named}", tensors="s*")
        assert sorted(some) == ["scalar", "small"]
        with pytest.raises(FileNotFoundError):
            dmafile.numpy.load_file(f"held:{named}", tensors=["nothing"])
        with pytest.raises(dmafile.UsageError, match="verify"):
            dmafile.numpy.load_file(f"held:{named}", verify="sha256")
        with dmafile.open_tensors(f"held:{named}") as opened:
            assert opened.format == "safetensors" and opened.metadata() == {"format": "np"}
            assert np.array_equal(opened.get_tensor("large"), arrays["large"])
            assert np.array_equal(opened.get_slice("large")[7:90:3], arrays["large"][7:90:3])
        with dmafile.safe_open(f"held:{named}", "np") as opened:
            together = opened.get_tensors()
            assert together.keys() == arrays.keys()
            assert all(np.array_equal(together[name], array) for name, array in arrays.items())
        assert dmafile.holds(socket=holder.socket)[0]["takers"] > 0
    # The memory outlives the holder.
    assert np.array_equal(tensors["large"], arrays["large"])
    with pytest.raises(FileNotFoundError):
        dmafile.numpy.load_file(f"held:{named}")


def test_a_name_may_include_the_path_of_the_socket(
    model: Path, arrays: Arrays, place: Path
) -> None:
    at = place / "a@b"
    with dmafile.hold(model, name="x", socket=at):
        tensors = dmafile.numpy.load_file(f"held:x@{at}")
        assert np.array_equal(tensors["large"], arrays["large"])
        with dmafile.open_tensors(f"held:x@{at}") as opened:
            assert np.array_equal(opened.get_tensor("small"), arrays["small"])
        for wrong in (f"held:y@{at}", f"held:x@{at}-not", "held:x@"):
            with pytest.raises(FileNotFoundError):
                dmafile.numpy.load_file(wrong)


def shared_kib(array: "np.ndarray[Any, Any]") -> int:
    """KiB of the mapping with this array that are pages of the mapped file, not private copies."""
    address = array.ctypes.data
    found = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            start, end = (int(part, 16) for part in words[0].split("-"))
            inside = start <= address < end
        elif inside and words[0] in ("Rss:", "Anonymous:"):
            found += int(words[1]) if words[0] == "Rss:" else -int(words[1])
    return found


def test_safetensors_reads_the_folder_of_links(model: Path, arrays: Arrays, place: Path) -> None:
    links = place / "links"
    with dmafile.hold(model, name="model", socket=place / "socket", folder=links):
        index = json.loads((links / "model.safetensors.index.json").read_text())["weight_map"]
        for name, file in index.items():
            with safetensors.safe_open(links / file, framework="np") as opened:
                assert np.array_equal(opened.get_tensor(name), arrays[name])
    assert not links.exists()


def test_the_index_decides_between_copies_of_a_held_tensor(folder: Path, place: Path) -> None:
    model = folder / "replaced tensors"
    model.mkdir()
    old: Arrays = {name: np.arange(9, dtype=np.int32) for name in ("a", "b")}
    new: Arrays = {"b": np.arange(7, dtype=np.int64)}
    safetensors.numpy.save_file(old, model / "1.safetensors")
    safetensors.numpy.save_file(new, model / "2.safetensors")
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    want = {"a": old["a"], "b": new["b"]}
    at = place / "socket"
    with dmafile.hold(model, name="replaced", socket=at):
        told = [one.get("superseded") for one in dmafile.holds(socket=at)[0]["files"]]
        assert told == [["b"], None]
        for path in (f"held:replaced@{at}", model):
            loaded = dmafile.numpy.load_file(path)
            assert loaded.keys() == want.keys()
            assert all(np.array_equal(loaded[name], array) for name, array in want.items())
        with dmafile.open_tensors(f"held:replaced@{at}") as lazy:
            assert np.array_equal(lazy.get_tensor("b"), new["b"])


def test_takers_of_a_writable_hold_see_each_others_writes(place: Path, folder: Path) -> None:
    path = write(folder / "writable.bin", bytes(100_000))
    at = place / "socket"
    with dmafile.hold(path, name="x", socket=at, writable=True):
        one, other = dmafile.take("x", socket=at), dmafile.take("x", socket=at)
        assert one.files[0].info["sealed"] is False
        os.pwrite(one.files[0].buffer.fileno(), b"changed", 50_000)
        assert bytes(memoryview(other.files[0].buffer)[50_000:50_007]) == b"changed"
        with pytest.raises(dmafile.Error) as refused:
            one.files[0].buffer._private()
        assert refused.value.errno == errno.EPERM
    assert path.read_bytes() == bytes(100_000)


def test_a_hold_can_be_replaced(folder: Path, place: Path) -> None:
    path = write(folder / "replaced.bin", b"old" * 10_000)
    at = place / "socket"
    first = dmafile.hold(path, name="x", socket=at)
    held = dmafile.take("x", socket=at)
    time.sleep(0.01)
    write(path, b"new" * 10_000)
    assert dmafile.holds(socket=at)[0]["changed"]
    with dmafile.hold(path, name="x", socket=at, replace=True):
        eventually(lambda: not first.serving)
        assert bytes(memoryview(dmafile.take("x", socket=at).files[0].buffer)[:3]) == b"new"
    assert bytes(memoryview(held.files[0].buffer)[:3]) == b"old"


STAYS = """
import os, sys
from pathlib import Path
import dmafile
{imports}

model, place = map(Path, sys.argv[1:])

def has():
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{{number}}"))
        except FileNotFoundError:
            pass
    others = sorted(link for link in links if not link.startswith(("/memfd:", "/dmabuf:")))
    threads = Path("/proc/self/task").glob("*/comm")
    return others, sorted(thread.read_text() for thread in threads)

before = has()
kept = {call}
after = has()
assert after == before, (before, after)
"""
ONE = 'model / "model-00001-of-00002.safetensors"'
CALLS = {
    "uring": ("", f'dmafile.load({ONE}, method="uring")'),
    "threads": ("", f'dmafile.load({ONE}, method="threads")'),
    "bounce": ("", f'dmafile.load({ONE}, method="bounce", length=99)'),
    "buffered": ("", f'dmafile.load({ONE}, io="buffered")'),
    "verified": ("", f'dmafile.load({ONE}, verify="sha256", progress=print)'),
    "async": ("import asyncio", f"asyncio.run(dmafile.load_async({ONE}))"),
    "saved": ("", 'dmafile.save(bytes(1 << 20), place / "saved")'),
    "taken": ("", 'dmafile.take("model", socket=place / "socket")'),
    "numpy": ("import dmafile.numpy", f"dmafile.numpy.load_file({ONE})"),
    "torch": ("import dmafile.torch", f"dmafile.torch.load_file({ONE})"),
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_but_the_memory_stays(name: str, model: Path, place: Path, python: Run) -> None:
    imports, call = CALLS[name]
    if name == "torch" and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    # It could be checkpointed: CRIU dumps no io_uring, and no connection to another process.
    program = STAYS.format(imports=imports, call=call)
    with dmafile.hold(model, name="model", socket=place / "socket"):
        done = python(program, str(model), str(place))
    assert done.returncode == 0, done.stderr
