"""The log of dm-log-writes, and the possible states of the disk after a power failure.

Its format is in drivers/md/dm-log-writes.c of Linux, its purpose in
Documentation/admin-guide/device-mapper/log-writes.rst. A write is logged when a flush has covered
it, a write with FUA (force unit access) at once. Writes between two flushes were in the cache of
the disk, of which any part may be lost.
"""

import os
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MAGIC, VERSION = 0x6A736677736872, 1
SUPER = struct.Struct("<QQQI")
"""Magic, version, number of entries, sector size."""
ENTRY = struct.Struct("<QQQQ")
"""First sector, number of sectors, flags, bytes of the text of a mark."""
FLUSH, FUA, DISCARD, MARK = 1, 2, 4, 8
TORN = 4096
"""A torn write ends at a multiple of this: no disk writes half a block."""


@dataclass(frozen=True)
class Entry:
    """A write, a discard, a flush or a mark. Offsets and sizes are bytes."""

    flags: int
    at: int
    size: int
    stored: int
    """The offset of its bytes in the log."""
    mark: str = ""

    @property
    def lasts(self) -> bool:
        """Whether it, or everything before it, is on the disk when it is done."""
        return bool(self.flags & (FLUSH | FUA))


class Log:
    """A complete log, whose device is gone."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("rb")
        magic, version, count, sector = SUPER.unpack(self.file.read(SUPER.size))
        assert (magic, version) == (MAGIC, VERSION), (magic, version)
        self.entries: list[Entry] = []
        at = sector
        for _ in range(count):
            head = os.pread(self.file.fileno(), sector, at)
            first, sectors, flags, own = ENTRY.unpack_from(head)
            mark = head[ENTRY.size : ENTRY.size + own].decode() if flags & MARK else ""
            size = sectors * sector
            self.entries.append(Entry(flags, first * sector, size, at + sector, mark))
            at += sector + (0 if flags & DISCARD else size)

    def apply(self, entry: Entry, disk: int, most: int | None = None) -> None:
        """Applies the entry to the disk, or its first `most` bytes."""
        size = entry.size if most is None else min(most, entry.size)
        if entry.flags & DISCARD:
            os.pwrite(disk, bytes(size), entry.at)
        elif size:
            data = os.pread(self.file.fileno(), size, entry.stored)
            assert len(data) == size, entry
            os.pwrite(disk, data, entry.at)


@dataclass(frozen=True)
class State:
    """A possible state of the disk: all entries before `base`, and some of the following ones."""

    base: int
    more: Sequence[tuple[int, int | None]]
    """Numbers of entries, and the number of bytes of each; None for all."""
    after: int
    """The last logged entry."""


def states(entries: Sequence[Entry], start: int, count: int, seed: int) -> Iterator[State]:
    """The states after every flush, FUA and mark from `start` on, and `count` random others.

    Half of the others have everything that was written, as after a kernel crash; half have only a
    part of the disk cache, as after a power failure. Sorted by base.
    """
    chance = random.Random(seed)
    all_of_them = range(start, len(entries))
    fixed = [at for at in all_of_them if entries[at].lasts or entries[at].mark]
    others = sorted(set(all_of_them) - set(fixed))
    found = [State(at + 1, (), at) for at in fixed]
    for number, at in enumerate(chance.sample(others, min(count, len(others)))):
        if number % 2:
            found.append(State(at + 1, (), at))
        else:
            found.append(cached(entries, at, chance))
    # With few writes, more random parts of them are added.
    while others and len(found) < len(fixed) + count:
        found.append(cached(entries, chance.choice(others), chance))
    return iter(sorted(found, key=lambda state: (state.base, state.after)))


def cached(entries: Sequence[Entry], at: int, chance: random.Random) -> State:
    """A power failure after entry `at`: bytes that the last flush did not cover may be lost."""
    flushes = [number for number in range(at + 1) if entries[number].flags & FLUSH]
    base = flushes[-1] + 1 if flushes else 0
    lost = chance.random()
    more: list[tuple[int, int | None]] = []
    for number in range(base, at + 1):
        entry = entries[number]
        if entry.flags & FUA:
            more.append((number, None))
        elif entry.size and chance.random() > lost:
            torn = entry.size > TORN and chance.random() < 0.2
            more.append((number, chance.randrange(0, entry.size, TORN) if torn else None))
    return State(base, more, at)
