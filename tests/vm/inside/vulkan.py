"""Vulkan imports loaded memory and reads the bytes of the file.

vulkan.py DMAFILE HELPERS PROGRAM FOLDER KIND...    in the machine, as root
"""

import sys
from pathlib import Path

from tests.vm.inside.importers import FRAME
from tests.vm.inside.loads import File, Loads, difference


def main(dmafile: str, helpers: str, program: str, folder: str, *kinds: str) -> None:
    loads = Loads(dmafile, helpers)
    # Whole pages: an imported descriptor must not be shorter than the size that Vulkan expects.
    file = File.of(Path(folder) / "file", FRAME)
    for kind in kinds:
        for how in ("fd", "host"):
            seen = loads.command(file, kind, command=[program, how])
            assert seen == file.data, f"{kind}, {how}: {difference(seen, file.data)}"
    print(f"{loads.count} imports checked")


if __name__ == "__main__":
    main(*sys.argv[1:])
