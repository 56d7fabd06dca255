"""The interpreter ends while threads are in the package: nothing is printed, nothing hangs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Tensors, write_safetensors

SOURCES = Path(__file__).parents[1] / "src"

BEGIN = """
import asyncio, os, sys, threading, time, traceback, dmafile, dmafile.numpy
from dmafile import _dmafile, _stream
path, folder = sys.argv[1:]
sys.setswitchinterval(1e-6)

class Late:
    # Its deletion is part of the shutdown: other threads want to continue during that time.
    def __del__(self, sleep=time.sleep):
        sleep(0.5)

late = Late()
busy = threading.Event()

def slowly(*_):
    busy.set()
    time.sleep(0.05)
    return True

def always(work):
    def run():
        try:
            while True:
                work()
                busy.set()
        except BaseException:
            traceback.print_exc()
            os._exit(3)
    threading.Thread(target=run, daemon=True).start()

def missing():
    try:
        dmafile.load(path + "-")
    except FileNotFoundError:
        pass

def own(name):
    return f"{folder}/{name}-{threading.get_ident()}"

class Source:
    size = 1 << 20

    def read_into(self, offset, memory):
        memory[:] = bytes(len(memory))
        time.sleep(0.001)

def source():
    dmafile.load(source=Source(), block=4096).close()

def ahead():
    return _stream.stream(_dmafile.Model(path), None, 1 << 20, None, None, {})[1]

def parts():
    for _ in ahead():
        pass

def bytes_of():
    for _ in dmafile.stream(path):
        time.sleep(0.001)

def many_async():
    async def several():
        await asyncio.gather(*(dmafile.load_async(path, length=4096) for _ in range(8)))
    asyncio.run(several())

def shared():
    dmafile.shared(path, folder=own("shared"), progress=slowly).close()

def snapshot():
    os.makedirs(own("snapshot"), exist_ok=True)
    dmafile.save_snapshot({"a": path, "b": path}, own("snapshot"), progress=slowly)
    dmafile.load_snapshot(own("snapshot"), progress=slowly)
"""

WORKS = {
    "progress of a load": "lambda: dmafile.load(path, progress=slowly).close()",
    "progress of a save": "lambda: dmafile.save(path, own('copy'), progress=slowly)",
    "progress of tensors": "lambda: dmafile.numpy.load_file(path, progress=slowly)",
    "progress of shared memory": "shared",
    "progress of a snapshot": "snapshot",
    "choice of tensors": "lambda: dmafile.numpy.load_file(path, tensors=slowly)",
    "reports": "lambda: dmafile.load(path, length=4096).report",
    "errors": "missing",
    "loads ahead": "parts",
    "streams": "bytes_of",
    "asyncio": "many_async",
    "objects of Python": "source",
}

LEFT_OPEN = """
stream = dmafile.stream(path)
next(stream)
parts_ahead = ahead()
next(parts_ahead)
holder = dmafile.hold(path, name="exit", socket=own("hold"))
held = dmafile.take("exit", socket=own("hold"), wait=60)
recorder = dmafile.Recorder(own("record"), in_flight=16)
for number in range(16):
    recorder.append(bytearray(4 << 20), tag=number)
# Whatever wants to continue in the interpreter waits when the shutdown begins.
sys.setswitchinterval(100)
until = time.monotonic() + 0.5
while time.monotonic() < until:
    pass
"""


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    one = ("U8", (1 << 18,), bytes(1 << 18))
    tensors: Tensors = {f"t{number}": one for number in range(24)}
    return write_safetensors(folder / "exit.safetensors", tensors)


def ends(program: str, model: Path, folder: Path) -> None:
    command = [sys.executable, "-c", BEGIN + program, str(model), str(folder)]
    # On a hang, this ends the test.
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS.keys())
def test_the_interpreter_may_end_while_threads_are_in_the_package(
    work: str, model: Path, tmp_path: Path
) -> None:
    program = f"""
for _ in range(3):
    always({work})
busy.wait()
"""
    for _ in range(2):
        ends(program, model, tmp_path)


def test_the_interpreter_may_end_while_things_are_open(model: Path, tmp_path: Path) -> None:
    for number in range(5):
        place = tmp_path / str(number)
        place.mkdir()
        ends(LEFT_OPEN, model, place)


def test_python_code_is_called_only_where_a_thread_may_be_ended() -> None:
    calls = (
        r"\.call\d?\(|\.call_method\w*\(|\.import\(|check_signals\(|[^_]attach\(|write_unraisable"
    )
    for path in SOURCES.glob("*.rs"):
        if path.name != "call.rs":
            found = re.findall(calls, path.read_text())
            # `attach` is also a function of the package.
            found = [text for text in found if path.name != "recorder.rs" or "attach" not in text]
            assert not found, path
