"""Saves: bytes, options, errors, interruptions and the old file."""

import errno
import os
import threading
from pathlib import Path

import dmafile
import numpy as np
import pytest

from conftest import SIZE, file_sha256, sha256


@pytest.fixture
def to(folder: Path) -> Path:
    inside = folder / "saves"
    inside.mkdir(exist_ok=True)
    for left in inside.iterdir():
        left.unlink()
    return inside / "to"


def test_a_buffer_is_saved_as_another_program_reads_it(file: Path, to: Path) -> None:
    with dmafile.load(file, offset=777) as buffer:
        report = dmafile.save(buffer, to, verify="sha256")
    assert report["bytes"] == SIZE - 777
    assert report["atomic"] and report["sync"]
    digest = sha256(file.read_bytes()[777:])
    assert file_sha256(to) == report["verify"]["digest"] == digest


def test_every_source_and_every_option_is_accepted(file: Path, to: Path) -> None:
    digest = file_sha256(file)
    with file.open("rb") as opened:
        opened.seek(1000)
        for source in (file, str(file), opened, opened.fileno()):
            report = dmafile.save(source, bytes(to), verify=f"sha256={digest}", sync=False)
            assert report["sync"] is False
            assert file_sha256(to) == digest
        assert opened.tell() == 1000
    told: list[tuple[int, int]] = []
    report = dmafile.save(
        file,
        to,
        offset=4096,
        length=1 << 20,
        method="bounce",
        io="auto",
        block=1 << 16,
        queue_depth=3,
        progress=lambda done, total: told.append((done, total)),
    )
    assert not report["atomic"]
    data = file.read_bytes()
    assert to.read_bytes() == data[:4096] + data[: 1 << 20] + data[4096 + (1 << 20) :]
    assert told[-1] == (1 << 20, 1 << 20)


def test_a_pipe_is_saved_to_its_end(file: Path, to: Path) -> None:
    """A Python thread fills the pipe: if save() held the interpreter lock, it would never end."""
    data = file.read_bytes()
    read, write = os.pipe()

    def feed() -> None:
        with os.fdopen(write, "wb") as end:
            end.write(data)

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        assert dmafile.save(read, to)["bytes"] == len(data)
    finally:
        os.close(read)
        feeder.join()
    assert to.read_bytes() == data


def test_errors_leave_the_old_file(file: Path, to: Path) -> None:
    to.write_bytes(b"old")
    with pytest.raises(dmafile.Error) as caught:
        dmafile.save(file, to, verify=f"sha256={'0' * 64}")
    assert caught.value.errno == errno.EBADMSG
    with pytest.raises(IsADirectoryError):
        dmafile.save(file, to.parent)
    with pytest.raises(FileNotFoundError):
        dmafile.save(to.parent / "missing", to)
    with pytest.raises(dmafile.UsageError, match="block: 1 is out of range"):
        dmafile.save(file, to, block=1)
    with pytest.raises(dmafile.UsageError, match="heap-read is a load method"):
        dmafile.save(file, to, method="heap-read")
    assert to.read_bytes() == b"old"
    assert [left.name for left in to.parent.iterdir()] == ["to"]


def test_an_exception_in_progress_stops_the_save(to: Path) -> None:
    to.write_bytes(b"old")
    read, write = os.pipe()
    os.write(write, bytes(5000))

    def stop(done: int, total: int) -> None:
        raise ZeroDivisionError

    # The pipe stays open: without the exception, the save would never end.
    timer = threading.Timer(0.1, os.write, (write, bytes(50_000)))
    timer.start()
    try:
        with pytest.raises(ZeroDivisionError):
            dmafile.save(read, to, block=4096, progress=stop)
    finally:
        timer.join()
        os.close(read)
        os.close(write)
    assert to.read_bytes() == b"old"
    assert [left.name for left in to.parent.iterdir()] == ["to"]


def test_every_kind_of_memory_is_saved(file: Path, to: Path) -> None:
    data = file.read_bytes()
    shifted = memoryview(b"x" + data)[1:]
    words = np.frombuffer(data[: SIZE // 8 * 8], np.uint64)
    with dmafile.load(file, to="anon") as private:
        for source in (data, bytearray(data), shifted, private):
            assert dmafile.save(source, to, verify=f"sha256={sha256(data)}")["bytes"] == SIZE
            assert file_sha256(to) == sha256(data)
    dmafile.save([words, data[SIZE // 8 * 8 :], b"", np.zeros((0, 3))], to)
    assert file_sha256(to) == sha256(data)
    with pytest.raises(BufferError, match="not contiguous"):
        dmafile.save(words[::2], to)
    assert file_sha256(to) == sha256(data)


def test_memory_cannot_be_resized_during_its_save(to: Path) -> None:
    memory = bytearray(64 << 20)
    ran: list[bool] = []

    def grow(done: int, total: int) -> None:
        ran.append(True)
        with pytest.raises(BufferError):
            memory.append(1)

    dmafile.save(memory, to, progress=grow)
    assert ran
    memory.append(1)
    assert to.stat().st_size == 64 << 20
