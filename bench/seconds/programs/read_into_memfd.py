"""The baseline: plain buffered read() of FILE into a fresh memfd mapping.

usage: read_into_memfd.py FILE [CHUNK]     CHUNK: bytes per read [1 MiB]
"""

import mmap
import os
import sys

path = sys.argv[1]
chunk = int(sys.argv[2]) if len(sys.argv) > 2 else 1 << 20

with open(path, "rb", buffering=0) as file:  # noqa: PTH123 (pathlib is a slow import; start-up counts)
    size = os.fstat(file.fileno()).st_size
    memory = os.memfd_create("baseline")
    os.ftruncate(memory, size)
    # Read straight into the mapping: one copy, page cache to memfd, no Python object in between.
    view = memoryview(mmap.mmap(memory, size))
    done = 0
    while done < size:
        count = file.readinto(view[done : done + chunk])
        if not count:
            sys.exit(f"read_into_memfd: {path}: ended at byte {done} of {size}")
        done += count
