"""Loads by an ordinary user: limits on pinned memory, cgroups, nodes without permission, and the
findings of `dmafile doctor`.

    users.py DMAFILE HELPERS FOLDER [KIND...]   in the machine, as root; no KIND if the kernel has
                                                no dma-bufs; `dmafile` with the module
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.vm.inside.loads import BLOB, GROUP, MIB, File, Loads, as_user, setting, settles

NODES = {
    "udmabuf": Path("/dev/udmabuf"),
    "heap:system": Path("/dev/dma_heap/system"),
    "module": Path("/dev/dmafile"),
}
CHECKS = {"udmabuf": "udmabuf", "heap:system": "dma-heap", "module": "dmafile.ko"}
"""The names of their checks in `doctor`."""
LIMIT = "/sys/module/udmabuf/parameters/size_limit_mb"
ROOM = 48 * MIB
NO_RINGS = "/proc/sys/kernel/io_uring_disabled"


class Users:
    def __init__(self, loads: Loads, folder: Path, kinds: Sequence[str]) -> None:
        self.loads, self.folder, self.kinds = loads, folder, kinds

    def may(self, mode: int) -> None:
        for node in NODES.values():
            if node.exists():
                node.chmod(mode)

    def doctor(self, inside: bool = False) -> Mapping[str, Any]:
        """The findings of each check."""
        self.loads.count += 1
        done = self.loads.run("doctor", str(self.folder), "--json", user=True, group=inside)
        assert done.returncode == 0, done
        return {check["name"]: check for check in json.loads(done.stdout)["checks"]}

    def pinned_memory(self) -> None:
        """The kernel's limit of 8 MiB is too low for registered buffers: loads do not use them."""
        limits = subprocess.run(as_user(["cat", "/proc/self/limits"]), capture_output=True)
        assert b"Max locked memory         8388608 " in limits.stdout, limits.stdout
        file = File.of(self.folder / "file", 6 * MIB + 777)
        for kind in ("memfd", *self.kinds):
            # An ordinary user learns which pages are cached only by reading some.
            io = "--io=auto" if kind.startswith("heap:") else "--io=direct"
            report = self.loads.load(file, kind, "--block=256K", io, user=True)
            if kind.startswith("heap:"):
                continue
            if kind == "module":
                # dmafile.ko pins nothing.
                assert report["method"] == "module", report
                continue
            reasons = [one["why"] for one in report["reasons"] if "registered" in one["choice"]]
            assert report["method"] == "uring" and "RLIMIT_MEMLOCK" in reasons[0], report
        check = self.doctor()["memlock"]
        assert (check["health"], check["found"][:6]) == ("fair", "8 MiB;"), check
        assert check["remedy"].startswith("ulimit -l "), check

    def no_list_and_list(self) -> None:
        """Above the udmabuf limit, a user gets several udmabufs."""
        file = File.of(self.folder / "file", 6 * MIB + 777)
        for mib, count in ((2, 4), (8, 1)):
            back = setting(LIMIT, mib)
            pieces = self.loads.load(file, "udmabuf", "--io=direct", user=True)["dma_bufs"]
            back()
            assert len(pieces) == count, pieces
            assert all(piece["bytes"] <= mib * MIB for piece in pieces), pieces

    def no_permission(self) -> None:
        self.may(0o600)
        file = File.of(self.folder / "file", MIB)
        found = self.doctor()
        for kind in self.kinds:
            node = NODES[kind]
            line = self.loads.refused("load", str(file.path), "--to", kind, user=True)
            assert f"{node} cannot be opened (EACCES)" in line and "; " in line, line
            check = found[CHECKS[kind]]
            assert f"{node} cannot be opened (EACCES)" in check["found"], check
            assert check["remedy"] and "rule" in check["remedy"], check
        line = self.loads.refused("load", str(file.path), "--to=dma-buf", "--quiet", user=True)
        assert all(f"{NODES[kind]} cannot be opened" in line for kind in self.kinds), line
        self.may(0o666)
        found = self.doctor()
        assert all(found[CHECKS[kind]]["health"] != "not present" for kind in self.kinds), found
        assert all("EACCES" not in found[CHECKS[kind]]["found"] for kind in self.kinds), found

    def no_rings(self) -> None:
        """Without io_uring, threads load, and --method=uring is refused."""
        back = setting(NO_RINGS, 2)
        file = File.of(self.folder / "file", 2 * MIB + 777)
        for kind in ("memfd", *self.kinds):
            report = self.loads.load(file, kind, user=True)
            assert report["method"] != "uring", report
        words = ("load", str(file.path), "--method=uring", "--io=direct")
        line = self.loads.refused(*words, user=True)
        assert "io_uring is refused (EPERM)" in line and "; " in line, line
        check = self.doctor()["io_uring"]
        back()
        assert "EPERM" in check["found"], check
        assert check["remedy"] == "sysctl -w kernel.io_uring_disabled=0", check

    def cgroup(self) -> None:
        """For sizes from far below to far above a memory limit, loads work or are refused early,
        and no process is killed.
        """
        subprocess.run(
            "mountpoint -q /sys/fs/cgroup || mount -t cgroup2 none /sys/fs/cgroup", shell=True
        )
        (GROUP.parent / "cgroup.subtree_control").write_text("+memory")
        GROUP.mkdir()
        (GROUP / "memory.max").write_text(str(ROOM))
        check = self.doctor(inside=True)["container limits"]
        assert check["health"] == "fair" and f"{GROUP}/memory.max" in check["found"], check
        assert check["remedy"] == "raise the memory limit of this container or slice", check
        path = self.folder / "sized"
        path.write_bytes(bytes(1))
        path.chmod(0o644)
        for mib in (32, 43, 46, 47, 64):
            with path.open("wb") as file:
                for _ in range(mib):
                    file.write(BLOB[:MIB])
            for kind in ("memfd", *self.kinds):
                # The kernel does not charge memory of a heap.
                if not kind.startswith("heap:"):
                    for pages in ("auto",) if kind == "module" else ("base", "thp"):
                        self.fits_or_not(File(path, b""), kind, pages, mib * MIB)
        events = (GROUP / "memory.events").read_text().split()
        assert events[events.index("oom_kill") + 1] == "0", events

    def fits_or_not(self, file: File, kind: str, pages: str, size: int) -> None:
        file.evict()
        # The charge of the previous load is released some time after its end.
        settles(charged, lambda left: left < MIB, "bytes are still charged")
        words = ("load", str(file.path), "--to", kind, "--pages", pages, "--io=direct", "--quiet")
        self.loads.count += 1
        done = self.loads.run(*words, user=True, group=True)
        case = f"{kind}, {pages}, {size >> 20} MiB: {done}"
        assert done.returncode in (0, 1), case
        if done.returncode:
            assert "(ENOMEM); " in done.stderr and f"{GROUP}/memory.max" in done.stderr, case
        # The process itself needs some memory.
        assert done.returncode == 0 or size > ROOM - 5 * MIB, case
        assert done.returncode == 1 or size < ROOM, case

    def nothing_here(self) -> None:
        """If the kernel offers no dma-bufs to user space, doctor advises dmafile.ko."""
        file = File.of(self.folder / "file", MIB)
        found = self.doctor()
        for kind, name in (("udmabuf", "udmabuf"), ("heap:system", "dma-heap")):
            line = self.loads.refused("load", str(file.path), "--to", kind, user=True)
            assert "; " in line, line
            assert found[name]["health"] == "not present", found[name]
            assert "dmafile.ko" in found[name]["remedy"], found[name]
        line = self.loads.refused("load", str(file.path), "--to=dma-buf", "--quiet", user=True)
        assert "there is no /dev/dmafile (ENOENT)" in line and "modprobe dmafile" in line, line
        check = found["dmafile.ko"]
        assert "the only way to get a dma-buf here" in check["found"], check
        assert check["remedy"].startswith("modprobe dmafile"), check


def charged() -> int:
    """The bytes that are charged to GROUP."""
    return int((GROUP / "memory.current").read_text())


def main(dmafile: str, helpers: str, folder: str, *kinds: str) -> None:
    loads = Loads(dmafile, helpers)
    users = Users(loads, Path(folder), kinds)
    users.may(0o666)
    users.pinned_memory()
    if "udmabuf" in kinds:
        users.no_list_and_list()
    if kinds:
        users.no_permission()
    else:
        users.nothing_here()
    if Path(NO_RINGS).exists():
        users.no_rings()
    users.cgroup()
    print(f"{loads.count} cases checked")


if __name__ == "__main__":
    main(*sys.argv[1:])
