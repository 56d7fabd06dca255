"""Write small recordings, from which fuzzing starts: python -m scripts.fuzz_seeds FOLDER.

A recorder's blocks are as large as those of its file system, and 64 of them are reserved for the
index. These have the smallest blocks that docs/recording.md allows, and no more of them than they
need. The fuzz target computes the sums.
"""

import struct
import sys
from pathlib import Path

BLOCK = 512
IDENTITY = bytes(range(16))
DATA = b"one record of a few bytes"


def pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


def header(file: int, first: int, hole: int = 0) -> bytes:
    """The target adds a hole of so many pages to the file."""
    created = 1_700_000_000_000_000_000
    fields = (b"DMAFREC1", 1, BLOCK, IDENTITY, file, hole, created, first, BLOCK, 0)
    return pad(struct.pack("<8sII16sIIqQII", *fields))


def index(file: int, number: int, flags: int, following: int, entries: list[bytes]) -> bytes:
    fields = (b"DMAFIDX1", IDENTITY, file, flags, number, following, len(entries), 0)
    head = struct.pack("<8s16sIIQQI8xI", *fields)
    return pad(head + b"".join(entries))


def entry(number: int, offset: int, length: int, flags: int = 0) -> bytes:
    return struct.pack("<QQQqQQII8x", number, offset, length, -5, 7, number // 2, 0, flags)


def recordings() -> dict[str, bytes]:
    data = pad(DATA)
    size = len(DATA)
    complete = header(0, 0) + index(0, 0, 1, 0, [entry(0, 2 * BLOCK, size)]) + data
    three = [entry(number, 3 * BLOCK, size) for number in range(3)]
    blocks = [index(0, 0, 0, 2 * BLOCK, three[:2]), index(0, 1, 1, 0, three[2:])]
    two_blocks = header(0, 0) + b"".join(blocks) + data
    more = header(0, 0) + index(0, 0, 3, 0, [entry(0, 2 * BLOCK, size)]) + data
    second = header(1, 1) + index(1, 0, 1, 0, [entry(1, 2 * BLOCK, size, 1)]) + data
    sparse = header(0, 0, 1 << 20) + index(0, 0, 0, 4 * BLOCK, [entry(0, 1 << 31, 5000)])
    return {
        "complete": complete,
        "two-blocks": two_blocks,
        "two-files": more + second,
        "sparse": sparse,
    }


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in recordings().items():
        (folder / f"{name}.recording").write_bytes(data)


if __name__ == "__main__":
    main()
