"""Brings what a URL names to a local disk."""

import os
from pathlib import Path

from . import _dmafile
from ._load import StrPath
from ._progress import Callback, callback


def fetch(
    url: str,
    cache: StrPath,
    *,
    limit: int | None = None,
    offline: bool = False,
    progress: Callback | bool | None = None,
) -> Path:
    """Brings what a URL stands for into a cache, and returns where it is: a file, or a folder with
    a model.

    >>> model = dmafile.fetch("s3://bucket/models/qwen/", "/nvme/models")
    >>> tensors = dmafile.numpy.load_file(model)

    What is there already is not fetched: the store is only asked which version it has. One file
    after the other is in memory. Of several processes that want the same, one fetches it.

    Args:
        url: `hf://`, or an object or folder of `s3://`, `gs://` or `az://`; needs
            `pip install 'dmafile[remote]'`.
        cache: The folder, created if necessary, with the layout of the Hugging Face Hub's cache.
        limit: The most bytes of files in it: those that were not used for the longest time are
            removed.
        offline: Ask no server: what is not there is an error.
        progress: As in `load`.

    Raises:
        Error: As `load`; EOPNOTSUPP for what has no version, ENOENT for what is not there if
            offline, ENOSPC and others of writing.
        KeyboardInterrupt: Ctrl-C.
    """
    with callback(progress) as tell:
        return _dmafile.fetch(url, os.fsdecode(cache), limit, offline, tell)
