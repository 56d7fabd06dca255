"""One way from a file into memory, in a process of its own.

    way.py FILE SIZE COUNT WORD=VALUE...

Makes COUNT buffers, fills them one after the other with SIZE bytes each of FILE, and closes them.

    to=memfd|u+mfd|udmabuf|heap    a memfd; one with a udmabuf over it; the same, filled through the
                                   udmabuf; a dma-buf of the system heap
    method=read|sendfile|splice|copy-file-range
                                   read() goes into a mapping
    method=populate                nothing is read: the memory is made, all of it (to=anon
                                   pages=4k|thp|huge, to=memfd pages=4k|huge)
    method=heap-read|in-order      the heap reads the file, while it allocates or afterwards (the
                                   kernel of the series): made and filled at once
    io=buffered|direct
    by=dmafile                     by dmafile, with the names and words that dmafile.load() has;
                                   made and filled at once, of a whole file
    check=1                        compares what came with what read() says, outside the clock

In a machine that counts instructions (vm/run --count-instructions) `instructions` are told, too, of
each step: all that the machine executed.

Prints one JSON object: seconds to `create`, `fill`, and `close`, and of CPU, by its own clock, and
dmafile's `report`; or `refused`, why this way can't be gone here. Without dmafile only what Python
brings is imported, so that it starts fast (python3 -I -S).
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import resource
import struct
import sys
import time

# Imports that only types need take longer than all others.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import Any

    import dmafile

HEAP = "/dev/dma_heap/system"
UDMABUF = "/dev/udmabuf"
SIZE_LIMIT = "/sys/module/udmabuf/parameters/size_limit_mb"
IN_ORDER = "/sys/module/dma_heap_read/parameters/in_order"
# linux/dma-heap.h, linux/udmabuf.h, linux/dma-buf.h
HEAP_ALLOC, UDMABUF_CREATE, SYNC = 0xC0184800, 0x40187542, 0x40086200
ALLOC_AND_READ_FILE, CLOEXEC = 1, 1
SYNC_RW, SYNC_END = 3, 4
NUMBERS = ("block", "gather", "length", "offset", "queue_depth")
PIPE, PIECE = 1 << 20, 16 << 20
# linux/mman.h, of which Python has no names yet.
MAP_HUGETLB, MADV_POPULATE_WRITE = 0x40000, 23


# The marks of vm/mark.h: `nopl disp32(%rax,%rax,1)` and a number, and here a `ret`.
MARK, RETURN = b"\x0f\x1f\x84\x00\x64\x6d\x66", b"\xc3"
STEPS = ("create", "fill", "close")
SETTLE = 0.05
"""Seconds after which what was put off until others are done, is done."""


class Steps:
    """When each step ended: by the clock, in CPU time, and in instructions where those count."""

    def __init__(self, count: int) -> None:
        self.marks, self.count = os.environ.get("DMAFILE_MARKS"), count
        self.times: list[tuple[float, float]] = []
        if self.marks:
            import ctypes

            self.code = mmap.mmap(-1, mmap.PAGESIZE, prot=7)
            self.code.write(b"".join(MARK + bytes([one]) + RETURN for one in range(count)))
            start = ctypes.addressof(ctypes.c_char.from_buffer(self.code))
            size = len(MARK) + 2
            self.calls = [ctypes.CFUNCTYPE(None)(start + one * size) for one in range(count)]

    def settle(self) -> None:
        if self.marks:
            time.sleep(SETTLE)

    def mark(self) -> None:
        """A step is over, or the first one begins."""
        if self.marks:
            self.calls[len(self.times)]()
        self.times.append((time.perf_counter(), busy()))

    def seconds(self, step: int) -> float:
        return self.times[step + 1][0] - self.times[step][0]

    def cpu(self, step: int) -> float:
        return self.times[step + 1][1] - self.times[step][1]

    def instructions(self) -> list[int]:
        """Of each step; nothing where nobody counts."""
        if not self.marks:
            return []
        with open(self.marks) as file:  # noqa: PTH123
            lines = [line.split() for line in file.read().splitlines()[-self.count :]]
        counts = [int(user) + int(kernel) for _, user, kernel in lines]
        return [after - before for before, after in zip(counts, counts[1:])]  # noqa: B905, RUF007


class Refused(Exception):
    """A way that this machine does not have."""


class Memory:
    """What is to be filled: descriptors that are -1, and a mapping that is None, are not there."""

    def __init__(self, memfd: int = -1, dmabuf: int = -1) -> None:
        self.memfd, self.dmabuf = memfd, dmabuf
        self.map: mmap.mmap | None = None

    def close(self) -> None:
        if self.map:
            self.map.close()
        for fd in (self.dmabuf, self.memfd):
            if fd >= 0:
                os.close(fd)


def attempt(what: str, call: Callable[..., Any], *words: Any) -> Any:
    """What a call returns; where it fails, this way is refused, and it is said why."""
    try:
        return call(*words)
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, str(error.errno))
        raise Refused(f"{what}: {error.strerror} ({name})") from None


def allocate(length: int, flags: int) -> int:
    """A buffer of the system heap of that length; with the flag, of the file of that number."""
    heap = attempt(HEAP, os.open, HEAP, os.O_RDONLY | os.O_CLOEXEC)
    data = bytearray(struct.pack("=QIIQ", length, 0, os.O_RDWR | os.O_CLOEXEC, flags))
    what = "DMA_HEAP_ALLOC_AND_READ_FILE" if flags else "DMA_HEAP_IOCTL_ALLOC"
    attempt(what, fcntl.ioctl, heap, HEAP_ALLOC, data)
    os.close(heap)
    return int(struct.unpack("=QIIQ", data)[1])


def size_limit() -> int | None:
    """MiB that a udmabuf may have; None where that isn't said."""
    try:
        with open(SIZE_LIMIT) as file:  # noqa: PTH123
            return int(file.read())
    except OSError:
        return None


def udmabuf_over(memfd: int, size: int) -> int:
    node = attempt(UDMABUF, os.open, UDMABUF, os.O_RDWR | os.O_CLOEXEC)
    if (limit := size_limit()) is not None and size > limit << 20:
        raise Refused(f"UDMABUF_CREATE: more than {limit} MiB; raise {SIZE_LIMIT}")
    request = bytearray(struct.pack("=IIQQ", memfd, CLOEXEC, 0, size))
    dmabuf = attempt("UDMABUF_CREATE", fcntl.ioctl, node, UDMABUF_CREATE, request, True)
    os.close(node)
    return int(dmabuf)


def create(words: Mapping[str, str], size: int) -> Memory:
    """Memory that is not filled yet, mapped where the way is read()."""
    memory, to, maps = Memory(), words["to"], words["method"] == "read"
    if by_heap(words):
        return memory
    if words["method"] == "populate":
        populate(words, memory, size)
        return memory
    if to == "heap":
        memory.dmabuf = allocate(size, 0)
    else:
        memory.memfd = os.memfd_create("bench", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(memory.memfd, size)
        if to != "memfd":
            fcntl.fcntl(memory.memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            memory.dmabuf = udmabuf_over(memory.memfd, size)
    if maps:
        memory.map = attempt("mmap", mmap.mmap, target(words, memory), size)
    return memory


def populate(words: Mapping[str, str], memory: Memory, size: int) -> None:
    """All pages of new memory."""
    pages = words["pages"]
    if words["to"] == "anon":
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (MAP_HUGETLB if pages == "huge" else 0)
        memory.map = attempt("mmap", mmap.mmap, -1, size, flags)
    else:
        huge = os.MFD_HUGETLB if pages == "huge" else 0
        memory.memfd = attempt("memfd_create", os.memfd_create, "bench", huge)
        os.ftruncate(memory.memfd, size)
        memory.map = attempt("mmap", mmap.mmap, memory.memfd, size)
    if pages != "huge" and words["to"] == "anon":
        memory.map.madvise(mmap.MADV_HUGEPAGE if pages == "thp" else mmap.MADV_NOHUGEPAGE)
    attempt("MADV_POPULATE_WRITE", memory.map.madvise, MADV_POPULATE_WRITE)


def by_heap(words: Mapping[str, str]) -> bool:
    return words["method"] in ("heap-read", "in-order")


def target(words: Mapping[str, str], memory: Memory) -> int:
    """The descriptor that is filled: of a memfd with a udmabuf over it, which one is meant."""
    return memory.memfd if words["to"] in ("memfd", "u+mfd") else memory.dmabuf


def fill(words: Mapping[str, str], memory: Memory, file: int, start: int, size: int) -> None:
    method = words["method"]
    if by_heap(words):
        memory.dmabuf = allocate(file, ALLOC_AND_READ_FILE)
        return
    pipes = list(os.pipe()) if method == "splice" else []
    if pipes:
        fcntl.fcntl(pipes[1], fcntl.F_SETPIPE_SZ, PIPE)
    out, done = target(words, memory), 0
    view = memoryview(memory.map) if memory.map else None
    os.lseek(file, start, os.SEEK_SET)
    while done < size:
        left = size - done
        if view:
            got = attempt("read", os.readv, file, [view[done:]])
        elif method == "sendfile":
            got = attempt("sendfile", os.sendfile, out, file, None, left)
        elif method == "splice":
            got = attempt("splice", os.splice, file, pipes[1], left)
            moved = 0
            while moved < got:
                moved += attempt("splice", os.splice, pipes[0], out, got - moved)
        elif method == "copy-file-range":
            got = attempt(
                "copy_file_range", os.copy_file_range, file, out, left, start + done, done
            )
        else:
            raise SystemExit(f"method={method}: no such method")
        if not got:
            raise Refused(f"{method}: ended at byte {start + done}")
        done += got
    if view:
        view.release()
    for fd in pipes:
        os.close(fd)


def content(memory: Memory, size: int) -> Iterator[bytes]:
    """Its bytes, in pieces: there is no room for all of them a second time."""
    fd = memory.memfd if memory.memfd >= 0 else memory.dmabuf
    view = memory.map or mmap.mmap(fd, size, prot=mmap.PROT_READ)
    if memory.dmabuf >= 0:
        fcntl.ioctl(memory.dmabuf, SYNC, struct.pack("=Q", SYNC_RW))
    for at in range(0, size, PIECE):
        yield view[at : min(at + PIECE, size)]
    if memory.dmabuf >= 0:
        fcntl.ioctl(memory.dmabuf, SYNC, struct.pack("=Q", SYNC_RW | SYNC_END))
    if not memory.map:
        view.close()


def content_of(buffer: dmafile.Buffer, size: int) -> Iterator[bytes]:
    """The same of what dmafile has made: it may consist of several dma-bufs."""
    if not (parts := buffer.dma_bufs):
        with memoryview(buffer) as view:
            for at in range(0, len(view), PIECE):
                yield bytes(view[at : at + PIECE])
    for part in parts:
        # It is made of whole pages.
        yield from content(Memory(dmabuf=part.fd), min(part.bytes, size - part.at))


def compare(words: Mapping[str, str], pieces: Iterable[bytes], path: str, size: int) -> None:
    """Ends this program, unless the pieces are the first `size` bytes of the file, all of them."""
    done = 0
    with open(path, "rb") as file:  # noqa: PTH123 (pathlib is a slow import)
        for piece in pieces:
            if piece != file.read(len(piece)):
                raise SystemExit(f"{words}: wrong bytes")
            done += len(piece)
    if done != size:
        raise SystemExit(f"{words}: {done} bytes, not {size}")


def load(words: Mapping[str, str], path: str, size: int) -> dict[str, Any]:
    """By dmafile, as its users call it."""
    import dmafile

    options: Any = {name: word for name, word in words.items() if name not in ("by", "check")}
    options |= {name: int(word) for name, word in options.items() if name in NUMBERS}
    steps = Steps(4)
    steps.settle()
    steps.mark()
    # It is made while it is filled.
    steps.mark()
    try:
        buffer = dmafile.load(path, **options)
    except dmafile.Error as error:
        raise Refused(str(error)) from None
    steps.mark()
    report = buffer.report
    if words.get("check"):
        compare(words, content_of(buffer, size), path, size)
    buffer.close()
    steps.settle()
    steps.mark()
    return {**told(steps), "report": report}


def told(steps: Steps) -> dict[str, Any]:
    # What checks bytes is not measured; of CPU time the closing is none of the load's.
    said: dict[str, Any] = {name: steps.seconds(step) for step, name in enumerate(STEPS)}
    said["cpu"] = steps.cpu(0) + steps.cpu(1)
    if counts := steps.instructions():
        said["instructions"] = dict(zip(STEPS, counts))  # noqa: B905
    return said


def busy() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def go(path: str, size: int, count: int, words: Mapping[str, str]) -> dict[str, Any]:
    if words.get("by") == "dmafile":
        return load(words, path, size)
    if by_heap(words):
        order = attempt(IN_ORDER, os.open, IN_ORDER, os.O_WRONLY | os.O_CLOEXEC)
        os.write(order, b"Y" if words["method"] == "in-order" else b"N")
        os.close(order)
        if count > 1:
            raise Refused("a heap reads whole files")
    direct = os.O_DIRECT if words["io"] == "direct" else 0
    file = attempt(path, os.open, path, os.O_RDONLY | os.O_CLOEXEC | direct)
    fills = words["method"] != "populate"
    steps = Steps(4)
    steps.settle()
    steps.mark()
    every = [create(words, size) for _ in range(count)]
    steps.mark()
    for number, memory in enumerate(every if fills else []):
        fill(words, memory, file, number * size, size)
    steps.mark()
    if words.get("check") and fills:
        pieces = (piece for memory in every for piece in content(memory, size))
        compare(words, pieces, path, size * count)
    for memory in every:
        memory.close()
    steps.settle()
    steps.mark()
    return told(steps)


def main() -> None:
    path, size, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    words = dict(word.split("=", 1) for word in sys.argv[4:])
    try:
        print(json.dumps(go(path, size, count, words)))
    except Refused as why:
        print(json.dumps({"refused": str(why)}))


if __name__ == "__main__":
    main()
