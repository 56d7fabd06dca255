"""Loads of a model in parts, in the order of its bytes, some parts ahead of their consumer."""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from . import _dmafile
from ._dmafile import Buffer
from ._errors import Error, make
from ._hold import HeldModel
from ._load import Options
from ._progress import Callback, callback

Placed: TypeAlias = tuple[str, str, tuple[int, ...], int, int]
"""Name, dtype, shape, offset of the first byte, and size in bytes."""
Batch: TypeAlias = tuple[Buffer | None, int, list[Placed]]
"""A buffer (None if it would be empty), the offset of its first byte, and the tensors in it."""
Tensors: TypeAlias = Iterable[str] | Callable[[str], bool] | None

_LARGEST = 64 << 20
"""Maximum size of a part with several tensors: keeping one tensor keeps its whole part."""
_GAP = 64 << 10
"""Gaps between tensors that are shorter, in bytes, cost less to read than to skip."""
_LOADING = 2
"""Number of parts that are loaded at the same time, so that the disk is not idle between two."""


def chosen(
    model: _dmafile.Model | HeldModel, tensors: Tensors
) -> tuple[list[str] | None, list[Placed]]:
    """The patterns for the wanted tensors, None for all; and their rows in the order of their
    bytes."""
    if tensors is None:
        return None, model.table()
    if callable(tensors):
        wanted = {name for name in model.names() if tensors(name)}
        # Otherwise a name could be taken for a pattern that matches others.
        return list(wanted), [row for row in model.table(list(wanted)) if row[0] in wanted]
    patterns = [tensors] if isinstance(tensors, str) else list(tensors)
    return patterns, model.table(patterns)


@dataclass
class Part:
    """A contiguous range of bytes, and the tensors in it."""

    start: int
    end: int
    rows: list[Placed]

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def parts_of(rows: list[Placed], budget: int) -> list[Part]:
    """Groups adjacent tensors into parts of a size that suits a budget."""
    most = min(_LARGEST, max(budget // 4, 1))
    parts: list[Part] = []
    for row in rows:
        start, end = row[3], row[3] + row[4]
        last = parts[-1] if parts else None
        if last and start - last.end < _GAP and end - last.start <= most:
            last.end = end
            last.rows.append(row)
        else:
            parts.append(Part(start, end, [row]))
    return parts


def _filled(parts: list[Part], nbytes: int, budget: int) -> list[Part]:
    """The same parts, and between them others without tensors, so that every byte belongs to one:
    headers, and copies of tensors that another file replaces."""
    most = max(min(_LARGEST, budget // 4), _GAP)
    every: list[Part] = []
    at = 0
    for part in [*parts, Part(nbytes, nbytes, [])]:
        while part.start - at > most:
            every.append(Part(at, at + most, []))
            at += most
        if part.rows or at < part.end:
            every.append(Part(at, part.end, part.rows))
        at = part.end
    return every


class Startable(Protocol):
    """What `Ahead` uses to start loads of parts: a model."""

    def start(
        self, at: int, nbytes: int, options: Mapping[str, object], then: Callable[[], object], /
    ) -> _dmafile.Running: ...


class Ahead:
    """Loads parts one after another, as far ahead as the budget allows."""

    def __init__(self, model: Startable, parts: list[Part], budget: int, options: Options) -> None:
        self._model = model
        self._options = options
        self._budget = budget
        self._waiting = deque(parts)
        # Started and not taken yet, in order; an exception if a load could not be started.
        self._begun: deque[_dmafile.Running | BaseException | None] = deque()
        self._held = 0
        self._loading = 0
        # Reentrant: if the thread of a load cannot be created, it calls back during the start.
        self._lock = threading.RLock()
        self._beginning = False
        # A forked child has neither the threads of the loads nor a thread that would release the
        # lock.
        self._process = os.getpid()

    def _fill(self) -> None:
        """Starts as many loads as allowed."""
        with self._lock:
            while not self._beginning and self._waiting and self._loading < _LOADING:
                nbytes = self._waiting[0].nbytes
                if self._held and self._held + nbytes > self._budget:
                    return
                part = self._waiting.popleft()
                self._held += nbytes
                self._beginning = True
                self._begun.append(self._begin(part))
                self._beginning = False

    def _begin(self, part: Part) -> _dmafile.Running | BaseException | None:
        if part.nbytes == 0:
            return None
        self._loading += 1
        try:
            return self._model.start(part.start, part.nbytes, self._options, self._ended)
        except BaseException as error:
            self._waiting.clear()
            return error

    def _ended(self) -> None:
        with self._lock:
            self._loading -= 1
        self._fill()

    def take(self, tell: Callback | None) -> Buffer | None:
        """Waits for the next part and returns it; None for an empty one."""
        if os.getpid() != self._process:
            raise RuntimeError("this stream belongs to the process that forked this one")
        self._fill()
        with self._lock:
            begun = self._begun.popleft()
        if isinstance(begun, BaseException):
            raise begun
        return begun and begun.attend(tell)

    def release(self, part: Part) -> None:
        """Marks a part as consumed, so that others can be loaded."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._held -= part.nbytes
        self._fill()

    def close(self) -> None:
        """Cancels what is in flight, and waits until it has been freed."""
        # When the interpreter shuts down, it stops threads at any place, maybe with the lock; and
        # whatever is in flight is cancelled when it is deleted.
        if os.getpid() != self._process or sys.is_finalizing():
            return
        with self._lock:
            self._waiting.clear()
            begun = [one for one in self._begun if isinstance(one, _dmafile.Running)]
            self._begun.clear()
        for running in begun:
            running.cancel()
        for running in begun:
            with suppress(Error):
                running.result().close()


def stream(
    model: _dmafile.Model,
    tensors: Tensors,
    budget: int,
    verify: str | None,
    progress: Callback | bool | None,
    options: Options,
) -> tuple[list[Placed], Generator[Batch, None, None]]:
    """The rows of the wanted tensors, and a generator of their parts, in the order of their bytes.

    Invalid arguments are raised immediately, other errors during the iteration.
    """
    if budget < 1:
        raise make("usage", None, f"budget: {budget} is out of range: 1 byte or more", None, "")
    _dmafile.check({**options, "verify": verify})
    _, rows = chosen(model, tensors)
    parts = parts_of(rows, budget)
    digests = None
    if verify is not None:
        if tensors is not None:
            text = "verify: cannot verify selected tensors; load whole files, or drop verify"
            raise make("usage", None, text, None, "load whole files, or drop verify")
        digests = model.digests(verify)
        parts = _filled(parts, model.nbytes, budget)
    return rows, _run(model, parts, budget, digests, progress, options)


def _run(
    model: _dmafile.Model,
    parts: list[Part],
    budget: int,
    digests: _dmafile.Digests | None,
    progress: Callback | bool | None,
    options: Options,
) -> Generator[Batch, None, None]:
    total, done = sum(part.nbytes for part in parts), 0
    ahead = Ahead(model, parts, budget, options)
    with callback(progress) as tell:

        def further(now: int, _: int) -> None:
            if tell is not None:
                tell(done + now, total)

        try:
            for part in parts:
                buffer = ahead.take(further if tell else None)
                done += part.nbytes
                if digests and buffer is not None:
                    digests.update(buffer)
                yield buffer, part.start, part.rows
                # Must not stay referenced while waiting for the next one.
                del buffer
                ahead.release(part)
        finally:
            ahead.close()
    if digests:
        try:
            digests.finish()
        except Error as error:
            text = f"tensors already returned contain wrong data: {error}"
            raise make("failed", error.errno, text, error.filename, error.remedy) from error
