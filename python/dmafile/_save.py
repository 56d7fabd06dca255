"""Saves: memory, files and pipes to the disk, whole or not at all."""

import os
from typing import Any, Protocol, TypeAlias, TypedDict

from . import _dmafile
from ._dmafile import Buffer
from ._load import StrPath
from ._progress import Callback, callback


class HasDescriptor(Protocol):
    """What has a descriptor: an open file, a `DmaBuf`, a socket."""

    def fileno(self) -> int: ...


class HasBytes(Protocol):
    """What has the buffer protocol: bytes, a memoryview, an array."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


class HasArray(Protocol):
    """An array of NumPy, which before Python 3.12 no type checker knows to have bytes."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...


Path: TypeAlias = str | os.PathLike[str] | os.PathLike[bytes]
Stored: TypeAlias = Buffer | HasDescriptor | int | Path
Where: TypeAlias = tuple[int, int] | str | list[memoryview | tuple[int, int, int]]
"""A descriptor and an offset, a path, or pieces: memory, or a descriptor, an offset and bytes."""
Source: TypeAlias = Buffer | HasBytes | HasArray | list[Any] | HasDescriptor | int | Path


class SaveOptions(TypedDict, total=False):
    """How bytes come to the disk; `save` says what each means."""

    method: str
    io: str
    block: int | None
    queue_depth: int | None
    verify: str | None
    sync: bool
    progress: Callback | bool | None


def bytes_of(source: HasBytes) -> memoryview:
    """The bytes of one object, as such."""
    view = memoryview(source)
    if not view.c_contiguous:
        raise BufferError("the bytes of the source are not contiguous; copy it first")
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def origin(source: Stored) -> tuple[Where, int | None]:
    """Where the bytes are, a descriptor and an offset, parts of several, or a path; and how many if
    not to the end."""
    match source:
        case Buffer() if len(source.dma_bufs) > 1:
            start, end = source.offset, source.offset + source.nbytes
            pieces: list[memoryview | tuple[int, int, int]] = []
            for fd, at, size in source.dma_bufs:
                first, last = max(start, at), min(end, at + size)
                if first < last:
                    pieces.append((fd, first - at, last - first))
            return pieces, source.nbytes
        case Buffer():
            return (source.fileno(), source.offset), source.nbytes
        case int():
            return (source, 0), None
        case str() | os.PathLike():
            return os.fsdecode(source), None
        case _:
            return (source.fileno(), 0), None


def save(
    source: Source,
    path: StrPath,
    *,
    offset: int | None = None,
    length: int | None = None,
    method: str = "auto",
    io: str = "auto",
    block: int | None = None,
    queue_depth: int | None = None,
    verify: str | None = None,
    sync: bool = True,
    progress: Callback | bool | None = None,
) -> dict[str, Any]:
    """Saves memory that devices share, a file or a pipe; returns the report.

    The file comes into being beside its place, and takes it in one step when all of it is on the
    disk: after a crash or any error there is the old file or the new one, never a mixture. Its
    owner, permissions and extended attributes stay; a symbolic link is followed. The interpreter's
    other threads run on meanwhile, and Ctrl-C stops the save where it is the main thread's. Sizes
    are in bytes.

    Args:
        source: A `Buffer` (its wanted bytes), a descriptor or what has one (a memfd, a dma-buf, any
            regular file, whatever its position; a pipe, to its end), the path of a file, or bytes
            in memory: an object with the buffer protocol (`bytes`, a memoryview, an array), or a
            list of such, saved one behind the other without being gathered first. They must be
            C-contiguous. What is written to them meanwhile may be in the file or not.
        path: The file.
        offset: Where in a file or block device that exists the bytes go, of which nothing else is
            touched; that is not atomic. None: the file is replaced, or made.
        length: How many bytes are saved; all of them if None.
        method: How bytes move: `auto`, `uring`, `threads`, `bounce`, `module`, `copy-file-range`,
            `premap`.
        io: Past or through the page cache: `auto`, `direct`, `buffered`.
        block: The size of one operation, 4 KiB to 64 MiB; chosen if None.
        queue_depth: Operations in flight, 1 to 4096; chosen if None.
        verify: A checksum to compute of what is saved, `crc32c`, `xxh3`, `blake3` or `sha256`, and
            with `=HEX` to compare: a save that differs fails with EBADMSG.
        sync: Whether to wait until the file and its name are on the disk.
        progress: As that of `load`.

    Raises:
        UsageError: A value is out of range (also a ValueError).
        Error: Everything else, with the errno of the call that failed (also an OSError). The file
            is as it was then, and nothing is left behind.
        KeyboardInterrupt: Ctrl-C. As after any error, the file is as it was.
    """
    where: Where
    match source:
        case Buffer() if source.kind == "anon":
            where = [memoryview(source)]
        case list():
            where = [bytes_of(one) for one in source]
        case Buffer() | int() | str() | os.PathLike():
            where, whole = origin(source)
            length = whole if length is None else length
        case _:
            try:
                where = [bytes_of(source)]  # type: ignore[arg-type]
            except TypeError:
                where = (source.fileno(), 0)  # type: ignore[union-attr]
    options = {
        "offset": offset,
        "length": length,
        "method": method,
        "io": io,
        "block": block,
        "queue_depth": queue_depth,
        "verify": verify,
        "sync": sync,
    }
    with callback(progress) as tell:
        return _dmafile.save(where, os.fsdecode(path), options, tell)
