"""Loads: bytes, options, errors, interruptions and leaks."""

import errno
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import dmafile
import pytest

from conftest import SIZE, SLOWLY, Run, bytes_read, file_sha256, open_files, sha256


def test_another_program_reads_the_same_bytes(file: Path) -> None:
    # The size of a memfd of huge pages would be a multiple of them.
    with dmafile.load(file, pages="base") as buffer:
        assert buffer.offset == 0
        seen = file_sha256(f"/proc/{os.getpid()}/fd/{buffer.fileno()}")
    assert seen == file_sha256(file)


@pytest.mark.parametrize("to", ["anon", "memfd"])
@pytest.mark.parametrize("method", ["auto", "uring", "threads", "bounce"])
def test_every_method_loads_the_range(file: Path, to: str, method: str) -> None:
    with dmafile.load(file, to=to, method=method, offset=77, length=1 << 20) as buffer:
        assert sha256(memoryview(buffer)) == sha256(file.read_bytes()[77 : 77 + (1 << 20)])
        assert buffer.report is not None and buffer.report["bytes"] == buffer.nbytes == 1 << 20


def test_a_file_of_a_hugging_face_cache_is_compared_with_its_name(
    file: Path, tmp_path: Path
) -> None:
    blobs, snapshot = (tmp_path / "models--a--b" / name for name in ("blobs", "snapshots/0f"))
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    blob = blobs / file_sha256(file)
    blob.write_bytes(file.read_bytes())
    path = snapshot / "model.bin"
    path.symlink_to(f"../../blobs/{blob.name}")
    with dmafile.load(path, verify="store") as buffer:
        assert buffer.report is not None
        told = buffer.report["verify"]
        assert (told["digest"], told["matched"]) == (blob.name, True)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    with pytest.raises(dmafile.Error) as bad:
        dmafile.load(path, verify="store")
    assert bad.value.errno == errno.EBADMSG
    with pytest.raises(dmafile.Error, match="it is not in a Hugging Face cache") as none:
        dmafile.load(file, verify="store")
    assert none.value.errno == errno.EINVAL and 'verify="sha256=HEX"' in str(none.value)


def test_all_options_are_accepted(file: Path) -> None:
    digest = file_sha256(file)
    buffer = dmafile.load(
        bytes(file),
        to="anon",
        pages="base",
        method="threads",
        io="buffered",
        allocation="before",
        offset=0,
        length=SIZE,
        chunk=1 << 20,
        block=1 << 16,
        queue_depth=3,
        verify=f"sha256={digest}",
        check_memory=False,
        progress=lambda done, total: None,
    )
    assert buffer.report is not None
    assert buffer.report["method"] == "threads"
    assert buffer.report["io"] == "buffered"
    assert buffer.report["pages"] == "base"
    assert buffer.report["verify"].items() >= {"digest": digest, "matched": True}.items()
    assert buffer.report == buffer.report


def test_an_existing_memfd_is_filled(file: Path) -> None:
    fd = os.memfd_create("mine", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    with dmafile.load(file, to=f"fd:{fd}") as buffer:
        assert buffer.kind == f"fd:{fd}"
        assert file_sha256(f"/proc/{os.getpid()}/fd/{fd}") == file_sha256(file)
        with pytest.raises(BufferError, match="F_SEAL_SHRINK"):
            memoryview(buffer)
        buffer.seal()
        assert sha256(memoryview(buffer)) == file_sha256(file)
    os.close(fd)


def test_only_the_given_part_of_a_memfd_is_filled(file: Path) -> None:
    at, length = 8192 + 100, 5000
    fd = os.memfd_create("mine", os.MFD_ALLOW_SEALING)
    os.pwrite(fd, b"\xaa" * 32768, 0)
    with dmafile.load(file, to=f"fd:{fd}@{at}", offset=100, length=length) as buffer:
        assert (buffer.kind, buffer.offset, buffer.nbytes) == (f"fd:{fd}@{at}", at, length)
        want = bytearray(b"\xaa" * 32768)
        want[at : at + length] = file.read_bytes()[100 : 100 + length]
        assert os.pread(fd, 32768, 0) == want
        buffer.seal()
        assert bytes(memoryview(buffer)) == want[at : at + length]
    for to in (f"fd:{fd}@", f"fd:{fd}@-1", "heap:", "heap:no/such"):
        with pytest.raises(dmafile.UsageError, match=r"^to: '"):
            dmafile.load(file, to=to)
    os.close(fd)


@pytest.mark.parametrize("to", ["heap:no-such-heap", "udmabuf", "module", "dma-buf"])
def test_an_unavailable_kind_is_refused_with_names_of_arguments(file: Path, to: str) -> None:
    nodes = {"udmabuf": ["udmabuf"], "module": ["dmafile"]}
    nodes["dma-buf"] = ["udmabuf", "dmafile", "dma_heap"]
    if any(Path("/dev", node).exists() for node in nodes.get(to, [])):
        pytest.skip("it is there")
    with pytest.raises(dmafile.Error) as caught:
        dmafile.load(file, to=to)
    assert "--" not in str(caught.value) and to.split(":")[0] in str(caught.value)


def test_progress_is_reported_to_the_end_on_the_thread_of_the_caller(file: Path) -> None:
    told: list[tuple[int, int]] = []
    threads = set()

    def tell(done: int, total: int) -> None:
        told.append((done, total))
        threads.add(threading.get_ident())

    dmafile.load(file, progress=tell)
    assert told[-1] == (SIZE, SIZE)
    assert told == sorted(told)
    assert threads == {threading.get_ident()}


def test_a_progress_bar_is_only_drawn_on_terminals(
    file: Path, capfd: pytest.CaptureFixture[str], python: Run
) -> None:
    dmafile.load(file, progress=True)
    assert capfd.readouterr().err == ""
    program = """
import os, pty, sys, dmafile
_, end = pty.openpty()
sys.stderr = os.fdopen(end, "w")
main, _ = _, dmafile.load(sys.argv[1], progress=True)
print(os.read(main, 1 << 16).decode())
"""
    drawn = python(program, file)
    assert "100% 0.00/0.00 GiB" in drawn.stdout, drawn


def test_errors_are_builtin_oserrors_and_dmafile_errors(file: Path, folder: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        dmafile.load("no/such/file")
    error = missing.value
    assert isinstance(error, dmafile.Error)
    assert (error.errno, error.filename) == (errno.ENOENT, "no/such/file")
    assert (
        str(error)
        == "cannot open: no/such/file: No such file or directory (ENOENT); check the path"
    )
    assert error.remedy == "check the path"
    with pytest.raises(IsADirectoryError):
        dmafile.load(folder)
    empty = folder / "empty"
    empty.touch()
    with pytest.raises(dmafile.Error) as nothing:
        dmafile.load(empty)
    assert nothing.value.errno == errno.ENODATA
    with pytest.raises(dmafile.Error) as wrong:
        dmafile.load(file, verify="crc32c=00000000")
    assert wrong.value.errno == errno.EBADMSG
    with pytest.raises(dmafile.Error) as impossible:
        dmafile.load(file, to="anon", method="copy-file-range")
    assert impossible.value.errno == errno.EOPNOTSUPP or isinstance(
        impossible.value, dmafile.UsageError
    )


@pytest.mark.parametrize(
    "options",
    [
        {"to": "disk"},
        {"method": "magic"},
        {"pages": "3k"},
        {"io": "both"},
        {"allocation": "never"},
        {"verify": "md5"},
        {"block": 0},
        {"queue_depth": 0},
        {"queue_depth": 1 << 40},
        {"chunk": 1},
        {"offset": -1},
        {"length": 1 << 64},
        {"length": 0},
    ],
)
def test_an_invalid_value_is_a_value_error(file: Path, options: dict[str, object]) -> None:
    with pytest.raises(dmafile.UsageError) as caught:
        dmafile.load(file, **options)  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)
    assert caught.value.errno == errno.EINVAL
    assert "--" not in str(caught.value)


def test_errors_name_the_arguments(file: Path) -> None:
    with pytest.raises(dmafile.Error, match="; leave method and io to auto, or see") as caught:
        dmafile.load(file, to="anon", method="copy-file-range")
    assert caught.value.remedy.startswith("leave method and io to auto")
    with pytest.raises(dmafile.UsageError, match=r"^queue_depth: "):
        dmafile.load(file, queue_depth=0)
    with pytest.raises(dmafile.Error, match=r'; load it to="memfd"$'):
        dmafile.load(file, to="anon").fileno()


@pytest.mark.parametrize("options", [{"to": 3}, {"block": "8M"}, {"block": 1.5}, {"progress": 3}])
def test_an_option_of_the_wrong_type_is_a_type_error(
    file: Path, options: dict[str, object]
) -> None:
    with pytest.raises(TypeError):
        dmafile.load(file, **options)  # type: ignore[arg-type]


def test_errors_can_be_pickled() -> None:
    with pytest.raises(dmafile.Error) as caught:
        dmafile.load("no/such/file")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is type(caught.value)
    assert str(copy) == str(caught.value)
    assert (copy.errno, copy.filename, copy.remedy) == (2, "no/such/file", "check the path")


def test_an_exception_in_progress_stops_the_load(slow: Path) -> None:
    before = open_files()

    def fail(done: int, total: int) -> None:
        raise KeyError(total)

    read = bytes_read()
    with pytest.raises(KeyError):
        dmafile.load(slow, **SLOWLY, progress=fail)
    assert bytes_read() - read < slow.stat().st_size
    assert open_files() == before


def test_ctrl_c_stops_the_load_without_leaks(slow: Path) -> None:
    program = """
import os, sys, threading, time, dmafile
fds = len(os.listdir("/proc/self/fd"))
end = time.monotonic() + 60
seen = lambda done, total: print("going", flush=True) if done else None
try:
    slowly = {"method": "threads", "io": "direct", "block": 4096, "queue_depth": 1}
    dmafile.load(sys.argv[1], progress=seen, **slowly)
except KeyboardInterrupt:
    read = int(open("/proc/self/io").readline().split()[1])
    memory = [line for line in open("/proc/self/smaps") if "memfd" in line]
    # A thread that has ended, and been waited for, is listed for a moment more.
    while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < end:
        time.sleep(0.001)
    tasks = len(os.listdir("/proc/self/task"))
    fds = len(os.listdir("/proc/self/fd")) - fds
    whole = read >= os.stat(sys.argv[1]).st_size
    print("stopped", whole, fds, memory, tasks, flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program, slow], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "going\n"
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert rest.splitlines()[-1] == "stopped False 0 [] 1"
    assert process.returncode == 0


def test_other_threads_run_during_a_load(slow: Path) -> None:
    turns = 0
    ended = threading.Event()

    def count() -> None:
        nonlocal turns
        while not ended.wait(0.001):
            turns += 1

    counter = threading.Thread(target=count)
    counter.start()
    dmafile.load(slow, length=24 << 20, **SLOWLY)
    ended.set()
    counter.join()
    # A blocked thread would turn only once.
    assert turns > 3


def test_loads_work_in_several_threads_and_after_a_fork(file: Path, python: Run) -> None:
    digests: list[str] = []
    want = file_sha256(file)

    def work() -> None:
        for _ in range(5):
            with dmafile.load(file, to="anon") as buffer, memoryview(buffer) as view:
                digests.append(sha256(view))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert digests == [want] * 20

    program = """
import hashlib, os, sys, dmafile
mine = dmafile.load(sys.argv[1], to="anon")
child = os.fork()
digest = lambda buffer: hashlib.sha256(buffer).hexdigest()
if child == 0:
    print(digest(mine), digest(dmafile.load(sys.argv[1])), flush=True)
    memoryview(mine)[0] ^= 1
    os._exit(0)
os.waitpid(child, 0)
print(digest(mine))
"""
    assert python(program, file).stdout.split() == [want] * 3


def test_a_fork_inside_a_callback_does_not_hang(file: Path, python: Run) -> None:
    program = """
import os, sys, dmafile
child = None
def tell(done, total):
    global child
    if child is None:
        child = os.fork()
try:
    dmafile.load(sys.argv[1], progress=tell).close()
except RuntimeError as error:
    assert child == 0
    print(error, flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    done = python(program, file)
    assert "forked" in done.stdout, done.stderr


def test_a_thread_that_cannot_start_is_an_error(file: Path, python: Run) -> None:
    program = """
import resource, sys, dmafile
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), -1))
try:
    dmafile.load(sys.argv[1])
except dmafile.Error as error:
    print(error.filename, error)
"""
    done = python(program, file)
    assert done.stdout.startswith(f"{file} cannot start the thread of the load"), done


def test_an_error_made_by_the_caller_keeps_its_text() -> None:
    assert str(dmafile.Error("x")) == str(pickle.loads(pickle.dumps(dmafile.Error("x")))) == "x"
    with pytest.raises(dmafile.UsageError, match="offset: it is out of range"):
        dmafile.load("any", offset=10**5000)


def test_a_falsy_callback_is_called(file: Path) -> None:
    class Quiet:
        told = 0

        def __bool__(self) -> bool:
            return False

        def __call__(self, done: int, total: int) -> None:
            self.told = done

    quiet = Quiet()
    dmafile.load(file, progress=quiet).close()
    assert quiet.told == SIZE


def test_loads_leak_no_descriptor_or_mapping(file: Path) -> None:
    dmafile.load(file).close()
    mappings = Path("/proc/self/maps")
    before = open_files(), len(mappings.read_text().splitlines())
    for turn in range(200):
        buffer = dmafile.load(file, to="anon" if turn % 2 else "memfd", length=8192)
        view = memoryview(buffer)
        if turn % 3 == 0:
            view.release()
            buffer.close()
        del buffer, view
    after = open_files(), len(mappings.read_text().splitlines())
    assert after[0] == before[0]
    assert after[1] - before[1] < 20
