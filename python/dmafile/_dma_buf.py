"""What a buffer says of its dma-bufs."""

from typing import NamedTuple


class DmaBuf(NamedTuple):
    """One of the dma-bufs that a buffer consists of; `Buffer.dma_bufs` has all of them."""

    fd: int
    """Its descriptor, which stays the buffer's: it is closed with it."""
    at: int
    """Where it begins, in bytes from the first one's start; the file's begin at `Buffer.offset`."""
    bytes: int
    """How many bytes it has."""
