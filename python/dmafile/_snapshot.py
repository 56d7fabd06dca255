"""Snapshots: several sources in one folder, which become valid at once."""

import os
from collections.abc import Mapping
from typing import Any

from . import _dmafile
from ._dmafile import Buffer
from ._load import StrPath
from ._progress import Callback, callback
from ._save import Stored, origin


def save_snapshot(
    sources: Mapping[str, Stored],
    path: StrPath,
    *,
    method: str = "auto",
    io: str = "auto",
    block: int | None = None,
    queue_depth: int | None = None,
    verify: str = "xxh3",
    sync: bool = True,
    progress: Callback | bool | None = None,
) -> dict[str, Any]:
    """Saves several sources into a folder; returns the report.

    They become valid all at once, when every byte is on the disk: after a crash or any error the
    snapshot before is there, whole. Its files are removed afterwards, so there must be room for
    both. What is written to memory meanwhile makes its digest wrong: it should be at rest.

    Args:
        sources: What is saved, by name: a Buffer, a descriptor or what has one, a path. A name has
            1 to 64 bytes, begins with no dot, and has no slash, comma, equals sign or control
            character; 256 at most.
        path: The folder, which exists.
        method: As that of `save`, for each source.
        io: The same.
        block: The same.
        queue_depth: The same.
        verify: The digests that a load compares: `crc32c`, `xxh3`, `blake3`, `sha256`.
        sync: Whether to wait until all of it is on the disk.
        progress: As that of `load`, of all sources together.

    Raises:
        UsageError: A name or value cannot be (also a ValueError).
        Error: Everything else (also an OSError): EBUSY while another snapshot is being saved to the
            folder.
        KeyboardInterrupt: Ctrl-C. As after any error, the snapshot before is there.
    """
    named = []
    for name, source in sources.items():
        where, length = origin(source)
        named.append((name, where, length))
    options = {"method": method, "io": io, "block": block, "queue_depth": queue_depth}
    with callback(progress) as tell:
        return _dmafile.save_snapshot(named, os.fsdecode(path), verify, sync, options, tell)


def load_snapshot(
    path: StrPath,
    *,
    to: str = "memfd",
    pages: str = "auto",
    method: str = "auto",
    io: str = "auto",
    allocation: str = "auto",
    gather: int | None = None,
    block: int | None = None,
    queue_depth: int | None = None,
    memory_check: bool = True,
    progress: Callback | bool | None = None,
) -> dict[str, Buffer]:
    """Loads the snapshot in a folder: a buffer for each source, by its name.

    Each is compared with its size and digest. While another snapshot takes the place of this one,
    all of the one or all of the other is loaded. A source without a byte comes back as an empty
    memfd, whatever kind is asked for.

    Args:
        path: The folder.
        to: As that of `load`, for each source; not `fd:N`, unless there is only one.
        pages: As that of `load`.
        method: The same.
        io: The same.
        allocation: The same.
        gather: The same.
        block: The same.
        queue_depth: The same.
        memory_check: The same.
        progress: The same, of all sources together.

    Raises:
        UsageError: A value is out of range or cannot be combined (also a ValueError).
        Error: Everything else (also an OSError): EBADMSG for a file or manifest that is damaged,
            which it names.
        KeyboardInterrupt: Ctrl-C.
    """
    options = {
        "to": to,
        "pages": pages,
        "method": method,
        "io": io,
        "allocation": allocation,
        "gather": gather,
        "block": block,
        "queue_depth": queue_depth,
        "memory_check": memory_check,
    }
    with callback(progress) as tell:
        return dict(_dmafile.load_snapshot(os.fsdecode(path), options, tell))
