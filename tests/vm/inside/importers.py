"""Drivers and programs that do not use dmafile import its buffers and get the bytes of the file.

importers.py DMAFILE HELPERS FOLDER KIND[,METHOD]...    in the machine, as root
"""

import mmap
import os
import subprocess
import sys
from pathlib import Path

from tests.vm.inside.loads import File, Loads, difference, setting

FRAME = 1280 * 720 * 4
"""The size of a picture of importer.c."""
HUGE = 2 << 20


def ways_in(importer: str) -> list[list[str]]:
    """Loads drivers; returns commands that import the dma-buf DMAFILE_FD and print its bytes."""
    # One HDMI input, one HDMI output, and no other nodes.
    vivid = "n_devs=1 num_inputs=1 input_types=3 num_outputs=1 output_types=1 node_types=0x101"
    subprocess.run(["modprobe", "vivid", *vivid.split()], check=True)
    subprocess.run(["modprobe", "vgem"], check=True)
    ways = [["vgem"], ["vivid"], ["send", importer, "receive"]]
    # In Linux 6.1, vivid has no control that connects its output to its input.
    if os.uname().release.startswith("6.1."):
        ways.remove(["vivid"])
    return [[importer, *how] for how in ways]


def main(dmafile: str, helpers: str, folder: str, *kinds: str) -> None:
    loads = Loads(dmafile, helpers)
    importer = str(loads.helpers / "importer")
    ways = ways_in(importer)
    file = File.of(Path(folder) / "file", FRAME)
    for one in kinds:
        kind, _, method = one.partition(",")
        words = ["--pages=base"] if kind == "udmabuf" else []
        words += [f"--method={method}"] if method else []
        for how in ways:
            seen = loads.command(file, kind, *words, command=how)
            assert seen == file.data, f"{one}, {how[1]}: {difference(seen, file.data)}"
    if "udmabuf" in kinds:
        # Large enough for huge pages, but by default no driver must see wrong bytes.
        larger = File.of(Path(folder) / "larger", 2 * FRAME)
        seen = loads.command(larger, "udmabuf", command=[importer, "vivid"])
        assert seen == larger.data[:FRAME], difference(seen, larger.data[:FRAME])
        back = setting("/proc/sys/vm/nr_hugepages", 4)
        for pages in ("thp", "huge"):
            words = [f"--pages={pages}", "--io=direct"]
            for how in (["vgem"], ["send", importer, "receive"]):
                seen = loads.command(file, "udmabuf", *words, command=[importer, *how])
                assert seen[:FRAME] == file.data, f"{pages}, {how[0]}"
                assert not any(seen[FRAME:]), f"{pages}, {how[0]}"
            heads_only(loads.command(file, "udmabuf", *words, command=[importer, "vivid"]), file)
        back()
    print(f"{loads.count} imports checked")


def heads_only(seen: bytes, file: File) -> None:
    """In Linux 6.12, a driver that maps a udmabuf for the CPU gets the first page of every huge
    page instead of each of its pages (`vmap_udmabuf`; fixed in 6.17). Correct bytes are accepted.
    """
    if seen == file.data:
        print("vmap of huge pages: right")
        return
    release = os.uname().release
    assert release.startswith("6.12."), f"vmap of huge pages: wrong on {release}"
    for at in range(0, FRAME, mmap.PAGESIZE):
        head = at - at % HUGE
        # The end of a file may be on base pages.
        either = [file.data[start : start + mmap.PAGESIZE] for start in (head, at)]
        assert seen[at : at + mmap.PAGESIZE] in either, f"neither right nor the known bug, at {at}"
    print("vmap of huge pages: the first page of each only, as known of Linux 6.12")


if __name__ == "__main__":
    main(*sys.argv[1:])
