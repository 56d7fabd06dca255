"""Loads the two halves of a file, concurrently or one after the other, in a separate process.

    halves.py FILE at-once|in-turn [check=1]

Prints one JSON object, as the other programs do; `fill` is the time until both are loaded.
"""

import json
import resource
import sys
import threading
import time
from pathlib import Path

import dmafile


def busy() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    path, together, check = Path(sys.argv[1]), sys.argv[2] == "at-once", "check=1" in sys.argv[3:]
    half = path.stat().st_size // 2
    buffers: dict[int, dmafile.Buffer] = {}

    def load(number: int) -> None:
        buffers[number] = dmafile.load(path, offset=number * half, length=half)

    threads = [threading.Thread(target=load, args=[number]) for number in (0, 1)]
    start, before = time.perf_counter(), busy()
    for thread in threads:
        thread.start()
        if not together:
            thread.join()
    for thread in threads:
        thread.join()
    seconds, cpu = time.perf_counter() - start, busy() - before
    if check:
        with path.open("rb") as file:
            for number in (0, 1):
                if memoryview(buffers[number]) != file.read(half):
                    sys.exit(f"half {number}: wrong bytes")
    said = {"create": 0.0, "fill": seconds, "close": 0.0, "cpu": cpu, "report": None}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
