"""Moves large files between the disk and memory that devices and processes can share.

>>> buffer = dmafile.load("model.safetensors")  # a memfd: buffer.fileno(), memoryview(buffer)
>>> report = dmafile.save(buffer, "copy.safetensors")  # on the disk, or unchanged
>>> tensors = dmafile.numpy.load_file("model.safetensors")  # views of one private buffer
>>> held = dmafile.shared("model/", wait=600)  # one load for several processes

Linux only. Sizes are in bytes. Failures raise `dmafile.Error`, which is an OSError.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

try:
    # The same with what opens URLs, of the package dmafile-remote.
    _remote = import_module("dmafile_remote._dmafile")
except ImportError:
    pass
else:
    sys.modules[f"{__name__}._dmafile"] = vars()["_dmafile"] = _remote

from ._bytes import stream
from ._dma_buf import DmaBuf
from ._dmafile import Buffer, Holder, RecorderBuffer, Ticket, __version__
from ._errors import Cancelled, Error, SafetensorError, UsageError
from ._fetch import fetch
from ._freeze import Thawed, freeze, thaw
from ._hold import Held, HeldFile, hold, holds, release, shared, take
from ._load import load, load_async
from ._record import Record, Recorder, Recording, read_recording
from ._safetensors import TensorSpec, deserialize, serialize, serialize_file
from ._save import save
from ._snapshot import load_snapshot, save_snapshot
from ._tensors import TensorFile, TensorSlice, open_tensors, safe_open
from ._tensors import _safe_open_handle as _safe_open_handle

if TYPE_CHECKING:
    from . import checkpoint as checkpoint
    from . import cuda as cuda
    from . import numpy as numpy
    from . import torch as torch
    from . import transformers as transformers

__all__ = [
    "Buffer",
    "Cancelled",
    "DmaBuf",
    "Error",
    "Held",
    "HeldFile",
    "Holder",
    "Record",
    "Recorder",
    "RecorderBuffer",
    "Recording",
    "SafetensorError",
    "TensorFile",
    "TensorSlice",
    "TensorSpec",
    "Thawed",
    "Ticket",
    "UsageError",
    "__version__",
    "deserialize",
    "fetch",
    "freeze",
    "hold",
    "holds",
    "load",
    "load_async",
    "load_snapshot",
    "open_tensors",
    "read_recording",
    "release",
    "safe_open",
    "save",
    "save_snapshot",
    "serialize",
    "serialize_file",
    "shared",
    "stream",
    "take",
    "thaw",
]

for _named in (
    DmaBuf,
    Error,
    UsageError,
    Cancelled,
    SafetensorError,
    load,
    load_async,
    stream,
    hold,
    take,
    shared,
    holds,
    release,
    Held,
    HeldFile,
    save,
    load_snapshot,
    save_snapshot,
    open_tensors,
    TensorFile,
    TensorSlice,
    TensorSpec,
    safe_open,
    serialize,
    serialize_file,
    deserialize,
    Record,
    Recorder,
    Recording,
    read_recording,
    Thawed,
    freeze,
    thaw,
):
    _named.__module__ = __name__


def __getattr__(name: str) -> ModuleType:
    """Imports the modules that need other packages, such as `dmafile.numpy`, on first use.

    If a package is missing, the module has no such attribute: `hasattr` returns False, and the
    AttributeError has the ImportError as its cause. `import dmafile.torch` raises the ImportError
    itself.
    """
    if name in ("checkpoint", "cuda", "numpy", "torch", "transformers"):
        try:
            return import_module(f"{__name__}.{name}")
        except ImportError as error:
            text = f"module {__name__!r} has no attribute {name!r} here: {error}"
            raise AttributeError(text, name=name) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
