"""Processes are frozen and thawed with Debian's criu: they go on where they were, with all of their
memory, and held memory comes from its hold."""

import contextlib
import ctypes
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vm.programs import TARGET, library
from vm.host import ROOT

HERE = Path(__file__).parent
DMAFILE = TARGET / "debug" / "dmafile"
SIZE = (24 << 20) + 12_345
ROUNDS = int(os.environ.get("ROUNDS", "6"))
PATIENCE = int(os.environ.get("PATIENCE", "120"))
"""Seconds. Nothing here takes so long, even on a very slow machine."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="criu needs root"),
]


class Keeper:
    """A running keeper.py, from outside: it is frozen, and runs again as another child."""

    def __init__(
        self, place: Path, path: str, before: tuple[str, ...] = (), files: tuple[str, ...] = ()
    ) -> None:
        self.place, self.path = place, path
        self.pipe = place / "go"
        os.mkfifo(self.pipe)
        self.out = place / "out"
        # A session of its own, without a terminal.
        command = [*before, sys.executable, "-E", "-S", str(HERE / "keeper.py"), *files]
        with self.out.open("wb") as out, self.pipe.open("r+b", buffering=0) as go:
            self.process: subprocess.Popen[bytes] | None = subprocess.Popen(
                command, stdin=go, stdout=out, stderr=out, start_new_session=True, cwd=place
            )
        self.pid = self.process.pid
        self.go = os.open(self.pipe, os.O_RDWR)
        self.lines = self.size = 0

    def line(self) -> list[str]:
        """What it says when it is asked for the next line."""
        os.write(self.go, b"\n")
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            lines = self.out.read_text().splitlines()
            if len(lines) > self.lines:
                self.lines = len(lines)
                assert not lines[-1].startswith("Traceback"), lines
                return lines[-1].split(" ")
            time.sleep(0.02)
        raise AssertionError(f"it is silent: {self.out.read_text()}")

    def facts(self) -> list[str]:
        """A line without its counter and what its child has just written."""
        return self.line()[2:]

    def dmafile(self, *words: object) -> "subprocess.CompletedProcess[str]":
        command = [str(DMAFILE), *map(str, words)]
        env = {**os.environ, "PATH": self.path}
        return subprocess.run(command, capture_output=True, text=True, cwd=self.place, env=env)

    def freeze(self, *words: object, to: str = "frozen") -> dict[str, object]:
        done = self.dmafile("freeze", *words, "--json", self.pid, to)
        assert done.returncode == 0, done.stderr
        self.frozen()
        frozen: dict[str, object] = json.loads(done.stdout)
        return frozen

    def freeze_running(self, to: str = "frozen") -> dict[str, object]:
        done = self.dmafile("freeze", "--leave-running", "--json", self.pid, to)
        assert done.returncode == 0, done.stderr
        frozen: dict[str, object] = json.loads(done.stdout)
        return frozen

    def thaw(self, *words: object) -> None:
        # criu refuses files whose size differs.
        os.truncate(self.out, self.size)
        self.lines = len(self.out.read_text().splitlines())
        done = self.dmafile("thaw", "--detach", *words, "frozen")
        assert done.returncode == 0, done.stderr

    def reap(self) -> None:
        """Waits until it and its child, which this process adopts, are gone."""
        if self.process is not None:
            self.process.wait()
            self.process = None
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-self.pid, 0)
        eventually(lambda: not running(self.pid))

    def frozen(self) -> None:
        self.reap()
        self.size = self.out.stat().st_size

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.reap()

    def close(self) -> None:
        self.kill()
        os.close(self.go)


def eventually(done: object) -> None:
    assert callable(done)
    end = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.fixture(autouse=True)
def adopts() -> None:
    """Thawed processes become children of this one, which can wait for them."""
    ctypes.CDLL(None).prctl(36, 1)


@pytest.fixture
def keeper(place: Path, path: str) -> Iterator[Keeper]:
    one = Keeper(place, path)
    yield one
    one.close()


@contextlib.contextmanager
def holding(place: Path, *words: str, name: str = "weights") -> Iterator[Path]:
    """A hold of a file, at a socket in PLACE."""
    file, at = place / "weights.bin", place / "socket"
    if not file.exists():
        file.write_bytes(random.Random(7).randbytes(SIZE))
    command = [str(DMAFILE), "hold", str(file), f"--name={name}", f"--socket={at}", *words]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline()
        yield at
    finally:
        holder.kill()
        holder.wait()
        at.unlink(missing_ok=True)


@pytest.fixture
def taker(place: Path, path: str) -> Iterator[Keeper]:
    """A keeper that has held memory; the hold ends when the test does."""
    with holding(place) as at:
        one = Keeper(place, path, (str(DMAFILE), "take", "weights", f"--socket={at}", "--"))
        yield one
        one.close()


def inode_of(pid: int, name: str) -> set[str]:
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in maps if f"/memfd:{name}" in line}


def bytes_in(folder: Path) -> int:
    """Holes do not count."""
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


def test_memory_positions_flags_and_seals_are_as_they_were(keeper: Keeper) -> None:
    before = keeper.facts()
    frozen = keeper.freeze()
    # criu itself makes what is empty.
    assert frozen["objects"] == 7 and frozen["bytes_held"] == 0
    # Holes stay holes.
    files = [file.stat() for file in (keeper.place / "frozen" / "memory").iterdir()]
    assert min(file.st_blocks * 512 for file in files if file.st_size > 9 << 20) < 1 << 20
    for _ in range(2):
        keeper.thaw()
        assert keeper.facts() == before
        # Its child writes from time to time.
        eventually(lambda: keeper.line()[1] == "childish")
        memory = Path(f"/proc/{keeper.pid}/fd")
        for name in ("holes", "large"):
            [blocks] = [
                link.stat().st_blocks * 512
                for link in memory.iterdir()
                if name in str(link.readlink())
            ]
            assert blocks < 1 << 20, name
        keeper.kill()


def test_held_memory_is_not_in_the_images_and_comes_from_its_hold(taker: Keeper) -> None:
    at = taker.place / "socket"
    before, held = taker.facts(), inode_of(taker.pid, "weights.bin")
    frozen = taker.freeze(f"--socket={at}")
    assert frozen["bytes_held"] == SIZE and frozen["holds"] == ["weights"]
    assert bytes_in(taker.place / "frozen") < SIZE
    for _ in range(2):
        taker.thaw()
        assert taker.facts() == before
        assert inode_of(taker.pid, "weights.bin") == held and len(held) == 1
        taker.kill()


@pytest.fixture
def huge_pages() -> Iterator[None]:
    pool = Path("/proc/sys/vm/nr_hugepages")
    before = pool.read_text()
    pool.write_text(f"{int(before) + 6}")
    if int(pool.read_text()) < int(before) + 6:
        pytest.skip("there is no memory for huge pages")
    yield
    pool.write_text(before)


@pytest.mark.usefixtures("huge_pages")
def test_hugetlb_pages_stay_huge(place: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUGE", "1")
    keeper = Keeper(place, path)
    before = keeper.facts()
    assert before[-1] == str(2 << 20)
    assert keeper.freeze()["objects"] == 8
    keeper.thaw()
    assert keeper.facts() == before
    keeper.close()


@pytest.mark.parametrize("folder", [False, True])
def test_files_are_opened_by_the_path_of_held_memory(place: Path, path: str, folder: bool) -> None:
    """`{}` is the path of a link in a private folder, which ends with the processes."""
    model = place / "model"
    model.mkdir()
    for name in ("weights.bin", "config.json"):
        (model / name).write_bytes(random.Random(7).randbytes(70_000))
    names = ("weights.bin", "config.json") if folder else ("weights.bin",)
    hold = [str(DMAFILE), "hold", *(str(model / name) for name in names)]
    at = place / "socket"
    holder = subprocess.Popen([*hold, "--name=m", f"--socket={at}"], stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline()
    files = tuple(f"{{}}/{name}" for name in names) if folder else ("{}",)
    try:
        before = (str(DMAFILE), "take", "m", f"--socket={at}", "--")
        keeper = Keeper(place, path, before, files)
        facts = keeper.facts()
        keeper.freeze(f"--socket={at}")
        words = Path(f"/proc/{keeper.pid}")
        for _ in range(2):
            eventually(lambda: not words.exists())
            keeper.thaw()
            assert keeper.facts() == facts
            # It is in use until they have ended; then the next run removes it.
            link = Path((words / "cmdline").read_bytes().split(b"\0")[-2].decode())
            subprocess.run([DMAFILE, "load", "/etc/passwd", "--quiet", "--", "true", "{}"])
            assert link.exists() and keeper.facts() == facts
            keeper.kill()
            subprocess.run([DMAFILE, "load", "/etc/passwd", "--quiet", "--", "true", "{}"])
            assert not link.exists()
        keeper.close()
    finally:
        holder.kill()
        holder.wait()


PYTHON = """
import sys
import dmafile
if sys.argv[1] == "freeze":
    _, _, at, to, *pids = sys.argv
    print(dmafile.freeze(map(int, pids), to, sockets=[at], options=["--tcp-close"]))
else:
    thawed = dmafile.thaw(sys.argv[2], options=["--tcp-close"])
    assert (thawed.taken, thawed.loaded) == (1, 0), thawed
    print(*thawed.pids, sep="\\n", flush=True)
    status = thawed.wait()
    sys.exit(status if status >= 0 else 128 - status)
"""


@pytest.mark.parametrize("face", ["Python", "C"])
def test_it_can_be_called_from(face: str, taker: Keeper) -> None:
    if face == "C":
        command = [str(taker.place / "face")]
        sources = ROOT / "crates" / "capi"
        words = ["cc", "-Wall", "-Wextra", "-Werror", "-static", "-pthread", "-o", *command]
        words += [f"-I{sources}/include", f"-I{sources}/tests", str(HERE / "face.c")]
        # The linker warns of user and host lookups in static programs, which are not used.
        subprocess.run([*words, str(library()), "-lm"], check=True, stderr=subprocess.PIPE)
    else:
        command = [sys.executable, "-c", PYTHON]
    env = {**os.environ, "PATH": taker.path}
    before = taker.facts()
    words = [*command, "freeze", str(taker.place / "socket"), "frozen", str(taker.pid)]
    said = subprocess.check_output(words, cwd=taker.place, env=env, text=True)
    assert f"{SIZE}" in said and "weights" in said
    taker.frozen()
    os.truncate(taker.out, taker.size)
    taker.lines = len(taker.out.read_text().splitlines())
    words = [*command, "thaw", "frozen"]
    pipe = subprocess.PIPE
    thaw = subprocess.Popen(words, cwd=taker.place, env=env, stdout=pipe, text=True)
    assert thaw.stdout is not None and thaw.stdout.readline() == f"{taker.pid}\n"
    assert taker.facts() == before
    os.kill(taker.pid, signal.SIGTERM)
    assert thaw.wait(PATIENCE) == 128 + signal.SIGTERM


def test_a_thaw_loads_what_nothing_holds(place: Path, path: str) -> None:
    with holding(place, "--verify=sha256") as at:
        command = (str(DMAFILE), "take", "weights", f"--socket={at}", "--")
        keeper = Keeper(place, path, command)
        before = keeper.facts()
        keeper.freeze(f"--socket={at}")
    keeper.thaw()
    assert keeper.facts() == before
    keeper.kill()
    # Another file in its place.
    data = bytearray((place / "weights.bin").read_bytes())
    data[1000] ^= 1
    (place / "weights.bin").write_bytes(data)
    refused(keeper, "EBADMSG")
    with holding(place, "--verify=sha256"):
        refused(keeper, "ESTALE", "its digest differs")
    with holding(place):
        refused(keeper, "ESTALE", "its digest differs")
    (place / "weights.bin").write_bytes(data + b"x")
    with holding(place):
        refused(keeper, "ESTALE", "its size differs")
    keeper.close()


def refused(keeper: Keeper, *words: str) -> None:
    done = keeper.dmafile("thaw", "--detach", "frozen")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert not running(keeper.pid)


def test_a_flipped_bit_is_refused(keeper: Keeper) -> None:
    before = keeper.facts()
    keeper.freeze()
    files = sorted(file for file in (keeper.place / "frozen").rglob("*") if file.is_file())
    assert len(files) > 15
    choose = random.Random(5)
    for file in files:
        data = file.read_bytes()
        if not data:
            continue
        at = choose.randrange(len(data) - 1)
        changed = bytearray(data)
        changed[at] ^= 1 << choose.randrange(8)
        file.write_bytes(changed)
        refused(keeper, "EBADMSG")
        file.write_bytes(data[:-1])
        refused(keeper, "EBADMSG")
        file.write_bytes(data)
    keeper.thaw()
    assert keeper.facts() == before


def test_images_that_others_can_change_are_refused(keeper: Keeper) -> None:
    before = keeper.facts()
    keeper.freeze()
    frozen = keeper.place / "frozen"
    for path, mode in ((frozen, 0o777), (keeper.place, 0o777)):
        usual = path.stat().st_mode
        path.chmod(mode)
        refused(keeper, "EPERM")
        path.chmod(usual)
    keeper.thaw()
    assert keeper.facts() == before


def test_several_processes_are_frozen_together(keeper: Keeper, path: str) -> None:
    folder = keeper.place / "other"
    folder.mkdir()
    other = Keeper(folder, path)
    before = [keeper.facts(), other.facts()]
    done = keeper.dmafile("freeze", keeper.pid, other.pid, "frozen")
    assert done.returncode == 0, done.stderr
    keeper.frozen()
    other.frozen()
    # The second one cannot run, because its folder is not there. So the first one does not, either.
    folder.rename(keeper.place / "elsewhere")
    refused(keeper, f"process {other.pid}", "criu says")
    keeper.reap()
    other.reap()
    (keeper.place / "elsewhere").rename(folder)
    keeper.thaw("--pidfile=pids")
    assert (keeper.place / "pids").read_text().split() == [str(keeper.pid), str(other.pid)]
    assert [keeper.facts(), other.facts()] == before
    other.close()


@pytest.mark.parametrize("passes", [True, False])
def test_the_command_stays_until_the_processes_end(keeper: Keeper, passes: bool) -> None:
    keeper.facts()
    keeper.freeze()
    command = [str(DMAFILE), "thaw", "frozen"]
    env = {**os.environ, "PATH": keeper.path}
    thaw = subprocess.Popen(command, cwd=keeper.place, env=env)
    keeper.facts()
    # It passes signals on.
    os.kill(thaw.pid if passes else keeper.pid, signal.SIGTERM)
    assert thaw.wait(PATIENCE) == 128 + signal.SIGTERM


def test_what_is_cancelled_leaves_the_processes_as_they_are(keeper: Keeper) -> None:
    before = keeper.facts()
    # criu stays at its action until then.
    slow = keeper.place / "slow"
    slow.write_text('#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" = "$WHERE" ] && sleep 2\nexit 0\n')
    slow.chmod(0o755)

    def cancelled(where: str, *words: object) -> None:
        command = [str(DMAFILE), *map(str, words), "--", "--action-script", str(slow)]
        env = {**os.environ, "PATH": keeper.path, "WHERE": where}
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, cwd=keeper.place, env=env, stderr=pipe)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE)
        assert process.returncode == 130 and b"cancelled" in said, (process.returncode, said)

    cancelled("pre-dump", "freeze", keeper.pid, "frozen")
    assert keeper.facts() == before and not (keeper.place / "frozen").exists()
    keeper.freeze()
    cancelled("pre-restore", "thaw", "frozen")
    # Its child was restored, too.
    keeper.reap()
    assert not running(keeper.pid)
    keeper.thaw()
    assert keeper.facts() == before


def test_processes_run_on_if_they_are_not_frozen(keeper: Keeper, place: Path) -> None:
    before = keeper.facts()
    (place / "taken").mkdir()
    empty, old = place / "empty", place / "old"
    for folder in (empty, old):
        folder.mkdir()
    (old / "criu").write_text("#!/bin/sh\necho Version: 3.17.1\n")
    (old / "criu").chmod(0o755)
    pid = keeper.pid
    cases: list[tuple[str, list[object], list[str]]] = [
        (keeper.path, [pid, "taken"], ["EEXIST", "taken"]),
        (keeper.path, [pid, "none/frozen"], ["ENOENT"]),
        (keeper.path, [4_000_000_000, "frozen"], ["ESRCH", "process 4000000000"]),
        (str(empty), [pid, "frozen"], ["ENOENT", "install criu 3.19"]),
        (str(old), [pid, "frozen"], ["EOPNOTSUPP", "3.17.1", "install criu 3.19"]),
        (keeper.path, [pid, "frozen", "--", "--no-such-option"], ["criu"]),
    ]
    path = keeper.path
    for keeper.path, words, said in cases:
        done = keeper.dmafile("freeze", *words)
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
        assert all(word in done.stderr for word in said), (said, done.stderr)
    keeper.path = path
    assert keeper.dmafile("freeze", "0", "frozen").returncode == 2
    frozen = keeper.freeze_running()
    assert frozen["objects"] == 7
    assert keeper.facts() == before
    names = {file.name for file in place.iterdir()}
    assert not [name for name in names if "freezing" in name], names


RING = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
fd = libc.syscall(425, 4, ctypes.create_string_buffer(120))
print(fd, ctypes.get_errno(), flush=True)
sys.stdin.read()
"""


def test_an_io_uring_is_named(place: Path, keeper: Keeper) -> None:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", RING], stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    fd, number = map(int, process.stdout.readline().split())
    try:
        if fd < 0:
            pytest.skip(f"there is no io_uring: {errno.errorcode[number]}")
        done = keeper.dmafile("freeze", process.pid, "frozen")
        assert done.returncode == 1, done.stderr
        assert f"process {process.pid}, descriptor {fd}: it has an io_uring" in done.stderr
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("round", range(ROUNDS))
def test_a_killed_freeze_or_thaw_leaves_nothing_half_done(keeper: Keeper, round: int) -> None:
    choose = random.Random(round)
    before = keeper.facts()
    begin = time.monotonic()
    keeper.freeze_running(to="other")
    took = time.monotonic() - begin
    env = {**os.environ, "PATH": keeper.path}

    def killed(*words: str, after: float) -> None:
        process = subprocess.Popen(
            [str(DMAFILE), *words], cwd=keeper.place, env=env, stderr=subprocess.DEVNULL
        )
        time.sleep(after)
        process.kill()
        process.wait()
        # criu ends by itself.
        left = ["pgrep", "--full", "/criu (dump|restore)"]
        eventually(lambda: not subprocess.run(left, stdout=subprocess.PIPE).stdout)

    killed("freeze", str(keeper.pid), "frozen", after=choose.uniform(0, took * 1.1))
    if running(keeper.pid):
        assert keeper.facts() == before
        shutil.rmtree(keeper.place / "frozen", ignore_errors=True)
        keeper.freeze()
    keeper.frozen()
    left = [file for file in keeper.place.iterdir() if "freezing" in file.name]
    assert not left or (keeper.place / "frozen").exists()
    killed("thaw", "--detach", "frozen", after=choose.uniform(0, took))
    if not running(keeper.pid):
        keeper.kill()
        keeper.thaw()
    assert keeper.facts() == before
    # The next one removes what killed ones have left.
    keeper.freeze_running(to="another")
    assert not list(Path("/run").glob("dmafile-criu-*"))
