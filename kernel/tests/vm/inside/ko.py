"""Runs the tests of dmafile.ko in a machine: the programs of kernel/tests, on all file systems, on
disks that are slow, broken or full, and with memory limits.

    ko.py PROGRAMS PART FOLDER...    in the machine, as root, with dmafile.ko loaded

PART is one of the functions here. Ends with an assertion or a program's line `not ok`, or with a
line that has the number of programs.
"""

import contextlib
import errno
import mmap
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.vm.inside.faults import broken, call, mapped, slow
from tests.vm.inside.loads import (
    BLOB,
    ENTER,
    GROUP,
    MIB,
    PATIENCE,
    File,
    difference,
    meminfo,
    setting,
    settles,
)

PARAMETERS = Path("/sys/module/dmafile/parameters")
STATS = Path("/sys/kernel/debug/dmafile/stats")
KMEMLEAK = Path("/sys/kernel/debug/kmemleak")
GATHER = "gather=65536"
DSYNC = "flags=0x40"
FRAME = 1280 * 720 * 4
"""The size of one frame in importer.c."""

WORDS: Mapping[str, Sequence[str]] = {"btrfs": ["-k"], "f2fs": ["-k"], "tmpfs": ["-m"]}
"""Options of bytes.c for a file system."""


@dataclass(frozen=True)
class Done:
    """The output of load.c."""

    result: int
    moved: int
    mode: int
    data: bytes


class Programs:
    """Runs copies of the programs in the machine's memory, and counts them."""

    def __init__(self, folder: str) -> None:
        self.folder = Path("/tmp/programs")
        shutil.copytree(folder, self.folder)
        self.count = 0

    def run(self, *words: str | Path) -> None:
        """Runs a program that checks its results itself."""
        self.count += 1
        print(f"# {' '.join(map(str, words))}", flush=True)
        start = time.monotonic()
        done = subprocess.run([self.folder / words[0], *map(str, words[1:])])
        assert done.returncode == 0, f"{words}: exit status {done.returncode}"
        print(f"# {time.monotonic() - start:.0f} s", flush=True)
        self.nothing_is_left(str(words))

    def load(self, path: Path, *words: str, before: Sequence[str] = ()) -> Done:
        """Makes one request, and returns its result."""
        self.count += 1
        command = [*before, str(self.folder / "load"), str(path), *words]
        done = subprocess.run(command, capture_output=True)
        assert done.returncode == 0, f"{words}: {done.stdout[:200]!r} {done.stderr.decode()}"
        self.nothing_is_left(str(words))
        line, _, data = done.stdout.partition(b"\n")
        result, size, mode = map(int, line.split())
        return Done(result, size, mode, data)

    def given(self, path: Path, *command: str) -> bytes:
        """Returns the output of a program that inherits a buffer with the contents of the file."""
        self.count += 1
        words = [str(self.folder / "load"), str(path), GATHER, "--", *command]
        done = subprocess.run(words, capture_output=True)
        assert done.returncode == 0, f"{words}: {done.stdout[:200]!r} {done.stderr.decode()}"
        self.nothing_is_left(str(words))
        return done.stdout

    def nothing_is_left(self, case: str) -> None:
        # The last test of buffer.c unloads the module.
        if STATS.exists():
            # The rings of a process that has exited are freed in the background.
            none = "buffers 0\nbuffer_bytes 0\n"
            settles(STATS.read_text, lambda seen: none in seen, f"{case}: a buffer is left")


def parameter(name: str, value: object) -> contextlib.AbstractContextManager[None]:
    return during(PARAMETERS / name, value)


@contextlib.contextmanager
def during(file: Path, value: object) -> Iterator[None]:
    """Sets a file in /proc or /sys temporarily."""
    take_back = setting(str(file), value)
    yield
    take_back()


@contextlib.contextmanager
def loop(image: Path, size: int, block: int = 512) -> Iterator[Path]:
    """A block device with this size and block size."""
    with image.open("wb") as disk:
        disk.truncate(size)
    device = call("losetup", "--find", "--show", f"--sector-size={block}", str(image)).strip()
    yield Path(device)
    call("losetup", "--detach", device)
    image.unlink()


def short(programs: Programs, folder: Path) -> None:
    """A short test, in less than half a minute."""
    programs.run("bytes", "-s", folder)
    programs.run("table", folder)


def every_byte(programs: Programs, *folders: Path) -> None:
    few: list[str | Path] = ["-s", *words_of(folders[0]), folders[0]]
    # A debug kernel takes ten minutes for a full run: test all offsets on one file system only.
    brief = ["-s"] if KMEMLEAK.exists() else []
    for folder in folders:
        words = brief if folder != folders[0] else []
        programs.run("bytes", *words, *words_of(folder), folder)
    # A size that is not a multiple of a page, and one that is.
    for size in (3 * 65536 + 1536, 6 * 65536):
        with loop(folders[0] / "disk", size) as device:
            programs.run("bytes", *brief, device)
    blocks(programs, folders[0], brief)
    programs.run("bytes", "-o", *few)
    with parameter("max_order", 0):
        programs.run("bytes", *few)
        if version() >= BLOCKS_OF_PAGES:
            blocks(programs, folders[0], brief)
    with parameter("depth", 1):
        programs.run("bytes", *few)
    # A debug kernel needs too much memory itself.
    if not brief:
        fragmented(programs, folders[0])


LARGE_BLOCKS = (6, 15)
"""The first kernel that supports disks with blocks larger than a page."""
BLOCKS_OF_PAGES = (6, 18)
"""The first kernel in which such a block may consist of non-contiguous pages."""


def version() -> tuple[int, ...]:
    return tuple(int(word) for word in re.findall(r"\d+", os.uname().release)[:2])


def blocks(programs: Programs, folder: Path, words: list[str]) -> None:
    """Disks with different block sizes, to which direct I/O is aligned."""
    for size in (512, 4096, 16384, 65536):
        if size > mmap.PAGESIZE and version() < LARGE_BLOCKS:
            print(f"# this kernel has no disks with blocks of {size} bytes")
            continue
        with loop(folder / "disk", 6 * 65536, size) as device:
            programs.run("bytes", *words, "-b", str(max(size, mmap.PAGESIZE)), device)
    if version() >= LARGE_BLOCKS:
        # For a file on such a disk, the file system reports the alignment.
        with loop(folder / "disk", 320 * MIB, 16384) as device, mounted(device, 16384) as mount:
            programs.run("bytes", "-s", "-b", "16384", mount)


@contextlib.contextmanager
def mounted(device: Path, block: int) -> Iterator[Path]:
    """Makes and mounts an XFS with this block and sector size."""
    mount = Path("/run/blocks")
    mount.mkdir(exist_ok=True)
    call("mkfs.xfs", "-q", "-b", f"size={block}", "-s", f"size={block}", str(device))
    call("mount", str(device), str(mount))
    yield mount
    call("umount", str(mount))


def words_of(folder: Path) -> list[str]:
    return [*WORDS.get(File(folder / "file", b"").file_system, [])]


def fragmented(programs: Programs, folder: Path) -> None:
    """Loads into memory that consists of single pages."""
    file = File(folder / "large", BLOB * 16)
    file.path.write_bytes(file.data)
    file.evict()
    with fragmentation(len(file.data)):
        for words in ([], ["buffered"]):
            done = programs.load(file.path, "print", *words)
            assert (done.result, done.moved) == (0, len(file.data)), done.result
            assert done.data == file.data, difference(done.data, file.data)
    file.path.unlink()


RESERVE = 64 * MIB
"""The memory that is left to the system while all other memory is allocated."""


@contextlib.contextmanager
def fragmentation(size: int) -> Iterator[None]:
    """Fragments memory: all free memory except for less than `size` consists of single pages."""
    Path("/proc/sys/vm/drop_caches").write_text("3")
    held: list[mmap.mmap] = []
    # No proactive compaction.
    with during(Path("/proc/sys/vm/compaction_proactiveness"), 0):
        # Memory that is freed by others at the same time is allocated as well.
        while (free := meminfo("MemFree:") << 10) > RESERVE + 8 * MIB:
            assert len(held) < 100, f"{free} bytes cannot be allocated"
            part = mmap.mmap(-1, free - RESERVE, flags=mmap.MAP_PRIVATE)
            part.madvise(mmap.MADV_NOHUGEPAGE)
            for at in range(0, len(part), mmap.PAGESIZE):
                part[at] = 1
            held.append(part)
        for part in held:
            for at in range(0, len(part), 2 * mmap.PAGESIZE):
                part.madvise(mmap.MADV_DONTNEED, at, mmap.PAGESIZE)
        large = free_in_large_pieces()
        print(f"# {large >> 10} of {meminfo('MemFree:')} KiB free in pieces of 64 KiB and more")
        assert large < size, "is not fragmented"
        yield
        for part in held:
            part.close()


def free_in_large_pieces() -> int:
    """The number of free bytes in blocks of at least 64 KiB."""
    pages = sum(
        int(count) << order
        for line in Path("/proc/buddyinfo").read_text().splitlines()
        for order, count in enumerate(line.split()[4:])
        if order >= 4
    )
    return pages * mmap.PAGESIZE


def calls(programs: Programs, folder: Path) -> None:
    """Tests the interface. The last program unloads the module."""
    programs.run("table", folder)
    programs.run("ring", folder)
    programs.run("race", "20", folder)
    programs.run("leak", folder)
    programs.run("random", "60", str(time.time_ns() % 1000000), folder)
    importers(programs, folder)
    programs.run("buffer", folder)


def importers(programs: Programs, folder: Path) -> None:
    """Other drivers and programs read the file from a buffer."""
    # One HDMI input, one HDMI output, and no other nodes.
    vivid = "n_devs=1 num_inputs=1 input_types=3 num_outputs=1 output_types=1 node_types=0x101"
    call("modprobe", "vivid", *vivid.split())
    importer = str(programs.folder / "importer")
    file = File.of(folder / "frame", FRAME)
    ways = [["vgem"], ["send", importer, "receive"]]
    # Since Linux 6.11 the output that an input is connected to can be selected.
    if not os.uname().release.startswith("6.1."):
        ways.append(["vivid"])
    for how in ways:
        seen = programs.given(file.path, importer, *how)
        assert seen == file.data, f"{how[0]}: {difference(seen, file.data)}"


def devices(programs: Programs, folder: Path, module: Path) -> None:
    """Tests with devices that have a buffer mapped."""
    call("insmod", str(module))
    programs.run("device", folder)
    call("rmmod", "testdev")


def breakage(programs: Programs, folder: Path) -> None:
    ahead(programs, folder)
    slow_disk(programs, folder)
    broken_disk(programs, folder)
    full_disk(programs, folder)
    cgroup(programs, folder)


def ahead(programs: Programs, folder: Path) -> None:
    """While a disk does not respond, memory is allocated for the gathers in flight and one more."""
    gather, in_order = f"gather={2 * MIB}", "flags=0x8"
    # Module parameters, options of the request, and the expected MiB, of LARGE.
    cases: Sequence[tuple[dict[str, object], list[str], int]] = (
        ({}, [gather], 10),
        ({"depth": 1}, [gather], 4),
        ({"depth": 0}, [gather], 4),
        ({"depth": 64}, [gather], LARGE),
        ({"gather_mb": 1}, [], 5),
        ({"gather_mb": 0}, [], 5),
        ({}, [gather, in_order], LARGE),
    )
    with mapped(folder, as_it_is) as small, limited(256 * MIB):
        file = File(small.path.parent / "large", BLOB * (LARGE // 8))
        file.path.write_bytes(file.data)
        file.evict()
        # This makes the file system read the metadata of the file.
        assert programs.load(file.path).result == 0
        for parameters, words, want in cases:
            with contextlib.ExitStack() as stack:
                for name, value in parameters.items():
                    stack.enter_context(parameter(name, value))
                held_while_waiting(programs, file, words, want)


LARGE = 40
"""The size of the file in MiB."""


def as_it_is(device: str, sectors: int, path: Path) -> Sequence[str]:
    return (f"0 {sectors} linear {device} 0",)


def held_while_waiting(programs: Programs, file: File, words: list[str], want: int) -> None:
    call("dmsetup", "suspend", "--noflush", "--nolockfs", "mapped")
    command = [*ENTER, str(programs.folder / "load"), str(file.path), "print", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        taken, before, waited = charged(), -1, 0.0
        # Until the expected amount is allocated, and does not increase any more.
        while taken != before or (taken < want * MIB and waited < PATIENCE):
            time.sleep(0.5)
            assert process.poll() is None, f"{words}: it has not waited"
            taken, before, waited = charged(), taken, waited + 0.5
        call("dmsetup", "resume", "mapped")
        data, _ = process.communicate()
    programs.count += 1
    assert want * MIB <= taken < (want + 1) * MIB, f"{words}: {taken / MIB:.1f} MiB, not {want}"
    assert data.partition(b"\n")[2] == file.data, f"{words}: wrong bytes"


def charged() -> int:
    """The number of bytes charged to the GROUP."""
    return int((GROUP / "memory.current").read_text())


def slow_disk(programs: Programs, folder: Path) -> None:
    with mapped(folder, slow) as file:
        programs.run("slow", file.path)
        programs.run("ring", folder, file.path)
    midway(programs, folder)


def midway(programs: Programs, folder: Path) -> None:
    """Open flags that change, and a file system that is frozen, during requests."""
    with mapped(folder, slow_both_ways) as file:
        programs.run("midway", file.path)


def slow_both_ways(device: str, sectors: int, path: Path) -> Sequence[str]:
    """dm-delay: reads and writes take 100 ms."""
    return (f"0 {sectors} delay {device} 0 100 {device} 0 100",)


def broken_disk(programs: Programs, folder: Path) -> None:
    """Some sectors in the middle of a file can be neither read nor written."""
    bad = 5 * MIB + 4096
    with mapped(folder, broken(bad)) as file:
        size = len(file.data)
        for words in ([], ["buffered"]):
            file.evict()
            done = programs.load(file.path, GATHER, "print", *words)
            assert (done.result, done.data) == (errno.EIO, b""), done.result
            done = programs.load(file.path, GATHER, "print", f"read={size}", *words)
            assert done.result == errno.EIO, done.result
            assert bad - 65536 < done.moved <= bad, done.moved
            assert done.data[: done.moved] == file.data[: done.moved], "reported data is missing"
            # The readable part is read.
            done = programs.load(file.path, f"length={5 * MIB}", "print", *words)
            assert done.result == 0 and done.data == file.data[: 5 * MIB], done.result
            done = programs.load(file.path, f"offset={6 * MIB}", "print", *words)
            assert done.result == 0 and done.data == file.data[6 * MIB :], done.result
            done = programs.load(file.path, GATHER, "print", DSYNC, f"write={size}", *words)
            assert done.result == errno.EIO, done.result
            assert done.moved <= bad, done.moved
            with file.path.open("rb") as reader:
                there = reader.read(done.moved)
            assert there == done.data[: done.moved], difference(there, done.data[: done.moved])
            file = File(file.path, there + done.data[done.moved :])
            with contextlib.suppress(OSError):
                rewrite(file)


def rewrite(file: File) -> None:
    """Writes everything except for the sectors that cannot be written."""
    with file.path.open("r+b") as writer:
        writer.write(file.data)
        writer.flush()
        os.fsync(writer.fileno())


def full_disk(programs: Programs, folder: Path) -> None:
    mount = Path("/run/full")
    mount.mkdir()
    for fs in ("ext4", "xfs"):
        with loop(folder / "small", 320 * MIB if fs == "xfs" else 16 * MIB) as device:
            call(f"mkfs.{fs}", "-q", str(device))
            call("mount", str(device), str(mount))
            leave_free(mount, 16 * MIB)
            for words in ([], ["buffered"]):
                path = mount / "file"
                path.write_bytes(b"")
                done = programs.load(path, GATHER, "print", f"write={24 * MIB}", *words)
                assert done.result == errno.ENOSPC, f"{fs}: {done.result}"
                assert MIB < done.moved < 24 * MIB, f"{fs}: {done.moved}"
                there = path.read_bytes()[: done.moved]
                assert there == done.data[: done.moved], f"{fs}: reported data is missing"
                path.unlink()
            call("umount", str(mount))


def leave_free(mount: Path, size: int) -> None:
    """Fills a file system, except for this size."""
    free = os.statvfs(mount).f_bavail * os.statvfs(mount).f_bsize
    if free > size:
        with (mount / "most").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free - size)


def cgroup(programs: Programs, folder: Path) -> None:
    """Reaching a memory limit is an error."""
    with limited(32 * MIB):
        for mib, want in ((16, 0), (31, None), (33, errno.ENOMEM), (128, errno.ENOMEM)):
            file = File(folder / "file", BLOB * (mib // 8 + 1))
            file.path.write_bytes(file.data[: mib * MIB])
            for words in ([], ["buffered"]):
                file.evict()
                done = programs.load(file.path, *words, before=ENTER)
                assert want is None or done.result == want, f"{mib} MiB: {done.result}"
            done = programs.load(file.path, f"alloc={mib * MIB}", before=ENTER)
            assert want is None or done.result == want, f"{mib} MiB: {done.result}"
    file.path.unlink()


@contextlib.contextmanager
def limited(limit: int) -> Iterator[None]:
    """A GROUP with a memory limit: no process may be killed, and all memory must be freed."""
    subprocess.run(
        "mountpoint -q /sys/fs/cgroup || mount -t cgroup2 none /sys/fs/cgroup", shell=True
    )
    (GROUP.parent / "cgroup.subtree_control").write_text("+memory")
    GROUP.mkdir()
    (GROUP / "memory.max").write_text(str(limit))
    yield
    events = (GROUP / "memory.events").read_text().split()
    assert events[events.index("oom_kill") + 1] == "0", events
    settles(charged, lambda left: left < 4 * MIB, "bytes are still charged")
    GROUP.rmdir()


PARTS: Mapping[str, Callable[..., None]] = {
    one.__name__: one for one in (short, every_byte, calls, devices, breakage, midway)
}


def main(parts: Mapping[str, Callable[..., None]], folder: str, part: str, *folders: str) -> None:
    programs = Programs(folder)
    call("modprobe", "vgem")
    parts[part](programs, *map(Path, folders))
    print(f"{programs.count} programs ran")


if __name__ == "__main__":
    main(PARTS, *sys.argv[1:])
