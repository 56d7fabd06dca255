"""Loads large files into memory that devices and processes can share, at the speed of the disk.

>>> buffer = dmafile.load("model.safetensors")  # a memfd: buffer.fileno(), memoryview(buffer)
>>> tensors = dmafile.numpy.load_file("model.safetensors")  # views of one private buffer

Linux only. Sizes are in bytes. What goes wrong is a `dmafile.Error`, which is an OSError.
"""

from ._dmafile import Buffer, __version__
from ._errors import Cancelled, Error, UsageError
from ._load import load, load_async

__all__ = [
    "Buffer",
    "Cancelled",
    "Error",
    "UsageError",
    "__version__",
    "load",
    "load_async",
]

for _named in (Error, UsageError, Cancelled, load, load_async):
    _named.__module__ = __name__
