"""Ranks of a process group load together, with PyTorch's gloo."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import dmafile
import pytest

from conftest import write

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
safetensors: Any = pytest.importorskip("safetensors.torch")

HERE = Path(__file__).parent
MIB = 1 << 20
GIB = 1 << 30
ROWS = {1: (41, 30, 3), 2: (22, 34)}
"""Tensors of each file, in MiB."""


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    """A model of several files, not in the page cache."""
    where = folder / "ranks"
    where.mkdir()
    places: dict[str, str] = {}
    for number, sizes in ROWS.items():
        name = f"model-{number:05}-of-{len(ROWS):05}.safetensors"
        tensors = {
            f"{number}.{at}": torch.randint(0, 256, (size * MIB,), dtype=torch.uint8)
            for at, size in enumerate(sizes)
        } | {f"{number}.small": torch.randn(number)}
        safetensors.save_file(tensors, where / name)
        places |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": places}
    (where / "model.safetensors.index.json").write_text(json.dumps(index))
    return where


def files(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors"))


def size(model: Path) -> int:
    return sum(file.stat().st_size for file in files(model))


def digests(model: Path) -> dict[str, str]:
    """The digest of each tensor, read without dmafile."""
    found = {}
    for file in files(model):
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, one in json.loads(data[8:start]).items():
            if name != "__metadata__":
                first, last = one["data_offsets"]
                found[name] = hashlib.sha256(data[start + first : start + last]).hexdigest()
    return found


@pytest.fixture(scope="module")
def copy(model: Path, folder: Path) -> Path:
    """The model in other files: ranks with these are on another node than those without."""
    return shutil.copytree(model, folder / "ranks-copy")


def evict(model: Path) -> None:
    for file in files(model):
        write(file, file.read_bytes())


class Node:
    """A process that has imported PyTorch and forks ranks."""

    def __init__(self, before: Sequence[str] = (), interface: str = "lo") -> None:
        own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
        self.process = subprocess.Popen(
            [*before, sys.executable, str(HERE / "together.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **own},
        )

    def start(self, wanted: dict[str, Any], ranks: Sequence[int]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({**wanted, "ranks": list(ranks)}) + "\n")
        self.process.stdin.flush()

    def said(self) -> tuple[list[dict[str, Any]], int]:
        """What each rank reports, and how many have failed."""
        assert self.process.stdout is not None
        found: list[dict[str, Any]] = []
        for line in self.process.stdout:
            said = json.loads(line)
            if isinstance(said, int):
                return found, said
            found.append(said)
        raise AssertionError("it has ended")

    def stop(self) -> None:
        self.process.communicate()


def load(
    nodes: Sequence[Node], place: Path, path: Path | str, **more: Any
) -> dict[int, dict[str, Any]]:
    """What the ranks report; each node has the same number of ranks."""
    wanted: dict[str, Any] = {
        "world": 4,
        "store": f"file://{place}/store",
        "timeout": 120,
        "call": "load_file",
        "path": str(path),
        "paths": {},
        "options": {},
        "users": {},
        "late": {},
        "killed": None,
        "killed_in": None,
        "again": None,
        "members": None,
        "leave": False,
        "mark": str(place / "half"),
        "environment": {"XDG_RUNTIME_DIR": str(place)},
        **more,
    }
    each = wanted["world"] // len(nodes)
    for number, node in enumerate(nodes):
        node.start(wanted, range(number * each, (number + 1) * each))
    found: dict[int, dict[str, Any]] = {}
    failed = 0
    for node in nodes:
        said, more_failed = node.said()
        failed += more_failed
        found |= {one["rank"]: one for one in said}
    killed = wanted["killed"]
    assert failed == (killed is not None), "unexpected failures of ranks: see stderr"
    assert found.keys() == set(range(wanted["world"])) - {killed}
    for one in found.values():
        before, after = one["before"], one["after"]
        # The process group may have closed descriptors since then.
        assert not Counter(after.pop("fds")) - Counter(before.pop("fds")), one
        assert after == before, "the load leaked something"
    return found


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    node = Node()
    yield node
    node.stop()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder for files and sockets that other users can enter."""
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    return tmp_path


def warm_up(nodes: Sequence[Node], place: Path, model: Path, **more: Any) -> None:
    """Loads once, because the pages of PyTorch's code count as read, too; then drops the files
    from the page cache."""
    before = place / "before"
    before.mkdir()
    load(nodes, before, model, **more)
    evict(model)


def check_equal(said: dict[int, dict[str, Any]], model: Path) -> None:
    want = digests(model)
    for one in said.values():
        assert "error" not in one, one["error"]
        assert one["digests"] == want


@pytest.mark.parametrize("call", ["load_file", "stream"])
def test_the_ranks_of_a_node_read_each_byte_once(
    place: Path, model: Path, call: str, node: Node
) -> None:
    warm_up([node], place, model, call=call)
    said = load([node], place, model, call=call)
    check_equal(said, model)
    assert sum(one["read"] for one in said.values()) <= 1.02 * size(model)
    assert sum(one["memory"] for one in said.values()) <= 1.05 * size(model)
    assert sum(one["private"] for one in said.values()) <= 0.1 * size(model), "copies"
    for one in said.values():
        (report,) = one["reports"]
        assert report["nodes"] == [[0, 1, 2, 3]]
        assert [rank["disk"] for rank in report["ranks"]] == [size(model), 0, 0, 0]
        assert all(rank["peers"] == 0 < rank["seconds"] for rank in report["ranks"])
    # Without direct reads more may be read, and from memory nothing.
    assert said[0]["read"] >= 0.98 * size(model) or said[0]["read"] == 0


def test_a_single_rank_loads_into_private_memory(place: Path, model: Path, node: Node) -> None:
    said = load([node], place, model, world=1)
    check_equal(said, model)
    assert said[0]["memory"] == 0 and said[0]["private"] >= size(model)
    assert said[0]["reports"][0]["ranks"][0]["disk"] >= size(model)


def test_digests_are_compared_and_each_rank_chooses_its_tensors(
    place: Path, model: Path, node: Node
) -> None:
    options: dict[str, Any] = {"0": {"verify": "xxh3"}}
    options["1"] = {"verify": "xxh3", "tensors": ["2.*"]}
    said = load([node], place, model, world=2, options=options)
    want = digests(model)
    assert said[0]["digests"] == want
    assert said[1]["digests"] == {name: one for name, one in want.items() if name[0] == "2"}


def test_a_load_can_be_repeated_while_its_error_is_handled(
    place: Path, model: Path, node: Node
) -> None:
    other = place / "other"
    shutil.copytree(model, other)
    with files(other)[0].open("r+b") as file:
        file.seek(-MIB, os.SEEK_END)
        file.write(bytes(MIB))
    # A rank with other files is on another node.
    said = load(
        [node], place, model, world=2, paths={"1": str(other)}, again=str(model), timeout=60
    )
    check_equal(said, model)
    for one in said.values():
        assert "has files that differ from those of rank" in one["first"]


@pytest.fixture
def loading(place: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """This process keeps others from loading the model."""
    from dmafile._hold import SharedModel
    from dmafile._load import open_model

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    wanted = SharedModel(open_model(model), None, {})
    vacant: Any = wanted.find(0)
    yield wanted
    vacant.close()


@pytest.mark.usefixtures("loading")
def test_a_failure_ends_the_wait_for_another_process(place: Path, model: Path, node: Node) -> None:
    said = load([node], place, model, world=3, killed=2, killed_in="ready", timeout=60)
    for one in said.values():
        assert one["error"] == f"cannot load: {model}: rank 2 has ended (ECONNRESET)"


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The state of a load by a group of this process only."""
    from dmafile._ranks import Ranks

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield Ranks(dist.group.WORLD)
    dist.destroy_process_group()


def test_the_timeout_ends_the_wait_for_another_process(loading: Any, alone: Any) -> None:
    alone.timeout = 1.5
    with pytest.raises(TimeoutError, match="another process is still loading it"):
        alone._find(loading)


FAILURES = [
    ([], "the list of files is empty"),
    ("held:none", "group: held:none is in memory already; leave group out"),
]


@pytest.mark.parametrize("path,text", FAILURES)
def test_a_rank_that_fails_before_the_others_know_it_is_named(
    place: Path, model: Path, node: Node, path: Any, text: str
) -> None:
    # The next load finds all ranks at the same call.
    said = load([node], place, model, world=3, paths={"1": path}, again=str(model), timeout=60)
    check_equal(said, model)
    for rank, one in said.items():
        assert text in one["first"]
        assert ("rank 1 has failed: " in one["first"]) == (rank != 1)


def test_a_group_of_some_ranks_loads_without_the_others(
    place: Path, model: Path, node: Node
) -> None:
    said = load([node], place, model, members=[1, 3])
    for other in (said.pop(0), said.pop(2)):
        assert f"group: rank {other['rank']} is not in it" in other["error"]
        assert other["errno"] == errno.EINVAL
    check_equal(said, model)
    for one in said.values():
        assert one["reports"][0]["nodes"] == [[1, 3]]
        assert [rank["disk"] for rank in one["reports"][0]["ranks"]] == [size(model), 0]


def test_a_backend_without_options_has_the_default_timeout() -> None:
    from dmafile._ranks import _timeout

    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist = torch.distributed
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        assert dist.group.WORLD._get_backend(torch.device("cpu")).options is None
        assert _timeout(dist.group.WORLD) == dist.default_pg_timeout.total_seconds()
    finally:
        dist.destroy_process_group()


MFD_NOEXEC_SEAL, F_SEAL_EXEC = 0x8, 0x20


def test_memory_for_several_nodes_cannot_become_executable() -> None:
    from dmafile._stripes import _Memory

    memory = _Memory([(Path("x"), 4096)])
    seals = fcntl.fcntl(memory.fds[0], fcntl.F_GET_SEALS)
    memory.close()
    try:
        os.close(os.memfd_create("x", MFD_NOEXEC_SEAL))
    except OSError:
        pytest.skip("needs Linux 6.3")
    assert seals & F_SEAL_EXEC


def test_a_child_forked_meanwhile_does_not_keep_memory_for_several_nodes_from_being_sealed() -> (
    None
):
    from dmafile._stripes import _Memory

    memory = _Memory([(Path("x"), 4096)])
    over, ended = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ended)
        os.read(over, 1)
        os._exit(0)
    memory.unmap()
    try:
        fcntl.fcntl(memory.fds[0], fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        os.close(ended)
        os.waitpid(child, 0)
        os.close(over)
        memory.close()


def test_a_file_that_was_replaced_is_read_as_it_is_now(place: Path, model: Path) -> None:
    # What is read is published under the identity of the file that is there.
    from dmafile import _stripes
    from dmafile._load import open_model

    file = Path(shutil.copy(files(model)[1], place))
    opened = open_model(file)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    (place / "new").write_bytes(data)
    (place / "new").rename(file)
    fd = os.memfd_create("memory")
    os.ftruncate(fd, len(data))
    pieces = [_stripes._Piece(0, 0, 0, len(data))]
    ended = threading.Event()
    running = _stripes._Files(opened, pieces, [fd]).start(0, len(data), {}, ended.set)
    running.attend(None).close()
    assert os.pread(fd, len(data), 0) == data
    os.close(fd)


@pytest.mark.parametrize("version", [None, "Sat, 28 Nov 2026 00:00:00 GMT", 'W/"1"'])
def test_objects_without_a_strong_etag_are_refused(alone: Any, version: str | None) -> None:
    from dmafile._hold import SharedModel

    shards = [(Path("a"), 0, 1), (Path("b"), 1, 1)]
    model: Any = SimpleNamespace(shards=lambda: shards, versions=lambda: ['"1"', version])
    with pytest.raises(dmafile.UsageError, match="a strong ETag"):
        alone._meet(SharedModel(model, None, {}))


def test_stripes_have_at_most_64_mib() -> None:
    from dmafile._stripes import _pieces

    sizes, nodes = [5 * GIB + 12345, 3, 40 * MIB, 12 * GIB, 0, 100 * MIB + 1], 3
    sources = [0, 4, 8]
    pieces = _pieces(sizes, sources, nodes)
    at = 0
    for file, nbytes in enumerate(sizes):
        own = [piece for piece in pieces if piece.file == file]
        ends = [0, *(piece.end for piece in own)]
        assert [piece.start for piece in own] == ends[:-1] and ends[-1] == nbytes
        for piece in own:
            first, last = (at + piece.start) // (64 * MIB), (at + piece.end - 1) // (64 * MIB)
            assert first == last, "in one stripe"
            assert piece.owner == sources[first % 3]
        at += -(-nbytes // MIB) * MIB
    assert max(piece.end - piece.start for piece in pieces) == 64 * MIB
    each = [sum(one.end - one.start for one in pieces if one.owner == rank) for rank in sources]
    assert max(each) - min(each) <= 2 * 64 * MIB
    # A node that has the files sends all; a small model is divided, too.
    assert {piece.owner for piece in _pieces(sizes, [4], nodes)} == {4}
    small = _pieces([300 * MIB], [0, 1], 2)
    assert {piece.end - piece.start for piece in small} == {2 * MIB}
    assert [piece.owner for piece in small] == 75 * [0, 1]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        port: int = one.getsockname()[1]
        return port


@pytest.mark.parametrize("killed", [0, 2])
def test_a_killed_rank_is_named(place: Path, model: Path, killed: int, node: Node) -> None:
    said = load([node], place, model, killed=killed)
    for one in said.values():
        text = f"cannot load: {model}: rank {killed} has ended (ECONNRESET)"
        assert (one["error"], one["errno"]) == (text, errno.ECONNRESET)


def test_a_killed_rank_with_the_store_is_named(place: Path, model: Path, node: Node) -> None:
    store = f"tcp://127.0.0.1:{free_port()}"
    said = load([node], place, model, killed=0, store=store)
    for one in said.values():
        assert one["error"] == f"cannot load: {model}: rank 0 has ended (ECONNRESET)"


def test_the_rank_with_the_store_may_end_at_once(place: Path, node: Node) -> None:
    small = place / "small"
    small.mkdir()
    safetensors.save_file({"it": torch.ones(3)}, small / "model.safetensors")
    store = f"tcp://127.0.0.1:{free_port()}"
    said = load([node], place, small, world=3, store=store, leave=True)
    check_equal(said, small)


def test_a_dead_rank_is_named_after_one_that_was_done(alone: Any) -> None:
    def ended() -> int:
        with subprocess.Popen(["true"]) as child:
            return os.pidfd_open(child.pid)

    with pytest.raises(ConnectionResetError, match="rank 2 has ended"), alone:
        alone._processes = {1: ended(), 2: ended()}
        alone.store.set("done/1", "{}")
        alone.look()


def all_say(said: dict[int, dict[str, Any]], own: int, theirs: str, others: str) -> None:
    """Asserts the text of the error in one rank, and in the others."""
    for rank, one in said.items():
        text = theirs if rank == own else others
        assert text in one["error"], (rank, one["error"])
        assert "\n" not in one["error"]


def test_a_rank_with_other_files_is_refused(place: Path, model: Path, node: Node) -> None:
    other = place / "other"
    other.mkdir()
    safetensors.save_file({"it": torch.ones(3)}, other / "model.safetensors")
    said = load([node], place, model, world=3, paths={"1": str(other)})
    text = "rank 1 asks for something other than rank 0: model.safetensors with"
    all_say(said, 1, text, text)
    assert {one["errno"] for one in said.values()} == {errno.EINVAL}


def test_a_rank_with_other_options_is_refused(place: Path, model: Path, node: Node) -> None:
    said = load([node], place, model, world=3, options={"2": {"verify": "xxh3"}})
    text = "rank 2 asks for something other than rank 0: verify='xxh3', not None (EINVAL)"
    all_say(said, 2, text, text)
    again = place / "again"
    again.mkdir()
    said = load([node], again, model, world=3, options={"1": {"block": 1}})
    all_say(said, 1, "rank 1 asks for something other than rank 0: block=1", "rank 1 asks for")
    last = place / "last"
    last.mkdir()
    said = load([node], last, model, world=3, options={"1": {"backend": "none"}})
    all_say(said, 1, "backend: 'none' is not supported", "rank 1 has failed: backend: 'none'")


def test_a_file_that_one_rank_lacks_is_named(place: Path, model: Path, node: Node) -> None:
    said = load([node], place, model, world=3, paths={"2": str(place / "none")})
    all_say(said, 2, f"{place}/none", f"rank 2 has failed: cannot open: {place}/none")
    assert {one["errno"] for one in said.values()} == {errno.ENOENT}


def test_a_rank_without_permission_is_named(place: Path, node: Node) -> None:
    if os.geteuid():
        pytest.skip("only root can become another user")
    path = place / "model.safetensors"
    safetensors.save_file({"it": torch.ones(1000)}, path)
    path.chmod(0o600)
    store = f"tcp://127.0.0.1:{free_port()}"
    said = load([node], place, path, world=3, users={"2": 65534}, store=store)
    all_say(said, 2, "EACCES", "rank 2 has failed: cannot open")
    assert {one["errno"] for one in said.values()} == {errno.EACCES}


def test_a_late_rank_is_named(place: Path, model: Path, node: Node) -> None:
    # This rank comes after the timeout of the group.
    said = load([node], place, model, world=3, timeout=20, late={"1": 25})
    text = "rank 1 has not begun to load within 20 seconds (ETIMEDOUT)"
    all_say(said, 1, text, text)


def test_ranks_of_torchrun_load_and_notice_the_death_of_one(place: Path, model: Path) -> None:
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "XDG_RUNTIME_DIR": str(place)}
    done = subprocess.run(
        [sys.executable, "-m", *launch, HERE / "launched.py", model, place],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | own,
    )
    assert done.returncode != 0 and "SIGKILL" in done.stderr, done.stderr
    said = {rank: json.loads((place / f"{rank}.json").read_text()) for rank in range(4)}
    want = digests(model)
    for rank, one in said.items():
        assert one["digests"] == want
        assert one["reports"][0]["nodes"] == [[0, 1, 2, 3]]
        if rank:
            assert one["error"] == f"cannot load: {model}: rank 0 has ended (ECONNRESET)"


STORE = "tcp://10.77.0.1:29511"


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    """Two nodes, each with its own network and /run."""
    if os.geteuid():
        pytest.skip("only root can make network namespaces")
    names = [f"dmafile-{os.getpid()}-{number}" for number in (1, 2)]
    with contextlib.ExitStack() as stack:

        def ip(*words: str) -> None:
            subprocess.run(["ip", *words], check=True, capture_output=True)

        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
            ends = [f"dmaf{os.getpid() % 100_000}{end}" for end in "ab"]
            ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for number, (name, end) in enumerate(zip(names, ends, strict=True), 1):
                ip("link", "set", end, "netns", name)
                ip("-n", name, "link", "set", end, "name", "node")
                ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "node")
                for one in ("lo", "node"):
                    ip("-n", name, "link", "set", one, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        own = 'mount -t tmpfs tmpfs /run && exec "$@"'
        both = [
            Node(("ip", "netns", "exec", name, "sh", "-c", own, "sh"), "node") for name in names
        ]
        yield both
        for made in both:
            made.stop()


def test_each_of_two_nodes_reads_half_of_the_bytes(
    place: Path, model: Path, nodes: list[Node]
) -> None:
    warm_up(nodes, place, model, store=STORE)
    said = load(nodes, place, model, store=STORE)
    check_equal(said, model)
    (report,) = said[3]["reports"]
    assert report["nodes"] == [[0, 1], [2, 3]]
    for node in report["nodes"]:
        assert sum(said[rank]["read"] for rank in node) <= 0.52 * size(model)
        assert sum(said[rank]["memory"] for rank in node) <= 1.05 * size(model)
        assert sum(said[rank]["private"] for rank in node) <= 0.1 * size(model), "copies"
        disk, peers = (report["ranks"][node[0]][what] for what in ("disk", "peers"))
        assert disk + peers == size(model) and disk <= 0.52 * size(model)
        assert report["ranks"][node[1]]["disk"] == report["ranks"][node[1]]["peers"] == 0


class Store:
    """A bucket with the files of a model, in the network of a node, or here."""

    def __init__(self, model: Path, address: str, before: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [*before, sys.executable, str(HERE.parent / "stores.py"), address, str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        self.environment = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "me",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

    def sent(self) -> int:
        """How many bytes since the last call."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()


HEADERS = MIB
"""What each rank reads of an object to find its tensors, at most."""


def needs_urls() -> None:
    try:
        dmafile.load("http://127.0.0.1:1/x")
    except dmafile.Error as error:
        if "dmafile[remote]" in error.remedy:
            pytest.skip("dmafile-remote is not installed")


@pytest.mark.parametrize("call", ["load_file", "stream"])
def test_the_ranks_of_a_node_fetch_each_byte_once(
    place: Path, model: Path, call: str, node: Node
) -> None:
    needs_urls()
    with Store(model, "127.0.0.1") as store:
        environment = {"XDG_RUNTIME_DIR": str(place), **store.environment}
        said = load([node], place, "s3://bucket/", call=call, environment=environment)
        check_equal(said, model)
        (report,) = said[0]["reports"]
        assert report["nodes"] == [[0, 1, 2, 3]]
        assert [rank["disk"] for rank in report["ranks"]] == [size(model), 0, 0, 0]
        assert sum(one["private"] for one in said.values()) <= 0.1 * size(model), "copies"
        assert size(model) <= store.sent() <= size(model) + 4 * len(files(model)) * HEADERS


def test_each_of_two_nodes_fetches_half_of_the_bytes(
    place: Path, model: Path, nodes: list[Node]
) -> None:
    needs_urls()
    inside = ("nsenter", f"--target={nodes[0].process.pid}", "--net")
    with Store(model, "10.77.0.1", inside) as store:
        environment = {"XDG_RUNTIME_DIR": str(place), **store.environment}
        said = load(nodes, place, "s3://bucket/", store=STORE, environment=environment)
        check_equal(said, model)
        (report,) = said[3]["reports"]
        assert report["nodes"] == [[0, 1], [2, 3]]
        for pair in report["nodes"]:
            disk, peers = (report["ranks"][pair[0]][what] for what in ("disk", "peers"))
            assert disk + peers == size(model) and disk <= 0.52 * size(model)
        assert size(model) <= store.sent() <= size(model) + 4 * len(files(model)) * HEADERS


def test_ranks_with_different_versions_of_an_object_are_refused(
    place: Path, model: Path, node: Node
) -> None:
    needs_urls()
    other = place / "other"
    shutil.copytree(model, other)
    changed = files(other)[1]
    data = bytearray(changed.read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)
    with Store(model, "127.0.0.1") as one, Store(other, "127.0.0.1") as two:
        urls = [f"{store.url}/bucket/{changed.name}" for store in (one, two)]
        said = load([node], place, urls[0], world=2, paths={"1": urls[1]})
    for each in said.values():
        assert "rank 1 asks for something other than rank 0: another version" in each["error"]
        assert each["errno"] == errno.EINVAL


def test_a_node_that_has_the_files_sends_all(
    place: Path, model: Path, copy: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    paths = dict.fromkeys("13", str(copy))
    with dmafile.shared(files(model)):
        said = load([node], place, model, paths=paths)
    check_equal(said, model)
    (report,) = said[3]["reports"]
    assert report["nodes"] == [[0, 2], [1, 3]]
    assert [one["disk"] for one in report["ranks"]] == [0, 0, 0, 0]
    assert [one["peers"] for one in report["ranks"]] == [0, size(model), 0, 0]


@pytest.mark.parametrize("verify", ["xxh3", "sha256=" + 64 * "0"])
def test_digests_are_compared_on_each_node(
    place: Path, model: Path, nodes: list[Node], verify: str
) -> None:
    path = files(model)[1]
    options = {str(rank): {"verify": verify} for rank in range(2)}
    said = load(nodes, place, path, store=STORE, world=2, options=options)
    for one in said.values():
        assert ("error" in one) == ("=" in verify), one
        assert one.get("errno") == (errno.EBADMSG if "=" in verify else None)


@pytest.mark.parametrize("killed", [0, 1, 2, 3])
def test_a_killed_rank_is_named_on_the_other_node(
    place: Path, model: Path, nodes: list[Node], killed: int
) -> None:
    said = load(nodes, place, model, store=STORE, killed=killed)
    for rank, one in said.items():
        named = f"rank {killed} has ended (ECONNRESET)"
        # Rank 0 also has the store; ranks of the other node may only notice the loss of the store.
        store = "the process that has the group's store, rank 0 or torchrun, has ended"
        store += " (ECONNRESET)"
        texts = [named, store] if killed == 0 and rank > 1 else [named]
        assert one["error"] in [f"cannot load: {model}: {text}" for text in texts]


@pytest.mark.parametrize("step", ["memory", "gloo"])
def test_a_rank_killed_before_the_first_byte_is_named(
    place: Path, model: Path, nodes: list[Node], step: str
) -> None:
    said = load(nodes, place, model, store=STORE, killed=2, killed_in=step)
    for one in said.values():
        assert one["error"] == f"cannot load: {model}: rank 2 has ended (ECONNRESET)"


def test_a_rank_that_cannot_be_connected_to_is_named(
    place: Path, model: Path, nodes: list[Node]
) -> None:
    # No other rank on its node notices its end.
    said = load(nodes, place, model, store=STORE, world=2, killed=1, killed_in="gloo")
    assert f"cannot load: {model}: rank 0 cannot connect to rank 1: " in said[0]["error"]
    assert "\n" not in said[0]["error"]


def test_nodes_with_different_bytes_are_refused(
    place: Path, model: Path, nodes: list[Node]
) -> None:
    # Files of the same size and tensors, with other bytes.
    other = place / "copy"
    other.mkdir()
    for file in model.iterdir():
        data = bytearray(file.read_bytes())
        if file.suffix == ".safetensors":
            data[-(20 * MIB) :] = bytes(20 * MIB)
        write(other / file.name, bytes(data))
    paths = {"2": str(other), "3": str(other)}
    said = load(nodes, place, model, store=STORE, paths=paths)
    for one in said.values():
        assert "has files that differ from those of rank" in one["error"]
        assert one["errno"] == errno.EINVAL


@pytest.fixture
def failing(place: Path, model: Path, nodes: list[Node]) -> Iterator[Path]:
    """A copy of a file on a disk of the second node that cannot read its last 512 KiB."""
    disk, where, content = place / "disk", place / "failing", place / "content"
    where.mkdir()
    content.mkdir()
    file = files(model)[1]
    data = file.read_bytes()
    write(content / file.name, data)

    def run(*words: str | Path) -> str:
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout

    run("mke2fs", "-q", "-t", "ext4", "-b", "4096", "-d", content, disk, "100M")
    first = (len(data) - 512 * 1024) // 4096
    end = int(run("debugfs", "-R", f"bmap /{file.name} {first}", disk))
    inside = ("nsenter", f"--target={nodes[1].process.pid}", "--mount")
    try:
        run(*inside, "mount", "-o", "ro,loop", disk, where)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no loop devices here: {error.stderr}")
    # The device keeps its size, and what is behind the end of the image cannot be read.
    os.truncate(disk, end * 4096)
    yield where / file.name
    run(*inside, "umount", where)


def test_a_failing_disk_is_named_on_both_nodes(
    place: Path, model: Path, failing: Path, nodes: list[Node]
) -> None:
    path = files(model)[1]
    evict(model)
    paths = {"2": str(failing), "3": str(failing)}
    said = load(nodes, place, path, store=STORE, paths=paths)
    for rank, one in said.items():
        assert one["errno"] == errno.EIO, one
        assert ("rank 2 has failed: " in one["error"]) == (rank != 2)
        assert f"{failing}" in one["error"] and "\n" not in one["error"]


def test_a_page_that_cannot_be_compared_is_named(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dmafile._ranks

    path = files(model)[0]

    def pread(fd: int, nbytes: int, at: int) -> bytes:
        if at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return bytes(nbytes)

    monkeypatch.setattr(os, "pread", pread)
    with pytest.raises(dmafile.Error) as caught:
        dmafile._ranks._samples([(path, path.stat().st_size)])
    at = path.stat().st_size // 64
    assert str(caught.value) == f"cannot read: {path} at byte {at} (EIO)"
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))
