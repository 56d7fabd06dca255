"""A buffer: exports, sending and receiving, closing."""

import contextlib
import ctypes
import errno
import gc
import io
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import dmafile
import numpy as np
import pytest

from conftest import SIZE, Run, file_sha256, sha256


def test_private_memory_is_writable_and_has_no_descriptor(file: Path) -> None:
    buffer = dmafile.load(file, to="anon")
    view = memoryview(buffer)
    assert (view.format, view.itemsize, view.shape, view.readonly) == ("B", 1, (SIZE,), False)
    assert not buffer.readonly
    view[0] ^= 255
    assert view[0] == file.read_bytes()[0] ^ 255
    with pytest.raises(dmafile.Error, match="EOPNOTSUPP") as caught:
        buffer.fileno()
    assert caught.value.errno == errno.EOPNOTSUPP
    assert len(buffer) == buffer.nbytes == SIZE
    assert repr(buffer) == f"<dmafile.Buffer kind=anon nbytes={SIZE}>"


def test_shared_memory_is_read_only_and_shows_external_writes(file: Path) -> None:
    buffer = dmafile.load(file, pages="base")
    view = memoryview(buffer)
    assert view.readonly and buffer.readonly
    with pytest.raises(TypeError):
        view[0] = 1
    with pytest.raises(TypeError):
        io.BytesIO(b"x" * SIZE).readinto(buffer)
    os.pwrite(buffer.fileno(), bytes([view[5] ^ 255]), 5)
    assert view[5] == file.read_bytes()[5] ^ 255
    assert repr(buffer) == f"<dmafile.Buffer kind=memfd nbytes={SIZE} fd={buffer.fileno()}>"


def test_a_sealed_buffer_cannot_be_changed(file: Path) -> None:
    with dmafile.load(file, pages="base") as buffer:
        view = memoryview(buffer)
        with pytest.raises(BufferError, match="cannot seal"):
            buffer.seal()
        view.release()
        buffer.seal()
        with pytest.raises(PermissionError):
            os.pwrite(buffer.fileno(), b"x", 0)
        assert sha256(memoryview(buffer)) == file_sha256(file)
    with pytest.raises(dmafile.Error) as caught:
        dmafile.load(file, to="anon").seal()
    assert caught.value.errno == errno.EOPNOTSUPP


def test_a_buffer_closes_only_without_exports(file: Path) -> None:
    buffer = dmafile.load(file, to="anon")
    views = [memoryview(buffer), memoryview(buffer)[7:]]
    array = np.frombuffer(memoryview(buffer), np.uint8)
    with pytest.raises(BufferError, match="cannot close a buffer while 3 of its exports"):
        buffer.close()
    with pytest.raises(BufferError), buffer:
        pass
    assert bytes(views[1][:9]) == file.read_bytes()[7:16]
    for view in views:
        view.release()
    del array, views, view
    buffer.close()
    buffer.close()
    assert buffer.closed
    assert repr(buffer) == f"<dmafile.Buffer kind=anon nbytes={SIZE} closed>"
    for use in (
        lambda: memoryview(buffer),
        lambda: len(buffer),
        buffer.fileno,
        buffer.seal,
        buffer.__dlpack__,
        buffer.__dlpack_device__,
        buffer.__enter__,
        lambda: buffer.send(socket.socket()),
        lambda: buffer.readonly,
    ):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_exports_outlive_the_buffer_object(file: Path) -> None:
    want = file.read_bytes()
    buffer = dmafile.load(file, to="anon")
    seen = weakref.ref(buffer)
    array = np.frombuffer(memoryview(buffer), np.uint8)
    shared = np.from_dlpack(buffer)
    del buffer
    gc.collect()
    assert array.tobytes() == want
    del array
    assert seen() is None
    assert shared.tobytes() == want


def capsule_name(capsule: object) -> bytes:
    name = ctypes.pythonapi.PyCapsule_GetName
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    found: bytes = name(capsule)
    return found


def version_and_flags(capsule: object) -> tuple[int, int, int]:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    begin = ctypes.string_at(pointer(capsule, b"dltensor_versioned"), struct.calcsize("IIPPQ"))
    major, minor, _, _, flags = struct.unpack("IIPPQ", begin)
    return major, minor, flags


@pytest.mark.parametrize("to", ["anon", "memfd"])
def test_numpy_imports_a_buffer_by_dlpack(file: Path, to: str) -> None:
    buffer = dmafile.load(file, to=to)
    array = np.from_dlpack(buffer)
    assert (array.dtype, array.shape) == (np.dtype(np.uint8), (SIZE,))
    assert array.flags.writeable == (to == "anon")
    assert sha256(array.data) == file_sha256(file)
    with pytest.raises(BufferError):
        buffer.close()
    del array
    buffer.close()


def test_dlpack_follows_the_protocol(file: Path) -> None:
    private, shared = dmafile.load(file, to="anon"), dmafile.load(file)
    assert private.__dlpack_device__() == (1, 0)
    assert capsule_name(private.__dlpack__()) == b"dltensor"
    for version in ((1, 0), (1, 3), (2, 0)):
        capsule = private.__dlpack__(max_version=version, dl_device=(1, 0), copy=False)
        assert capsule_name(capsule) == b"dltensor_versioned"
        assert version_and_flags(capsule) == (1, 0, 0)
    # Read-only, and a copy.
    assert version_and_flags(shared.__dlpack__(max_version=(1, 0))) == (1, 0, 1)
    assert version_and_flags(shared.__dlpack__(max_version=(1, 0), copy=True)) == (1, 0, 2)
    # Only DLPack 1.0 has a flag for read-only memory.
    with pytest.raises(BufferError, match="read-only"):
        shared.__dlpack__()
    with pytest.raises(BufferError, match="read-only"):
        shared.__dlpack__(max_version=(0, 8))
    with pytest.raises(BufferError):
        private.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError):
        private.__dlpack__(stream=1)  # type: ignore[arg-type]
    # A capsule that is not consumed releases the memory.
    capsule = private.__dlpack__(max_version=(1, 0))
    with pytest.raises(BufferError):
        private.close()
    del capsule
    private.close()

    class Copied:
        def __dlpack__(self, **_: Any) -> Any:
            return shared.__dlpack__(copy=True)

        def __dlpack_device__(self) -> tuple[int, int]:
            return shared.__dlpack_device__()

    copied = np.from_dlpack(Copied())
    shared.close()
    assert sha256(copied.data) == file_sha256(file)


def test_a_buffer_is_sent_to_another_process(file: Path) -> None:
    ours, theirs = socket.socketpair()
    program = """
import hashlib, socket, sys, dmafile
with dmafile.Buffer.receive(socket.socket(fileno=int(sys.argv[1]))) as buffer:
    print(buffer.kind, buffer.offset, buffer.nbytes, buffer.report, buffer.readonly)
    with memoryview(buffer) as view:
        print(hashlib.sha256(view).hexdigest())
"""
    command = [sys.executable, "-c", program, str(theirs.fileno())]
    with (
        ours,
        theirs,
        dmafile.load(file, offset=100, pages="base") as buffer,
        subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        buffer.send(ours)
        assert process.stdout is not None
        first, second = process.stdout.read().splitlines()
        assert first == f"memfd {buffer.offset} {SIZE - 100} None True"
    assert second == sha256(file.read_bytes()[100:])


def test_send_and_receive_obey_timeouts_and_refuse_invalid_messages(file: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0.1)
        with pytest.raises(TimeoutError):
            dmafile.Buffer.receive(ours)
        ours.setblocking(False)
        with pytest.raises(BlockingIOError):
            dmafile.Buffer.receive(ours)
        ours.setblocking(True)
        with dmafile.load(file, to="anon") as private:
            with pytest.raises(dmafile.Error) as caught:
                private.send(theirs)
            assert caught.value.errno == errno.EOPNOTSUPP
        theirs.sendall(b"x" * 24)
        with pytest.raises(dmafile.Error) as caught:
            dmafile.Buffer.receive(ours)
        assert caught.value.errno == errno.EPROTO
        theirs.close()
        with pytest.raises(ConnectionResetError):
            dmafile.Buffer.receive(ours)
    with pytest.raises(ValueError, match="closed"):
        dmafile.Buffer.receive(ours)


@pytest.mark.parametrize("timeout", [0, 0.2, None])
def test_send_to_a_full_socket_obeys_the_timeout(file: Path, timeout: float | None) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, dmafile.load(file, pages="base") as buffer:
        ours.setblocking(False)
        sent = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                sent += ours.send(b"x" * 4096)
        ours.settimeout(timeout)
        if timeout is not None:
            with pytest.raises(TimeoutError if timeout else BlockingIOError):
                buffer.send(ours)
        # Other threads of the interpreter run while send() waits.
        reader = threading.Thread(target=lambda: theirs.recv(sent, socket.MSG_WAITALL))
        reader.start()
        ours.settimeout(None if timeout is None else 10)
        buffer.send(ours)
        reader.join()
        with dmafile.Buffer.receive(theirs) as received:
            assert sha256(memoryview(received)) == file_sha256(file)


@pytest.mark.parametrize("to", ["anon", "memfd"])
def test_other_memory_has_no_dma_bufs(file: Path, to: str) -> None:
    with dmafile.load(file, to=to) as buffer:
        assert buffer.dma_bufs == []
    with pytest.raises(ValueError, match="closed"):
        _ = buffer.dma_bufs


def test_threads_may_use_a_buffer_while_another_closes_it(file: Path) -> None:
    buffer = dmafile.load(file, to="anon", length=4096)
    want = bytes(memoryview(buffer))
    outcomes: list[str] = []

    def use() -> None:
        while True:
            try:
                with memoryview(buffer) as view:
                    assert bytes(view) == want
                time.sleep(0.0002)
            except ValueError:
                outcomes.append("closed")
                return

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    while not buffer.closed:
        with contextlib.suppress(BufferError):
            buffer.close()
    for thread in threads:
        thread.join()
    assert outcomes == ["closed"] * 4


@pytest.mark.parametrize("to", ["anon", "memfd"])
def test_an_array_without_an_export_reads_zeros_after_close(file: Path, to: str) -> None:
    buffer = dmafile.load(file, to=to, pages="base")
    array = np.ndarray((SIZE,), np.uint8, buffer=buffer)  # type: ignore[arg-type]
    if to == "memfd":
        buffer.seal()
        assert array.tobytes() == file.read_bytes()
    before = resident()
    buffer.close()
    assert before - resident() > SIZE // 2
    others = [dmafile.load(file, to=to) for _ in range(8)]
    assert not array.any(), "the bytes of another buffer"
    assert len(others) == 8


def resident() -> int:
    """Counted page by page: other totals lack what each CPU has not added yet."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))


def test_an_incomplete_message_is_refused() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(1)
        theirs.sendall(b"dmafile1")
        with pytest.raises(dmafile.Error) as caught:
            dmafile.Buffer.receive(ours)
        assert caught.value.errno == errno.EPROTO


@pytest.mark.parametrize("timeout", [float("inf"), float("nan"), 1e30])
def test_any_number_is_accepted_as_timeout(file: Path, timeout: float) -> None:
    class Patient(socket.socket):
        def gettimeout(self) -> float:
            return timeout

    ours, theirs = socket.socketpair()
    with Patient(fileno=ours.detach()) as patient, theirs, dmafile.load(file) as buffer:
        buffer.send(theirs)
        dmafile.Buffer.receive(patient).close()


def test_a_copy_without_memory_is_a_memory_error(slow: Path, python: Run) -> None:
    program = """
import resource, sys, dmafile
buffer = dmafile.load(sys.argv[1])
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), -1))
try:
    buffer.__dlpack__(copy=True)
except MemoryError:
    print("MemoryError")
"""
    done = python(program, slow)
    assert done.stdout == "MemoryError\n", done


def test_each_report_is_a_new_dict(file: Path) -> None:
    with dmafile.load(file) as buffer:
        first = buffer.report
        assert first is not None
        first["buffer"] = buffer
        assert buffer.report != first
