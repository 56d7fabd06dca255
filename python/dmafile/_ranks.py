"""Loads by the ranks of a process group: each node has the files in memory once, and each byte is
read from the disk once.

Ranks find each other and report their state through the store of their process group. On a node the
memory is shared as with `dmafile.shared`; between nodes `_stripes` transfers it.
"""

import errno
import hashlib
import json
import os
import select
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from . import _dmafile
from ._errors import Error, make
from ._hold import Held, HeldModel, SharedModel, held_name
from ._load import ModelPath, Options, open_model
from ._progress import Callback, callback
from ._stripes import Links, exchange

_SAMPLES = 64
"""Number of pages that are compared if files are on several nodes."""
_PAGE = 4096
_POLL_INTERVAL = 0.05
"""Interval at which the store is polled, in seconds."""
_REPLY_TIMEOUT = timedelta(seconds=30)
"""How long to wait for ranks that may have ended already."""


class Ranks:
    """The ranks of a group during one load. Leaving the context with an exception ends the load in
    all ranks."""

    def __init__(self, group: Any) -> None:
        self.began = time.monotonic()
        self.me: int = dist.get_rank()
        if dist.get_rank(group) < 0:
            text = f"group: rank {self.me} is not in it; load only in its ranks"
            raise make("usage", None, text, None, "load only in its ranks")
        self.all: list[int] = dist.get_process_group_ranks(group)
        self.timeout = _timeout(group)
        self._path = ""
        store = _get_process_group_store(group)
        # All ranks call this in the same order, so the numbers match: it must not fail before.
        number = store.add(f"dmafile/calls/{self.me}", 1)
        self.store = dist.PrefixStore(f"dmafile/{number}", store)
        self.nodes: list[list[int]] = []
        self.leaders: list[int] = []
        self.links: Links | None = None
        self.disk = 0
        self.peers = 0
        self._over = False
        self._processes: dict[int, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.give_up(error)
        if self.links is not None:
            self.links.close()
        for fd in self._processes.values():
            os.close(fd)

    @property
    def leader(self) -> int:
        """The rank that loads the files for this rank's node."""
        return next(node[0] for node in self.nodes if self.me in node)

    def left(self) -> float:
        """Remaining seconds of the group's timeout."""
        return max(self.began + self.timeout - time.monotonic(), 0.001)

    def is_late(self) -> bool:
        return time.monotonic() > self.began + self.timeout

    def say(self, what: str, content: Any) -> None:
        """Publishes a value for the other ranks."""
        with self._asking():
            self.store.set(f"{what}/{self.me}", json.dumps(content))

    def has_said(self, what: str, rank: int) -> bool:
        with self._asking():
            return bool(self.store.check([f"{what}/{rank}"]))

    def hear(self, what: str, ranks: Sequence[int], late: str) -> dict[int, Any]:
        """Waits for values of other ranks; `late` says what a rank without one has not done."""
        pause = 0.001
        while missing := [rank for rank in ranks if not self.has_said(what, rank)]:
            self.look()
            if self.is_late():
                text = f"has not {late} within {self.timeout:g} seconds"
                raise self.fail(missing[0], text, errno.ETIMEDOUT)
            time.sleep(pause)
            pause = min(2 * pause, _POLL_INTERVAL)
        with self._asking():
            return {rank: json.loads(self.store.get(f"{what}/{rank}")) for rank in ranks}

    def look(self) -> None:
        """Raises an error if the load has failed in another rank."""
        if self.links is not None:
            self.links.look()
        with self._asking():
            if self.store.check(["failed"]):
                self._over = True
                raise self._error(*json.loads(self.store.get("failed")))
        for dead in self._dead(self._processes):
            # A rank may have ended because it is done.
            if not self.has_said("done", dead):
                raise self.fail(dead, "has ended", errno.ECONNRESET)

    def fail(self, rank: int, text: str, number: int | None) -> Error:
        """Ends the load in all ranks. Returns the error, or that of a rank that failed first."""
        said = json.dumps([rank, text, number])
        # The process with the store may have ended, too.
        with suppress(RuntimeError):
            said = self.store.compare_set("failed", "", said)
        self._over = True
        return self._error(*json.loads(said))

    def give_up(self, error: BaseException) -> None:
        """As `fail`, for an exception of this rank."""
        if not self._over:
            text = str(error) or type(error).__name__
            number = error.errno if isinstance(error, OSError) else None
            self.fail(self.me, f"has failed: {text}", number)

    def _error(self, rank: int | None, text: str, number: int | None) -> Error:
        who = "" if rank is None else f"rank {rank} "
        code = errno.errorcode.get(number or 0)
        named = f" ({code})" if code and code not in text else ""
        whole = f"cannot load: {self._path}: {who}{text}{named}"
        return make("failed", number, whole, self._path, "see the error of that rank")

    def _dead(self, ranks: Iterable[int], wait: float = 0) -> list[int]:
        """Those of these ranks that are on this node and whose processes have ended; waits for the
        first."""
        ranks_by_fd = {self._processes[rank]: rank for rank in ranks if rank in self._processes}
        poll = select.poll()
        for fd in ranks_by_fd:
            poll.register(fd, select.POLLIN)
        ended = poll.poll(1000 * wait if ranks_by_fd else 0)
        return [ranks_by_fd[fd] for fd, _ in ended]

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError:
            self._over = True
            # Other ranks may end because of this. A process closes its connections before it ends.
            if self._dead([0], wait=1):
                raise self._error(0, "has ended", errno.ECONNRESET) from None
            text = "the process that has the group's store, rank 0 or torchrun, has ended"
            raise self._error(None, text, errno.ECONNRESET) from None

    def _meet(self, wanted: SharedModel) -> None:
        """Finds out which ranks share a node, and checks that all request the same."""
        model = wanted.model
        paths = [path for path, _, _ in model.shards()]
        versions = model.versions()
        # Two versions may have the same date.
        if any(not (version or "").startswith('"') for version in versions or ()):
            text = "group: its server does not say which version an object is (a strong ETag)"
            raise make("usage", None, text, None, "leave group out")
        found: Iterable[object] = map(_identity, paths)
        if versions is not None:
            found = [*map(str, paths), *versions]
        node = _node(list(found))
        options = {**wanted.options, "verify": wanted.verify}
        own = {
            "node": node,
            "pid": os.getpid(),
            "files": [(path.name, nbytes) for path, _, nbytes in model.shards()],
            "versions": versions,
            "table": hashlib.blake2b(repr(model.table()).encode(), digest_size=16).hexdigest(),
            "options": {name: value for name, value in options.items() if value is not None},
        }
        self.say("here", own)
        facts = self.hear("here", self.all, "begun to load")
        first = self.all[0]
        for rank in self.all:
            if why := _difference(facts[rank], facts[first]):
                text = f"asks for something other than rank {first}: {why}"
                raise self.fail(rank, text, errno.EINVAL)
        by_node: dict[str, list[int]] = {}
        for rank in self.all:
            by_node.setdefault(facts[rank]["node"], []).append(rank)
        self.nodes = list(by_node.values())
        for rank in by_node[node]:
            if rank != self.me:
                try:
                    self._processes[rank] = os.pidfd_open(facts[rank]["pid"])
                except ProcessLookupError:
                    raise self.fail(rank, "has ended", errno.ECONNRESET) from None
        # In the same order in all groups, so that no two wait for each other.
        self.leaders = [by_node[node][0] for node in sorted(by_node)]

    def load(
        self,
        path: ModelPath,
        verify: str | None,
        progress: Callback | bool | None,
        options: Options,
    ) -> HeldModel:
        """Loads the files into the memory of each node, and returns this node's."""
        if (name := held_name(path)) is not None:
            text = f"group: held:{name} is in memory already; leave group out"
            raise make("usage", None, text, None, "leave group out")
        model = open_model(path)
        self._path = model.name
        wanted = SharedModel(model, verify, options)
        self._meet(wanted)
        if self.me == self.leader:
            with callback(progress) as tell:
                if len(self.nodes) == 1:
                    held = self._load_alone(wanted, tell)
                else:
                    held = self._load_in_stripes(wanted, tell)
            self.say("ready", True)
        else:
            self.hear("ready", [self.leader], "loaded the files of its node")
            held = wanted.load(self.left())
            self._count(held)
        superseded = model.superseded()
        return HeldModel(self._path, held.files, private=True, superseded=superseded)

    def _load_alone(self, wanted: SharedModel, tell: Callback | None) -> Held:
        def further(done: int, total: int) -> None:
            self.look()
            if tell is not None:
                tell(done, total)

        found = self._find(wanted)
        if not isinstance(found, Held):
            found.close()
            found = wanted.load(self.left(), further)
            self._count(found)
        return found

    def _find(self, wanted: SharedModel) -> Held | _dmafile.Vacant:
        """Notices failures while another process loads the files."""
        while True:
            try:
                return wanted.find(min(self.left(), 1))
            except TimeoutError:
                self.look()
                if self.is_late():
                    raise

    def _count(self, held: Held) -> None:
        if held.holder[0] == os.getpid():
            self.disk = sum(file.buffer.nbytes for file in held)

    def _load_in_stripes(self, wanted: SharedModel, tell: Callback | None) -> Held:
        before = self.leaders[: self.leaders.index(self.me)]
        self.hear("memory", before, "looked for the files on its node")
        found = self._find(wanted)
        try:
            # Objects are known by their versions.
            is_local = wanted.model.versions() is None
            files = [(path, nbytes) for path, _, nbytes in wanted.model.shards() if is_local]
            own = {"there": isinstance(found, Held), "samples": _samples(files)}
            self.say("memory", own)
            words = self.hear("memory", self.leaders, "looked for the files on its node")
            first = self.leaders[0]
            for rank in self.leaders:
                if words[rank]["samples"] != words[first]["samples"]:
                    text = f"has files that differ from those of rank {first}"
                    raise self.fail(rank, text, errno.EINVAL)
            there = [rank for rank in self.leaders if words[rank]["there"]]
            wanting = [rank for rank in self.leaders if not words[rank]["there"]]
            sources = there[:1] or self.leaders
            if not wanting or self.me not in (*sources, *wanting):
                assert isinstance(found, Held)
                return found
            return exchange(self, found, wanted, sources, wanting, tell)
        finally:
            # A traceback would keep it, and a retry would wait for it.
            if not isinstance(found, Held):
                found.close()

    def finish(self) -> dict[str, Any]:
        """Waits until all ranks are done; returns the report."""
        own = {"rank": self.me, "disk": self.disk, "peers": self.peers}
        self.say("done", {**own, "seconds": time.monotonic() - self.began})
        said = self.hear("done", self.all, "finished")
        # One of them may have the store, and exit as soon as it returns.
        with suppress(RuntimeError):
            self.store.set(f"seen/{self.me}", "")
            self.store.wait([f"seen/{rank}" for rank in self.all], _REPLY_TIMEOUT)
        return {"nodes": self.nodes, "ranks": [said[rank] for rank in self.all]}


def _timeout(group: Any) -> float:
    """The timeout of a group in seconds, PyTorch's default for a backend without one."""
    timeout: timedelta = dist.default_pg_timeout
    # Some backends have no options.
    with suppress(AttributeError, RuntimeError):
        timeout = group._get_backend(group._device_types[0]).options._timeout
    return timeout.total_seconds()


def _identity(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _node(identities: Sequence[object]) -> str:
    """Equal for processes that can share the files in memory, and can see each other end."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    spaces = [Path(f"/proc/self/ns/{name}").stat().st_ino for name in ("mnt", "pid")]
    text = repr((boot, spaces, os.geteuid(), identities))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _difference(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    """How the requests of two ranks differ; None if they are the same."""
    if one["files"] != other["files"]:
        mine, theirs = ([tuple(file) for file in rank["files"]] for rank in (one, other))
        name, nbytes = next(iter(set(mine) - set(theirs)), theirs[-1])
        if (name, nbytes) in mine:
            return f"{name} with {nbytes} bytes"
        return f"not {name} with {nbytes} bytes"
    if one["versions"] != other["versions"]:
        return "another version"
    if one["table"] != other["table"]:
        return "files with other tensors"
    for name in sorted({*one["options"], *other["options"]}):
        if one["options"].get(name) != other["options"].get(name):
            return f"{name}={one['options'].get(name)!r}, not {other['options'].get(name)!r}"
    return None


def _samples(files: Sequence[tuple[Path, int]]) -> str:
    """A digest of pages spread over the files."""
    found = hashlib.blake2b(digest_size=16)
    step = max(sum(nbytes for _, nbytes in files) // _SAMPLES, _PAGE)
    for path, nbytes in files:
        with path.open("rb", buffering=0) as file:
            # Nothing would use what is read ahead.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for at in range(0, nbytes, step):
                try:
                    found.update(os.pread(file.fileno(), _PAGE, at))
                except OSError as error:
                    code = errno.errorcode.get(error.errno or 0, "")
                    text = f"cannot read: {path} at byte {at} ({code})"
                    raise make("failed", error.errno, text, os.fsdecode(path), "") from error
    return found.hexdigest()
