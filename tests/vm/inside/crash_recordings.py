"""Recordings for crashes.py: several in turn, direct and buffered, one of them rotated."""

import random
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.vm.inside.camera import Record, reader
from tests.vm.inside.crashes import Tools, Wrong
from tests.vm.inside.loads import MIB

FRAMES = random.Random("frames").randbytes(MIB)
"""The bytes of which records are parts."""
LENGTHS = (5000, 200_000, 65536, 1, 4096, 300_001, 0, 4097)
GROUPS = (1, 3, 4)
"""The numbers of records that are appended before each sync."""
ENDING = 2
"""The number of records that are appended before the end."""
COUNT = sum(GROUPS) + ENDING


@dataclass(frozen=True)
class Way:
    method: str
    io: str
    rotate: int = 0

    def words(self, path: Path, source: Path) -> Sequence[str]:
        """The arguments of recorder.c."""
        return (str(path), str(source), self.method, self.io, str(self.rotate))


WAYS = (Way("uring", "direct"), Way("auto", "buffered"), Way("bounce", "direct", 700_000))


def part(number: int) -> tuple[int, int]:
    """The offset of record `number` in FRAMES, and its length."""
    return number * 4096, LENGTHS[number % len(LENGTHS)]


class Recording:
    """A running recorder.c, which answers each line with a line."""

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.began = self.says()

    def says(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        assert self.process.stdin
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.says()

    def ends(self) -> int:
        self.process.communicate()
        return self.process.returncode


class Scenario:
    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.source = tools.sources / "frames"
        self.source.write_bytes(FRAMES)
        self.records = reader()

    def prepare(self, folder: Path) -> None:
        pass

    def work(self, folder: Path, mark: Callable[[str], None]) -> None:
        for at, way in enumerate(WAYS):
            words = way.words(folder / f"{at}.rec", self.source)
            recording = Recording(self.tools.command(folder, "recorder", *words))
            assert recording.began == "started", recording.began
            mark(f"{at}:0")
            number = 0
            for group in (*GROUPS, ENDING):
                for _ in range(group):
                    start, length = part(number)
                    said = recording.ask(f"append {start} {length}")
                    assert said == f"{number}", said
                    number += 1
                said = recording.ask("sync" if number < COUNT else "finish")
                assert said == f"{number}", said
                mark(f"{at}:{number}")
            assert recording.ends() == 0

    def check(self, folder: Path, marked: str) -> None:
        last, acknowledged = map(int, marked.split(":")) if marked else (-1, 0)
        for at in range(len(WAYS)):
            first = folder / f"{at}.rec"
            there = list(self.there(first, begun=at <= last))
            for number, record in enumerate(there):
                start, length = part(number)
                want = (number, length, number, number)
                data = FRAMES[start : start + length]
                if (record[0], record[2], record[3], record[4]) != want or record[8] != data:
                    raise Wrong(
                        f"{first.name}: record {number} is {record[:8]}, or its bytes are wrong"
                    )
            least = COUNT if at < last else acknowledged if at == last else 0
            if not least <= len(there) <= COUNT:
                raise Wrong(f"{first.name}: {len(there)} records, {least} were acknowledged")

    def there(self, first: Path, begun: bool) -> Iterator[Record]:
        """The records of all files, read by the reader in docs/recording.md."""
        file, path = 0, first
        while path.exists():
            try:
                yield from self.records(str(path))
            except (AssertionError, struct.error) as error:
                # A recording that has not begun has no header.
                if begun and not file:
                    raise Wrong(f"{path.name} is no recording: {error}") from error
                return
            file += 1
            path = first.with_name(f"{first.name}.{file}")
        if begun and not file:
            raise Wrong(f"{first.name} is not there")
