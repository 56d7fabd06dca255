"""Snapshots: several sources in one folder, which become valid together."""

import os
from collections.abc import Mapping
from typing import Any, Unpack

from . import _dmafile
from ._dmafile import Buffer
from ._load import Options, StrPath
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

    All of them become valid together, when every byte is on the disk: after a crash or any error
    the previous snapshot is still complete. Its files are removed afterwards, so there must be room
    for both. The memory should not change during the save: concurrent writes make its digest wrong.

    Args:
        sources: What to save, by name: a Buffer, a descriptor or an object that has one, or a path.
            A name has 1 to 64 bytes, does not start with a dot, and has no slash, comma, equals
            sign or control character. At most 256.
        path: The folder, which must exist; or, after `pip install 'dmafile[remote]'`, the URL of
            one in a store (`s3://`, `gs://`, `az://`), with a slash at its end.
        method: As in `save`, for each source.
        io: As in `save`.
        block: As in `save`.
        queue_depth: As in `save`.
        verify: The digests that a load compares: `crc32c`, `xxh3`, `blake3`, `sha256`.
        sync: Whether to wait until everything is on the disk.
        progress: As in `load`, for all sources together.

    Raises:
        UsageError: A name or value is invalid (also a ValueError).
        Error: Everything else (also an OSError): EBUSY while another snapshot is being saved to the
            folder; in a store, if another one was saved there meanwhile.
        KeyboardInterrupt: Ctrl-C. As after any error, the previous snapshot is still complete.
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
    progress: Callback | bool | None = None,
    **options: Unpack[Options],
) -> dict[str, Buffer]:
    """Loads the snapshot in a folder: one buffer per source, by name.

    Each is checked against its size and digest. If another snapshot replaces this one during the
    load, either the old or the new one is loaded, completely. An empty source becomes an empty
    memfd, whatever kind of memory is requested.

    Args:
        path: The folder, or the URL of one in a store.
        to: As in `load`, for each source; `fd:N` only if there is one source.
        progress: As in `load`, for all sources together.
        options: As in `load`: `pages`, `method`, `io`, `allocation`, `chunk`, `block`,
            `queue_depth`, `check_memory`.

    Raises:
        UsageError: A value is out of range, or options exclude each other (also a ValueError).
        Error: Everything else (also an OSError): EBADMSG for a damaged file or manifest, with its
            name.
        KeyboardInterrupt: Ctrl-C.
    """
    with callback(progress) as tell:
        return dict(_dmafile.load_snapshot(os.fsdecode(path), {**options, "to": to}, tell))
