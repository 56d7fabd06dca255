"""Saves: writes memory, files and pipes to the disk, completely or not at all."""

import os
from typing import Any, Protocol, TypeAlias, TypedDict

from . import _dmafile
from ._dmafile import Buffer
from ._load import StrPath
from ._progress import Callback, callback


class HasDescriptor(Protocol):
    """An object with a descriptor: an open file, a `DmaBuf`, a socket."""

    def fileno(self) -> int: ...


class HasBytes(Protocol):
    """An object with the buffer protocol: bytes, a memoryview, an array."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


class HasArray(Protocol):
    """A NumPy array; before Python 3.12 type checkers do not know that it has the buffer
    protocol."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...


Path: TypeAlias = str | os.PathLike[str] | os.PathLike[bytes]
Stored: TypeAlias = Buffer | HasDescriptor | int | Path
Where: TypeAlias = tuple[int, int] | str | list[memoryview | tuple[int, int, int]]
"""A descriptor and an offset; a path; or pieces: memory, or a descriptor, an offset and a size."""
Source: TypeAlias = Buffer | HasBytes | HasArray | list[Any] | HasDescriptor | int | Path


class SaveOptions(TypedDict, total=False):
    """Options of a save; documented in `save`."""

    method: str
    io: str
    block: int | None
    queue_depth: int | None
    verify: str | None
    sync: bool
    progress: Callback | bool | None


def bytes_of(source: HasBytes) -> memoryview:
    """The bytes of an object, as a flat memoryview."""
    view = memoryview(source)
    if not view.c_contiguous:
        raise BufferError("the bytes of the source are not contiguous; copy it first")
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def origin(source: Stored) -> tuple[Where, int | None]:
    """Where the bytes are: a descriptor and an offset, parts of several, or a path; and their
    number, None for all up to the end."""
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

    The new file is written next to its final place, and replaces the old one atomically when all of
    it is on the disk: after a crash or any error there is either the old file or the new one, never
    a mixture. Owner, permissions and extended attributes are kept; a symbolic link is followed,
    unless another user has made it in a folder like `/tmp`.
    Other threads of the interpreter continue to run. Ctrl-C cancels a save in the main thread.
    Sizes are in bytes.

    Args:
        source: A `Buffer` (its requested bytes); a descriptor or an object that has one (a memfd, a
            dma-buf, any regular file, from its start whatever its position; a pipe, up to its end);
            the path of a file; or bytes in memory: an object with the buffer protocol (`bytes`, a
            memoryview, an array), or a list of such objects, which are saved back to back without
            being copied together first. They must be C-contiguous. Concurrent writes to them may or
            may not be in the file.
        path: The file, or, after `pip install 'dmafile[remote]'`, the URL of an object in a store
            (`s3://`, `gs://`, `az://`), which is replaced when all bytes have arrived.
        offset: Write in place, from this byte on; default: the file is replaced. The file or block
            device must exist; nothing else in it changes. That is not atomic: a save that ends
            early leaves a mixture of old and new bytes. The source may be another range of the
            file, if the two do not overlap.
        length: How many bytes to save; default: to the end of the source.
        method: Method that moves the bytes: `auto` (default), `uring`, `threads`, `bounce`,
            `module`, `copy-file-range`, `premap`.
        io: Bypass or use the page cache: `auto` (default), `direct`, `buffered`.
        block: Size of one operation, 4 KiB to 64 MiB, a multiple of the file's alignment for direct
            I/O; default: 4 MiB for direct I/O, 1 MiB through the page cache, 512 KiB for `bounce`.
        queue_depth: Operations in flight, 1 to 4096; default: 8 for direct I/O, 1 to 4 by the
            number of CPUs through the page cache. At most 64 threads, where each does one operation
            after another.
        verify: Compute a checksum of what is saved, and compare it with HEX if given; default:
            none. `crc32c`, `crc64nvme`, `xxh3`, `blake3` or `sha256`, which the report then
            contains; with `=HEX` the save fails (EBADMSG) if the digest differs, before the old
            file is replaced.
        sync: Return only when the bytes and the name are on the disk.
        progress: As in `load`.

    Raises:
        UsageError: A value is out of range (also a ValueError).
        Error: Everything else, with the errno of the call that failed (also an OSError). The old
            file is unchanged then, and nothing is left behind.
        KeyboardInterrupt: Ctrl-C. As after any error, the old file is unchanged.
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
