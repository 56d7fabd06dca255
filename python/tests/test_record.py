"""Recorders: records, readers, errors and interruptions."""

import array
import errno
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import dmafile
import pytest

from conftest import Run, eventually, sha256

DOCS = Path(__file__).parents[2] / "docs" / "recording.md"


@pytest.fixture
def to(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    inside = folder / "recordings"
    inside.mkdir(exist_ok=True)
    for left in inside.iterdir():
        left.unlink()
    return inside / "to.rec"


def memfd(data: bytes) -> int:
    fd = os.memfd_create("frame")
    os.pwrite(fd, data, 0)
    return fd


def by_the_docs(path: Path) -> list[list[str]]:
    """The output of the reader in docs/recording.md."""
    code = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)[-1]
    words = [sys.executable, "-c", code, str(path)]
    output = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return [line.split() for line in output.splitlines()]


def test_the_documented_reader_reads_every_kind_of_source(file: Path, to: Path) -> None:
    data = file.read_bytes()
    fd = memfd(data)
    numbers = array.array("d", range(1000))
    with (
        dmafile.load(file) as buffer,
        file.open("rb") as opened,
        dmafile.Recorder(to, in_flight=2) as recorder,
    ):
        attached = recorder.attach(fd)
        assert attached.nbytes == len(data)
        wanted: list[bytes] = []
        for source in (attached, fd, buffer, opened, data, bytearray(data), memoryview(data)):
            for offset, length in ((0, None), (4096, 5000), (7, 0)):
                ticket = recorder.append(
                    source, offset=offset, length=length, timestamp=-5, tag=len(wanted)
                )
                assert ticket is not None and ticket.number == len(wanted)
                wanted.append(data[offset:][:length])
        ticket = recorder.append(numbers, tag=1 << 63)
        assert ticket is not None
        wanted.append(numbers.tobytes())
        assert ticket.wait() and ticket.done()
        assert ticket.wait_durable(timeout=None) and ticket.durable()
    os.close(fd)
    assert (recorder.records, recorder.durable, recorder.files) == (len(wanted), len(wanted), 1)
    assert recorder.nbytes == sum(map(len, wanted))
    recording = dmafile.read_recording(to)
    assert recording.complete and recording.files == [to]
    assert [record.read() for record in recording] == wanted
    assert [record.tag for record in recording] == [*range(len(wanted) - 1), 1 << 63]
    assert {record.timestamp for record in recording[:-1]} == {-5}
    assert recording[-1].timestamp > 1 << 60
    lines = by_the_docs(to)
    assert [line[-1] for line in lines] == [sha256(bytes) for bytes in wanted]
    last = recording[-1]
    with dmafile.load(last.path, offset=last.offset, length=last.length) as again:
        assert bytes(memoryview(again)) == wanted[-1]
    with pytest.raises(IndexError):
        recording[len(wanted)]


def test_options_are_accepted_and_files_are_rotated(to: Path) -> None:
    options = {"method": "bounce", "io": "buffered", "checksum": False}
    with dmafile.Recorder(
        os.fsencode(to),
        sync_every=3,
        sync_interval=None,
        rotate_bytes=600_000,
        rotate_after=1e9,
        **options,  # type: ignore[arg-type]
    ) as recorder:
        for number in range(9):
            recorder.append(bytes([number]) * 100_000)
    assert recorder.files == 3
    recording = dmafile.read_recording(to)
    assert [path.name for path in recording.files] == ["to.rec", "to.rec.1", "to.rec.2"]
    assert [record.read()[:1] for record in recording] == [bytes([n]) for n in range(9)]
    assert recording[4].checksum is None and recording[4].dropped == 0


def test_a_full_queue_drops_records_on_request(to: Path) -> None:
    data = bytes(16 << 20)
    with dmafile.Recorder(to, in_flight=1, when_full="drop") as recorder:
        tickets = [recorder.append(data) for _ in range(20)]
    assert recorder.dropped == tickets.count(None) and recorder.records + recorder.dropped == 20
    assert recorder.dropped > 0


def test_errors_have_an_errno_and_name_the_file(to: Path) -> None:
    with dmafile.Recorder(to) as recorder:
        with pytest.raises(dmafile.Error, match="another recorder writes to it") as busy:
            dmafile.Recorder(to)
        assert busy.value.errno == errno.EBUSY and busy.value.filename == str(to)
        with pytest.raises(dmafile.Error, match="are past the end") as past:
            recorder.append(b"abc", length=4)
        assert past.value.errno == errno.EINVAL
        with pytest.raises(dmafile.Error) as closed:
            recorder.attach(987654)
        assert closed.value.errno == errno.EBADF
        with pytest.raises(TypeError):
            recorder.append("text")
        with pytest.raises(OverflowError):
            recorder.append(b"", tag=-1)
    recorder.finish()
    with pytest.raises(dmafile.Error, match="finished"):
        recorder.append(b"abc")
    with pytest.raises(dmafile.Error) as there:
        dmafile.Recorder(to)
    assert there.value.errno == errno.EEXIST
    other = to.with_name("other")
    for bad in ({"in_flight": 0}, {"sync_every": 0}, {"sync_interval": 0}, {"rotate_after": -1}):
        with pytest.raises(dmafile.UsageError):
            dmafile.Recorder(other, **bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="neither"):
        dmafile.Recorder(other, when_full="other")  # type: ignore[arg-type]
    assert not other.exists()
    other.write_bytes(b"x" * 5000)
    with pytest.raises(dmafile.Error) as unknown:
        dmafile.read_recording(other)
    assert unknown.value.errno == errno.EBADMSG


def test_an_exception_in_the_with_block_keeps_the_records(to: Path) -> None:
    with pytest.raises(ZeroDivisionError), dmafile.Recorder(to) as recorder:
        recorder.append(b"abc")
        raise ZeroDivisionError
    assert [record.read() for record in dmafile.read_recording(to)] == [b"abc"]


def test_deleting_a_recorder_finishes_the_file(to: Path) -> None:
    recorder = dmafile.Recorder(to)
    recorder.append(bytearray(3 << 20))
    del recorder
    assert dmafile.read_recording(to).complete


def test_several_threads_can_append(to: Path) -> None:
    with dmafile.Recorder(to) as recorder:

        def append(first: int) -> None:
            for number in range(50):
                recorder.append(bytes([first]) * 5000, tag=number)

        threads = [threading.Thread(target=append, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    seen: dict[int, list[int]] = {}
    for record in dmafile.read_recording(to):
        data = record.read()
        assert data == data[:1] * 5000
        seen.setdefault(data[0], []).append(record.tag)
    assert seen == {first: list(range(50)) for first in range(4)}


def test_a_forked_child_cannot_use_the_recorder_and_exits(to: Path) -> None:
    program = (
        "import dmafile, os, sys\n"
        "recorder = dmafile.Recorder(sys.argv[1])\n"
        "recorder.append(b'abc')\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    try:\n"
        "        recorder.append(b'def')\n"
        "    except RuntimeError:\n"
        "        sys.exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "recorder.finish()\n"
    )
    subprocess.run([sys.executable, "-c", program, str(to)], check=True)
    assert [record.read() for record in dmafile.read_recording(to)] == [b"abc"]


def test_acknowledged_records_survive_a_kill(to: Path) -> None:
    program = (
        "import dmafile, os, signal, sys\n"
        "recorder = dmafile.Recorder(sys.argv[1], sync_interval=None)\n"
        "for number in range(10):\n"
        "    recorder.append(bytes([number]) * 70000)\n"
        "recorder.sync()\n"
        "recorder.append(b'lost')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(to)], check=False)
    assert ended.returncode == -signal.SIGKILL
    recording = dmafile.read_recording(to)
    assert [record.read() for record in recording] == [bytes([n]) * 70000 for n in range(10)]
    assert not recording.complete


def test_a_record_is_in_memory_only_once(to: Path, python: Run) -> None:
    size = 256 << 20
    fd = os.memfd_create("holes")
    os.ftruncate(fd, size)
    with dmafile.Recorder(to, checksum=False) as recorder:
        recorder.append(fd)
    os.close(fd)
    program = """
import sys, dmafile
data = dmafile.read_recording(sys.argv[1])[0].read()
status = open("/proc/self/status").read().split()
print(len(data), int(status[status.index("VmHWM:") + 1]) << 10)
"""
    done = python(program, to)
    read, peak = map(int, done.stdout.split())
    assert read == size
    assert peak < 1.5 * size, done.stderr


def test_memory_is_released_with_the_next_call_after_its_record_is_written(to: Path) -> None:
    with dmafile.Recorder(to, in_flight=2) as recorder:
        for call in ("wait", "done", "durable", "sync", "append"):
            memory = bytearray(70000)
            ticket = recorder.append(memory)
            assert ticket is not None
            match call:
                case "wait":
                    ticket.wait()
                case "done":
                    eventually(ticket.done)
                case "durable":
                    ticket.wait_durable()
                case "sync":
                    recorder.sync()
                case "append":
                    eventually(ticket.done)
                    recorder.append(b"another")
            # With an export this is a BufferError.
            memory.clear()
