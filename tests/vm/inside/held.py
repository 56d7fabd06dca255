"""A process takes what another holds, and a driver imports it after the holder is killed.

Before that, the holder is killed once and restarted with the stored descriptors.

held.py DMAFILE HELPERS FOLDER [KIND...]    in the machine, as root; memfds are always held too
"""

import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.vm.inside.importers import FRAME, ways_in
from tests.vm.inside.loads import PATIENCE, File, Loads, difference

SOCKET = Path("/run/held/socket")
FIRST = 3
"""The first descriptor that a service manager passes (SD_LISTEN_FDS_START)."""


class Manager:
    """The service manager of a holder (sd_notify(3), sd_listen_fds(3))."""

    def __init__(self) -> None:
        self.path = SOCKET.parent / "notify"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(self.path))
        self.socket.settimeout(PATIENCE)
        self.kept: list[tuple[str, int]] = []

    def start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        """Starts a holder with the stored descriptors, and waits until it is ready."""

        def place() -> None:
            # First move them away, so that none is overwritten.
            high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 100) for _, fd in self.kept]
            for number, fd in enumerate(high, FIRST):
                os.dup2(fd, number)

        names = ":".join(name for name, _ in self.kept)
        given = {"LISTEN_FDS": str(len(self.kept)), "LISTEN_FDNAMES": names}
        holder = subprocess.Popen(
            ["sh", "-c", 'LISTEN_PID=$$ exec "$@"', "sh", *command, "--notify"],
            env={**os.environ, **given, "NOTIFY_SOCKET": str(self.path)},
            stdout=subprocess.PIPE,
            text=True,
            close_fds=False,
            preexec_fn=place,
        )
        while (message := socket.recv_fds(self.socket, 4096, 253))[0] != b"READY=1\n":
            said = dict(line.split("=", 1) for line in message[0].decode().splitlines())
            assert said["FDSTORE"] == "1" and len(message[1]) == 1, message
            self.kept.append((said["FDNAME"], message[1][0]))
        return holder


def held(
    loads: Loads, manager: Manager, file: File, kind: str, ways: Sequence[Sequence[str]]
) -> None:
    """Holds a file, kills the holder and restarts it with the stored descriptors. Then takes the
    file once for each importer, kills the holder again, and lets the importers import it.
    """
    where = ["--name=file", f"--socket={SOCKET}", f"--to={kind}"]
    # Linux 6.12 maps huge pages wrongly for drivers (importers.py).
    where += ["--pages=base"] if kind == "udmabuf" else []
    file.evict()
    for again in (False, True):
        holder = manager.start([loads.dmafile, "hold", str(file.path), *where])
        assert holder.stdout is not None
        line = json.loads(holder.stdout.readline())
        assert line["files"][0]["kind"] == kind and line["sealed"] == (kind == "memfd"), line
        assert line["stored"] == again, line
        if not again:
            holder.kill()
            holder.wait()
    take = [loads.dmafile, "take", "file", f"--socket={SOCKET}", "--quiet", "--"]
    wait = ["sh", "-c", 'echo >&2 && read go && exec "$@"', "sh"]
    pipe = subprocess.PIPE
    takers = [
        subprocess.Popen([*take, *wait, *how], stdin=pipe, stdout=pipe, stderr=pipe) for how in ways
    ]
    for taker in takers:
        assert taker.stderr is not None and taker.stderr.read(1) == b"\n"
    holder.kill()
    holder.wait()
    for _, fd in manager.kept:
        os.close(fd)
    manager.kept.clear()
    # One after another, because vivid has one output.
    for taker, how in zip(takers, ways, strict=True):
        seen, said = taker.communicate(b"go\n")
        case = f"{kind}, {how[1]}"
        assert taker.returncode == 0, f"{case}: {said!r}"
        assert seen == file.data, f"{case}: {difference(seen, file.data)}"
        loads.count += 1


def unseen(loads: Loads, file: File) -> None:
    """Holds the file in a PID namespace of its own: Linux before 6.5 does not tell it who takes."""
    socket = f"--socket={SOCKET}"
    hold = [loads.dmafile, "hold", str(file.path), "--name=file", socket]
    take = [loads.dmafile, "take", "file", socket, "--quiet", "--", "sh", "-c", "echo; read go"]
    release = tuple(map(int, os.uname().release.split(".")[:2]))

    def takers() -> tuple[int, int]:
        said = subprocess.check_output([loads.dmafile, "holds", "--json", socket])
        [held] = json.loads(said)
        return held["takers"], held["unknown_takers"]

    for outer in ([], ["unshare", "--pid", "--fork"]):
        holder = subprocess.Popen([*outer, *hold], stdout=subprocess.PIPE)
        assert holder.stdout is not None and holder.stdout.readline()
        known = not outer or release >= (6, 5)
        pipe = subprocess.PIPE
        taker = subprocess.Popen(take, stdin=pipe, stdout=pipe)
        assert taker.stdout is not None and taker.stdout.readline() == b"\n"
        assert takers() == ((1, 0) if known else (0, 1)), (takers(), release)
        taker.communicate(b"go\n")
        assert takers() == ((0, 0) if known else (0, 1)), (takers(), release)
        subprocess.run([loads.dmafile, "release", "file", socket], check=True)
        assert holder.wait() == 0


def main(dmafile: str, helpers: str, folder: str, *kinds: str) -> None:
    loads = Loads(dmafile, helpers)
    SOCKET.parent.mkdir(mode=0o755)
    manager = Manager()
    file = File.of(Path(folder) / "file", FRAME)
    importer = str(loads.helpers / "importer")
    ways = ways_in(importer) if kinds else []
    # A memfd is mapped by another process, not imported by a driver.
    held(loads, manager, file, "memfd", [[importer, "send", importer, "receive"]])
    for kind in kinds:
        held(loads, manager, file, kind, ways)
    unseen(loads, file)
    print(f"{loads.count} imports checked")


if __name__ == "__main__":
    main(*sys.argv[1:])
