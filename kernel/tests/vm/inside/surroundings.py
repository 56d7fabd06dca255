"""Tests dmafile.ko together with other parts of the system: io_uring, fanotify, FUSE, NFS, 32-bit
programs, and suspend.

    surroundings.py PROGRAMS PART FOLDER...    in the machine, as root, with dmafile.ko loaded

PART is one of the functions here. Ends like ko.py.
"""

import contextlib
import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kernel.tests.vm.inside.ko import GATHER, Programs, loop, main
from tests.vm.inside.faults import broken, call, mapped, reads, slow
from tests.vm.inside.loads import MIB, File, difference, settles

LONG = "gather=4096"
"""With this option, a file on a slow disk takes most of a minute."""


def requests(programs: Programs, folder: Path) -> None:
    """io_uring commands, and files that other programs guard or serve."""
    with loop(folder / "swap", 2 * MIB) as device:
        programs.run("guarded", folder, device)
    programs.run("fuse", folder)
    with mapped(folder, slow) as file:
        programs.run("submit", folder, file.path)


def narrow(programs: Programs, folder: Path) -> None:
    """32-bit programs: PROGRAMS must be compiled for 32 bits."""
    programs.run("table", folder)
    programs.run("bytes", "-s", folder)
    with mapped(folder, slow) as file:
        programs.run("ring", folder, file.path)
        programs.run("slow", file.path)


def preemptible(programs: Programs, folder: Path) -> None:
    """With full preemption (preempt=full)."""
    assert "(full)" in Path("/sys/kernel/debug/sched/preempt").read_text()
    programs.run("ring", folder)
    programs.run("race", "20", folder)
    programs.run("random", "60", str(time.time_ns() % 1000000), folder)
    with mapped(folder, slow) as file:
        programs.run("slow", file.path)
        programs.run("submit", folder, file.path)
    # Its last test unloads the module.
    programs.run("buffer", folder)


def offline(programs: Programs, folder: Path, module: Path) -> None:
    call("insmod", str(module))
    with mapped(folder, slow) as file:
        programs.run("offline", file.path)


def suspended(programs: Programs, folder: Path) -> None:
    with mapped(folder, slow) as file:
        programs.run("suspend", file.path)


# NFS

NFSD = Path("/proc/fs/nfsd")
CACHES = Path("/proc/net/rpc")
PORT = 2049
INSECURE, NO_SUBTREE_CHECK, HAS_FSID = 0x2, 0x400, 0x2000
"""Flags of an export: any client port, no subtree checks, identified by a number."""
FOR_EVER = 2**31 - 1


def network(programs: Programs, folder: Path) -> None:
    """Files on an NFS server in the same machine, over the loopback device."""
    call("busybox", "ip", "link", "set", "lo", "up")
    call("modprobe", "-a", "nfsd", "nfsv4")
    call("mount", "-t", "nfsd", "none", str(NFSD))
    with served(folder) as mount:
        programs.run("bytes", "-s", mount)
        programs.run("table", mount)
    with mapped(folder, broken(5 * MIB + 4096)) as file, served(file.path.parent) as mount:
        broken_server(programs, mount, file)
    with mapped(folder, slow) as file, served(file.path.parent) as mount:
        broken_network(programs, mount, file)
    # Force the unmount, since the server has stopped.
    with (
        mapped(folder, slow) as file,
        served(file.path.parent, "soft", "retrans=1", leave=("-f", "-l")) as mount,
    ):
        dead_server(programs, mount, file)


@contextlib.contextmanager
def served(folder: Path, *options: str, leave: tuple[str, ...] = ()) -> Iterator[Path]:
    """Exports and mounts a folder with NFS, without user space daemons."""
    # The replies of mountd(8) to the kernel.
    flags = INSECURE | NO_SUBTREE_CHECK | HAS_FSID
    say("auth.unix.ip", f"nfsd 127.0.0.1 {FOR_EVER} self")
    say("nfsd.export", f"self {folder} {FOR_EVER} {flags} 65534 65534 0")
    say("nfsd.fh", f"self 1 \\x00000000 {FOR_EVER} {folder}")
    # Version 4 needs no rpcbind(8).
    (NFSD / "versions").write_text("-3 +4 +4.1 +4.2\n")
    (NFSD / "nfsv4leasetime").write_text("10\n")
    (NFSD / "nfsv4gracetime").write_text("10\n")
    start()
    mount = Path("/run/nfs")
    mount.mkdir(exist_ok=True)
    words = ["addr=127.0.0.1", "clientaddr=127.0.0.1", "vers=4.2", "timeo=50", *options]
    call("mount", "-i", "-t", "nfs4", "-o", ",".join(words), "127.0.0.1:/", str(mount))
    yield mount
    call("umount", *leave, str(mount))
    stop()
    for cache in ("nfsd.fh", "nfsd.export", "auth.unix.ip"):
        (CACHES / cache / "flush").write_text(f"{int(time.time()) + 1}\n")


def say(cache: str, line: str) -> None:
    (CACHES / cache / "channel").write_text(f"{line}\n")


def start() -> None:
    (NFSD / "portlist").write_text(f"tcp {PORT}\n")
    (NFSD / "threads").write_text("4\n")
    # The grace period, in which clients may reclaim state from an earlier server.
    settles((NFSD / "v4_end_grace").read_text, lambda ended: ended == "Y\n", "no end of grace")


def stop() -> None:
    (NFSD / "threads").write_text("0\n")


def broken_server(programs: Programs, mount: Path, there: File) -> None:
    """A part of the server's disk is unreadable."""
    file = File(mount / there.path.name, there.data)
    bad = 5 * MIB + 4096
    for words in ([], ["buffered"]):
        there.evict()
        file.evict()
        done = programs.load(file.path, GATHER, "print", *words)
        assert (done.result, done.data) == (errno.EIO, b""), done.result
        done = programs.load(file.path, GATHER, "print", f"read={len(file.data)}", *words)
        assert done.result == errno.EIO, done.result
        assert done.moved <= bad, done.moved
        assert done.data[: done.moved] == file.data[: done.moved], "bytes are missing"
        done = programs.load(file.path, f"length={4 * MIB}", "print", *words)
        assert done.result == 0 and done.data == file.data[: 4 * MIB], done.result


def broken_network(programs: Programs, mount: Path, there: File) -> None:
    """The network fails temporarily: a load takes longer, but succeeds."""
    for words in ([], ["buffered"]):
        with begun(programs, mount, there, *words) as process:
            call("busybox", "ip", "link", "set", "lo", "down")
            # Longer than the client's timeout for a reply (timeo).
            time.sleep(6)
            assert process.poll() is None, f"{words}: it was over before"
            call("busybox", "ip", "link", "set", "lo", "up")
            data, _ = process.communicate()
        line, _, seen = data.partition(b"\n")
        assert line.split()[0] == b"0", f"{words}: {line!r}"
        assert seen == there.data, f"{words}: {difference(seen, there.data)}"


def dead_server(programs: Programs, mount: Path, there: File) -> None:
    """The server stops during a load: the load fails, and leaves nothing behind."""
    with begun(programs, mount, there) as process:
        stop()
        data, _ = process.communicate()
    number = int(data.split()[0])
    assert number in (errno.EIO, errno.ETIMEDOUT), os.strerror(number)


@contextlib.contextmanager
def begun(
    programs: Programs, mount: Path, there: File, *words: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """Starts a load over NFS, and waits until it has read some data."""
    there.evict()
    file = File(mount / there.path.name, there.data)
    file.evict()
    command = [str(programs.folder / "load"), str(file.path), LONG, "print", *words]
    programs.count += 1
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        reads(process)
        yield process
    programs.nothing_is_left(str(words))


# KCSAN

KCSAN = Path("/sys/kernel/debug/kcsan")


def races(programs: Programs, folder: Path) -> None:
    """Checks the functions of dmafile.ko for data races."""
    watch_for_races("dmafile")
    programs.run("race", "60", folder)
    programs.run("ring", folder)
    programs.run("random", "60", str(time.time_ns() % 1000000), folder)
    with mapped(folder, slow) as file:
        programs.run("slow", file.path)
        programs.run("submit", folder, file.path)
    KCSAN.write_text("off")


def watch_for_races(module: str) -> None:
    """Limits the reports to data races between functions of a module."""
    KCSAN.write_text("whitelist")
    symbols = [line.split() for line in Path("/proc/kallsyms").read_text().splitlines()]
    functions = [words[2] for words in symbols if words[3:] == [f"[{module}]"] and words[1] in "tT"]
    assert functions, f"no functions of {module}"
    for name in functions:
        KCSAN.write_text(f"!{module}:{name}")
    KCSAN.write_text("on")


PARTS: Mapping[str, Callable[..., None]] = {
    one.__name__: one for one in (requests, narrow, preemptible, offline, suspended, network, races)
}


if __name__ == "__main__":
    main(PARTS, *sys.argv[1:])
