"""dmafile-hold@.service under systemd: held memory survives restarts and a crash.

services.py DMAFILE HELPERS FOLDER    in the machine, as root
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.vm.inside.loads import MIB, PATIENCE, File, settles

HERE = Path(__file__).parents[3]
UNIT = HERE / "crates" / "cli" / "systemd" / "dmafile-hold@.service.in"
NAME = "llama"
SERVICE = f"dmafile-hold@{NAME}.service"
PROGRAMS, UNITS = Path("/run/programs"), Path("/run/units")
TARGETS = ("sysinit", "basic", "shutdown", "multi-user")
"""The units that systemd starts instead of those of the host."""
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000


def call(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, f"{words}: {done}"
    return done.stdout


def prepare(dmafile: str) -> None:
    """Makes private folders: the originals are read-only in the machine, or belong to vm/run."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(CLONE_NEWNS) == 0, ctypes.get_errno()
    assert libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) == 0, ctypes.get_errno()
    for folder in ("/run/dmafile", "/var/tmp"):
        call("mount", "-t", "tmpfs", "none", folder)
    for name in ("upper", "work"):
        Path("/run", name).mkdir()
    layers = "lowerdir=/etc,upperdir=/run/upper,workdir=/run/work"
    call("mount", "-t", "overlay", "-o", layers, "none", "/etc")
    PROGRAMS.mkdir()
    shutil.copy(dmafile, PROGRAMS / "dmafile")
    UNITS.mkdir()
    for target in TARGETS:
        (UNITS / f"{target}.target").write_text("[Unit]\nDefaultDependencies=no\n")
    unit = UNIT.read_text().replace("@BINDIR@", str(PROGRAMS))
    (UNITS / "dmafile-hold@.service").write_text(unit)


class Systemd:
    """systemd, as the first process of a PID namespace."""

    def __init__(self) -> None:
        words = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
        says = {"container": "test", "SYSTEMD_UNIT_PATH": str(UNITS), "SYSTEMD_LOG_TARGET": "null"}
        self.process = subprocess.Popen(
            (*words, "/lib/systemd/systemd", "--system", "--unit=multi-user.target"),
            env={**os.environ, **says},
            stdin=subprocess.DEVNULL,
        )
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        settles(children.read_text, lambda found: found.strip() != "", "no child")
        # It only answers processes in its own namespace.
        self.enter = ("nsenter", f"--target={children.read_text().strip()}", "--pid", "--mount")
        command = (*self.enter, "systemctl", "is-active", "multi-user.target")
        settles(
            lambda: subprocess.run(command, capture_output=True, text=True),
            lambda done: done.stdout == "active\n",
            "systemd does not start",
        )

    def ctl(self, *words: str) -> str:
        return call(*self.enter, "systemctl", *words)

    def stored(self) -> int:
        """The number of stored descriptors of the service."""
        return int(self.ctl("show", "--value", "--property=NFileDescriptorStore", SERVICE))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def holder() -> int:
    """The PID of the holder; 0 if there is none."""
    words = (str(PROGRAMS / "dmafile"), "holds", "--json")
    held = json.loads(call(*words))
    assert len(held) <= 1, held
    return held[0]["pid"] if held else 0


def read(pid: int) -> int:
    """The bytes that a process has read from disks."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def take(*command: str) -> list[str]:
    return [str(PROGRAMS / "dmafile"), "take", NAME, "--quiet", "--", *command]


def digest(path: Path) -> str:
    return call("sha256sum", str(path)).split()[0]


def serves(systemd: Systemd, file: File, before: int, reads: bool) -> int:
    """Waits for a new process that serves the file; asserts whether it has read the file."""
    settles(holder, lambda pid: pid not in (0, before), "no other holder")
    pid = holder()
    # Before the test itself reads the file.
    got = read(pid)
    assert call(*take("sha256sum", "{}")).split()[0] == digest(file.path), pid
    assert (got >= len(file.data)) if reads else got == 0, f"{got} bytes were read from the disk"
    # The memory of the file, and the table that describes it.
    assert systemd.stored() == 2
    return pid


def main(dmafile: str, _: str, folder: str) -> None:
    prepare(dmafile)
    file = File.of(Path(folder) / "file", 6 * MIB + 777)
    want = digest(file.path)
    configuration = Path("/etc/dmafile")
    configuration.mkdir()
    (configuration / f"{NAME}.conf").write_text(f"MODEL={file.path}\nOPTIONS=--verify sha256\n")
    systemd = Systemd()
    file.evict()
    systemd.ctl("start", SERVICE)
    first = serves(systemd, file, 0, reads=True)
    waiting = subprocess.Popen(
        take("sh", "-c", "echo; read go; sha256sum <$DMAFILE_PATH"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert waiting.stdout is not None and waiting.stdout.readline() == "\n"
    file.evict()
    systemd.ctl("restart", SERVICE)
    second = serves(systemd, file, first, reads=False)
    file.evict()
    # systemd restarts it (Restart=on-failure).
    os.kill(second, signal.SIGKILL)
    third = serves(systemd, file, second, reads=False)
    # A changed file is loaded again.
    other = File.of(file.path, 5 * MIB + 13)
    other.evict()
    systemd.ctl("restart", SERVICE)
    serves(systemd, other, third, reads=True)
    assert waiting.communicate("go\n", timeout=PATIENCE)[0].split()[0] == want
    systemd.ctl("stop", SERVICE)
    assert (holder(), systemd.stored()) == (0, 0)
    systemd.end()
    print("4 starts checked")


if __name__ == "__main__":
    main(*sys.argv[1:])
