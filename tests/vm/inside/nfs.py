"""The kernel's NFS server and client in one machine, without any program of theirs."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

NFSD = Path("/proc/fs/nfsd")
EVER = (1 << 31) - 1
FLAGS = 0x2 | 0x10 | 0x400 | 0x2000
"""Any port (insecure), async, no_subtree_check, and fsid=0, which makes it the root."""


def call(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"


class Server:
    """Exports a folder to this machine by NFSv4.2."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, False
        call("ip", "link", "set", "lo", "up")
        call("modprobe", "-a", "nfsd", "nfsv4")
        call("mount", "-t", "nfsd", "nfsd", str(NFSD))
        # Where the server remembers its clients, so that they may reclaim open files.
        state = Path("/run/nfsd")
        state.mkdir()
        (NFSD / "nfsv4recoverydir").write_text(f"{state}\n")
        # A machine with little memory would offer less.
        (NFSD / "max_block_size").write_text(f"{1 << 20}\n")
        self.start()

    def start(self) -> None:
        # What exportfs and mountd write. A stop empties these tables, and a request that finds
        # nothing there waits.
        for table, line in (
            ("auth.unix.ip", f"nfsd 127.0.0.1 {EVER} us"),
            ("nfsd.fh", rf"us 1 \x00000000 {EVER} {self.folder}"),
            ("nfsd.export", f"us {self.folder} {EVER} {FLAGS} 65534 65534 0"),
        ):
            Path(f"/proc/net/rpc/{table}/channel").write_text(f"{line}\n")
        # NFSv3 would need rpcbind.
        (NFSD / "versions").write_text("-3 +4 +4.1 +4.2\n")
        (NFSD / "portlist").write_text("tcp 2049\n")
        (NFSD / "threads").write_text("8\n")
        # Not the 90 seconds in which only old clients may open files.
        (NFSD / "v4_end_grace").write_text("Y\n")
        self.runs = True

    def stop(self) -> None:
        (NFSD / "threads").write_text("0\n")
        self.runs = False

    @contextlib.contextmanager
    def mounted(self, *options: str) -> Iterator[Path]:
        at = Path("/run/nfs")
        at.mkdir(exist_ok=True)
        words = ["vers=4.2", "addr=127.0.0.1", "clientaddr=127.0.0.1", *options]
        # Without the helper of nfs-common, which does nothing else than look up the address.
        call("mount", "-i", "-t", "nfs4", "-o", ",".join(words), "127.0.0.1:/", str(at))
        try:
            yield at
        finally:
            # After a failed assertion, the server may be away, and unmounting would wait for it.
            call("ip", "link", "set", "lo", "up")
            if not self.runs:
                self.start()
            call("umount", str(at))


def reads(at: Path) -> int:
    """The number of reads that the client has sent for a mount."""
    mounts = Path("/proc/self/mountstats").read_text().split("\ndevice ")
    [own] = [mount for mount in mounts if f" mounted on {at} " in mount]
    lines = (line.split() for line in own.splitlines())
    return sum(int(words[1]) for words in lines if words and words[0] in ("READ:", "READ_PLUS:"))
