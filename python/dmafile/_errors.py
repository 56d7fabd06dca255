"""Exceptions: `Error` for all that goes wrong in dmafile, and what else it is."""

import errno as _errno
import os

__all__ = ["Cancelled", "Error", "UsageError"]


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


_BUILTIN: tuple[type[OSError], ...] = (
    BlockingIOError,
    BrokenPipeError,
    ConnectionAbortedError,
    ConnectionRefusedError,
    ConnectionResetError,
    FileExistsError,
    FileNotFoundError,
    InterruptedError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    ProcessLookupError,
    TimeoutError,
)
_BOTH: dict[type[OSError], type[Error]] = {
    builtin: type(builtin.__name__, (Error, builtin), {"__module__": "dmafile"})
    for builtin in _BUILTIN
}


def make(
    kind: str, errno: int | None, message: str, filename: str | bytes | None, remedy: str
) -> Error:
    """The exception for an error of the engine."""
    error: Error
    if kind == "usage":
        error = UsageError(errno or _errno.EINVAL, message, filename)
    elif kind == "cancelled":
        error = Cancelled(errno or _errno.ECANCELED, message, filename)
    elif errno is None:
        error = Error(None, message, filename)
    else:
        builtin = type(OSError(errno, os.strerror(errno)))
        error = _BOTH.get(builtin, Error)(errno, message, filename)
    error.remedy = remedy
    error._kind = kind
    return error
