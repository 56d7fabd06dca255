"""Tests DMA_HEAP_ALLOC_AND_READ_FILE under adverse conditions: disks that are slow or broken, files
that change during the read, limits, fragmented memory, injected failures, and random requests.

    heap_flag.py FOLDER PART...    in the machine, as root

PART is one of the functions in PARTS. Ends with an assertion that names the case, or with a line
that has the number of calls.
"""

import contextlib
import errno
import fcntl
import functools
import mmap
import os
import random
import signal
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kernel.tests.vm.inside.ko import fragmentation, limited
from kernel.tests.vm.inside.nth import Nth
from tests.vm.inside.faults import Machine, broken, interrupted, mapped, slow
from tests.vm.inside.loads import BLOB, GROUP, MIB, PATIENCE, File, difference, setting

ALLOC = 0xC0184800
"""DMA_HEAP_IOCTL_ALLOC."""
READ_FILE = 1
REQUEST = struct.Struct("=IIIIQ")
"""struct dma_heap_allocation_data: file_fd, file_reserved, fd, fd_flags, heap_flags."""
IOCTL = 16
"""The number of ioctl() on x86-64."""
SYNC = 0x40086200
"""DMA_BUF_IOCTL_SYNC."""
READ, END = 1, 4

PARAMETERS = Path("/sys/module/dma_heap_read/parameters")
ORDERS = ("N", "Y")
"""Values of in_order."""
MODES = (os.O_DIRECT, 0)


@dataclass
class Heap:
    """The heap, and the number of calls."""

    fd: int
    count: int = 0

    def ask(self, file: int) -> int:
        """Returns the descriptor of a new buffer that contains the file."""
        return self.request(file, 0, 0, os.O_RDWR | os.O_CLOEXEC, READ_FILE)

    def request(self, *words: int) -> int:
        self.count += 1
        data = bytearray(REQUEST.pack(*words))
        fcntl.ioctl(self.fd, ALLOC, data)
        return int(REQUEST.unpack(data)[2])

    def load(self, path: Path, mode: int) -> int:
        file = os.open(path, os.O_RDONLY | mode)
        try:
            return self.ask(file)
        finally:
            os.close(file)

    def read(self, path: Path, mode: int) -> bytes:
        """Returns the contents of a buffer into which a file was read."""
        return content(self.load(path, mode))

    def fails(self, path: Path, mode: int) -> int:
        """Returns the errno of a load that must fail."""
        try:
            os.close(self.load(path, mode))
        except OSError as error:
            assert error.errno
            return error.errno
        raise AssertionError(f"{path} was loaded")


def content(buffer: int) -> bytes:
    """Returns the contents of a buffer, and closes it."""
    with mmap.mmap(buffer, os.lseek(buffer, 0, os.SEEK_END), prot=mmap.PROT_READ) as memory:
        fcntl.ioctl(buffer, SYNC, struct.pack("=Q", READ))
        data = bytes(memory)
        fcntl.ioctl(buffer, SYNC, struct.pack("=Q", READ | END))
    os.close(buffer)
    return data


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % mmap.PAGESIZE)


@contextlib.contextmanager
def ways() -> Iterator[list[tuple[int, str]]]:
    """Direct and buffered I/O, each during the allocation and after it."""
    back = setting(str(PARAMETERS / "in_order"), "N")
    yield [(mode, order) for order in ORDERS for mode in MODES]
    back()


def put(order: str) -> None:
    (PARAMETERS / "in_order").write_text(order)


def slow_disk(heap: Heap, folder: Path) -> None:
    """SIGKILL ends a load at once, and leaves nothing behind. Other signals do not end it."""
    with mapped(folder, slow) as file, ways() as all_ways:
        machine = Machine()
        for mode, order in all_ways:
            put(order)
            for after in (0.0, 0.3, 0.6):
                file.evict()
                child = os.fork()
                if not child:
                    # Loads that consist of many reads.
                    for _ in range(1000):
                        os.close(heap.load(file.path, mode))
                        file.evict()
                    os._exit(1)
                heap.count += 1
                time.sleep(after)
                os.kill(child, signal.SIGKILL)
                begun = time.monotonic()
                _, status = os.waitpid(child, 0)
                assert os.WIFSIGNALED(status), status
                assert time.monotonic() - begun < PATIENCE, "it was killed, and did not end"
                machine.is_as_it_was(f"killed, {mode}, {order}")
            # Another signal, as of a timer.
            data = interrupted(functools.partial(cold, heap, file, mode), IOCTL, ALLOC)
            assert data == padded(file.data), difference(data, padded(file.data))
            machine.is_as_it_was(f"a signal, {mode}, {order}")


def cold(heap: Heap, file: File, mode: int) -> bytes:
    file.evict()
    return heap.read(file.path, mode)


def broken_disk(heap: Heap, folder: Path) -> None:
    """Some sectors in the middle of a file cannot be read, so the load fails."""
    with mapped(folder, broken(5 * MIB + 4096)) as file, ways() as all_ways:
        machine = Machine()
        for mode, order in all_ways:
            put(order)
            file.evict()
            assert heap.fails(file.path, mode) == errno.EIO
            machine.is_as_it_was(f"{mode}, {order}")


def changing_file(heap: Heap, folder: Path) -> None:
    """A file is truncated and rewritten during loads: a load gets its data, zeros, or an error."""
    path, size = folder / "changing", 6 * MIB + 777
    path.write_bytes(BLOB[:size])
    child = os.fork()
    if not child:
        draw = random.Random(5)
        with path.open("r+b", buffering=0) as file:
            while True:
                at = draw.randrange(size)
                file.truncate(at)
                os.pwrite(file.fileno(), BLOB[at:size], at)
                if draw.random() < 0.3:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    results: Counter[str] = Counter()
    machine = Machine()
    with ways() as all_ways:
        end = time.monotonic() + 40
        while time.monotonic() < end or not results["loaded"]:
            assert time.monotonic() < end + PATIENCE, results
            for mode, order in all_ways:
                put(order)
                try:
                    data = heap.read(path, mode)
                except OSError as error:
                    results[errno.errorcode[error.errno or 0]] += 1
                    continue
                results["loaded"] += 1
                for at in range(0, len(data), 4096):
                    either(data[at : at + 4096], BLOB[at : min(size, at + 4096)], at)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    path.unlink()
    print(f"# {dict(results)}", flush=True)
    assert set(results) <= {"loaded", "ENODATA"}, results
    machine.is_as_it_was("a file that changes")


def either(page: bytes, want: bytes, at: int) -> None:
    """Each byte of a page is that of the file or zero, never other data."""
    if page.startswith(want) and not any(page[len(want) :]):
        return
    for got, wanted in zip(page, want.ljust(len(page), b"\0"), strict=True):
        assert got in (0, wanted), f"bytes of something else on the page at {at}"


def charged() -> bool:
    """Newer kernels charge the memory of heaps only with dma_heap.mem_accounting=1."""
    knob = Path("/sys/module/dma_heap/parameters/mem_accounting")
    return not knob.exists() or knob.read_text().strip() == "Y"


def limits(heap: Heap, folder: Path) -> None:
    """Reaching the limit of the caller's cgroup is an error, unless heaps are not charged."""
    file = File(folder / "file", BLOB * 16)
    over = errno.ENOMEM if charged() else 0
    with limited(32 * MIB):
        for mib, want in ((16, 0), (33, over), (128, over)):
            file.path.write_bytes(file.data[: mib * MIB])
            for mode in MODES:
                file.evict()
                child = os.fork()
                if not child:
                    (GROUP / "cgroup.procs").write_text(str(os.getpid()))
                    try:
                        os.close(heap.load(file.path, mode))
                    except OSError as error:
                        os._exit(error.errno or 255)
                    os._exit(0)
                heap.count += 1
                _, status = os.waitpid(child, 0)
                assert os.WIFEXITED(status), f"{mib} MiB: {status}"
                assert os.WEXITSTATUS(status) == want, f"{mib} MiB: {os.WEXITSTATUS(status)}"
        # Its page cache is charged to the group, too.
        file.evict()
    file.path.unlink()


def in_pieces(heap: Heap, folder: Path) -> None:
    """All free memory consists of single pages."""
    file = File(folder / "large", BLOB * 16)
    file.path.write_bytes(file.data)
    file.evict()
    with fragmentation(len(file.data)):
        for mode in MODES:
            data = heap.read(file.path, mode)
            assert data == file.data, difference(data, file.data)
    file.path.unlink()


def many(heap: Heap, folder: Path) -> None:
    """1,000 loads by four processes leave nothing behind."""
    file = File.of(folder / "file", 300001)
    heap.read(file.path, 0)
    machine = Machine()
    children = []
    for number in range(4):
        child = os.fork()
        if not child:
            for _ in range(250):
                data = heap.read(file.path, MODES[number % 2])
                assert data == padded(file.data), difference(data, padded(file.data))
            os._exit(0)
        heap.count += 250
        children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0, "one of four differs"
    machine.is_as_it_was("a thousand loads")


def anything(heap: Heap, folder: Path) -> None:
    """Requests with random fields, most of them almost valid, for one minute."""
    seed = time.time_ns() % 1000000
    print(f"# seed {seed}", flush=True)
    draw = random.Random(seed)
    file = File.of(folder / "file", 100001)
    pipe, other = os.pipe()
    sorts = [
        os.open(file.path, os.O_RDONLY),
        os.open(file.path, os.O_RDONLY | os.O_DIRECT),
        os.open(file.path, os.O_WRONLY),
        os.open(file.path, os.O_PATH),
        os.open(folder, os.O_RDONLY),
        os.open("/dev/zero", os.O_RDONLY),
        os.open("/proc/self/maps", os.O_RDONLY),
        os.memfd_create("empty"),
        pipe,
        other,
        heap.fd,
        99,
    ]
    machine = Machine()
    results: Counter[str] = Counter()
    end = time.monotonic() + 60

    def bits(size: int) -> int:
        return draw.getrandbits(size) & draw.getrandbits(size) & draw.getrandbits(size)

    while time.monotonic() < end:
        words = [
            draw.choice(sorts) if draw.random() < 0.9 else draw.getrandbits(32),
            0 if draw.random() < 0.8 else bits(32),
            0 if draw.random() < 0.8 else bits(32),
            os.O_RDWR | os.O_CLOEXEC if draw.random() < 0.8 else bits(32),
            READ_FILE if draw.random() < 0.9 else bits(64),
        ]
        # Without the flag the first field is a length: limit it to less than all memory.
        if words[4] == 0:
            words[:2] = [draw.getrandbits(24), 0]
        try:
            buffer = heap.request(*words)
        except OSError as error:
            results[errno.errorcode[error.errno or 0]] += 1
            continue
        results["made"] += 1
        assert words[1:3] == [0, 0] and words[4] in (0, READ_FILE), words
        if words[4]:
            assert words[0] in sorts[:2], words
            assert os.lseek(buffer, 0, os.SEEK_END) == len(padded(file.data)), words
        os.close(buffer)
    print(f"# {dict(results)}", flush=True)
    known = {"made", "EBADF", "EINVAL", "EISDIR", "ENODATA", "ENOMEM"}
    assert results["made"] and set(results) <= known, results
    for fd in sorts[:-2]:
        os.close(fd)
    machine.is_as_it_was("requests of any sort")


def failures(heap: Heap, folder: Path) -> None:
    """Each allocation and each disk request fails once, by fault injection."""
    file = File.of(folder / "file", 3 * MIB + 777)
    nth = Nth()
    machine = Machine()
    results: Counter[str] = Counter()
    with ways() as all_ways:
        for mode, order in all_ways:
            put(order)
            # in_order maps the buffer with vmap(), which logs failed allocations. So only disk
            # requests fail there.
            nth.of_those_that_wait(order == "N")
            heap.read(file.path, mode)
            with nth.disk_of(file.path):
                places = next(
                    one
                    for one in range(1, 2000)
                    if not failing(heap, file, mode, nth, one, results)
                )
            print(f"# {mode}, {order}: {places} places, {dict(results)}", flush=True)
            machine.is_as_it_was(f"failures, {mode}, {order}")
    assert set(results) == {"loaded", "ENOMEM", "EIO"}, results
    # Then loads work as before.
    for mode in MODES:
        assert heap.read(file.path, mode) == padded(file.data)


def failing(heap: Heap, file: File, mode: int, nth: Nth, place: int, results: Counter[str]) -> bool:
    """Loads with a failure in this place. Returns whether the failure was injected."""
    file.evict()
    opened = os.open(file.path, os.O_RDONLY | mode)
    failed, result = nth.at(place, lambda: heap.ask(opened))
    os.close(opened)
    if isinstance(result, OSError):
        results[errno.errorcode[result.errno or 0]] += 1
        return failed
    # The load succeeded, or another allocation was tried.
    data, want = content(result), padded(file.data)
    assert data == want, f"place {place}: {difference(data, want)}"
    results["loaded"] += 1
    return failed


PARTS: Mapping[str, Callable[[Heap, Path], None]] = {
    one.__name__: one
    for one in (
        slow_disk,
        broken_disk,
        changing_file,
        limits,
        in_pieces,
        many,
        anything,
        failures,
    )
}


def main(folder: str, *parts: str) -> None:
    heap = Heap(os.open("/dev/dma_heap/system", os.O_RDWR | os.O_CLOEXEC))
    for part in parts:
        start = time.monotonic()
        PARTS[part](heap, Path(folder))
        print(f"{part}: {heap.count} so far, {time.monotonic() - start:.0f} s", flush=True)
    print(f"{heap.count} calls checked")


if __name__ == "__main__":
    main(*sys.argv[1:])
