"""A buffer is sent from Python to a C program."""

import os
import shutil
import socket
import subprocess
from pathlib import Path

import dmafile
import pytest

from conftest import SIZE, eventually

ROOT = Path(__file__).resolve().parent.parent.parent


def built(folder: Path, example: str) -> str:
    """A C example, linked with the C library of this checkout."""
    missing = [tool for tool in ("cargo", "cc", "make") if shutil.which(tool) is None]
    if missing:
        assert os.environ.get("CI") != "true", f"{missing} missing"
        pytest.skip(f"no {', '.join(missing)} to build the C example with")
    build = folder / "c"
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    archive = target / "debug/libdmafile_capi.a"
    link = [f"-L{build}", "-ldmafile", f"-Wl,-rpath,{build}", "-o", str(build / example)]
    for command in (
        ["cargo", "build", "--quiet", "--locked", "--package", "dmafile-capi"],
        ["make", "--quiet", "-C", "crates/capi", "all", f"ARCHIVE={archive}", f"BUILD={build}"],
        ["cc", "-std=c99", "-Icrates/capi/include", f"crates/capi/examples/{example}.c", *link],
    ):
        subprocess.run(command, cwd=ROOT, check=True)
    if not (build / "libdmafile.so.0").exists():
        (build / "libdmafile.so.0").symlink_to("libdmafile.so")
    return str(build / example)


@pytest.fixture(scope="module")
def receiver(folder: Path) -> list[str]:
    return [built(folder, "load"), "--receive"]


@pytest.mark.slow
@pytest.mark.parametrize("seal", [False, True])
@pytest.mark.parametrize("offset", [0, 777])
def test_a_c_program_receives_a_buffer(
    receiver: list[str], folder: Path, file: Path, seal: bool, offset: int
) -> None:
    # A short path: the address of a socket holds 107 bytes.
    place = Path(os.path.relpath(folder / f"socket-{seal}-{offset}"))
    program = subprocess.Popen([*receiver, str(place)], stdout=subprocess.PIPE, text=True)
    try:
        with dmafile.load(file, offset=offset) as buffer, socket.socket(socket.AF_UNIX) as peer:
            if seal:
                buffer.seal()
            # The socket exists shortly before the program listens on it.
            eventually(lambda: peer.connect_ex(str(place)) == 0)
            buffer.send(peer)
        out, _ = program.communicate(timeout=60)
    finally:
        program.kill()
        program.wait()
    data = file.read_bytes()[offset:]
    assert program.returncode == 0
    assert f"bytes {SIZE - offset}\n" in out
    assert f"first {data[:8].hex(' ')}\n" in out
    assert f"sum {sum(data)}\n" in out
