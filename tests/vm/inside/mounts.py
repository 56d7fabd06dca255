"""Loads and saves where a server has the bytes: NFS, FUSE, 9p, virtiofs, and overlays.

    mounts.py DMAFILE HELPERS PART... -- DISK 9P VIRTIOFS   in the machine, as root

DISK is a folder on a disk, which NFS and FUSE serve; 9P and VIRTIOFS are such mounts. Files of NFS
and FUSE are written, and saved ones compared, on the server's side. Fails with an assertion that
names the case, or prints the number of cases.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.vm.inside import nfs
from tests.vm.inside.faults import listens
from tests.vm.inside.loads import MIB, PATIENCE, File, Loads, settles
from tests.vm.inside.nfs import Server, call

SIZES = (1, 4095, MIB + 513)
ODD = 4 * MIB + 777
SIZE = 8 * MIB
DIRECT = ("uring", "threads", "bounce")
"""The methods that read directly into a memfd."""
FUSE = ("threads",)
"""Those that do so from FUSE."""
CHUNK = ("--chunk=2M", "--block=256K")
SLOWLY = ("--io=direct", "--block=64K", "--chunk=64K", "--queue-depth=1", "--quiet")
"""One small read after another."""
TELLS = "the mount allows only "


class Mounts:
    def __init__(self, loads: Loads) -> None:
        self.loads = loads
        self.source = File.of(Path("/tmp/source"), ODD)
        self.memory = os.memfd_create("source")
        os.write(self.memory, self.source.data)

    def moves(self, at: Path, server: Path, methods: Sequence[str], io: str = "direct") -> None:
        """Loads by all methods, sizes and ranges, and saves, byte for byte."""
        ways: list[tuple[str, ...]] = [(f"--method={name}", f"--io={io}") for name in methods]
        ways += [("--method=threads", "--io=buffered"), ()]
        for size in SIZES:
            self.load(file_in(at, server, size), f"--io={io}")
        file = file_in(at, server, ODD)
        for way in ways:
            self.load(file, *way)
            self.load(file, "--offset=777", "--length=1M", *way, start=777, size=MIB)
        # Holes at the start, between and at the end.
        path = server / "sparse"
        pieces = [(MIB, MIB + 4096), (2 * MIB, 3 * MIB + 5)]
        sparse = File(at / "sparse", File.sparse(path, pieces, ODD).data)
        for way in ways:
            self.load(sparse, *way)
        self.into_memory(file)
        for way in ways:
            self.save(at / "saved", server / "saved", *way)
        for name in (*SIZES, ODD, "sparse", "saved"):
            (server / str(name)).unlink()

    def save(self, to: Path, written: Path, *words: str) -> None:
        self.loads.count += 1
        command = [self.loads.dmafile, "save", f"fd:{self.memory}", str(to), "--quiet", *words]
        done = subprocess.run(command, pass_fds=[self.memory], capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        call("cmp", str(self.source.path), str(written))

    def load(self, file: File, *words: str, start: int = 0, size: int | None = None) -> None:
        self.loads.load(file, "memfd", *CHUNK, *words, start=start, size=size)

    def into_memory(self, file: File) -> None:
        """To any page of existing memory: alignment is not the size of the mount's requests."""
        at = 3 * 4096
        report = self.loads.fill(file, "memfd", 2 * SIZE, at=at)
        assert report["method"] != "bounce", report

    def tells(self, path: Path, *said: str) -> None:
        """Asserts that explain and doctor have one sentence on the mount, with this, or none."""
        # The verdict of doctor repeats it.
        for command, of, times in (
            ("explain", path, 1),
            ("doctor", path, 2),
            ("doctor", path.parent, 2),
        ):
            done = self.loads.run(command, str(of))
            self.loads.count += 1
            assert done.returncode == 0, f"{command} {of}: {done.stderr}"
            text = done.stdout
            assert text.count(TELLS) == (times if said else 0), text
            for part in said:
                assert part in text, f"{part!r} is not in: {text}"


def file_in(at: Path, server: Path, size: int) -> File:
    """A file that is written on the server's side, named after its size, which FUSE caches."""
    written = File.of(server / str(size), size)
    with written.path.open("rb") as file:
        os.fsync(file.fileno())
    return File(at / str(size), written.data)


def on_nfs(mounts: Mounts, folder: Path) -> None:
    loads = mounts.loads
    server = Server(folder)
    with server.mounted("nconnect=2") as at:
        mounts.moves(at, folder, DIRECT)
        file = file_in(at, folder, SIZE)
        mounts.tells(file.path)
        # No smaller requests than the mount allows.
        for method in DIRECT:
            before = nfs.reads(at)
            loads.load(file, "memfd", f"--method={method}", "--io=direct")
            sent = nfs.reads(at) - before
            # And a small one, which tries direct I/O.
            assert sent <= SIZE // MIB + 1, f"{method}: {sent} requests"
    with server.mounted("rsize=65536") as at:
        mounts.tells(
            at / str(SIZE),
            "requests of 65536 bytes and one TCP connection",
            "rsize=1048576,nconnect=8",
        )
        mounts.moves(at, folder, DIRECT[:1])
    nfs_faults(loads, server)


def nfs_faults(loads: Loads, server: Server) -> None:
    """The file changes on the server, or the server goes away, in the middle of a load."""
    folder = server.folder
    # Attributes stay in the client's cache for longer than the test takes.
    with server.mounted("actimeo=3600") as at:
        for method in ("uring", "threads"):
            for change, said in (
                # The old file exists on the server for as long as it is open there.
                (replace, ""),
                (replace_and_restart, "load it again"),
                (truncate, "(ENODATA)"),
            ):
                file = file_in(at, folder, SIZE)
                process = begun(loads, file, f"--method={method}")
                change(server)
                ends(loads, process, file, said)
                print(f"nfs: {method}: {change.__name__}", flush=True)
            # The end of a file that is only a hole there, which is not read.
            path = folder / "sparse"
            sparse = File(at / "sparse", File.sparse(path, [(0, 6 * MIB)], SIZE).data)
            process = begun(loads, sparse, f"--method={method}")
            os.truncate(path, 7 * MIB)
            ends(loads, process, sparse, "(ENODATA)")
            file = file_in(at, folder, SIZE)
            for away, back in (
                (server.stop, server.start),
                (lambda: link("down"), lambda: link("up")),
            ):
                process = begun(loads, file, f"--method={method}")
                away()
                process.send_signal(signal.SIGCONT)
                waits(process)
                back()
                ends(loads, process, file, "")
                print(f"nfs: {method}: away and back", flush=True)
            interrupts(loads, server, file, f"--method={method}")
    # In a call before the first read, which any signal that is handled has to wait for: without
    # cached attributes it is the first one that looks at the file.
    for options in ((), ("actimeo=0",)):
        with server.mounted(*options) as at:
            file = file_in(at, folder, SIZE)
            server.stop()
            two_signals(started(loads, file))
            server.start()
    with server.mounted("soft", "timeo=10", "retrans=1") as at:
        file = file_in(at, folder, SIZE)
        process = begun(loads, file)
        server.stop()
        ends(loads, process, file, "cannot read: ")


def replace(server: Server) -> None:
    new = server.folder / "new"
    new.write_bytes(bytes(SIZE))
    new.rename(server.folder / str(SIZE))


def replace_and_restart(server: Server) -> None:
    replace(server)
    # Only the server has the old file open: its last link.
    server.stop()
    server.start()


def truncate(server: Server) -> None:
    os.truncate(server.folder / str(SIZE), 5 * MIB)


def link(state: str) -> None:
    call("ip", "link", "set", "lo", state)


def started(loads: Loads, file: File, *words: str) -> "subprocess.Popen[bytes]":
    """A load that handles signals."""
    loads.count += 1
    command = [loads.dmafile, "load", str(file.path), *SLOWLY, *words, "--", "sh", "-c"]
    command.append("exec head -c $DMAFILE_BYTES /proc/self/fd/$DMAFILE_FD")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    listens(process)
    return process


def begun(loads: Loads, file: File, *words: str) -> "subprocess.Popen[bytes]":
    """A load that has read some of its file, and is stopped."""
    file.evict()
    process = started(loads, file, *words)
    settles(lambda: read_bytes(process), lambda bytes: bytes > MIB, f"{words}: it never read")
    process.send_signal(signal.SIGSTOP)
    assert read_bytes(process) < len(file.data) - MIB, f"{words}: over too early"
    return process


def read_bytes(process: "subprocess.Popen[bytes]") -> int:
    lines = Path(f"/proc/{process.pid}/io").read_text().splitlines()
    counts = dict(line.split(": ") for line in lines)
    # Reads from FUSE are in the one, those of a ring in the other.
    return max(int(counts["rchar"]), int(counts["read_bytes"]))


def ends(loads: Loads, process: "subprocess.Popen[bytes]", file: File, said: str) -> None:
    """Asserts that a load ends with the bytes of its file, or with a line that says this."""
    process.send_signal(signal.SIGCONT)
    out, errors = process.communicate(timeout=PATIENCE)
    line = errors.decode()
    case = f"{process.args!r}: {process.returncode}: {line}"
    if said:
        assert (process.returncode, out) == (1, b""), case
        assert len(line.splitlines()) == 1 and said in line, f"{said!r} is not in {case}"
    else:
        assert process.returncode == 0 and out == file.data, case
    loads.nothing_stays_pinned(case)


def waits(process: "subprocess.Popen[bytes]") -> None:
    """Waits until a load has stopped reading, because its server is away."""
    seen = [-1]

    def still() -> bool:
        seen.append(read_bytes(process))
        time.sleep(0.5)
        return seen[-1] == seen[-2]

    settles(still, bool, f"{process.args!r}: still reads")
    assert process.poll() is None, process.communicate()


def interrupts(loads: Loads, server: Server, file: File, *words: str) -> None:
    """Of a load whose server is away: the first signal may have to wait, the second one ends it."""
    process = begun(loads, file, *words)
    server.stop()
    process.send_signal(signal.SIGCONT)
    waits(process)
    two_signals(process)
    server.start()


def two_signals(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGINT)
    # Until it has been handled: two that are pending are one.
    settles(lambda: pending(process), lambda there: not there, f"{process.args!r}: not handled")
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (130, b""), f"{process.args!r}: {process.returncode}"


def pending(process: "subprocess.Popen[bytes]") -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        [mask] = [line.split()[1] for line in status if line.startswith("ShdPnd:")]
        return bool(int(mask, 16) & 1 << (signal.SIGINT - 1))
    return False


@contextlib.contextmanager
def served(folder: Path, *options: str) -> Iterator[tuple[Path, "subprocess.Popen[bytes]"]]:
    """A folder served by bindfs, and the server."""
    at = Path("/run/fuse")
    at.mkdir(exist_ok=True)
    words = [option for one in options for option in ("-o", one)]
    process = subprocess.Popen(["bindfs", "-f", *words, str(folder), str(at)])
    settles(lambda: at.is_mount(), bool, "bindfs did not mount")
    try:
        yield at, process
    finally:
        call("umount", "-l", str(at))
        process.kill()
        process.wait()


def on_fuse(mounts: Mounts, folder: Path) -> None:
    with served(folder) as (at, process):
        mounts.moves(at, folder, FUSE)
        file = file_in(at, folder, SIZE)
        mounts.tells(file.path)
        load = begun(mounts.loads, file)
        process.kill()
        process.wait()
        ends(mounts.loads, load, file, "cannot read: ")
    with served(folder, "max_read=4096") as (at, _):
        mounts.tells(at / str(SIZE), "requests of 4096 bytes", "max_read=1048576")
        mounts.moves(at, folder, FUSE)


def on_9p(mounts: Mounts, at: Path) -> None:
    tag = at_mount(at)[0]
    mounts.moves(at, at, DIRECT)
    for options, *said in (
        ("msize=8192,cache=none", "requests of 8192 bytes", "msize=512000"),
        ("msize=512000,cache=loose",),
    ):
        call("umount", str(at))
        call("mount", "-t", "9p", "-o", f"trans=virtio,version=9p2000.L,{options}", tag, str(at))
        mounts.tells(file_in(at, at, SIZE).path, *said)
        mounts.moves(at, at, DIRECT[:1])


def on_virtiofs(mounts: Mounts, at: Path) -> None:
    mounts.moves(at, at, FUSE)
    mounts.tells(file_in(at, at, SIZE).path)


def on_overlay(mounts: Mounts, folder: Path) -> None:
    """Over a disk, memory and NFS, from below and from the upper layer."""
    memory = Path("/run/overlay")
    call("mkdir", "-p", str(memory))
    call("mount", "-t", "tmpfs", "none", str(memory))
    with Server(folder).mounted() as remote:
        for number, lower in enumerate((folder, memory / "lower", remote)):
            upper, work, at = (memory / f"{name}{number}" for name in ("upper", "work", "merged"))
            for made in (upper, work, at, lower):
                made.mkdir(exist_ok=True)
            layers = f"lowerdir={lower},upperdir={upper},workdir={work}"
            written = folder if lower == remote else lower
            file = file_in(lower, written, ODD)
            call("mount", "-t", "overlay", "-o", layers, "none", str(at))
            merged = File(at / str(ODD), file.data)
            for way in ((), ("--io=buffered",), ("--method=threads",)):
                mounts.load(merged, *way)
            mounts.tells(merged.path)
            mounts.moves(at, at, (), io="auto")
            call("umount", str(at))


def at_mount(at: Path) -> list[str]:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    [mount] = [mount for mount in mounts if mount[1] == str(at)]
    return mount


def main(dmafile: str, helpers: str, *rest: str) -> None:
    loads = Loads(dmafile, helpers)
    mounts = Mounts(loads)
    end = rest.index("--")
    disk, plan9, virtiofs = map(Path, rest[end + 1 :])
    parts: dict[str, Callable[[], None]] = {
        "nfs": lambda: on_nfs(mounts, disk),
        "fuse": lambda: on_fuse(mounts, disk),
        "9p": lambda: on_9p(mounts, plan9),
        "virtiofs": lambda: on_virtiofs(mounts, virtiofs),
        "overlay": lambda: on_overlay(mounts, disk),
    }
    for part in rest[:end]:
        start, count = time.monotonic(), loads.count
        parts[part]()
        print(f"{part}: {loads.count - count} in {time.monotonic() - start:.0f} s", flush=True)
    print(f"{loads.count} cases checked")


if __name__ == "__main__":
    main(*sys.argv[1:])
