"""Recording: appends buffers to a file that stays readable after a crash."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, overload

from . import _dmafile
from ._dmafile import Buffer, RecorderBuffer, Ticket
from ._load import StrPath
from ._save import HasDescriptor


class Recorder:
    """Appends buffers to a new file as devices fill them; finishes it at the end of a `with` block.

    The disk reads several buffers at a time directly from their memory, bypassing the page cache.
    Acknowledged records survive a system crash, together with all records before them;
    docs/recording.md describes the file. A recorder can be used by several threads, but not in a
    fork.

    >>> with dmafile.Recorder("camera.rec") as recorder:
    ...     ticket = recorder.append(b"a frame", tag=1)
    ...     ticket.wait()  # the memory may be used again
    True

    Args:
        path: The file; an existing one is not replaced (EEXIST, or EBUSY while another recorder is
            writing to it). With rotation, the second one is `path.1`, and so on.
        in_flight: Maximum number of buffers that are queued or being written, 1 to 64.
        when_full: What an append does when that many are: `wait`, or `drop` the new buffer.
        method: Method that moves the bytes: `auto` (default), `uring`, `threads`, `bounce`,
            `module`, `copy-file-range`, `premap`.
        io: Bypass or use the page cache: `auto` (default), `direct`, `buffered`.
        checksum: Whether to compute a CRC-32C of each record, for which the CPU reads it.
        sync_every: Sync, and so acknowledge what is written, after this many records, at least 1.
        sync_interval: Sync, and so acknowledge what is written, after this many seconds; if None,
            only `sync` and every 4096th record do.
        rotate_bytes: Start a new file before one exceeds this many bytes.
        rotate_after: Start a new file when one is this many seconds old.

    Raises:
        UsageError: A value is out of range (also a ValueError).
        Error: Everything else, with the errno of the call that failed (also an OSError).
    """

    def __init__(
        self,
        path: StrPath,
        *,
        in_flight: int = 4,
        when_full: Literal["wait", "drop"] = "wait",
        method: str = "auto",
        io: str = "auto",
        checksum: bool = True,
        sync_every: int | None = None,
        sync_interval: float | None = 1.0,
        rotate_bytes: int | None = None,
        rotate_after: float | None = None,
    ) -> None:
        if when_full not in ("wait", "drop"):
            raise ValueError(f"when_full: {when_full!r} is neither 'wait' nor 'drop'")
        options = {
            "in_flight": in_flight,
            "drop": when_full == "drop",
            "method": method,
            "io": io,
            "checksum": checksum,
            "sync_every": sync_every,
            "sync_interval": sync_interval,
            "rotate_bytes": rotate_bytes,
            "rotate_after": rotate_after,
        }
        self._recorder = _dmafile.Recorder(os.fsdecode(path), options)

    def attach(self, source: Buffer | HasDescriptor | int) -> RecorderBuffer:
        """Maps and inspects memory once that will be appended often, by any recorder.

        Args:
            source: A `Buffer` (not one of private memory), or a descriptor or an object that has
                one: a memfd, a dma-buf, a regular file. The descriptor may be closed afterwards.
        """
        match source:
            case Buffer():
                return _dmafile.attach(source.fileno(), source.offset)
            case int():
                return _dmafile.attach(source, 0)
            case _:
                return _dmafile.attach(source.fileno(), 0)

    def append(
        self,
        source: object,
        *,
        offset: int = 0,
        length: int | None = None,
        timestamp: int | None = None,
        tag: int = 0,
    ) -> Ticket | None:
        """Appends a buffer or a part of it; returns when it has a place in the file.

        Its bytes should not change until the ticket's `wait` returns; the object is kept alive
        until then, or until the next call of this recorder or of one of its tickets.

        Args:
            source: The result of `attach`, or anything that it accepts; or contiguous memory with
                the buffer protocol (bytes, an array).
            offset: Offset of the first byte.
            length: Number of bytes; up to the end if None.
            timestamp: In nanoseconds of a clock of your choice; if None, the time since 1970.
            tag: Any number from 0 to 2**64 - 1.

        Returns:
            A ticket: `wait()`, `done()`, `wait_durable()`, `durable()`, `number`. None if the
                buffer was dropped (`when_full="drop"`).

        Raises:
            Error: ENOSPC, EDQUOT or EFBIG if there is no room for it, after which the recording
                continues; EINVAL for a range outside the buffer, and after `finish`; otherwise the
                error of an earlier write.
        """
        part = (offset, length, timestamp, tag)
        if isinstance(source, RecorderBuffer):
            return self._recorder.append(source, *part)
        if isinstance(source, Buffer | int) or hasattr(source, "fileno"):
            return self._recorder.append(self.attach(source), *part)
        view = memoryview(source)  # type: ignore[arg-type]
        return self._recorder.append_memory(view.cast("B"), *part)

    def sync(self) -> None:
        """Waits until everything appended before the call is acknowledged."""
        self._recorder.sync()

    def finish(self) -> None:
        """Waits until everything is on the disk, and marks the recording as complete.

        Can be called again. Nothing can be appended afterwards.
        """
        self._recorder.finish()

    @property
    def records(self) -> int:
        """Number of records appended."""
        return self._recorder.recorded()[0]

    @property
    def nbytes(self) -> int:
        """Bytes of these records."""
        return self._recorder.recorded()[1]

    @property
    def durable(self) -> int:
        """Number of records acknowledged: the first `durable` ones survive a crash."""
        return self._recorder.recorded()[2]

    @property
    def dropped(self) -> int:
        """Number of buffers dropped."""
        return self._recorder.recorded()[3]

    @property
    def files(self) -> int:
        """Number of files."""
        return self._recorder.recorded()[4]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finish()


@dataclass(frozen=True, slots=True)
class Record:
    """A record of a recording. Sizes are in bytes."""

    number: int
    """Its number, from 0."""
    path: Path
    """The file that contains it."""
    offset: int
    """Offset of its first byte in that file."""
    length: int
    timestamp: int
    """In nanoseconds of the recorder's clock."""
    tag: int
    dropped: int
    """Total number of buffers dropped before it."""
    checksum: int | None
    """Its CRC-32C, if one was computed."""
    _recording: _dmafile.Recording = field(repr=False, compare=False)
    _index: int = field(repr=False, compare=False)

    def read(self) -> bytes:
        """Returns its bytes; raises an `Error` with EBADMSG if they do not match the checksum, and
        MemoryError if there is no memory for them.

        `dmafile.load(record.path, offset=record.offset, length=record.length)` loads them into
        memory that devices can share.
        """
        return self._recording.read(self._index)


class Recording(Sequence[Record]):
    """The acknowledged records, in order. See `read_recording`."""

    def __init__(self, path: StrPath) -> None:
        self._recording = _dmafile.Recording(os.fsdecode(path))

    @property
    def complete(self) -> bool:
        """True if the recording was finished and all of it is here."""
        return self._recording.complete

    @property
    def files(self) -> list[Path]:
        """The files, in order."""
        return self._recording.files

    def __len__(self) -> int:
        return len(self._recording)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        record = self._recording.record(at)
        assert record is not None
        return Record(*record, self._recording, at)


def read_recording(path: StrPath) -> Recording:
    """Reads a recording: a complete one, what a crash has left of it, or what has been recorded so
    far.

    Args:
        path: Its first file, from which the others are found.

    Raises:
        Error: EBADMSG if it is not a recording (also an OSError).
    """
    return Recording(path)
