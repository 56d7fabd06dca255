"""The log that dm-log-writes keeps of a disk, and what the disk may hold when the power fails.

Its format is in drivers/md/dm-log-writes.c of Linux, its purpose in
Documentation/admin-guide/device-mapper/log-writes.rst. A write is logged when a flush has covered
it, a write with FUA (force unit access) at once. What stands between two flushes lay in the disk's
cache, of which any part may be lost.
"""

import os
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MAGIC, VERSION = 0x6A736677736872, 1
SUPER = struct.Struct("<QQQI")
"""Magic, version, entries, bytes of a sector."""
ENTRY = struct.Struct("<QQQQ")
"""First sector, sectors, flags, bytes of data of the log's own, which is the text of a mark."""
FLUSH, FUA, DISCARD, MARK = 1, 2, 4, 8
TORN = 4096
"""Where a write is cut short, it is at a multiple of this: no disk writes half a block."""


@dataclass(frozen=True)
class Entry:
    """A write, a discard, a flush or a mark. Offsets and sizes are bytes."""

    flags: int
    at: int
    size: int
    stored: int
    """Where its bytes are in the log."""
    mark: str = ""

    @property
    def lasts(self) -> bool:
        """All that came before it is on the disk when it is done, or it itself is."""
        return bool(self.flags & (FLUSH | FUA))


class Log:
    """A log that is complete: its device is gone."""

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
        """Does to the disk what the entry says, or the first bytes of it."""
        size = entry.size if most is None else min(most, entry.size)
        if entry.flags & DISCARD:
            os.pwrite(disk, bytes(size), entry.at)
        elif size:
            data = os.pread(self.file.fileno(), size, entry.stored)
            assert len(data) == size, entry
            os.pwrite(disk, data, entry.at)


@dataclass(frozen=True)
class State:
    """What the disk may hold: all entries before `base`, and some of what follows."""

    base: int
    more: Sequence[tuple[int, int | None]]
    """Numbers of entries, and how many bytes of each; None for all."""
    after: int
    """The last entry that had been logged."""


def states(entries: Sequence[Entry], start: int, count: int, seed: int) -> Iterator[State]:
    """The states after every flush, FUA and mark from `start` on, and `count` others, by chance.

    Half of the others have all that was written, as when the kernel dies, half a part of what lay
    in the disk's cache, as when the power fails. In the order of their bases.
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
    # Where writes are few, more parts of them are to be had.
    while others and len(found) < len(fixed) + count:
        found.append(cached(entries, chance.choice(others), chance))
    return iter(sorted(found, key=lambda state: (state.base, state.after)))


def cached(entries: Sequence[Entry], at: int, chance: random.Random) -> State:
    """The power fails after entry `at`: what the last flush had not covered may be lost."""
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
