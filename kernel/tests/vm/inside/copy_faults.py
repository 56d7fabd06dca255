"""Tests copy_file_range() between a disk and memory under adverse conditions: disks that are slow
or broken, a disk that is stored in the memory file itself, seals that are added during a copy,
injected failures, and very large buffers.

    copy_faults.py FOLDER PART...    in the machine, as root

PART is one of the functions in PARTS. Ends with an assertion that names the case, or with a line
that has the number of calls.
"""

import contextlib
import ctypes
import errno
import fcntl
import functools
import mmap
import os
import signal
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kernel.tests.vm.inside.heap_flag import MODES, READ, SYNC, Heap
from kernel.tests.vm.inside.ko import as_it_is
from kernel.tests.vm.inside.nth import Nth
from tests.vm.inside.faults import SIZE, Machine, broken, call, interrupted, mapped, slow
from tests.vm.inside.loads import BLOB, MIB, PATIENCE, File, difference, setting, settles

POOL = "/proc/sys/vm/nr_hugepages"
UDMABUF_CREATE = 0x40187542
UDMABUF = struct.Struct("=IIQQ")
"""struct udmabuf_create: memfd, flags, offset, size."""
FALLOC_FL_KEEP_SIZE = 1
COPY_FILE_RANGE = 326
"""The system call number on x86-64."""
WRITE, END = 2, 4
"""Flags of DMA_BUF_IOCTL_SYNC."""
KINDS = ("memfd", "memfd on huge pages", "udmabuf", "heap")
OLD = bytes(range(256)) * 4096
"""1 MiB of old data. Repeated to 8 MiB, it differs from BLOB everywhere."""
BAD = 5 * MIB + 4096
"""The offset of the 4096 bytes that are broken on the broken disk."""

count = 0


@dataclass
class Memory:
    """A memory file, and a mapping of it that the copies do not use."""

    kind: str
    fd: int
    map: mmap.mmap

    @classmethod
    def make(cls, kind: str, size: int) -> "Memory":
        if kind == "heap":
            heap = os.open("/dev/dma_heap/system", os.O_RDWR | os.O_CLOEXEC)
            fd = Heap(heap).request(size, 0, 0, os.O_RDWR | os.O_CLOEXEC, 0)
            os.close(heap)
        else:
            fd = memfd(size, "huge" in kind)
        if kind == "udmabuf":
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            under, device = fd, os.open("/dev/udmabuf", os.O_RDWR | os.O_CLOEXEC)
            # A mutable buffer, so that ioctl() returns its result and not the buffer.
            request = bytearray(UDMABUF.pack(under, 1, 0, size))
            fd = fcntl.ioctl(device, UDMABUF_CREATE, request, True)
            os.close(device)
            os.close(under)
        return cls(kind, fd, mmap.mmap(fd, size))

    @contextlib.contextmanager
    def access(self) -> Iterator[None]:
        """CPU access, which must be announced for a dma-buf."""
        if self.kind in ("udmabuf", "heap"):
            fcntl.ioctl(self.fd, SYNC, struct.pack("=Q", READ | WRITE))
        yield
        if self.kind in ("udmabuf", "heap"):
            fcntl.ioctl(self.fd, SYNC, struct.pack("=Q", READ | WRITE | END))

    def read(self) -> bytes:
        with self.access():
            return bytes(self.map)

    def write(self, data: bytes) -> None:
        with self.access():
            self.map[: len(data)] = data

    def close(self) -> None:
        self.map.close()
        os.close(self.fd)


def memfd(size: int, huge: bool = False) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if huge else 0)
    fd = os.memfd_create("copies", flags)
    os.ftruncate(fd, size)
    return fd


@contextlib.contextmanager
def of_each_kind(size: int) -> Iterator[list[Memory]]:
    back = setting(POOL, size // (2 * MIB) + 1)
    every = [Memory.make(kind, size) for kind in KINDS]
    for memory in every:
        # Allocate all memory before the counts are recorded.
        memory.write(bytes(size))
    yield every
    for memory in every:
        memory.close()
    back()


def copy(source: int, at: int, target: int, to: int, size: int) -> int:
    global count
    count += 1
    return os.copy_file_range(source, target, size, at, to)


def until_it_fails(source: int, at: int, target: int, to: int, size: int) -> tuple[int, int]:
    """Copies until the end or an error. Returns the number of bytes and the error, or 0."""
    done = 0
    while done < size:
        try:
            got = copy(source, at + done, target, to + done, size - done)
        except OSError as error:
            assert error.errno
            return done, error.errno
        if not got:
            break
        done += got
    return done, 0


def opened(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC)


def mixed(got: bytes, new: bytes, old: bytes, done: int, case: str) -> None:
    """The copied bytes are new. Each other byte is either old or new: more I/O may have been in
    flight after the error.
    """
    assert len(got) == len(new) == len(old), (len(got), len(new), len(old))
    assert got[:done] == new[:done], f"{case}: {difference(got[:done], new[:done])}"
    for at in range(done - done % mmap.PAGESIZE, len(got), mmap.PAGESIZE):
        pages = [one[at : at + mmap.PAGESIZE] for one in (got, new, old)]
        if pages[0] not in pages[1:]:
            for seen, *either in zip(*pages, strict=True):
                assert seen in either, f"{case}: bytes of something else on the page at {at}"


def slow_disk(folder: Path) -> None:
    """SIGKILL ends a copy at once, and the files remain usable. Other signals do not end it."""
    with mapped(folder, slow) as file, of_each_kind(SIZE) as every:
        machine = Machine()
        for memory, mode in ((memory, mode) for memory in every for mode in MODES):
            case = f"{memory.kind}, {mode}"
            source = opened(file.path, os.O_RDONLY | mode)
            for after in (0.0, 0.3, 0.6):
                file.evict()
                child = os.fork()
                if not child:
                    for _ in range(1000):
                        copy(source, 0, memory.fd, 0, SIZE)
                        file.evict()
                    os._exit(1)
                time.sleep(after)
                os.kill(child, signal.SIGKILL)
                begun = time.monotonic()
                _, status = os.waitpid(child, 0)
                assert os.WIFSIGNALED(status), f"{case}: {status}"
                assert time.monotonic() - begun < PATIENCE, f"{case}: it did not end"
            again = functools.partial(cold, source, file, memory)
            done = interrupted(again, COPY_FILE_RANGE)
            data = memory.read()
            assert (done, data) == (SIZE, file.data), f"{case}: {difference(data, file.data)}"
            os.close(source)
        machine.is_as_it_was("slow copies")


def cold(source: int, file: File, memory: Memory) -> int:
    file.evict()
    memory.write(OLD)
    return copy(source, 0, memory.fd, 0, SIZE)


def broken_disk(folder: Path) -> None:
    """Some sectors of a file can be neither read nor written. The part before them is copied."""
    with mapped(folder, broken(BAD)) as file, of_each_kind(SIZE) as every:
        machine = Machine()
        ways = [(memory, mode) for memory in every for mode in MODES]
        for memory, mode in ways:
            unreadable(file, memory, mode)
        for number, (memory, mode) in enumerate(ways, 1):
            unwritable(file, memory, mode, BLOB[number:] + BLOB[:number])
        machine.is_as_it_was("copies from and to a broken disk")


def unreadable(file: File, memory: Memory, mode: int) -> None:
    case, old = f"{memory.kind}, {mode}", OLD * (SIZE // MIB)
    source = opened(file.path, os.O_RDONLY | mode)
    file.evict()
    memory.write(old)
    done, error = until_it_fails(source, 0, memory.fd, 0, SIZE)
    assert error == errno.EIO and 4 * MIB < done <= BAD, f"{case}: {done}, {error}"
    mixed(memory.read(), file.data, old, done, case)
    # A folio that reaches beyond the sector would be read again as a whole.
    file.evict()
    rest = SIZE - BAD - 4096
    assert until_it_fails(source, BAD + 4096, memory.fd, 5, rest) == (rest, 0), case
    assert memory.read()[5 : 5 + rest] == file.data[-rest:], case
    os.close(source)


def unwritable(file: File, memory: Memory, mode: int, data: bytes) -> None:
    case = f"from {memory.kind}, {mode}"
    memory.write(data)
    target = opened(file.path, os.O_RDWR | mode)
    done, error = until_it_fails(memory.fd, 0, target, 0, SIZE)
    if mode:
        assert error == errno.EIO and 4 * MIB < done <= BAD, f"{case}: {done}, {error}"
    else:
        # As for any buffered write, the error is reported on writeback.
        assert (done, error) == (SIZE, 0), f"{case}: {done}, {error}"
        assert fails(lambda: os.fsync(target)) == errno.EIO, f"{case}: is it on the disk?"
        done = 4 * MIB
    os.close(target)
    seen = opened(file.path, os.O_RDONLY)
    os.posix_fadvise(seen, 0, 0, os.POSIX_FADV_DONTNEED)
    assert os.pread(seen, done, 0) == data[:done], case
    os.close(seen)


def fails(act: Callable[[], object]) -> int:
    """Returns the errno of a call that should fail, or 0."""
    try:
        act()
    except OSError as error:
        return error.errno or -1
    return 0


def kept(folder: Path) -> None:
    """After a failed copy, space that fallocate() has reserved beyond the end of a file stays, and
    is zero. Space that the copy has added there is freed.
    """
    with mapped(folder, broken(BAD)) as file:
        for mode in MODES:
            source = opened(file.path, os.O_RDONLY | mode)
            # The reserved range: none, the whole range, its start, and its second half.
            for begin, end in ((0, 0), (0, 4 * MIB), (0, 65536), (2 * MIB, 4 * MIB)):
                for start in (BAD, BAD - 8192, BAD - 2 * MIB):
                    case = f"{mode}, {begin} to {end}, from {start}"
                    file.evict()
                    fd = memfd(0)
                    if end:
                        keep_size(fd, begin, end - begin)
                    done, error = until_it_fails(source, start, fd, 0, 4 * MIB)
                    assert error == errno.EIO and done <= BAD - start, f"{case}: {done}, {error}"
                    stat = os.fstat(fd)
                    assert stat.st_size == done, f"{case}: {stat.st_size}, not {done}"
                    # Holes may have been filled up to the end of the reserved range.
                    least = max(end - max(begin, done), 0) + done
                    most = max(end, done + mmap.PAGESIZE)
                    blocks = stat.st_blocks * 512
                    assert least <= blocks <= most, f"{case}: {blocks}, {least} to {most}"
                    os.ftruncate(fd, 5 * MIB)
                    want = file.data[start : start + done] + bytes(5 * MIB - done)
                    seen = os.pread(fd, 5 * MIB, 0)
                    assert seen == want, f"{case}: {difference(seen, want)}"
                    os.close(fd)
            os.close(source)


def keep_size(fd: int, start: int, size: int) -> None:
    """fallocate() with FALLOC_FL_KEEP_SIZE."""
    libc = ctypes.CDLL(None, use_errno=True)
    words = [ctypes.c_int64(start), ctypes.c_int64(size)]
    if libc.fallocate(fd, FALLOC_FL_KEEP_SIZE, *words):
        raise OSError(ctypes.get_errno(), "fallocate")


def cut_short(folder: Path) -> None:
    """A copy into a file that is truncated during the copy does not extend it, and leaves no memory
    beyond its end.
    """
    with mapped(folder, as_it_is) as file:
        for to in (0, 3 * MIB + 5):
            fd = memfd(SIZE)
            source = opened(file.path, os.O_RDONLY | os.O_DIRECT)
            # This makes the file system read the metadata of the file.
            assert until_it_fails(source, 0, fd, 0, SIZE) == (SIZE, 0)
            os.ftruncate(fd, 0)
            os.ftruncate(fd, SIZE)
            call("dmsetup", "suspend", "--noflush", "--nolockfs", "mapped")
            child = os.fork()
            if not child:
                os._exit(until_it_fails(source, 0, fd, 0, SIZE) != (SIZE, 0))
            # Wait until the copy has gathers in flight.
            begun = functools.partial(os.fstat, fd)
            settles(begun, lambda stat: stat.st_blocks > 0, "it has not begun")
            os.ftruncate(fd, to)
            call("dmsetup", "resume", "mapped")
            assert os.waitpid(child, 0)[1] == 0, f"{to}: the copy failed"
            stat = os.fstat(fd)
            assert stat.st_size == to, f"{to}: {stat.st_size}"
            most = to + mmap.PAGESIZE
            assert stat.st_blocks * 512 <= most, f"{to}: {stat.st_blocks * 512} bytes are left"
            os.close(fd)
            os.close(source)


def sealed(folder: Path) -> None:
    """A memfd can be sealed against writing between two copies, but not during one."""
    files = [File.of(folder / "one", 3 * MIB), File.of(folder / "other", 3 * MIB - 1)]
    sources = [opened(file.path, os.O_RDONLY | mode) for file in files for mode in MODES]
    back = setting(POOL, 4)
    busy: Counter[str] = Counter()
    for kind, number in ((kind, number) for kind in KINDS[:2] for number in range(1000)):
        if number >= 20 and busy[kind]:
            # Both cases have occurred: during a copy, and between two.
            continue
        fd = memfd(4 * MIB, "huge" in kind)
        errors: list[int] = []

        def copies(fd: int = fd, errors: list[int] = errors) -> None:
            while not errors:
                for source in sources:
                    _, error = until_it_fails(source, 0, fd, 0, 3 * MIB - 1)
                    if error:
                        errors.append(error)
                        return

        worker = threading.Thread(target=copies)
        worker.start()
        time.sleep(number / 1000)
        seal = functools.partial(fcntl.fcntl, fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        while error := fails(seal):
            assert error == errno.EBUSY, f"{kind}: {error}"
            busy[kind] += 1
        before = os.pread(fd, 4 * MIB, 0)
        worker.join()
        assert errors == [errno.EPERM], f"{kind}: {errors}"
        assert os.pread(fd, 4 * MIB, 0) == before, f"{kind}: it was written to, and is sealed"
        os.close(fd)
    print(f"# busy: {dict(busy)}", flush=True)
    assert len(busy) == 2, busy
    for fd in sources:
        os.close(fd)
    back()


LIVE_UPDATE = "/dev/liveupdate"
CREATE_SESSION, PRESERVE_FD = 0xBA00, 0xBA40


@contextlib.contextmanager
def preserving(fd: int) -> Iterator[None]:
    """Preserves a memfd for a live update, as long as the session exists."""
    device = os.open(LIVE_UPDATE, os.O_RDWR | os.O_CLOEXEC)
    # struct liveupdate_ioctl_create_session: size, fd, name; the kernel fills in the descriptor.
    request = bytearray(struct.pack("=Ii64s", 72, -1, b"copies"))
    fcntl.ioctl(device, CREATE_SESSION, request, True)
    session = struct.unpack_from("=Ii", request)[1]
    # struct liveupdate_session_preserve_fd: size, fd, token
    fcntl.ioctl(session, PRESERVE_FD, struct.pack("=IiQ", 16, fd, 1))
    yield
    os.close(session)
    os.close(device)


def preserved(folder: Path) -> None:
    """While a memfd is preserved for a live update, nothing is copied to it. A copy that has begun
    before does not extend it. Needs CONFIG_LIVEUPDATE, and kho=on liveupdate=on.
    """
    with mapped(folder, slow) as file:
        for mode in MODES:
            source = opened(file.path, os.O_RDONLY | mode)
            fd = memfd(MIB)
            assert until_it_fails(source, 0, fd, 0, MIB) == (MIB, 0), mode
            with preserving(fd):
                for at, to, size in ((0, 0, 4096), (5, 700, 9000), (0, MIB, 4096), (0, 3, MIB)):
                    done = until_it_fails(source, at, fd, to, size)
                    assert done == (0, errno.EPERM), f"{mode}, {at}, {to}: {done}"
                assert os.pread(fd, MIB, 0) == file.data[:MIB] and os.fstat(fd).st_size == MIB
                target = opened(folder / "saved", os.O_RDWR | os.O_CREAT | os.O_TRUNC | mode)
                assert until_it_fails(fd, 0, target, 0, MIB) == (MIB, 0), mode
                os.close(target)
                assert (folder / "saved").read_bytes() == file.data[:MIB], mode
            assert until_it_fails(source, 0, fd, 5, MIB) == (MIB, 0), mode
            os.close(fd)
            extended_meanwhile(source, file, mode)
            os.close(source)


def extended_meanwhile(source: int, file: File, mode: int) -> None:
    """A memfd is preserved in the middle of a copy that would extend it."""
    file.evict()
    fd = memfd(4096)
    results: list[tuple[int, int]] = []
    thread = threading.Thread(target=lambda: results.append(until_it_fails(source, 0, fd, 0, SIZE)))
    thread.start()
    time.sleep(0.15)
    assert thread.is_alive(), f"{mode}: it was over before the memfd was preserved"
    with preserving(fd):
        thread.join()
        assert os.fstat(fd).st_size == 4096, f"{mode}: {os.fstat(fd).st_size}"
    assert results[0] == (4096, errno.EPERM), f"{mode}: {results}"
    os.close(fd)


def loop(_folder: Path) -> None:
    """Copies between a tmpfs and a loop device that is stored on the same tmpfs."""
    memory, disk = Path("/run/memory"), Path("/run/disk")
    for folder in (memory, disk):
        folder.mkdir()
    call("mount", "-t", "tmpfs", "-o", "size=200M", "none", str(memory))
    image = memory / "image"
    with image.open("wb") as file:
        file.truncate(96 * MIB)
    device = call("losetup", "--find", "--show", str(image)).strip()
    call("mkfs.ext4", "-q", "-F", "-b4096", device)
    call("mount", device, str(disk))
    pairs = [(disk / "a", memory / "a"), (memory / "b", disk / "b"), (disk / "a", memory / "b")]
    for path in {path for pair in pairs for path in pair}:
        path.write_bytes(BLOB)
    end = time.monotonic() + 40
    children = []
    for number, pair in enumerate(pairs * 2):
        child = os.fork()
        if not child:
            mode = MODES[number // len(pairs)]
            flags = [os.O_RDWR | (mode if path.parent == disk else 0) for path in pair]
            one, other = map(opened, pair, flags)
            while time.monotonic() < end:
                _, error = until_it_fails(one, 0, other, 0, len(BLOB))
                if error not in (0, errno.ENOSPC):
                    os._exit(1)
                os.fsync(other)
            os._exit(0)
        children.append(child)
    children.append(os.fork())
    if not children[-1]:
        files = [opened(path, os.O_RDWR) for pair in pairs for path in pair]
        while time.monotonic() < end:
            for fd in files:
                # Copies end at the current end of the file.
                os.ftruncate(fd, 3 * MIB + 5)
                os.ftruncate(fd, len(BLOB))
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            Path("/proc/sys/vm/drop_caches").write_text("3")
        os._exit(0)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0, "a copy failed"
    # Then copies work as before.
    (disk / "a").write_bytes(BLOB)
    for mode in MODES:
        one = opened(disk / "a", os.O_RDONLY | mode)
        other = opened(memory / "a", os.O_RDWR | os.O_TRUNC)
        assert until_it_fails(one, 0, other, 0, len(BLOB)) == (len(BLOB), 0)
        assert os.pread(other, len(BLOB), 0) == BLOB, "wrong bytes"
        os.close(one)
        os.close(other)
    call("umount", str(disk))
    call("losetup", "--detach", device)
    call("umount", str(memory))


def large(folder: Path) -> None:
    """Copies to the start and end of a udmabuf of 3 GiB."""
    size, part = 3 << 30, 8 * MIB
    file = File.of(folder / "file", part)
    back = setting("/sys/module/udmabuf/parameters/size_limit_mb", size // MIB)
    memory = Memory.make("udmabuf", size)
    source = opened(file.path, os.O_RDONLY | os.O_DIRECT)
    for at in (0, size - part):
        assert until_it_fails(source, 0, memory.fd, at, part) == (part, 0), at
        with memory.access():
            assert memory.map[at : at + part] == file.data, at
    with memory.access():
        assert not any(memory.map[part : 2 * part]), "bytes outside of the copied ranges"
    os.close(source)
    memory.close()
    back()


WHOLE = MIB // 2
"""The size of the file whose copy fails in each place, of which there are hundreds."""


def failures(folder: Path) -> None:
    """Each allocation and each disk request fails once."""
    at, size = 777, WHOLE - 2000
    file = File.of(folder / "file", WHOLE)
    nth = Nth()
    with nth.disk_of(file.path), of_each_kind(2 * MIB) as every:
        machine = Machine()
        for memory, mode in ((memory, mode) for memory in every for mode in MODES):
            for fill in (True, False):
                case = f"{'into' if fill else 'from'} {memory.kind}, {mode}"
                results: Counter[str] = Counter()
                for place in range(1, 2000):
                    if not failing(nth, place, file.path, memory, mode, fill, (at, size), results):
                        break
                print(f"# {case}: {place} places, {dict(results)}", flush=True)
                assert place > 1 and set(results) <= {"all", "some", "ENOMEM", "EIO"}, results
            machine.is_as_it_was(case)


def failing(
    nth: Nth,
    place: int,
    path: Path,
    memory: Memory,
    mode: int,
    fill: bool,
    part: tuple[int, int],
    results: Counter[str],
) -> bool:
    """Copies with a failure in this place. Returns whether the failure was injected."""
    at, size = part
    new, old = BLOB[:WHOLE], OLD[:WHOLE]
    path.write_bytes(new if fill else old)
    memory.write(old if fill else new)
    fd = opened(path, os.O_RDWR | mode)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    ends = (fd, memory.fd) if fill else (memory.fd, fd)
    failed, done = nth.at(place, lambda: copy(ends[0], at, ends[1], at, size))
    if isinstance(done, OSError):
        results[errno.errorcode[done.errno or 0]] += 1
        done = 0
    else:
        assert 0 < done <= size, done
        results["all" if done == size else "some"] += 1
    os.close(fd)
    got = memory.read()[:WHOLE] if fill else path.read_bytes()
    case = f"{'into' if fill else 'from'} {memory.kind}, {mode}, place {place}, {done}"
    want = old[:at] + new[at : at + size] + old[at + size :]
    assert got[:at] == old[:at], f"{case}: bytes before it"
    mixed(got[at:], want[at:], old[at:], done, case)
    return failed


PARTS: Mapping[str, Callable[[Path], None]] = {
    one.__name__: one
    for one in (
        slow_disk,
        broken_disk,
        kept,
        cut_short,
        sealed,
        preserved,
        loop,
        large,
        failures,
    )
}


DRIVERS = Path("/sys/kernel/debug/dma-api/driver_filter")
"""Selects the driver whose errors DMA API debugging reports."""


def main(folder: str, *parts: str) -> None:
    if DRIVERS.exists():
        # It reports pages that are mapped for two devices, which is normal for a udmabuf.
        DRIVERS.write_text("none")
    for part in parts:
        start = time.monotonic()
        PARTS[part](Path(folder))
        print(f"{part}: {count} so far, {time.monotonic() - start:.0f} s", flush=True)
    print(f"{count} calls checked")


if __name__ == "__main__":
    main(*sys.argv[1:])
