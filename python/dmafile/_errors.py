"""Exceptions: `Error` for all failures in dmafile, and its subclasses."""

import errno as _errno
import os
import sys
from functools import cache

__all__ = ["Cancelled", "Error", "SafetensorError", "UsageError"]


class Error(OSError):
    """A failure in dmafile: what failed, where, why, and what would help, in one message.

    `errno` and `filename` are set if there are any. If a builtin exception exists for the errno,
    the error is an instance of it, too: a missing file is caught by ``except FileNotFoundError`` as
    well as by ``except dmafile.Error``.
    """

    remedy: str = ""
    """What would help; empty if nothing is known to."""

    _kind: str = "failed"

    def __str__(self) -> str:
        # Only errors from `make` have these parts.
        return super().__str__() if self.strerror is None else str(self.strerror)

    def __reduce__(self) -> tuple[object, ...]:
        if self.strerror is None:
            return (type(self), self.args)
        # The classes below cannot be found by name, so their parts are pickled.
        return make, (self._kind, self.errno, self.strerror, self.filename, self.remedy)


class UsageError(Error, ValueError):
    """An invalid request: a value out of range, or options that exclude each other."""


class Cancelled(Error):
    """A load that was cancelled (errno ECANCELED)."""


class SafetensorError(Error):
    """Raised where the package `safetensors` raises its `SafetensorError`: an invalid header, a
    tensor or a part that the file does not have, a closed file, a failed save.

    If that package has been imported, the error is also an instance of its class, so that existing
    `except` clauses catch it.
    """


_KINDS: dict[str, tuple[type[Exception], ...]] = {
    "failed": (Error,),
    "usage": (UsageError,),
    "cancelled": (Cancelled,),
    "safetensors": (SafetensorError,),
    # Each also with the builtin exception for the same mistake.
    "closed": (SafetensorError, ValueError),
    "device": (SafetensorError, UsageError, RuntimeError),
    "dtype": (SafetensorError, TypeError),
    "index": (SafetensorError, IndexError),
    "name": (SafetensorError, KeyError),
    "request": (SafetensorError, UsageError),
    "size": (SafetensorError, ValueError),
}


@cache
def _class(bases: tuple[type[Exception], ...]) -> type[Error]:
    """A class derived from all of these."""
    first = bases[0]
    if len(bases) == 1 and issubclass(first, Error):
        return first
    # A missing file keeps the name of its builtin exception.
    named = bases[1] if first is Error else first
    made: type[Error] = type(named.__name__, bases, {"__module__": "dmafile"})
    return made


def make(
    kind: str,
    errno: int | None,
    message: str,
    filename: str | bytes | None = None,
    remedy: str = "",
) -> Error:
    """Creates the exception for an error, from its kind and errno."""
    bases = _KINDS[kind]
    if UsageError in bases:
        errno = errno or _errno.EINVAL
    if kind == "cancelled":
        errno = errno or _errno.ECANCELED
    if errno is not None and kind in ("failed", "safetensors"):
        builtin = type(OSError(errno, os.strerror(errno)))
        if builtin is not OSError:
            bases += (builtin,)
    if issubclass(bases[0], SafetensorError):
        # An `except` clause that names this class has imported its package.
        theirs = getattr(sys.modules.get("safetensors"), "SafetensorError", None)
        if theirs is not None and not issubclass(bases[0], theirs):
            bases += (theirs,)
    error = _class(bases)(errno, message, filename)
    error.remedy = remedy
    error._kind = kind
    return error


def as_safetensors(error: Error) -> Error:
    """The same failure, as an error that is a `SafetensorError`, too."""
    if error._kind != "failed":
        return error
    made = make("safetensors", error.errno, str(error), error.filename, error.remedy)
    made.__cause__ = error.__cause__
    return made.with_traceback(error.__traceback__)
