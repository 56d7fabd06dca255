"""The main job of the Python package: loads `file`, and writes it to `viewed` and `stored`."""

from pathlib import Path

import dmafile

with dmafile.load("file") as buffer:
    Path("viewed").write_bytes(memoryview(buffer))
    dmafile.save(buffer, "stored")
