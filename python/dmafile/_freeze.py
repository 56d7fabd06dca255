"""Processes whose memory comes from a hold, frozen to a folder and thawed from it."""

import os
from collections.abc import Iterable
from typing import Any

from . import _dmafile
from ._load import StrPath


class Thawed:
    """Processes that run again, as children of this one; see `thaw`.

    While it exists, the holders count this process as a taker of their memory.
    """

    def __init__(self, pids: list[int], taken: int, loaded: int, kept: _dmafile.Kept) -> None:
        self.pids = tuple(pids)
        """Their IDs, in the order in which they were named to `freeze`, without descendants."""
        self.taken = taken
        """The number of holds that memory was taken from."""
        self.loaded = loaded
        """The number of held files that had to be loaded again, because nothing held them."""
        self._kept = kept

    def wait(self) -> int:
        """Waits until all of them have ended. Returns the exit status of the last one, or minus the
        number of the signal that ended it. Raises ChildProcessError if it was called before.
        """
        status = 0
        for pid in self.pids:
            status = os.waitpid(pid, 0)[1]
        return os.waitstatus_to_exitcode(status)

    def __repr__(self) -> str:
        return f"<dmafile.Thawed pids={self.pids}>"


def freeze(
    pids: int | Iterable[int],
    to: StrPath,
    *,
    sockets: Iterable[StrPath] = (),
    leave_running: bool = False,
    options: Iterable[str] = (),
) -> dict[str, Any]:
    """Freezes processes and their descendants to a new folder; returns what is in it.

    They end when all of it is on the disk, and become valid together. Memory that they took from a
    hold stays there: the folder names it instead. It needs root, and criu 3.19 or later.

    >>> dmafile.freeze(server.pid, "server.frozen")
    >>> dmafile.thaw("server.frozen").wait()

    Args:
        pids: The ID of a process, or several.
        to: The folder, which must not exist.
        sockets: Sockets of holds that `holds` does not list.
        leave_running: Whether the processes run on afterwards.
        options: Further options of criu(8), such as `--tcp-close`.

    Raises:
        Error: It failed (also an OSError), and the processes run on: ENOENT without criu,
            EOPNOTSUPP if it is too old, ESRCH for a process that does not exist, EINVAL if this
            process is one of them, EBUSY for one with an io_uring, EEXIST if the folder exists, and
            what criu says.
        KeyboardInterrupt: Ctrl-C. The processes run on.
    """
    all_pids = [pids] if isinstance(pids, int) else list(pids)
    places = [os.fsdecode(socket) for socket in sockets]
    return _dmafile.freeze(all_pids, os.fsdecode(to), places, leave_running, list(options))


def thaw(path: StrPath, *, wait: float | None = 600, options: Iterable[str] = ()) -> Thawed:
    """Lets frozen processes run again, as children of this one.

    Memory that is held comes from its hold; if nothing holds it, its file is loaded. Every byte is
    compared with its digest before anything runs. It needs root, and criu 3.19 or later.

    Args:
        path: The folder that `freeze` has written.
        wait: How many seconds to wait for another process that is loading a file that nothing
            holds; without limit if None.
        options: Further options of criu(8).

    Raises:
        UsageError: `wait` is out of range (also a ValueError).
        Error: It failed (also an OSError), and nothing has run: ENOENT without criu or images,
            EOPNOTSUPP if criu is too old, EPERM if other users can change the images, EBADMSG if
            one is damaged, ESTALE if what is held, or the file that would be loaded in its place,
            is not what the processes had, and what criu says.
        KeyboardInterrupt: Ctrl-C. Nothing has run.
    """
    return Thawed(*_dmafile.thaw(os.fsdecode(path), wait, list(options)))
