"""Gets the bytes of a model into memory once, and prints the CPU seconds of that as JSON.

    ring.py WAY FILE

The ways: `device` loads into the memory of a GPU, `anon` into memory of this process, and `memcpy`
copies as many bytes into fresh memory. For `device`, the dynamic linker must find a driver.
"""

import ctypes
import json
import mmap
import sys
import time
from pathlib import Path

import dmafile
import dmafile.cuda


def main() -> None:
    way, path = sys.argv[1], Path(sys.argv[2])
    if way == "memcpy":
        size = path.stat().st_size
        # Private, like the memory of the double.
        source, to = (mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE) for _ in range(2))
        # Written, so that the pages are not all the page of zeros.
        for at in range(0, size, mmap.PAGESIZE):
            source[at] = 1
        start = time.process_time()
        ctypes.memmove(
            ctypes.addressof(ctypes.c_char.from_buffer(to)),
            ctypes.addressof(ctypes.c_char.from_buffer(source)),
            size,
        )
    elif way == "device":
        start = time.process_time()
        kept = dmafile.cuda.load(path)
        assert sum(tensor.nbytes for tensor in kept.values()) > 0
    else:
        start = time.process_time()
        with dmafile.load(path, to="anon"):
            print(json.dumps({"cpu": time.process_time() - start}))
        return
    print(json.dumps({"cpu": time.process_time() - start}))


if __name__ == "__main__":
    main()
