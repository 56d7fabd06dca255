"""Loads files together on several nodes: the leader of each node reads its stripes, and sends them
to the others while later ones are being read.
"""

import errno
import fcntl
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from . import _dmafile
from ._errors import Error
from ._hold import Held, SharedModel
from ._progress import Callback
from ._stream import Ahead, Part

if TYPE_CHECKING:
    from ._ranks import Ranks

_STRIPE = 64 << 20
_GRAIN = 1 << 20
"""Alignment of stripes and files."""
_MFD_NOEXEC_SEAL = 8
"""Newer than the constants of the module os."""
_IN_FLIGHT = 4
"""Stripes in flight between two leaders, and stripes of this one that are being read or sent."""
_CONNECT = 60
"""How many seconds connecting may take, while failures of other ranks are not noticed."""

# Type checks run without PyTorch.
_Tensor: TypeAlias = Any


class _Piece(NamedTuple):
    """What one leader reads at a time."""

    owner: int
    file: int
    start: int
    end: int


def _pieces(sizes: Sequence[int], sources: Sequence[int], nodes: int) -> list[_Piece]:
    """Assigns stripes by bytes, not by files; they are cut at the end of a file."""
    fair = sum(sizes) // (64 * nodes) // _GRAIN * _GRAIN
    stripe = min(max(fair, _GRAIN), _STRIPE)
    pieces, at = [], 0
    for file, size in enumerate(sizes):
        start = 0
        while start < size:
            end = min(start + stripe - (at + start) % stripe, size)
            owner = sources[(at + start) // stripe % len(sources)]
            pieces.append(_Piece(owner, file, start, end))
            start = end
        at += -(-size // _GRAIN) * _GRAIN
    return pieces


def _memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    # Systems with vm.memfd_noexec=2 refuse memfds that may become executable; kernels before 6.3 do
    # not support the flag.
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)


_forking = threading.Lock()
"""Held during a fork."""
os.register_at_fork(
    before=_forking.acquire,
    after_in_parent=_forking.release,
    after_in_child=_forking.release,
)


def _map(fd: int, nbytes: int) -> mmap.mmap:
    """A writable mapping that no forked child gets: as long as a child has one, the memory cannot
    be sealed."""
    with _forking:
        made = mmap.mmap(fd, nbytes)
        made.madvise(mmap.MADV_DONTFORK)
        return made


class _Memory:
    """Memory for files that are received from several sources."""

    def __init__(self, files: Sequence[tuple[Path, int]]) -> None:
        self.fds: list[int] = []
        self._maps: list[mmap.mmap] = []
        try:
            for path, nbytes in files:
                fd = _memfd(path.name[:48])
                self.fds.append(fd)
                os.ftruncate(fd, nbytes)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
                self._maps.append(_map(fd, nbytes))
        except BaseException:
            self.close()
            raise

    def tensors(self) -> list[_Tensor]:
        return [torch.frombuffer(one, dtype=torch.uint8) for one in self._maps]

    def unmap(self) -> None:
        """Memory can only be sealed without writable mappings; these are removed with the last
        tensor."""
        self._maps.clear()

    def close(self) -> None:
        self._maps.clear()
        while self.fds:
            os.close(self.fds.pop())


class _Files:
    """Has the interface that `Ahead` needs from a model: a part is a piece."""

    def __init__(self, model: _dmafile.Model, pieces: Sequence[_Piece], fds: Sequence[int]) -> None:
        self._model = model
        self._is_local = model.versions() is None
        self._shards = model.shards()
        self._fds = fds
        self._pieces = iter(pieces)

    def start(
        self, at: int, nbytes: int, options: Mapping[str, object], then: Callable[[], object]
    ) -> _dmafile.Running:
        piece = next(self._pieces)
        where: dict[str, object] = {"to": f"fd:{self._fds[piece.file]}@{at}"}
        path, start, _ = self._shards[piece.file]
        if self._is_local:
            # The file that is there now, which will be compared with the one that was looked for:
            # another may have taken its place since the model was opened.
            where |= {"offset": at, "length": nbytes}
            return _dmafile.start(str(path), {**options, **where}, then)
        return self._model.start(start + at, nbytes, {**options, **where}, then)


class Links:
    """Connections to other leaders, by gloo, which detect when one of them ends."""

    def __init__(self, ranks: "Ranks", leaders: Sequence[int]) -> None:
        self._ranks = ranks
        self._index = {rank: index for index, rank in enumerate(leaders)}
        self.others = [rank for rank in leaders if rank != ranks.me]
        self._threads: list[threading.Thread] = []
        self.received = dict.fromkeys(self.others, 0)
        """Number of bytes received from each."""
        self._complete = threading.Semaphore(0)
        self._failed = threading.Event()
        self._failure: Error | None = None
        self._closing = False
        ranks.say("connecting", True)
        ranks.hear("connecting", leaders, "begun to connect")
        try:
            self._group = dist.ProcessGroupGloo(
                dist.PrefixStore("leaders", ranks.store),
                self._index[ranks.me],
                len(leaders),
                timedelta(seconds=min(ranks.left(), _CONNECT)),
            )
        except RuntimeError as error:
            ranks.look()
            names = ", ".join(map(str, self.others))
            why = str(error).partition("\n")[0]
            raise ranks.fail(ranks.me, f"cannot connect to rank {names}: {why}", None) from None

    def receive(self, rank: int, tensors: list[_Tensor]) -> None:
        """Starts to receive what a leader sends, in order, and then detects when it ends."""

        def run() -> None:
            try:
                self._receive(rank, tensors)
                self._complete.release()
                end = self._group.recv([torch.zeros(1, dtype=torch.uint8)], self._index[rank], 0)
                # `close` ends it at the latest.
                end.wait(timedelta(days=1))
            except RuntimeError as error:
                tensors.clear()
                self._broken(rank, str(error))

        thread = threading.Thread(target=run, name=f"dmafile, rank {rank}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _receive(self, rank: int, tensors: list[_Tensor]) -> None:
        begun: deque[tuple[Any, int]] = deque()
        while tensors or begun:
            while tensors and len(begun) < _IN_FLIGHT:
                tensor = tensors.pop(0)
                begun.append((self._group.recv([tensor], self._index[rank], 0), tensor.nbytes))
                del tensor
            work, nbytes = begun.popleft()
            work.wait(self._left())
            self.received[rank] += nbytes

    def send(self, tensor: _Tensor) -> list[tuple[int, Any]]:
        """Starts to send to all others."""
        sent = []
        for rank in self.others:
            try:
                sent.append((rank, self._group.send([tensor], self._index[rank], 0)))
            except RuntimeError as error:
                self._broken(rank, str(error))
                self._raise()
        return sent

    def wait(self, sent: list[tuple[int, Any]]) -> None:
        """Waits until all others have received it."""
        for rank, work in sent:
            try:
                work.wait(self._left())
            except RuntimeError as error:
                self._broken(rank, str(error))
                self._raise()

    def _left(self) -> timedelta:
        return timedelta(seconds=self._ranks.left())

    def is_complete(self) -> bool:
        """Waits briefly until everything has arrived from one more leader."""
        return self._complete.acquire(timeout=0.05)

    def look(self) -> None:
        """Raises the error that has broken a connection."""
        if self._failure is not None:
            raise self._failure

    def _raise(self) -> None:
        # Another thread finds the reason, which takes very little time.
        self._failed.wait(60)
        self.look()

    def _broken(self, rank: int, why: str) -> None:
        # What gloo reports for all operations after one has timed out, which `close` causes, too.
        if self._closing or "Application timeout" in why:
            return
        if "Timed out" in why:
            text = f"has not sent its part within {self._ranks.timeout:g} seconds"
            error = self._ranks.fail(rank, text, errno.ETIMEDOUT)
        else:
            with suppress(Error):
                if self._ranks.has_said("done", rank):
                    return
            error = self._ranks.fail(rank, "has ended", errno.ECONNRESET)
        self._failure = self._failure or error
        self._failed.set()
        self._break()

    def _break(self) -> None:
        """Ends all operations, here and at the others: gloo closes its connections after an
        operation has timed out."""
        for rank in self.others:
            with suppress(RuntimeError):
                none = torch.zeros(1, dtype=torch.uint8)
                self._group.recv([none], self._index[rank], 0).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Closes the connections. After a failure, all ranks must have been informed of it
        before."""
        self._closing = True
        self._break()
        for thread in self._threads:
            thread.join()
        del self._group


def exchange(
    ranks: "Ranks",
    found: Held | _dmafile.Vacant,
    wanted: SharedModel,
    sources: Sequence[int],
    wanting: Sequence[int],
    tell: Callback | None,
) -> Held:
    """Brings the files into the memory of all nodes in `wanting`; the leaders in `sources` read
    them or already have them. `found` is what this leader has, or else what keeps others on its
    node from loading."""
    leaders = [rank for rank in ranks.leaders if rank in (*sources, *wanting)]
    ranks.links = links = Links(ranks, leaders)
    if isinstance(found, Held):
        sizes = [file.buffer.nbytes for file in found]
        views = [memoryview(file.buffer._private()) for file in found]
        tensors = [torch.frombuffer(view, dtype=torch.uint8) for view in views]
        pieces = _pieces(sizes, sources, len(leaders))
        for rank in links.others:
            links.receive(rank, [])
        for piece in pieces:
            links.wait(links.send(tensors[piece.file][piece.start : piece.end]))
            ranks.look()
        return found
    files = found.files()
    pieces = _pieces([nbytes for _, nbytes in files], sources, len(leaders))
    memory = _Memory(files)
    try:
        _fill(ranks, links, pieces, memory, wanted, tell)
        memory.unmap()
        return Held(*found.fill(memory.fds))
    finally:
        memory.close()


def _fill(
    ranks: "Ranks",
    links: Links,
    pieces: Sequence[_Piece],
    memory: _Memory,
    wanted: SharedModel,
    tell: Callback | None,
) -> None:
    total = sum(piece.end - piece.start for piece in pieces)
    tensors = memory.tensors()
    for rank in links.others:
        theirs = [piece for piece in pieces if piece.owner == rank]
        links.receive(rank, [tensors[one.file][one.start : one.end] for one in theirs])

    def further(now: int, _: int) -> None:
        ranks.look()
        if tell is not None:
            tell(ranks.disk + sum(links.received.values()) + now, total)

    own = [piece for piece in pieces if piece.owner == ranks.me]
    parts = [Part(piece.start, piece.end, []) for piece in own]
    # Existing memory keeps its page size.
    tuning: Any = {name: value for name, value in wanted.options.items() if name != "pages"}
    ahead = Ahead(_Files(wanted.model, own, memory.fds), parts, _IN_FLIGHT * _STRIPE, tuning)
    sent: deque[tuple[Part, list[tuple[int, Any]]]] = deque()
    try:
        for piece, part in zip(own, parts, strict=True):
            ahead.take(further)
            ranks.disk += part.nbytes
            further(0, total)
            sent.append((part, links.send(tensors[piece.file][piece.start : piece.end])))
            # Up to as many stripes as are read ahead may wait to be sent.
            while len(sent) > _IN_FLIGHT // 2:
                _finish(links, ahead, *sent.popleft())
        while sent:
            _finish(links, ahead, *sent.popleft())
        for _ in links.others:
            while not links.is_complete():
                further(0, total)
    finally:
        ahead.close()
        ranks.peers = sum(links.received.values())


def _finish(links: Links, ahead: Ahead, part: Part, sent: list[tuple[int, Any]]) -> None:
    links.wait(sent)
    ahead.release(part)
