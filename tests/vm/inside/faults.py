"""Faults during a load: it ends with one line and leaks nothing.

    faults.py DMAFILE HELPERS IMAGE FOLDER SPARE KIND...   in the machine, as root

IMAGE is a squashfs with a file `file`; FOLDER is on a disk, and SPARE on another, which is removed.
Fails with an assertion that names the case, or prints the number of cases.
"""

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from tests.vm.inside.loads import (
    BLOB,
    MIB,
    PATIENCE,
    File,
    Loads,
    meminfo,
    pinned,
    setting,
    settles,
)

STARTS = ("--", "/bin/echo", "started")
"""A COMMAND that must not run."""
SECTOR = 512
SECTORS = (64 * MIB) // SECTOR
BLOCK = MIB
SIZE = 8 * MIB
DIRECT = {
    "memfd": ("uring", "threads"),
    "udmabuf": ("uring", "threads"),
    "heap:system": ("bounce",),
    "module": ("module", "bounce"),
}
"""The methods of each kind that read directly."""
BUFFERED = ("threads",)
ALLOWED = {"KiB of shared memory": 64, "KiB of uncounted memory": 6 << 10}
"""The allowed increase after a fault. Reports in /tmp are shared memory too. Devices and rings use
some unaccounted pages; one load of SIZE would be more."""
ACCOUNTS = (
    "MemFree:",
    "Active:",
    "Inactive:",
    "Unevictable:",
    "Slab:",
    "KernelStack:",
    "PageTables:",
    "SecPageTables:",
    "Percpu:",
    "Hugetlb:",
)
"""Fields of /proc/meminfo that count each page once: free, of files and programs, of the kernel."""


def call(*words: str, text: str = "") -> str:
    done = subprocess.run(words, input=text, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return done.stdout


class Machine:
    """The resources of the machine, which must not change."""

    def __init__(self) -> None:
        self.before = self.counts()

    def counts(self) -> dict[str, int]:
        # Ends with "Total 0 objects, 0 bytes".
        table = Path("/sys/kernel/debug/dma_buf/bufinfo").read_text().splitlines()
        return {
            "pinned pages": pinned(),
            "dma-bufs": int(table[-1].split()[1]),
            "KiB of shared memory": meminfo("Shmem:"),
            # All other memory; the counts above only include known uses.
            "KiB of uncounted memory": uncounted(),
            "reserved huge pages": meminfo("HugePages_Rsvd:"),
            "processes": sum(map(is_ours, Path("/proc").iterdir())),
        }

    def is_as_it_was(self, case: str) -> None:
        def more() -> dict[str, int]:
            return {name: now - self.before[name] for name, now in self.counts().items()}

        def well(more: Mapping[str, int]) -> bool:
            return all(count <= ALLOWED.get(name, 0) for name, count in more.items())

        # The kernel releases some resources later: rings, deferred closes.
        settles(more, well, f"{case}: left behind")


def uncounted() -> int:
    """KiB of memory that is in use, but not in any count of the kernel.

    Free memory alone is not enough: the memory of caches, slabs and programs varies.
    """
    lines = Path("/proc/meminfo").read_text().splitlines()
    sizes = {name: int(size) for name, size, *_ in map(str.split, lines)}
    # Each CPU keeps a few free pages.
    zones = Path("/proc/zoneinfo").read_text().splitlines()
    at_hand = sum(int(line.split()[1]) for line in zones if line.split()[0] == "count:")
    page = mmap.PAGESIZE >> 10
    used = sizes["MemTotal:"] - sum(sizes.get(one, 0) for one in ACCOUNTS) - at_hand * page
    return used - shadows()


def shadows() -> int:
    """KiB of KASAN shadow for mappings that the kernel unmaps lazily: an eighth of them.

    Up to 8 MiB on two CPUs (lazy_max_pages() in mm/vmalloc.c).
    """
    if not os.uname().release.endswith("-debug"):
        return 0
    areas = Path("/proc/vmallocinfo").read_text().splitlines()
    return sum(int(line.split()[1]) for line in areas if "unpurged" in line) >> 10 >> 3


def is_ours(process: Path) -> bool:
    try:
        return (process / "comm").read_text().strip() == "dmafile"
    except OSError:
        return False


class Faults:
    def __init__(self, loads: Loads, kinds: Sequence[str]) -> None:
        self.loads, self.kinds = loads, ("memfd", *kinds)
        self.machine = Machine()

    def ways(self) -> Iterator[list[str]]:
        for kind in self.kinds:
            for method in DIRECT[kind]:
                yield [f"--to={kind}", f"--method={method}", "--io=direct"]
            for method in BUFFERED:
                yield [f"--to={kind}", f"--method={method}", "--io=buffered"]

    def fails(self, path: Path, words: Sequence[str], *said: str) -> str:
        """Asserts that a load ends with one line, in time, without COMMAND, and leaks nothing."""
        line = self.loads.refused("load", str(path), "--quiet", *words, *STARTS)
        for text in said:
            assert text in line, f"{words}: {text!r} is not in: {line}"
        self.machine.is_as_it_was(f"{words}: {line}")
        return line

    def broken_sectors(self, folder: Path) -> None:
        """Bad sectors in the middle of a file: dm-error."""
        bad = 5 * MIB + 4096
        with mapped(folder, broken(bad)) as file:
            self.machine = Machine()
            for way in self.ways():
                words = [*way, f"--block={BLOCK}", f"--chunk={BLOCK}"]
                line = self.fails(file.path, words, "(EIO)", "the device failed to read")
                # A block is read as a whole: the named byte is in the block with the bad one.
                assert bad - BLOCK < place(line, file.path) <= bad, f"{way}: {line}"
            # The readable ranges are loaded.
            for kind in self.kinds:
                self.loads.load(file, kind, f"--length={5 * MIB}", size=5 * MIB)
                self.loads.load(file, kind, f"--offset={6 * MIB}", start=6 * MIB)

    def slow_disk(self, folder: Path) -> None:
        """A load is interrupted or killed, or its file is truncated, during the reads."""
        with mapped(folder, slow) as file:
            self.machine = Machine()
            for kind in self.kinds:
                for number, status in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
                    process = self.start(file, f"--to={kind}")
                    listens(process)
                    reads(process)
                    process.send_signal(number)
                    process.communicate(timeout=PATIENCE)
                    assert process.returncode == status, f"{kind}, {number}: {process.returncode}"
                    self.machine.is_as_it_was(f"{kind}, {number}")
                process = self.start(file, f"--to={kind}")
                reads(process)
                os.truncate(file.path, 2 * MIB)
                out, line = process.communicate(timeout=PATIENCE)
                assert (process.returncode, out) == (1, ""), f"{kind}: {process}, {line}"
                assert "(ENODATA)" in line, f"{kind}: {line}"
                # The error is at the byte where the load was, not at the new end of the file.
                assert MIB < place(line, file.path) < SIZE, f"{kind}: {line}"
                self.machine.is_as_it_was(f"{kind}, cut short")
                file = File.of(file.path, SIZE)

    def no_rings(self, folder: Path) -> None:
        """Without io_uring, threads load, and --method=uring is refused with a remedy."""
        if not Path("/proc/sys/kernel/io_uring_disabled").exists():
            print("no sysctl switches io_uring off, which Linux 6.6 brought")
            return
        back = setting("/proc/sys/kernel/io_uring_disabled", 2)
        file = File.of(folder / "file", SIZE)
        self.machine = Machine()
        for kind in self.kinds:
            report = self.loads.load(file, kind)
            assert report["method"] != "uring", report
            if "uring" in DIRECT[kind]:
                words = [f"--to={kind}", "--method=uring", "--io=direct"]
                self.fails(file.path, words, "(EPERM)", "; ")
        back()

    def not_direct(self, image: str) -> None:
        """squashfs has no direct I/O, which overlayfs reports in different ways."""
        for name in ("lower", "upper", "over"):
            Path(f"/run/{name}").mkdir()
        call("modprobe", "squashfs")
        call("mount", "-o", "loop,ro", "-t", "squashfs", image, "/run/lower")
        # The upper and the work folder must be on the same file system.
        call("mount", "-t", "tmpfs", "none", "/run/upper")
        for name in ("upper", "work"):
            Path(f"/run/upper/{name}").mkdir()
        folders = "lowerdir=/run/lower,upperdir=/run/upper/upper,workdir=/run/upper/work"
        call("mount", "-t", "overlay", "-o", folders, "none", "/run/over")
        path = Path("/run/over/file")
        file = File(path, path.read_bytes())
        self.machine = Machine()
        for kind in self.kinds:
            report = self.loads.load(file, kind)
            assert report["bytes_direct"] == 0, report
            for method in DIRECT[kind]:
                words = [f"--to={kind}", f"--method={method}", "--io=direct"]
                self.fails(path, words, "; ", "(E")
        for name in ("over", "upper", "lower"):
            call("umount", f"/run/{name}")

    def vanishing_disk(self, spare: Path) -> None:
        """A disk is removed during loads: they fail, and nothing hangs."""
        path = spare / "file"
        with path.open("wb") as file:
            for _ in range(128):
                file.write(BLOB[:MIB])
        device = device_of(path)
        self.machine = Machine()
        running = []
        for kind in self.kinds:
            running.append(process := self.start(File(path, b""), f"--to={kind}", block="4K"))
            reads(process)
            # Stopped, so that no load ends before all have begun.
            process.send_signal(signal.SIGSTOP)
        for process in running:
            process.send_signal(signal.SIGCONT)
        (device / "device/device/remove").write_text("1")
        for process, kind in zip(running, self.kinds, strict=True):
            out, line = process.communicate(timeout=PATIENCE)
            assert (process.returncode, out) == (1, ""), f"{kind}: {process}, {line}"
            assert len(line.splitlines()) == 1 and "(EIO)" in line, f"{kind}: {line}"
            assert place(line, path) > 0, line
        self.machine.is_as_it_was("a disk that vanished")

    def start(self, file: File, *words: str, block: str = "64K") -> "subprocess.Popen[str]":
        """A load that takes some seconds."""
        self.loads.count += 1
        file.evict()
        command = [self.loads.dmafile, "load", str(file.path), "--io=direct", "--quiet", *words]
        # One small read after another; dmafile.ko keeps several in flight.
        command += [f"--block={block}", f"--chunk={block}", "--queue-depth=1", *STARTS]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


Table = Callable[[str, int, Path], Sequence[str]]
"""A device-mapper table for a disk, its size in sectors, and a file on it."""


def slow(device: str, sectors: int, path: Path) -> Sequence[str]:
    """Delays reads by 100 ms, but not writes: dm-delay."""
    return (f"0 {sectors} delay {device} 0 100 {device} 0 0",)


def broken(bad: int) -> Table:
    """Makes 4096 bytes of the file, from `bad` on, fail to read and write: dm-error."""

    def table(device: str, sectors: int, path: Path) -> Sequence[str]:
        start = on_disk(path, bad) // SECTOR
        return (
            f"0 {start} linear {device} 0",
            f"{start} 8 error",
            f"{start + 8} {sectors - start - 8} linear {device} {start + 8}",
        )

    return table


@contextlib.contextmanager
def mapped(folder: Path, table: Table) -> Iterator[File]:
    """A file on a device-mapper disk with the given table."""
    image, mount, name = folder / "image", Path("/run/mapped"), "mapped"
    mount.mkdir(exist_ok=True)
    with image.open("wb") as disk:
        disk.truncate(SECTORS * SECTOR)
    device = call("losetup", "--find", "--show", "--direct-io=on", str(image)).strip()
    call("mkfs.ext4", "-q", "-F", "-b4096", device)
    call("mount", device, str(mount))
    file = File.of(mount / "file", SIZE)
    file.evict()
    lines = table(device, SECTORS, file.path)
    call("umount", str(mount))
    call("dmsetup", "create", name, text="\n".join(lines))
    # Without udev in the machine, dmsetup must make the nodes in /dev/mapper.
    call("dmsetup", "mknodes")
    # Background threads of ext4 must not read from the slow disk: while they wait, the file system
    # cannot be suspended.
    quiet = "noinit_itable,no_prefetch_block_bitmaps"
    call("mount", "-o", quiet, f"/dev/mapper/{name}", str(mount))
    yield file
    call("umount", str(mount))
    call("dmsetup", "remove", name)
    call("losetup", "--detach", device)
    image.unlink()


def device_of(path: Path) -> Path:
    """The sysfs folder of the device with a file."""
    number = path.stat().st_dev
    return Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()


def listens(process: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> None:
    """Waits until a load has a handler for SIGINT: on a busy machine, programs start slowly."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        status = Path(f"/proc/{process.pid}/status").read_text()
        [caught] = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")]
        if int(caught, 16) & 1 << (signal.SIGINT - 1):
            return
        time.sleep(0.05)
    raise AssertionError("a load that never listened")


def reads(process: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> None:
    """Waits until a load has read some of its file."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        assert process.poll() is None, f"over too early: {process} {process.communicate()}"
        lines = Path(f"/proc/{process.pid}/io").read_text().splitlines()
        if int(dict(line.split(": ") for line in lines)["read_bytes"]) > MIB:
            return
        time.sleep(0.05)
    raise AssertionError("a load that never read")


Result = TypeVar("Result")


def interrupted(act: Callable[[], Result], *call: int) -> Result:
    """The result of an action that was interrupted by a signal in a system call: `call` is the
    number of the system call and its arguments after the first. Repeats the action until then.
    """
    seen: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: seen.append(number))
    for _ in range(100):
        parent, child = os.getpid(), os.fork()
        if not child:
            with contextlib.suppress(OSError):
                while not waits_in(parent, *call):
                    time.sleep(0.002)
                os.kill(parent, signal.SIGALRM)
            os._exit(0)
        result = act()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if seen:
            signal.signal(signal.SIGALRM, before)
            return result
    raise AssertionError("it never waited")


def waits_in(process: int, number: int, *arguments: int) -> bool:
    words = Path(f"/proc/{process}/syscall").read_text().split()
    # For a running process, the file only has that word.
    found = [int(word, 0) for word in words if word != "running"]
    return found[:1] == [number] and found[2 : 2 + len(arguments)] == [*arguments]


def place(line: str, path: Path) -> int:
    """The offset in the file that an error names."""
    _, _, after = line.partition(f"{path} at byte ")
    assert after, line
    return int(after.split(":")[0])


def on_disk(path: Path, offset: int) -> int:
    """The offset on the device of a byte of a file."""
    block = 4096
    for line in call("filefrag", "-v", f"-b{block}", str(path)).splitlines():
        fields = line.replace("..", " ").replace(":", " ").split()
        if len(fields) > 4 and all(field.isdigit() for field in fields[:4]):
            first, last, physical = (int(field) for field in fields[1:4])
            if first <= offset // block <= last:
                return (physical + offset // block - first) * block
    raise AssertionError(f"{path} has no extent at {offset}")


def main(dmafile: str, helpers: str, image: str, folder: str, spare: str, *kinds: str) -> None:
    loads = Loads(dmafile, helpers)
    faults = Faults(loads, kinds)
    parts: Sequence[Callable[[], None]] = (
        lambda: faults.not_direct(image),
        lambda: faults.slow_disk(Path(folder)),
        lambda: faults.vanishing_disk(Path(spare)),
        lambda: faults.broken_sectors(Path(folder)),
        lambda: faults.no_rings(Path(folder)),
    )
    for part in parts:
        start = time.monotonic()
        part()
        print(f"{loads.count} so far, {time.monotonic() - start:.0f} s", flush=True)
    print(f"{loads.count} faults checked")


if __name__ == "__main__":
    main(*sys.argv[1:])
