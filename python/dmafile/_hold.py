"""Files that one process holds in memory, and that others take: the same memory, not a copy."""

import grp
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, Unpack

from . import _dmafile
from ._dmafile import Buffer, Holder
from ._errors import make
from ._load import ModelPath, Options, StrPath
from ._progress import Callback, callback

PREFIX = "held:"


class HeldFile(NamedTuple):
    """A file that was taken."""

    name: str
    """Its name, without a folder."""
    buffer: Buffer
    """Its bytes. While this is in use, the holder counts this process as a user."""
    info: dict[str, Any]
    """Its description by the holder, as in `dmafile take --json`: `file`, `bytes`, `pages`,
    `sealed`, `digest`, `changed` (on the disk, since it was loaded; None if its file system does
    not answer), ...; and `huge`: whether this process maps its huge pages as such, None if it has
    none or the kernel does not report it."""


class Held:
    """Files in memory that another process loaded; see `take` and `shared`.

    As a context manager it closes the buffers at the end. Otherwise each buffer is freed when it is
    no longer referenced.
    """

    def __init__(
        self,
        name: str,
        socket: Path,
        holder: tuple[int, int],
        files: Iterable[tuple[str, Buffer, dict[str, Any]]],
    ) -> None:
        self.name = name
        """The name of the hold."""
        self.socket = socket
        """The path of the socket that it was taken from."""
        self.holder = holder
        """The process that served it, and its user; process 0 means another PID namespace."""
        self.files = tuple(HeldFile(*file) for file in files)
        """Its files, in the order in which they were loaded."""

    def close(self) -> None:
        """Closes the buffers; raises BufferError while exports of one exist."""
        for file in self.files:
            file.buffer.close()

    def __iter__(self) -> Iterator[HeldFile]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<dmafile.Held name={self.name} socket={self.socket} files={len(self.files)}>"


def hold(
    path: StrPath | Iterable[StrPath],
    *,
    name: str | None = None,
    socket: StrPath | None = None,
    to: str = "memfd",
    verify: str | None = None,
    mode: int | None = None,
    group: int | str | None = None,
    writable: bool = False,
    idle: float | None = None,
    folder: StrPath | None = None,
    replace: bool = False,
    progress: Callback | bool | None = None,
    **options: Unpack[Options],
) -> Holder:
    """Loads files, each into separate memory, and serves them to other processes from a thread.

    >>> with dmafile.hold("model/", name="llama") as holder:
    ...     ...  # elsewhere: dmafile.take("llama"), or the command `dmafile take llama`

    It serves until `stop` is called, the `with` block ends, or the object is deleted. Processes
    that have taken the memory keep it.

    Args:
        path: A file or a model, or several. A model's folder or index stands for all of its files.
        name: The name of the hold: 1 to 64 letters, digits, `.`, `_` and `-`, starting with a
            letter or digit; if None, the name of the folder, or of the file without its extension.
        socket: The path of the socket, in a folder that only trusted users can write to; if None,
            the name's socket in `$XDG_RUNTIME_DIR/dmafile`, in `/run/dmafile` for root, or without
            that variable in `/dev/shm/dmafile-UID`.
        to: The kind of memory, any of `load` that has its own descriptor: `memfd`, `udmabuf`,
            `heap:NAME`, `module`, `dma-buf`.
        verify: As in `load`, for each file.
        mode: The permissions of the socket: users that may write to it may take the files. If None,
            0o600, or 0o660 with a group.
        group: The group of the socket, by name or number.
        writable: Whether processes that take a memfd may write to it. Otherwise it is sealed, and
            no process can.
        idle: Ends the hold when no process has taken it or been connected for this many seconds;
            never if None.
        folder: A folder to create that any loader of this user can read as the model during the
            hold.
        replace: Whether to replace another holder at the same socket, which ends.
        progress: As in `load`, for all files together.
        options: As in `load`: `pages` (`auto` does not use hugetlb pages here), `method`, `io`,
            `allocation`, `chunk`, `block`, `queue_depth`, `check_memory`.

    Raises:
        UsageError: A value is out of range, or options exclude each other (also a ValueError).
        Error: As `load`; EADDRINUSE if another holder serves there, EPERM for a socket in a folder
            that other users can write to, EBUSY if another holder has the `folder`, EEXIST for two
            files with the same name and for a `folder` that is not empty.
        KeyboardInterrupt: Ctrl-C.
    """
    how = {
        "name": name,
        "socket": None if socket is None else os.fsdecode(socket),
        "to": to,
        "pages": options.pop("pages", None),
        "verify": verify,
        "mode": mode,
        "group": _group(group),
        "writable": writable,
        "idle": idle,
        "folder": None if folder is None else os.fsdecode(folder),
        "replace": replace,
    }
    with callback(progress) as tell:
        return _dmafile.hold(_paths(path), how, options, tell)


def take(name: str, *, socket: StrPath | None = None, wait: float | None = 0) -> Held:
    """Takes the files that are held under a name: the same memory. Nothing is read or copied.

    The holder is not trusted: its memory must be of the kind that it claims, must contain the bytes
    of each file, and must not be able to shrink.

    Args:
        name: The name of the hold.
        socket: The path of the socket; if None, the name's socket of this user, or else of root.
        wait: How many seconds to wait until something is held there; without limit if None. Ctrl-C
            ends the wait.

    Raises:
        UsageError: The name is invalid (also a ValueError).
        Error: ENOENT or ECONNREFUSED if nothing is held there after `wait`, EACCES if this user may
            not use the socket, EPERM if other users could have put it there, EPROTO for an invalid
            answer, ETIMEDOUT for no answer within 10 seconds, EMFILE if this process has too many
            open descriptors.
    """
    return Held(*_dmafile.take(name, None if socket is None else os.fsdecode(socket), wait))


def shared(
    path: StrPath | Iterable[StrPath],
    *,
    wait: float | None = 0,
    folder: StrPath | None = None,
    to: str = "memfd",
    verify: str | None = None,
    writable: bool = False,
    progress: Callback | bool | None = None,
    **options: Unpack[Options],
) -> Held:
    """Shares files in memory between processes of one user, without a holder: the first process
    that asks for them loads them, the others take them from any process that has them.

    >>> held = dmafile.shared("model/", wait=600)  # in each process

    While one of the buffers is in use, a thread of this process passes the memory on. The memory is
    freed when the last process is done with it. If the process that loads dies, the next one loads.

    Args:
        path: As in `hold`.
        wait: How many seconds to wait for another process that is loading; without limit if None.
            Ctrl-C ends the wait.
        folder: The folder in which processes find each other; if None, `shared` in
            the folder of the sockets of `hold`. It must belong to this user.
        to, verify, writable, progress, options: As in `hold`. Processes share memory only if their
            `to`, `pages`, `verify` and `writable` are the same.

    Raises:
        UsageError: A value is out of range, or options exclude each other (also a ValueError).
        Error: As `load`; ETIMEDOUT if another process has not finished loading within `wait`,
            EPERM if other users can write to the folder.
        KeyboardInterrupt: Ctrl-C.
    """
    how = {
        "wait": wait,
        "folder": None if folder is None else os.fsdecode(folder),
        "to": to,
        "pages": options.pop("pages", None),
        "verify": verify,
        "writable": writable,
    }
    with callback(progress) as tell:
        return Held(*_dmafile.shared(_paths(path), how, options, tell))


class SharedModel(NamedTuple):
    """An open model that processes share, as `shared` does."""

    model: _dmafile.Model
    verify: str | None
    options: Options

    def load(self, wait: float, tell: Callback | None = None) -> Held:
        """Takes it from another process, or loads it."""
        return Held(*_dmafile.shared(self.model, *self._how(wait), tell))

    def find(self, wait: float) -> Held | _dmafile.Vacant:
        """Loads nothing: takes it from another process, or returns a `Vacant`, which keeps others
        from loading it until it is filled."""
        found, vacant = _dmafile.find_shared(self.model, *self._how(wait))
        if found is not None:
            return Held(*found)
        assert vacant is not None
        return vacant

    def _how(self, wait: float) -> tuple[dict[str, object], Options]:
        tuning = self.options.copy()
        how: dict[str, object]
        how = {"wait": wait, "pages": tuning.pop("pages", None), "verify": self.verify}
        return how, tuning


def holds(*, socket: StrPath | None = None) -> list[dict[str, Any]]:
    """Lists what is held at one socket, or at all sockets of this user and of root, as `dmafile
    holds --json` prints it.

    Each is a dict: `name`, `socket`, `pid` and `uid` of the holder, `since` (seconds since 1970),
    `bytes`, `sealed`, `changed` (on the disk, since it was loaded; None if a file system does not
    answer), `files`, `takers` (how often processes that still run have taken it and not
    returned it), `some_takers` (`pid` and `uid` of up to 1,000 of them), `unknown_takers` (how
    often it was taken by processes whose end the holder does not see: in another PID namespace, on
    Linux before 6.5).
    """
    held: list[dict[str, Any]] = _dmafile.holds(None if socket is None else os.fsdecode(socket))
    return held


def release(name: str, *, socket: StrPath | None = None) -> None:
    """Ends a hold. Processes that have taken the memory keep it.

    Raises `dmafile.Error`: EPERM unless this process belongs to the holder's user or to root,
    otherwise as `take`.
    """
    _dmafile.release(name, None if socket is None else os.fsdecode(socket))


def _paths(path: StrPath | Iterable[StrPath]) -> list[str]:
    if isinstance(path, str | bytes | os.PathLike):
        return [os.fsdecode(path)]
    return [os.fsdecode(each) for each in path]


def _group(group: int | str | None) -> int | None:
    if not isinstance(group, str):
        return group
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        text = f"group: there is no group {group!r}; see: getent group"
        raise make("usage", None, text, None, "see: getent group") from None


def held_name(path: ModelPath) -> str | None:
    """The part after `held:`: the name of a hold, and `@SOCKET` if its socket is not in the default
    place."""
    if not isinstance(path, str | bytes | os.PathLike):
        return None
    text = os.fsdecode(path)
    return text.removeprefix(PREFIX) if text.startswith(PREFIX) else None


class HeldModel:
    """A model that is held. Has the interface of `_dmafile.Model`, with tensors that are used in
    place."""

    def __init__(
        self,
        path: str,
        files: Sequence[HeldFile],
        *,
        private: bool,
        superseded: list[list[str]] | None = None,
    ) -> None:
        """`superseded` has, for each file, its tensors that do not count; if None, the holder says
        which."""
        if superseded is None:
            superseded = [file.info.get("superseded", []) for file in files]
        named = [
            (file.name, file.buffer, without)
            for file, without in zip(files, superseded, strict=True)
        ]
        self._model = _dmafile.Model.of_buffers(path, named)
        self._starts = [start for _, start, _ in self._model.shards()]
        self._bytes = [
            memoryview(file.buffer._private() if private else file.buffer) for file in files
        ]

    @classmethod
    def taken(cls, name: str, options: Mapping[str, object], *, private: bool) -> Self:
        """Takes what is held under a name."""
        given = [option for option, value in options.items() if value is not None]
        if given:
            text = f"{given[0]}: it is not an option for {PREFIX}{name}, which is already loaded"
            raise make("usage", None, text, None, "")
        # A name cannot contain @, a path can.
        held, elsewhere, socket = name.partition("@")
        files = take(held, socket=socket if elsewhere else None).files
        return cls(PREFIX + name, files, private=private)

    @property
    def format(self) -> str:
        return self._model.format

    def metadata(self) -> dict[str, Any] | None:
        return self._model.metadata()

    def names(self) -> list[str]:
        return self._model.names()

    def table(
        self, patterns: list[str] | None = None
    ) -> list[tuple[str, str, tuple[int, ...], int, int]]:
        return self._model.table(patterns)

    def described(self, name: str) -> tuple[str, tuple[int, ...]]:
        return self._model.described(name)

    def viewed(self, name: str) -> tuple[str, tuple[int, ...], int]:
        return self._model.viewed(name)

    def at(self, at: int, nbytes: int) -> memoryview:
        """Bytes of a tensor, by its offset as in `table`."""
        number = bisect_right(self._starts, at) - 1
        at -= self._starts[number]
        return self._bytes[number][at : at + nbytes]

    def load_part(
        self, name: str, offset: int, nbytes: int, options: Mapping[str, object]
    ) -> memoryview:
        return self.at(self._model.place(name) + offset, nbytes)
