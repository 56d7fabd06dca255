"""Files that one process holds in memory, and others take: the same memory, not a copy."""

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
    """Its bytes. As long as this is used, the holder knows of this process."""
    info: dict[str, Any]
    """What its holder says of it, as in `dmafile take --json`: `file`, `bytes`, `pages`, `sealed`,
    `digest`, `changed` (on the disk, since it was loaded), ...; and `huge`: whether this process
    has its huge pages mapped as such, None where it has none or the kernel doesn't say."""


class Held:
    """Files in memory that another process loaded; see `take` and `shared`.

    As a context manager it closes the buffers at the end. Otherwise each is given back when it is
    no longer used.
    """

    def __init__(
        self,
        name: str,
        at: Path,
        holder: tuple[int, int],
        files: Iterable[tuple[str, Buffer, dict[str, Any]]],
    ) -> None:
        self.name = name
        """What it is called."""
        self.at = at
        """The path of the socket it was taken at."""
        self.holder = holder
        """The process that served it, and its user; process 0 is one of another PID namespace."""
        self.files = tuple(HeldFile(*file) for file in files)
        """Its files, in the order in which they were loaded."""

    def close(self) -> None:
        """Closes the buffers; a BufferError while exports of one are alive."""
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
        return f"<dmafile.Held name={self.name} at={self.at} files={len(self.files)}>"


def hold(
    path: StrPath | Iterable[StrPath],
    *,
    name: str | None = None,
    at: StrPath | None = None,
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
    """Loads files, each into memory of its own, and serves them to other processes on a thread.

    >>> with dmafile.hold("model/", name="llama") as holder:
    ...     ...  # elsewhere: dmafile.take("llama"), or the command `dmafile take llama`

    It serves until `stop`, the end of the block, or the end of the object. What was taken stays
    with those who have it.

    Args:
        path: A file or a model, or several. A model's folder or index stands for all of its files.
        name: What it is called: 1 to 64 letters, digits, `.`, `_` and `-`, a letter or digit first;
            if None the name of the folder, or of the file without its ending.
        at: The path of the socket, in a folder that not everybody can write to; if None its name in
            `$XDG_RUNTIME_DIR/dmafile`, as root in `/run/dmafile`.
        to: The kind of memory, any of `load` that has a descriptor of its own: `memfd`, `udmabuf`,
            `heap:NAME`, `dmafile`, `dma-buf`.
        verify: As that of `load`, for each file.
        mode: The permissions of the socket: who may write to it may take what is held. If None
            0o600, with a group 0o660.
        group: The group of the socket, by name or number.
        writable: Whether those who take a memfd may write to it. Otherwise it is sealed: nobody
            can.
        idle: Ends it when for so many seconds nobody has taken it or been connected; never if None.
        folder: A folder to make that any loader of this user reads as the model while it is held.
        replace: Whether it takes the place of another holder at the same socket, which ends.
        progress: As that of `load`, of all files together.
        options: As in `load`: `pages` (`auto` leaves the hugetlb pool alone here), `method`, `io`,
            `allocation`, `gather`, `block`, `queue_depth`, `memory_check`.

    Raises:
        UsageError: A value is out of range or cannot be combined (also a ValueError).
        Error: As `load`; EADDRINUSE where another holder serves there, EPERM for a socket in a
            folder that anybody can write to, EEXIST for two files of the same name and for a
            `folder` that is not empty, ENOENT without XDG_RUNTIME_DIR, except for root.
        KeyboardInterrupt: Ctrl-C.
    """
    how = {
        "name": name,
        "at": None if at is None else os.fsdecode(at),
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


def take(name: str, *, at: StrPath | None = None, wait: float | None = 0) -> Held:
    """Takes the files that are held under a name: the memory itself. Nothing is read or copied.

    The holder is not trusted: its memory has to be of the kind that it says, to hold the bytes of
    each file, and to be unable to shrink.

    Args:
        name: What it is called.
        at: The path of the socket; if None that with this name of this user, or else of root.
        wait: How many seconds to wait until something is held there; for ever if None. Ctrl-C ends
            the wait.

    Raises:
        UsageError: The name is none (also a ValueError).
        Error: ENOENT or ECONNREFUSED where nothing is held there after `wait`, EACCES where the
            socket is not for this user, EPERM where others could have put it there, EPROTO for an
            answer that is not sound, ETIMEDOUT for none in 10 seconds, EMFILE where there is no
            room for the descriptors.
    """
    return Held(*_dmafile.take(name, None if at is None else os.fsdecode(at), wait))


def shared(
    path: StrPath | Iterable[StrPath],
    *,
    wait: float | None = 0,
    at: StrPath | None = None,
    to: str = "memfd",
    verify: str | None = None,
    writable: bool = False,
    progress: Callback | bool | None = None,
    **options: Unpack[Options],
) -> Held:
    """Files in memory that several processes of one user share, without a holder: the first that
    asks loads them, the others take them from any that has them.

    >>> held = dmafile.shared("model/", wait=600)  # in each process

    From then on this process passes them on, by a thread, as long as it uses one of the buffers.
    The memory goes with the last process. If the one that loads dies, the next one loads.

    Args:
        path: As that of `hold`.
        wait: How many seconds to wait for another process that loads; for ever if None. Ctrl-C
            ends the wait.
        at: The folder by which processes find each other; if None `shared` in
            `$XDG_RUNTIME_DIR/dmafile`, as root in `/run/dmafile`. It has to be this user's own.
        to, verify, writable, progress, options: As those of `hold`. Processes share only what they
            ask for with the same `to`, `pages`, `verify` and `writable`.

    Raises:
        UsageError: A value is out of range or cannot be combined (also a ValueError).
        Error: As `load`; ETIMEDOUT where another process has not loaded it within `wait`, ENOENT
            without XDG_RUNTIME_DIR, except for root.
        KeyboardInterrupt: Ctrl-C.
    """
    how = {
        "wait": wait,
        "at": None if at is None else os.fsdecode(at),
        "to": to,
        "pages": options.pop("pages", None),
        "verify": verify,
        "writable": writable,
    }
    with callback(progress) as tell:
        return Held(*_dmafile.shared(_paths(path), how, options, tell))


def find_shared(
    files: Sequence[Path], wait: float, verify: str | None, options: Options
) -> Held | _dmafile.Vacant:
    """As `shared`, but loads nothing: what another process has, or else what keeps others from
    loading it until it is filled."""
    tuning = options.copy()
    how = {"wait": wait, "pages": tuning.pop("pages", None), "verify": verify}
    found, vacant = _dmafile.find_shared(_paths(files), how, tuning)
    if found is not None:
        return Held(*found)
    assert vacant is not None
    return vacant


def holds(*, at: StrPath | None = None) -> list[dict[str, Any]]:
    """What is held at one socket, or at all of this user and of root, as `dmafile holds --json`
    prints it.

    Each is a dict: `name`, `at`, `pid` and `uid` of the holder, `since` (in seconds since 1970),
    `bytes`, `sealed`, `changed` (on the disk, since it was loaded), `files`, `takers` (how many
    processes have it and are connected), `some_takers` (`pid` and `uid` of up to 1,000 of them).
    """
    held: list[dict[str, Any]] = _dmafile.holds(None if at is None else os.fsdecode(at))
    return held


def release(name: str, *, at: StrPath | None = None) -> None:
    """Ends a hold. What was taken stays with those who have it.

    Raises `dmafile.Error`: EPERM for another user than the holder's and root, else as `take`.
    """
    _dmafile.release(name, None if at is None else os.fsdecode(at))


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
    """What follows `held:`: the name of a hold, and `@SOCKET` where its socket is elsewhere."""
    if not isinstance(path, str | bytes | os.PathLike):
        return None
    text = os.fsdecode(path)
    return text.removeprefix(PREFIX) if text.startswith(PREFIX) else None


class HeldModel:
    """A model that is held: as `_dmafile.Model`, with tensors that are where they are."""

    def __init__(self, path: str, files: Sequence[HeldFile], *, private: bool) -> None:
        named = [(file.name, file.buffer) for file in files]
        self._model = _dmafile.Model.of_buffers(path, named)
        self._starts = [start for _, start, _ in self._model.shards()]
        self._bytes = [
            memoryview(file.buffer._private() if private else file.buffer) for file in files
        ]

    @classmethod
    def taken(cls, name: str, options: Mapping[str, object], *, private: bool) -> Self:
        """What is held under a name."""
        given = [option for option, value in options.items() if value is not None]
        if given:
            text = f"{given[0]}: it is not an option for {PREFIX}{name}, which is loaded already"
            raise make("usage", None, text, None, "")
        # A name has no @, a path may.
        held, elsewhere, at = name.partition("@")
        files = take(held, at=at if elsewhere else None).files
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
        """Bytes of a tensor, by the place that `table` says."""
        number = bisect_right(self._starts, at) - 1
        at -= self._starts[number]
        return self._bytes[number][at : at + nbytes]

    def load_part(
        self, name: str, offset: int, nbytes: int, options: Mapping[str, object]
    ) -> memoryview:
        return self.at(self._model.place(name) + offset, nbytes)
