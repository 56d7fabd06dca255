"""Exceptions: `Error` for all that goes wrong in dmafile, and what else it is."""

import errno as _errno
import os
import sys
from functools import cache

__all__ = ["Cancelled", "Error", "SafetensorError", "UsageError"]


class Error(OSError):
    """What dmafile could not do: what, where, why, and what would mend it, in one sentence.

    `errno` and `filename` are set where there are any. An error whose errno has a class of its own
    among the builtin ones is of that class too: a missing file is caught by
    ``except FileNotFoundError`` as well as by ``except dmafile.Error``.
    """

    remedy: str = ""
    """What would mend it; empty where nothing is known to."""

    _kind: str = "failed"

    def __str__(self) -> str:
        # Only what `make` makes has these parts.
        return super().__str__() if self.strerror is None else str(self.strerror)

    def __reduce__(self) -> tuple[object, ...]:
        if self.strerror is None:
            return (type(self), self.args)
        # The classes below have no name to be found by; between processes their parts go.
        return make, (self._kind, self.errno, self.strerror, self.filename, self.remedy)


class UsageError(Error, ValueError):
    """An invalid request: a value out of range, options that exclude each other."""


class Cancelled(Error):
    """A load that was asked to stop (errno ECANCELED)."""


class SafetensorError(Error):
    """What the package `safetensors` raises its `SafetensorError` for: an unsound header, a tensor
    or a part that the file does not have, a file that is closed, a save that failed.

    Where that package is imported, such an error is of its class too, so that clauses written for
    it catch it.
    """


_KINDS: dict[str, tuple[type[Exception], ...]] = {
    "failed": (Error,),
    "usage": (UsageError,),
    "cancelled": (Cancelled,),
    "safetensors": (SafetensorError,),
    # And what the same mistake is elsewhere in Python.
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
    """The class of an error that is all of these."""
    first = bases[0]
    if len(bases) == 1 and issubclass(first, Error):
        return first
    # A missing file is called what it is without dmafile.
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
    """The exception for an error, by its kind and errno."""
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
        # An `except` clause that names its class has imported it.
        theirs = getattr(sys.modules.get("safetensors"), "SafetensorError", None)
        if theirs is not None and not issubclass(bases[0], theirs):
            bases += (theirs,)
    error = _class(bases)(errno, message, filename)
    error.remedy = remedy
    error._kind = kind
    return error


def as_safetensors(error: Error) -> Error:
    """The same failure, as an error that is a `SafetensorError` too."""
    if error._kind != "failed":
        return error
    made = make("safetensors", error.errno, str(error), error.filename, error.remedy)
    made.__cause__ = error.__cause__
    return made.with_traceback(error.__traceback__)
