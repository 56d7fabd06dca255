"""What dmafile.ko does in a machine: the programs of kernel/tests, on every file system, on disks
that are slow, broken or full, and within limits.

    ko.py PROGRAMS PART FOLDER...    in the machine, as root, with dmafile.ko loaded

PART is one of the functions here. Ends with an assertion or a program's line `not ok`, or with a
line that counts the programs.
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
"""What importer.c takes for one picture."""

WORDS: Mapping[str, Sequence[str]] = {"btrfs": ["-k"], "f2fs": ["-k"], "tmpfs": ["-m"]}
"""What bytes.c is told of a file system: see there."""


@dataclass(frozen=True)
class Done:
    """What load.c says."""

    result: int
    moved: int
    mode: int
    data: bytes


class Programs:
    """Starts them, in the machine's own memory, and counts."""

    def __init__(self, folder: str) -> None:
        self.folder = Path("/tmp/programs")
        shutil.copytree(folder, self.folder)
        self.count = 0

    def run(self, *words: str | Path) -> None:
        """One that judges by itself, and says what it has seen."""
        self.count += 1
        print(f"# {' '.join(map(str, words))}", flush=True)
        start = time.monotonic()
        done = subprocess.run([self.folder / words[0], *map(str, words[1:])])
        assert done.returncode == 0, f"{words}: exit status {done.returncode}"
        print(f"# {time.monotonic() - start:.0f} s", flush=True)
        self.nothing_is_left(str(words))

    def load(self, path: Path, *words: str, before: Sequence[str] = ()) -> Done:
        """One request, and what became of it."""
        self.count += 1
        command = [*before, str(self.folder / "load"), str(path), *words]
        done = subprocess.run(command, capture_output=True)
        assert done.returncode == 0, f"{words}: {done.stdout[:200]!r} {done.stderr.decode()}"
        self.nothing_is_left(str(words))
        line, _, data = done.stdout.partition(b"\n")
        result, size, mode = map(int, line.split())
        return Done(result, size, mode, data)

    def given(self, path: Path, *command: str) -> bytes:
        """What a program prints that inherits a buffer with the file in it."""
        self.count += 1
        words = [str(self.folder / "load"), str(path), GATHER, "--", *command]
        done = subprocess.run(words, capture_output=True)
        assert done.returncode == 0, f"{words}: {done.stdout[:200]!r} {done.stderr.decode()}"
        self.nothing_is_left(str(words))
        return done.stdout

    def nothing_is_left(self, case: str) -> None:
        # The last test of buffer.c unloads the module.
        if STATS.exists():
            # A ring of a process that ended is taken apart in the background.
            none = "buffers 0\nbuffer_bytes 0\n"
            settles(STATS.read_text, lambda seen: none in seen, f"{case}: a buffer stays")


def parameter(name: str, value: object) -> contextlib.AbstractContextManager[None]:
    return during(PARAMETERS / name, value)


@contextlib.contextmanager
def during(file: Path, value: object) -> Iterator[None]:
    """A file of /proc or /sys holds something else."""
    take_back = setting(str(file), value)
    yield
    take_back()


@contextlib.contextmanager
def loop(image: Path, size: int, block: int = 512) -> Iterator[Path]:
    """A block device of a size, and of blocks of a size."""
    with image.open("wb") as disk:
        disk.truncate(size)
    device = call("losetup", "--find", "--show", f"--sector-size={block}", str(image)).strip()
    yield Path(device)
    call("losetup", "--detach", device)
    image.unlink()


def short(programs: Programs, folder: Path) -> None:
    """One of each sort, in less than half a minute."""
    programs.run("bytes", "-s", folder)
    programs.run("table", folder)


def every_byte(programs: Programs, *folders: Path) -> None:
    few: list[str | Path] = ["-s", *words_of(folders[0]), folders[0]]
    # A kernel that checks itself takes ten minutes for each: it sees every offset on one, and every
    # path on all.
    brief = ["-s"] if KMEMLEAK.exists() else []
    for folder in folders:
        words = brief if folder != folders[0] else []
        programs.run("bytes", *words, *words_of(folder), folder)
    # A size of which no page is a multiple, and one on which a request of any size fits.
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
    # What checks itself takes memory for that, and is then short of it.
    if not brief:
        fragmented(programs, folders[0])


LARGE_BLOCKS = (6, 15)
"""The first kernel with disks whose blocks are larger than a page."""
BLOCKS_OF_PAGES = (6, 18)
"""The first one on which such a block may consist of pages that are not contiguous."""


def version() -> tuple[int, ...]:
    return tuple(int(word) for word in re.findall(r"\d+", os.uname().release)[:2])


def blocks(programs: Programs, folder: Path, words: list[str]) -> None:
    """Disks with blocks of all sizes: direct I/O is aligned to them."""
    for size in (512, 4096, 16384, 65536):
        if size > mmap.PAGESIZE and version() < LARGE_BLOCKS:
            print(f"# this kernel has no disks with blocks of {size} bytes")
            continue
        with loop(folder / "disk", 6 * 65536, size) as device:
            programs.run("bytes", *words, "-b", str(max(size, mmap.PAGESIZE)), device)
    if version() >= LARGE_BLOCKS:
        # Of a file on such a disk, its file system tells the alignment.
        with loop(folder / "disk", 320 * MIB, 16384) as device, mounted(device, 16384) as mount:
            programs.run("bytes", "-s", "-b", "16384", mount)


@contextlib.contextmanager
def mounted(device: Path, block: int) -> Iterator[Path]:
    """An XFS whose blocks and sectors are so large."""
    mount = Path("/run/blocks")
    mount.mkdir(exist_ok=True)
    call("mkfs.xfs", "-q", "-b", f"size={block}", "-s", f"size={block}", str(device))
    call("mount", str(device), str(mount))
    yield mount
    call("umount", str(mount))


def words_of(folder: Path) -> list[str]:
    return [*WORDS.get(File(folder / "file", b"").file_system, [])]


def fragmented(programs: Programs, folder: Path) -> None:
    """A load is made of single pages, and of nothing else."""
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
"""What is left to the system while all other memory is taken."""


@contextlib.contextmanager
def fragmentation(size: int) -> Iterator[None]:
    """All free memory but less than that is single pages: half of all, and not next to another."""
    Path("/proc/sys/vm/drop_caches").write_text("3")
    held: list[mmap.mmap] = []
    # Nobody puts pages together again without being asked.
    with during(Path("/proc/sys/vm/compaction_proactiveness"), 0):
        # What was in use before becomes free meanwhile, and is large: it's taken, too.
        while (free := meminfo("MemFree:") << 10) > RESERVE + 8 * MIB:
            assert len(held) < 100, f"{free} bytes can't be taken"
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
    """Bytes in free pieces of 64 KiB and more."""
    pages = sum(
        int(count) << order
        for line in Path("/proc/buddyinfo").read_text().splitlines()
        for order, count in enumerate(line.split()[4:])
        if order >= 4
    )
    return pages * mmap.PAGESIZE


def calls(programs: Programs, folder: Path) -> None:
    """What may be asked, and by whom; the last program unloads the module."""
    programs.run("table", folder)
    programs.run("ring", folder)
    programs.run("race", "20", folder)
    programs.run("leak", folder)
    programs.run("random", "60", str(time.time_ns() % 1000000), folder)
    importers(programs, folder)
    programs.run("buffer", folder)


def importers(programs: Programs, folder: Path) -> None:
    """Drivers and programs that know nothing of dmafile see the file."""
    # One input and one output, HDMI, and no other nodes.
    vivid = "n_devs=1 num_inputs=1 input_types=3 num_outputs=1 output_types=1 node_types=0x101"
    call("modprobe", "vivid", *vivid.split())
    importer = str(programs.folder / "importer")
    file = File.of(folder / "frame", FRAME)
    ways = [["vgem"], ["send", importer, "receive"]]
    # Before Linux 6.11, which output an input is connected to could not be chosen.
    if not os.uname().release.startswith("6.1."):
        ways.append(["vivid"])
    for how in ways:
        seen = programs.given(file.path, importer, *how)
        assert seen == file.data, f"{how[0]}: {difference(seen, file.data)}"


def devices(programs: Programs, folder: Path, module: Path) -> None:
    """What devices see that have a buffer mapped."""
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
    """While a disk answers nothing, memory is allocated for the gathers in flight and one more."""
    gather, in_order = f"gather={2 * MIB}", "flags=0x8"
    # The module's parameters, what a request says, and how many MiB come of it, of LARGE.
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
        # Where its blocks are is known to the file system from then on.
        assert programs.load(file.path).result == 0
        for parameters, words, want in cases:
            with contextlib.ExitStack() as stack:
                for name, value in parameters.items():
                    stack.enter_context(parameter(name, value))
                held_while_waiting(programs, file, words, want)


LARGE = 40
"""MiB."""


def as_it_is(device: str, sectors: int, path: Path) -> Sequence[str]:
    return (f"0 {sectors} linear {device} 0",)


def held_while_waiting(programs: Programs, file: File, words: list[str], want: int) -> None:
    call("dmsetup", "suspend", "--noflush", "--nolockfs", "mapped")
    command = [*ENTER, str(programs.folder / "load"), str(file.path), "print", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        taken, before, waited = charged(), -1, 0.0
        # As long as it takes to allocate so much, and until no more comes.
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
    """Bytes that count for the GROUP."""
    return int((GROUP / "memory.current").read_text())


def slow_disk(programs: Programs, folder: Path) -> None:
    with mapped(folder, slow) as file:
        programs.run("slow", file.path)
        programs.run("ring", folder, file.path)
    midway(programs, folder)


def midway(programs: Programs, folder: Path) -> None:
    """Flags that change, and a file system that is frozen, in the middle of requests."""
    with mapped(folder, slow_both_ways) as file:
        programs.run("midway", file.path)


def slow_both_ways(device: str, sectors: int, path: Path) -> Sequence[str]:
    """Reads and writes wait for 100 ms: dm-delay."""
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
            assert done.data[: done.moved] == file.data[: done.moved], "what was told is not there"
            # What can be read is.
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
    """All but what can't be written."""
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
                assert there == done.data[: done.moved], f"{fs}: what was told is not there"
                path.unlink()
            call("umount", str(mount))


def leave_free(mount: Path, size: int) -> None:
    """Takes all of a file system but so much."""
    free = os.statvfs(mount).f_bavail * os.statvfs(mount).f_bsize
    if free > size:
        with (mount / "most").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free - size)


def cgroup(programs: Programs, folder: Path) -> None:
    """A limit on memory is an error."""
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
    """There is a GROUP with a limit on memory; nobody in it is killed, and all is given back."""
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
