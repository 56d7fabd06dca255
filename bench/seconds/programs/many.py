"""Opens a file of many small tensors and makes an array of each, in a separate process.

    many.py FILE [check=1]

Prints one JSON object, as the other programs do. `create` is the time to open the file and read
its header. `fill` is the time to load all tensors as NumPy arrays, less the time to load only the
bytes.
"""

import json
import resource
import sys
import time

import dmafile
import dmafile.numpy


def main() -> None:
    path = sys.argv[1]
    start = time.perf_counter()
    with dmafile.open_tensors(path):
        opened = time.perf_counter() - start
    start = time.perf_counter()
    with dmafile.load(path, to="anon"):
        bytes_only = time.perf_counter() - start
    start = time.perf_counter()
    tensors = dmafile.numpy.load_file(path)
    whole = time.perf_counter() - start
    usage = resource.getrusage(resource.RUSAGE_SELF)
    said = {
        "create": opened,
        # The header is already counted in `create`; the rest is making arrays.
        "fill": max(0.0, whole - bytes_only - opened),
        "close": 0.0,
        "cpu": usage.ru_utime + usage.ru_stime,
        "report": {"tensors": len(tensors)},
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
