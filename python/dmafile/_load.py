"""Loads: blocking, and for asyncio."""

import asyncio
import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, TypeAlias, TypedDict, Unpack

from . import _dmafile
from ._dmafile import Buffer
from ._errors import Error, make
from ._progress import Callback, callback

StrPath: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]
ModelPath: TypeAlias = StrPath | Sequence[StrPath]
"""A model: one path, or all of its files."""


class Options(TypedDict, total=False):
    """Options that say how bytes move; documented in `load`."""

    pages: str
    method: str
    io: str
    allocation: str
    chunk: int | None
    block: int | None
    queue_depth: int | None
    limit: int | None
    check_memory: bool


class LoadOptions(Options, total=False):
    """Options that say which bytes, and into which kind of memory."""

    to: str
    offset: int
    length: int | None
    verify: str | None


class Source(Protocol):
    """What `load` reads in place of a file: anything that has a size and can be read by offset.

    If it has a `name`, a string, that is its name in errors.
    """

    @property
    def size(self) -> int:
        """Its size in bytes."""

    def read_into(self, offset: int, memory: memoryview, /) -> int | None:
        """Fills `memory` with the bytes from `offset` on.

        Returns how many it has written; None: all of it.
        Called from several threads at the same time, `queue_depth` of them.
        """


def load(
    path: StrPath | None = None,
    *,
    source: Source | None = None,
    to: str = "memfd",
    pages: str = "auto",
    method: str = "auto",
    io: str = "auto",
    allocation: str = "auto",
    offset: int = 0,
    length: int | None = None,
    chunk: int | None = None,
    block: int | None = None,
    queue_depth: int | None = None,
    limit: int | None = None,
    verify: str | None = None,
    check_memory: bool = True,
    progress: Callback | bool | None = None,
) -> Buffer:
    """Loads a file into memory that devices and processes can share.

    Other threads of the interpreter continue to run. Ctrl-C cancels a load in the main thread, the
    only one in which the interpreter handles signals. Sizes are in bytes.

    Args:
        path: A regular file, a block device, or, after `pip install 'dmafile[remote]'`, a URL
            (`https://`, `hf://`, `s3://`, `gs://`, `az://`).
        source: An object in place of a file, with `size` and `read_into(offset, memory)`.
        to: Kind of memory: `memfd`, `anon`, `dma-buf`, `fd:N`, and others; default: `memfd`.
            `memfd` (sealable); `anon` (private, without a descriptor); `udmabuf` (a dma-buf over a
            memfd, or several); `heap:NAME` (a dma-buf from /dev/dma_heap/NAME); `module` (a dma-buf
            of dmafile.ko); `dma-buf` (the best of the last three that works here); `fd:N` (fills an
            existing memfd or dma-buf from its start, and keeps a duplicate of N); `fd:N@OFFSET`
            (fills a range of it, from byte OFFSET on, and changes nothing else); `cuda-host`,
            `cuda-host:N`, `hip-host`, `hip-host:N` (a memfd that is pinned for a GPU while it is
            filled).
        pages: Page size: `auto` (default), `base`, `thp`, `huge`.
        method: Method that moves the bytes: `auto` (default), `uring`, `threads`, `bounce`,
            `module`, `copy-file-range`, `heap-read`, `premap`, `fetch`.
        io: Bypass or use the page cache: `auto` (default), `direct`, `buffered`.
        allocation: When memory is allocated: `auto` (default), `ahead`, `in-read`, `before`.
            `ahead` (one chunk ahead of the reads), `in-read` (by the reads themselves), `before`
            (all of it before the first read).
        offset: First byte of the file to load; default: 0.
        length: How many bytes to load; default: to the end of the file. A range that ends after the
            file is refused.
        chunk: Largest chunk of memory that is allocated before it is read into, at least a block;
            default: 128 MiB.
        block: Size of one operation, 4 KiB to 64 MiB, a multiple of the file's alignment for direct
            I/O; default: 4 MiB for direct I/O, 1 MiB through the page cache, 512 KiB for `bounce`,
            8 MiB for objects.
        queue_depth: Operations in flight, 1 to 4096; default: 8 for direct I/O, 1 to 8 by the
            number of CPUs through the page cache, 16 for objects. At most 64 threads, where each
            does one operation after another.
        limit: The most to read or receive in a second, at least 64 KiB; default: none. It is held
            on average, block by block. Methods in which the kernel moves all bytes in one call are
            left out.
        verify: Compute a checksum, and compare it with HEX if given; default: none. `crc32c`,
            `crc64nvme`, `xxh3`, `blake3` or `sha256`, which the report then contains; with `=HEX`
            the load fails (EBADMSG) if the digest differs. `store` compares each file with the
            digest that is stored with it (its name in a Hugging Face cache; what the store of an
            object says), and refuses files without one.
        check_memory: Refuse early what exceeds available memory or a cgroup's limit.
        progress: Called with the bytes in place and the total, at most 30 times a second, on this
            thread. An exception in it cancels the load, and is raised here. `True` draws a bar on
            stderr if that is a terminal.

    Raises:
        UsageError: A value is out of range, or options exclude each other (also a ValueError).
        Error: Everything else, with the errno of the call that failed (also an OSError, and
            FileNotFoundError, PermissionError, ... if there is one for the errno).
        KeyboardInterrupt: Ctrl-C. As after any error, nothing is left behind, except in an `fd:N`
            that was being filled.
    """
    options: LoadOptions = {
        "to": to,
        "pages": pages,
        "method": method,
        "io": io,
        "allocation": allocation,
        "offset": offset,
        "length": length,
        "chunk": chunk,
        "block": block,
        "queue_depth": queue_depth,
        "limit": limit,
        "verify": verify,
        "check_memory": check_memory,
    }
    if (path is None) == (source is None):
        raise TypeError("either a path or a source has to be given")
    with callback(progress) as tell:
        return _dmafile.load("" if path is None else os.fsdecode(path), options, tell, source)


def open_model(path: ModelPath) -> _dmafile.Model:
    """Opens a model."""
    if isinstance(path, (str, bytes, os.PathLike)):
        return _dmafile.Model(os.fsdecode(path))
    return _dmafile.Model([os.fsdecode(one) for one in path])


def check_empty(path: ModelPath, options: Options, verify: str | None) -> None:
    """Raises the errors that loading empty tensors would, if there were anything to load."""
    _dmafile.check({**options, "verify": verify})
    if verify is not None:
        name = os.fsdecode(path if isinstance(path, (str, bytes, os.PathLike)) else path[0])
        text = f"cannot verify: {name}: the tensors have no bytes (ENODATA)"
        raise make("failed", errno.ENODATA, text, name, "leave verify out")


async def load_async(
    path: StrPath, *, progress: Callback | bool | None = None, **options: Unpack[LoadOptions]
) -> Buffer:
    """As `load`, for asyncio: the event loop continues to run, and `progress` is called on it.

    Cancelling the task cancels the load. The cancellation is raised when the operations in flight
    have completed and everything has been freed.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def wake() -> None:
        # A closed loop has nothing that waits.
        if not loop.is_closed():
            loop.call_soon_threadsafe(ended.set)

    with callback(progress) as tell:
        running = _dmafile.start(os.fsdecode(path), options, wake)
        try:
            if tell is None:
                await ended.wait()
            else:
                await _tell_until(ended, running, tell)
        except GeneratorExit:
            # A coroutine that is being closed must not await.
            running.cancel()
            raise
        except BaseException:
            running.cancel()
            while not ended.is_set():
                # Reads in flight cannot be aborted, even if the task is cancelled again.
                try:
                    await ended.wait()
                except asyncio.CancelledError:
                    continue
            # The exception may be kept, and its frames with it; that must not keep the buffer.
            with suppress(Error):
                running.result().close()
            raise
    return running.result()


async def _tell_until(ended: asyncio.Event, running: _dmafile.Running, tell: Callback) -> None:
    """Calls `tell` whenever the progress has changed."""
    waiting = asyncio.ensure_future(ended.wait())
    told = (0, 0)
    try:
        while True:
            done, _ = await asyncio.wait((waiting,), timeout=1 / 30)
            now = running.progress()
            if now != told:
                tell(*now)
                told = now
            if done:
                return
    finally:
        waiting.cancel()
