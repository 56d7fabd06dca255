"""Loads of tensors into the memory of a GPU."""

import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeAlias

from . import _dmafile
from ._errors import Error, make
from ._load import Options
from ._progress import Callback, callback
from ._stream import Placed, Tensors, chosen, parts_of
from ._stream import stream as _on_host

Ring: TypeAlias = tuple[int, int] | None
"""Size of the ring in host memory, in bytes, and number of slots. None: 64 MiB and 16 slots."""
How: TypeAlias = tuple[str, int | None, Ring]

_ALIGN = 256
"""Alignment of blocks of tensors, the same as in device libraries."""
_GAP = 64 << 10
"""Gaps between tensors that are shorter, in bytes, cost less to copy than a separate copy."""


def is_usable(how: How) -> bool:
    """Returns True if the driver can be used; otherwise warns why not."""
    try:
        _dmafile.check_device(how[0])
    except Error as error:
        text = f"{error}: tensors are copied from the memory of the host"
        warnings.warn(text, RuntimeWarning, stacklevel=4)
        return False
    return True


class Layout:
    """The positions of tensors in one block of memory: adjacent as in the files where the alignment
    of their elements allows it, so that one copy moves many tensors."""

    def __init__(self, rows: Iterable[Placed], sizes: Callable[[str], int]) -> None:
        self.places: list[tuple[int, int, int]] = []
        """Offset in the files, number of bytes, and offset in the memory."""
        self.offsets: dict[str, int] = {}
        self.nbytes = 0
        for name, dtype, _, at, nbytes in rows:
            if nbytes:
                self._add(at, nbytes, sizes(dtype))
                start, _, to = self.places[-1]
                self.offsets[name] = to + at - start

    def _add(self, at: int, nbytes: int, size: int) -> None:
        if self.places:
            start, had, to = self.places[-1]
            near = 0 <= at - (start + had) < _GAP
            if near and (to + at - start) % size == 0:
                self.places[-1] = (start, at + nbytes - start, to)
                self.nbytes = to + at + nbytes - start
                return
        to = -(-self.nbytes // _ALIGN) * _ALIGN
        self.places.append((at, nbytes, to))
        self.nbytes = to + nbytes


def load(
    model: _dmafile.Model,
    patterns: list[str] | None,
    layout: Layout,
    memory: _dmafile.DeviceMemory,
    how: How,
    verify: str | None,
    progress: Callback | bool | None,
    options: Options,
) -> dict[str, Any]:
    """Loads tensors into memory at the positions of a layout; returns the report."""
    with callback(progress) as tell:
        every = {**options, "verify": verify}
        return _dmafile.load_to_device(model, patterns, (memory, layout.places), how, every, tell)


Batch: TypeAlias = tuple[Any, int, list[Placed]]
"""A block of memory (None if it would be empty), the offset of its first byte in the files, and
the tensors in it."""


def stream(
    model: _dmafile.Model,
    tensors: Tensors,
    allocate: Callable[[int], tuple[Any, int]],
    how: How,
    budget: int,
    verify: str | None,
    progress: Callback | bool | None,
    options: Options,
) -> tuple[list[Placed], Generator[Batch, None, None]]:
    """The rows of the wanted tensors, and a generator of their parts, in the order of their bytes.
    Each part is in a block that `allocate` returns together with its address.

    Invalid arguments are raised immediately, other errors during the iteration.
    """
    if budget < 1:
        raise make("usage", None, f"budget: {budget} is out of range: 1 byte or more", None, "")
    _dmafile.check({**options, "verify": verify})
    if verify is not None and tensors is not None:
        text = "verify: cannot verify selected tensors; load whole files, or drop verify"
        raise make("usage", None, text, None, "load whole files, or drop verify")
    if verify is not None:
        # Only to raise its errors.
        model.digests(verify)
    patterns, rows = chosen(model, tensors)
    if not any(row[4] for row in rows):
        # No memory of the device is needed, but the digests must still be compared.
        return _on_host(model, tensors, budget, verify, progress, options)
    every: Any = {**options, "verify": verify}
    return rows, _run(model, patterns, rows, allocate, how, budget, progress, every)


def _run(
    model: _dmafile.Model,
    patterns: list[str] | None,
    rows: list[Placed],
    allocate: Callable[[int], tuple[Any, int]],
    how: How,
    budget: int,
    progress: Callback | bool | None,
    options: Any,
) -> Generator[Batch, None, None]:
    parts = parts_of(rows, budget)
    running = _dmafile.DeviceStream(model, patterns, how, options)
    waiting, blocks, held = deque(parts), deque[Any](), 0
    try:
        with callback(progress) as tell:
            for part in parts:
                # Allocate as far ahead as the budget allows, but at least one block.
                while waiting and (not blocks or held + waiting[0].nbytes <= budget):
                    ahead = waiting.popleft()
                    block = None
                    if ahead.nbytes:
                        block, address = allocate(ahead.nbytes)
                        memory = _dmafile.DeviceMemory.borrowed(how[0], address, ahead.nbytes)
                        running.give(memory, ahead.start, ahead.nbytes)
                        del memory
                    held += ahead.nbytes
                    blocks.append(block)
                if part.nbytes:
                    running.wait(part.end, tell)
                block = blocks.popleft()
                yield block, part.start, part.rows
                # Must not stay referenced while waiting for the next one.
                del block
                held -= part.nbytes
            try:
                running.finish(tell)
            except Error as error:
                text = f"tensors already returned contain wrong data: {error}"
                raise make("failed", error.errno, text, error.filename, error.remedy) from error
    finally:
        running.close()
