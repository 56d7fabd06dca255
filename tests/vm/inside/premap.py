"""Loads into premapped memory, from a raw NVMe disk and from files.

    premap.py DMAFILE HELPERS HOW raw|raw-KIND|FOLDER...    in the machine, as root; the first raw
                                                             disk is $RAW, the next one $RAW2

HOW is what this kernel does: `maps`, `translates` (maps with an IOMMU that translates), `bounces`
(would map, but devices only reach bounce buffers) or `not`. Fails with an assertion that names the
case, or prints the number of cases.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import json
import mmap
import os
import random
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.vm.inside.loads import BLOB, MIB, File, Loads, Seen, difference, setting

MAPPED = ("ext4", "xfs")
"""File systems for which memory is premapped."""
HEAP = "heap:system"
MADE = (HEAP, "udmabuf", "memfd", "anon")
FILLED = (HEAP, "udmabuf")
"""dma-bufs of another process."""
RANGES = (
    (0, 1),
    (0, 512),
    (511, 2),
    (777, 4098),
    (4096, 8192),
    (5, 3 * MIB),
    (MIB - 1, 2 * MIB + 3),
)
"""The offset and the length of ranges."""
PLACES = ((0, 0), (777, 777), (4096, 8192), (8191, 4095), (5, 4098), (1, 0))
"""The offset of a range in the file and in memory: congruent, and not."""
SMALL = ("--block=64K", "--queue-depth=5")
REFUSING = {
    "raw-pi": "has metadata or protection information",
    "raw-zoned": "is zoned",
    "raw-multipath": "is a head of NVMe multipath (nvme_core.multipath=N on the kernel's command "
    "line avoids it), and not served by one NVMe controller",
}
"""Kinds of disks for which memory cannot be premapped, and the reasons."""
PARAMETERS = Path("/sys/module/nvme/parameters")
TRIES = 50
"""The number of attempts to stop a load during its reads."""
LIBC = ctypes.CDLL(None, use_errno=True)
PIDFD_GETFD = 438
OVERLAPS = "/sys/kernel/debug/dma-api/driver_filter"
"""A filter on a driver that does not exist: see kernel/tests/vm/test_series.py."""


class Disk(File):
    """A raw disk, whose size is fixed."""

    @classmethod
    def filled(cls, path: Path) -> "Disk":
        """A disk filled with random bytes, of which none are cached."""
        with path.open("r+b") as disk:
            size = disk.seek(0, os.SEEK_END)
            data = random.Random(5).randbytes(size)
            disk.seek(0)
            disk.write(data)
            disk.flush()
            os.fsync(disk.fileno())
        return cls(path, data)

    @classmethod
    def found(cls, path: Path) -> "Disk":
        """A disk with its present bytes."""
        return cls(path, path.read_bytes())


class Premap:
    def __init__(self, loads: Loads, how: str) -> None:
        self.loads, self.how = loads, how
        self.maps = how in ("maps", "translates")

    def disk(self, disk: File) -> None:
        self.made(disk, self.maps)
        self.filled(disk, self.maps, copies=False)
        self.best(disk, self.maps)
        if self.maps:
            self.cached(disk)
            self.limits(disk)
            self.resets(disk)
            self.turned_away(disk)
            with loop(Path("/tmp")) as other:
                self.refused(other, "is a loop device, and not served by one NVMe controller")
        elif self.how == "bounces":
            self.refused(disk, "its DMA may go through bounce buffers")
        else:
            self.refused(disk, "this kernel's io_uring has no extended buffer update")

    def folder(self, folder: Path) -> None:
        file = File.of(folder / "file", 6 * MIB + 777)
        mapped = self.maps and file.file_system in MAPPED
        self.made(file, mapped)
        self.filled(file, mapped, copies=self.how != "not")
        self.best(file, mapped)
        if mapped:
            self.cached(file)
            self.holes(folder)
            self.models(folder)

    def way(self, report: Any) -> str:
        """The line of the report about premapping, if any."""
        lines = [one for one in report["reasons"] if one["about"] == "pre-mapped"]
        assert len(lines) <= 1, report
        return f"{lines[0]['choice']}: {lines[0]['why']}" if lines else ""

    def expect(self, report: Any, method: str, way: str) -> None:
        assert report["method"] == method and way in self.way(report), report
        assert report["io"] == "direct" and report["bytes_buffered"] == 0, report

    def made(self, file: File, mapped: bool) -> None:
        """Loads all bytes and ranges into memory that the load makes, by default and on request."""
        for kind in MADE:
            if kind == "anon":
                # No other process can read it; the digest is that of the bytes in memory.
                self.digests(file, kind, mapped)
                continue
            for start, size in ((0, len(file.data)), *RANGES):
                part = (f"--offset={start}", f"--length={size}", "--io=direct")
                report = self.loads.load(file, kind, *part, start=start, size=size)
                self.default(report, kind, whole=size == len(file.data), mapped=mapped)
                if mapped:
                    for words in ((), SMALL):
                        way = ("--method=premap", *words, *part)
                        report = self.loads.load(file, kind, *way, start=start, size=size)
                        self.expect(report, "premap", "yes: ")
                if kind == HEAP:
                    way = ("--method=bounce", *part)
                    report = self.loads.load(file, kind, *way, start=start, size=size)
                    self.expect(report, "bounce", "ring: " if mapped else "")

    def default(self, report: Any, kind: str, *, whole: bool, mapped: bool) -> None:
        """Asserts the default method."""
        if kind == HEAP and whole and self.how != "not":
            assert report["method"] == "heap-read", report
        elif kind == HEAP:
            way = "yes: heap:system mapped once for nvme" if mapped else "no: "
            self.expect(report, "premap" if mapped else "bounce", way)
        elif mapped and self.how == "translates":
            self.expect(report, "premap", "a window at a time for nvme")
        else:
            self.expect(report, "uring", "no: there is no IOMMU" if mapped else "")
            assert mapped or not self.way(report), report

    def digests(self, file: File, kind: str, mapped: bool) -> None:
        """A digest is computed while the device writes, and is that of the file."""
        digest = hashlib.sha256(file.data).hexdigest()
        methods = ("auto", "premap") if mapped else ("auto",)
        for method in methods:
            words = [self.loads.dmafile, "load", str(file.path), f"--to={kind}", "--quiet"]
            words += [f"--method={method}", f"--verify=sha256={digest}", *SMALL]
            file.evict()
            done = subprocess.run([*words, "--json"], capture_output=True, text=True)
            assert done.returncode == 0, done
            report = json.loads(done.stdout)
            assert report["verify"]["matched"], report
            assert method == "auto" or report["method"] == method, report
            self.loads.count += 1

    def filled(self, file: File, mapped: bool, copies: bool) -> None:
        """Loads into existing dma-bufs: all of the memory, with zeros after the file, and parts,
        around which nothing changes. `copies`: without premapping, the kernel has another method.
        """
        for kind in FILLED:
            part = File(file.path, file.data[: 2 * MIB + 777])
            words = ("--length", str(len(part.data)), "--io=direct")
            report = self.loads.fill(part, kind, 3 * MIB, *words)
            if mapped:
                self.expect(report, "premap", "yes: fd:9 mapped once for nvme")
            elif not copies:
                self.expect(report, "bounce", "no: ")
            for start, at in PLACES:
                for length in (1, 4096, MIB - 3):
                    part = File(file.path, file.data[start : start + length])
                    words = (f"--offset={start}", f"--length={length}", "--io=direct")
                    report = self.loads.fill(part, kind, 2 * MIB, *words, at=at)
                    if mapped and (start - at) % 4096 == 0 and length > 8192:
                        self.expect(report, "premap", "yes: fd:9@")
                    elif mapped and (start - at) % 512:
                        if not copies:
                            self.expect(report, "bounce", "ring: ")
                    elif not mapped and not copies:
                        assert report["method"] == "bounce", report

    def best(self, file: File, mapped: bool) -> None:
        """`dma-buf` selects the heap if the disk can write into it."""
        report = self.loads.load(file, "dma-buf", "--offset=512", start=512)
        kind = HEAP if mapped else "udmabuf"
        assert (report["kind"], report["method"] == "premap") == (kind, mapped), report

    def cached(self, file: File) -> None:
        """Cached pages are copied from the page cache during the reads."""
        for kind in (HEAP, "memfd"):
            file.evict()
            # Pages of a disk stay cached only while it is open.
            with file.path.open("rb", buffering=0) as some:
                os.posix_fadvise(some.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                for at in range(0, len(file.data), 3 * MIB):
                    os.pread(some.fileno(), MIB, at)
                words = ("--method=premap", *SMALL, "--verify=sha256")
                command = self.loads.words(file, kind, *words)
                seen, report = self.loads.read("a part is cached", command)
            whole(seen, file, report)
            assert report["method"] == "premap" and report["io"] == "auto", report
            assert report["bytes_direct"] > 0 and report["bytes_buffered"] > 0, report
            assert report["verify"]["digest"] == hashlib.sha256(file.data).hexdigest(), report

    def holes(self, folder: Path) -> None:
        """Small holes, which are read as zeros, are loaded correctly."""
        pieces = [(0, MIB), (MIB + 8192, 3 * MIB), (5 * MIB, 5 * MIB + 5), (6 * MIB, 6 * MIB + 777)]
        file = File.sparse(folder / "sparse", pieces, 7 * MIB + 1)
        for words in ((), SMALL):
            for kind in (HEAP, "memfd"):
                report = self.loads.load(file, kind, "--method=premap", "--io=direct", *words)
                self.expect(report, "premap", "yes: ")
                assert report["bytes_hole"] > 2 * MIB, report
        file.path.unlink()

    def models(self, folder: Path) -> None:
        """Several files, each with its own mapping of the dma-buf."""
        model = folder / "model"
        model.mkdir(exist_ok=True)
        for number in range(5):
            tensor = BLOB[number * MIB // 2 : (number + 3) * MIB // 2 + 5 * number]
            entry = {"dtype": "U8", "shape": [len(tensor)], "data_offsets": [0, len(tensor)]}
            header = json.dumps({f"t{number}": entry}).encode()
            path = model / f"{number}.safetensors"
            path.write_bytes(struct.pack("<Q", len(header)) + header + tensor)
        for kind in (HEAP, "memfd"):
            for more in ((), SMALL, ("--tensor=t[13]",)):
                for path in model.iterdir():
                    File(path, b"").evict()
                words = self.loads.words(File(model, b""), kind, "--method=premap", *more)
                seen, report = self.loads.read("a model", words)
                assert report["method"] == "premap" and report["io"] == "direct", report
                if more and more[0].startswith("--tensor"):
                    continue
                assert len(report["shards"]) == 5, report
                for shard in report["shards"]:
                    data = (model / Path(shard["file"]).name).read_bytes()
                    at = report["offset"] + shard["at"]
                    assert seen.data[at : at + len(data)] == data, shard

    def limits(self, disk: File) -> None:
        """If driver parameters refuse the mapping, another method is used; the report says why."""
        name = disk.path.name
        back = setting(str(PARAMETERS / "premap"), 0)
        self.refused(disk, "the parameter nvme.premap is 0")
        back()
        # A probe with one page succeeds, but mapping all of the memory fails.
        back = setting(str(PARAMETERS / "premap_max_mb"), 1)
        words = ("--offset=512", "--io=direct")
        report = self.loads.load(disk, HEAP, *words, start=512)
        back()
        assert report["method"] == "bounce", report
        why = " ".join(one["why"] for one in report["reasons"])
        assert "premap direct ended: " in why and "(ENOSPC)" in why, report
        # An ordinary user, who may pin 8 MiB.
        for node in (disk.path, Path("/dev/dma_heap/system")):
            node.chmod(0o666)
        report = self.loads.load(disk, HEAP, *words, start=512, user=True)
        self.expect(report, "premap", f"yes: heap:system mapped once for {name}; ")

    def refused(self, file: File, why: str) -> None:
        """Another method loads the same bytes, and --method=premap is refused with this reason."""
        words = ("--offset=512", "--io=direct")
        report = self.loads.load(file, HEAP, *words, start=512)
        self.expect(report, "bounce", "no: ")
        assert why in self.way(report), report
        by_name = (f"--to={HEAP}", "--method=premap", "--quiet")
        line = self.loads.refused("load", str(file.path), *by_name)
        assert why in line and "(EOPNOTSUPP)" in line, line

    def resets(self, disk: File) -> None:
        """Resets of the controller during loads lose no bytes."""
        block = Path("/sys/block") / disk.path.name
        reset = (block / "device" / "reset_controller").resolve()
        over, done = threading.Event(), []

        def again() -> None:
            while not over.wait(0.05):
                # During a reset, another one is refused (EBUSY).
                with contextlib.suppress(OSError):
                    done.append(reset.write_text("1"))

        thread = threading.Thread(target=again)
        thread.start()
        try:
            for _ in range(10):
                report = self.loads.load(disk, HEAP, "--method=premap", *SMALL)
                self.expect(report, "premap", "yes: ")
        finally:
            over.set()
            thread.join()
        assert len(done) > 1, "no reset"

    def turned_away(self, disk: File) -> None:
        """Reads that are refused during a load fall back to the next method, and bytes that were
        read are kept. Here, another process clears O_DIRECT of the shared open file.
        """
        # Many small reads, so that the load can be stopped during them; not every attempt succeeds.
        slow = ("--method=auto", "--offset=4096", "--io=direct", "--block=4096", "--queue-depth=1")
        for _ in range(TRIES):
            report_file = self.loads.report
            report_file.unlink(missing_ok=True)
            disk.evict()
            command = self.loads.words(disk, HEAP, *slow)
            self.loads.count += 1
            with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
                took = takes_direct_away(process.pid)
                assert process.stdout
                process.stdout.readline()
                data = process.stdout.read()
            assert process.returncode == 0, process
            report = json.loads(report_file.read_text())
            start, want = report["offset"], disk.data[4096:]
            assert data[start : start + len(want)] == want, difference(data[start:], want)
            if took and report["method"] != "premap":
                whys = [one["why"] for one in report["reasons"]]
                ended = [why for why in whys if why.startswith("premap direct ended: ")]
                assert len(ended) == 1 and "(EINVAL)" in ended[0], whys
                return
        raise AssertionError("no load was ever caught in the middle")


def takes_direct_away(pid: int) -> bool:
    """Clears O_DIRECT on the files of a process during its reads; returns whether it could."""
    # The load may end before it is stopped.
    with contextlib.suppress(OSError):
        # A busy ring lists no buffers.
        while not stopped_in_reads(pid):
            os.kill(pid, signal.SIGCONT)
            # The load must also make progress.
            time.sleep(0.01)
        handle = os.pidfd_open(pid)
        for number, info in descriptors(pid).items():
            [flags] = re.findall(r"(?m)^flags:\s+([0-7]+)$", info)
            if int(flags, 8) & os.O_DIRECT:
                fd = LIBC.syscall(PIDFD_GETFD, handle, number, 0)
                assert fd >= 0, os.strerror(ctypes.get_errno())
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
                os.close(fd)
        os.close(handle)
        os.kill(pid, signal.SIGCONT)
        return True
    return False


def stopped_in_reads(pid: int) -> bool:
    os.kill(pid, signal.SIGSTOP)
    stat = Path(f"/proc/{pid}/stat")
    while (state := stat.read_text().rpartition(")")[2].split()[0]) not in "TZ":
        pass
    # The buffer of an earlier probe has one page.
    lines = "".join(descriptors(pid).values())
    sizes = re.findall(r"(?m)^PreMapped:\t\d+: 0x0/(\d+) dma-buf ", lines)
    if state == "Z" or Path(f"/proc/{pid}/comm").read_text() == "reader\n":
        os.kill(pid, signal.SIGCONT)
        raise ProcessLookupError
    return any(int(size) > mmap.PAGESIZE for size in sizes)


def descriptors(pid: int) -> dict[int, str]:
    """The fdinfo of each descriptor."""
    return {int(one.name): one.read_text() for one in Path(f"/proc/{pid}/fdinfo").iterdir()}


def whole(seen: Seen, file: File, report: Any) -> None:
    lead = report["offset"]
    data = seen.data[lead : lead + len(file.data)]
    assert data == file.data, difference(data, file.data)


@contextlib.contextmanager
def loop(folder: Path) -> Iterator[File]:
    """A block device that is not served by one NVMe controller."""
    image = folder / "image"
    image.write_bytes(BLOB[: 2 * MIB])
    command = ["losetup", "--find", "--show", str(image)]
    device = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    yield File(Path(device), BLOB[: 2 * MIB])
    subprocess.run(["losetup", "--detach", device], check=True)
    image.unlink()


def main(dmafile: str, helpers: str, how: str, *places: str) -> None:
    loads = Loads(dmafile, helpers)
    if Path(OVERLAPS).exists():
        setting(OVERLAPS, "none")
    premap = Premap(loads, how)
    raws = 0
    for place in places:
        if not place.startswith("raw"):
            premap.folder(Path(place))
            continue
        raws += 1
        node = Path(os.environ["RAW" if raws == 1 else f"RAW{raws}"])
        if place == "raw":
            premap.disk(Disk.filled(node))
        else:
            premap.refused(Disk.found(node), REFUSING[place])
    print(f"{loads.count} loads checked")


if __name__ == "__main__":
    main(*sys.argv[1:])
