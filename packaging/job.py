"""The main job of the Python package: the file `file` is loaded, and written to `viewed` and `stored`."""

from pathlib import Path

import dmafile

with dmafile.load("file") as buffer:
    Path("viewed").write_bytes(memoryview(buffer))
    dmafile.save(buffer, "stored")
