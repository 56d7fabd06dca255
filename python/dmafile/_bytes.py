"""Files whose bytes come through a ring of slots, and do not stay in memory."""

import os
from collections.abc import Generator
from contextlib import suppress

from . import _dmafile
from ._load import StrPath


def stream(
    path: StrPath,
    *,
    offset: int = 0,
    length: int | None = None,
    ring: int | None = None,
    slots: int | None = None,
    device: str | None = None,
    io: str = "auto",
    method: str = "auto",
    block: int | None = None,
    queue_depth: int | None = None,
    verify: str | None = None,
) -> Generator[tuple[int, memoryview], None, None]:
    """Reads a file of any size through a ring of slots, while the caller uses earlier bytes.

    Yields the offset of the first byte in the file, and a read-only view of the bytes, in the
    order of the file. A view is released when the next one is taken, because its memory is filled
    again: copy what you keep.

    Args:
        path: A regular file or a block device.
        offset: First byte of the file to read.
        length: Number of bytes to read; up to the end of the file if None.
        ring: Size of the ring in bytes. 64 MiB if None.
        slots: Number of slots in the ring, 2 to 1024; a view is at most as large as a slot. 16 if
            None.
        device: `cuda:N` or `hip:N`: pins the ring for that GPU, so that copies from the views can
            be queued. Not tested on an AMD GPU.
        io, method, block, queue_depth: As for `load`.
        verify: As for `load`. The digest is known after the last view, when EBADMSG is raised.

    Raises:
        UsageError: A value is out of range, or options exclude each other.
        Error: Everything else, with the errno of the call that failed.
        BufferError: Something still uses a view when the next one is taken.
    """
    options = {
        "offset": offset,
        "length": length,
        "io": io,
        "method": method,
        "block": block,
        "queue_depth": queue_depth,
        "verify": verify,
    }
    running = _dmafile.Stream(os.fsdecode(path), (ring, slots), device, options)
    return _views(running)


def _views(running: _dmafile.Stream) -> Generator[tuple[int, memoryview], None, None]:
    try:
        while (part := running.next()) is not None:
            view, at = memoryview(part), part.at
            # The view has the last reference: the slot is filled again when it is released.
            del part
            yield at, view
            # Other views of the same bytes are found by `next`.
            with suppress(BufferError):
                view.release()
        running.finish()
    finally:
        running.close()
