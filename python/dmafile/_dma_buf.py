"""The type of the elements of `Buffer.dma_bufs`."""

from typing import NamedTuple


class DmaBuf(NamedTuple):
    """One of the dma-bufs that a buffer consists of; `Buffer.dma_bufs` lists all of them."""

    fd: int
    """Its descriptor, which belongs to the buffer and is closed with it."""
    at: int
    """Offset of its first byte from the start of the first one; the file starts at
    `Buffer.offset`."""
    bytes: int
    """Its size in bytes."""
