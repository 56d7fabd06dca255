#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-only
"""Makes an empty floppy disk with Amiga's old file system (OFS). Usage: mkofs.py IMAGE"""

import struct
import sys
from pathlib import Path

BLOCKS, ROOT, BITMAP = 1760, 880, 881


def closed(words: list[int], at: int) -> bytes:
    """A block of numbers whose sum is 0."""
    words[at] = 0
    words[at] = -sum(words) & 0xFFFFFFFF
    return struct.pack(">128I", *words)


root = [0] * 128
root[0], root[3], root[127] = 2, 72, 1
root[78], root[79] = 0xFFFFFFFF, BITMAP
root[108] = 0x01410000
bitmap = [0] * 128
for block in range(2, BLOCKS):
    if block not in (ROOT, BITMAP):
        bitmap[1 + (block - 2) // 32] |= 1 << ((block - 2) % 32)
with Path(sys.argv[1]).open("wb") as image:
    image.truncate(BLOCKS * 512)
    image.write(b"DOS\0")
    image.seek(ROOT * 512)
    image.write(closed(root, 5))
    image.write(closed(bitmap, 0))
