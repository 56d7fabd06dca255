"""Capture: buffers that come one after the other, appended to a file that outlives crashes."""

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
    """Appends buffers to a new file as they come; finishes it at the end of a `with` block.

    The disk reads the buffers where they are, several at a time, past the page cache. What is
    acknowledged survives a crash of the machine, with all that came before it; docs/recording.md
    describes the file. A recorder may be used by several threads, and not in a fork.

    >>> with dmafile.Recorder("camera.rec") as recorder:
    ...     ticket = recorder.append(b"a frame", tag=1)
    ...     ticket.wait()  # the memory may be used again
    True

    Args:
        path: The file; one that exists is not replaced (EEXIST, or EBUSY while another recorder
            writes to it). With rotation, the second one is `path.1`, and so on.
        in_flight: How many buffers may be queued or being written, 1 to 64.
        when_full: What an append does when that many are: `wait`, or `drop` the new buffer.
        method: How bytes move: `auto`, `uring`, `threads`, `bounce`, `module`, `copy-file-range`,
            `premap`.
        io: Past or through the page cache: `auto`, `direct`, `buffered`.
        checksum: Whether the CPU reads each record for its CRC-32C.
        sync_every: So many records that are written are acknowledged at once, at least 1.
        sync_interval: What is written is acknowledged after so many seconds; None leaves it to
            `sync`, and to every 4096th record.
        rotate_bytes: Another file begins rather than let one have more bytes.
        rotate_seconds: Another file begins when one is that old.

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
        rotate_seconds: float | None = None,
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
            "rotate_seconds": rotate_seconds,
        }
        self._recorder = _dmafile.Recorder(os.fsdecode(path), options)

    def attach(self, source: Buffer | HasDescriptor | int) -> RecorderBuffer:
        """Maps and looks at memory once that is to be appended often, in whatever recorder.

        Args:
            source: A `Buffer` (not one of private memory), a descriptor or what has one: a memfd,
                a dma-buf, a regular file. The descriptor may be closed afterwards.
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
        """Appends a buffer or a part of it; returns when it has its place.

        Its bytes should stay as they are until the ticket's `wait` returns; the object is held
        until then.

        Args:
            source: What `attach` returned, or takes; or contiguous memory with the buffer protocol
                (bytes, an array).
            offset: The first byte.
            length: How many bytes; to the end if None.
            timestamp: In nanoseconds of whatever clock; now since 1970 if None.
            tag: Any number from 0 to 2**64 - 1.

        Returns:
            A ticket: `wait()`, `done()`, `wait_durable()`, `durable()`, `number`. None where the
            buffer was dropped (`when_full="drop"`).

        Raises:
            Error: ENOSPC, EDQUOT or EFBIG where there is no room for it, after which the recording
                goes on; EINVAL for a range outside of the buffer, and after `finish`; what an
                earlier write has failed with.
        """
        part = (offset, length, timestamp, tag)
        if isinstance(source, RecorderBuffer):
            return self._recorder.append(source, *part)
        if isinstance(source, Buffer | int) or hasattr(source, "fileno"):
            return self._recorder.append(self.attach(source), *part)
        view = memoryview(source)  # type: ignore[arg-type]
        return self._recorder.append_memory(view.cast("B"), *part)

    def sync(self) -> None:
        """Waits until all that was appended before is acknowledged."""
        self._recorder.sync()

    def finish(self) -> None:
        """Waits until all is on the disk, and marks the recording as complete.

        May be called again. Nothing is appended afterwards.
        """
        self._recorder.finish()

    @property
    def records(self) -> int:
        """How many records were appended."""
        return self._recorder.recorded()[0]

    @property
    def nbytes(self) -> int:
        """Their bytes."""
        return self._recorder.recorded()[1]

    @property
    def durable(self) -> int:
        """How many of them are acknowledged: the first so many."""
        return self._recorder.recorded()[2]

    @property
    def dropped(self) -> int:
        """How many buffers were dropped."""
        return self._recorder.recorded()[3]

    @property
    def files(self) -> int:
        """How many files there are."""
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
    """Which one it is, from 0."""
    path: Path
    """The file that it is in."""
    offset: int
    """Where it begins there."""
    length: int
    timestamp: int
    """In nanoseconds of the recorder's clock."""
    tag: int
    dropped: int
    """How many buffers had been dropped before it, in all."""
    checksum: int | None
    """Its CRC-32C, where one was computed."""
    _recording: _dmafile.Recording = field(repr=False, compare=False)
    _index: int = field(repr=False, compare=False)

    def read(self) -> bytes:
        """Its bytes; an `Error` with EBADMSG where they do not fit the checksum.

        `dmafile.load(record.path, offset=record.offset, length=record.length)` has them in memory
        that devices share.
        """
        return self._recording.read(self._index)


class Recording(Sequence[Record]):
    """The records that were acknowledged, in order. See `read_recording`."""

    def __init__(self, path: StrPath) -> None:
        self._recording = _dmafile.Recording(os.fsdecode(path))

    @property
    def complete(self) -> bool:
        """Whether the recording was finished, and all of it is here."""
        return self._recording.complete

    @property
    def files(self) -> list[Path]:
        """The files that were found."""
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
    """Reads a recording: all of it, what a crash has left of it, or what there is of it by now.

    Args:
        path: Its first file; the others are found by it.

    Raises:
        Error: EBADMSG where it is no recording (also an OSError).
    """
    return Recording(path)
