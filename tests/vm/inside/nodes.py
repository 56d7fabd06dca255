"""The NUMA node of loaded memory, in a machine with several nodes.

    nodes.py DMAFILE HELPERS FOLDER    in the machine, as root

Fails with an assertion that names the case, or prints the number of cases.
"""

import ctypes
import json
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.vm.inside.loads import BLOB, MIB, File, Loads

SIZE = 96 * MIB
"""Large enough for several allocating threads."""
SET_MEMPOLICY, BIND = 238, 2
"""On x86-64; linux/mempolicy.h."""


def lies(fd: int) -> dict[int, int]:
    """The number of pages of a memfd on each node."""
    with mmap.mmap(fd, SIZE, prot=mmap.PROT_READ) as view:
        # Only mapped pages are counted.
        assert sum(view[:: mmap.PAGESIZE]) >= 0
        line = next(
            line
            for line in Path("/proc/self/numa_maps").read_text().splitlines()
            if "memfd" in line
        )
    return {int(node): int(count) for node, count in re.findall(r" N(\d+)=(\d+)", line)}


def load(loads: Loads, file: File, pages: str, bind: int | None = None) -> dict[int, int]:
    """Loads without a memory policy, or bound to a node; returns the pages on each node."""
    fd = os.memfd_create("nodes", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    os.set_inheritable(fd, True)

    def bound() -> None:
        if bind is not None:
            mask = ctypes.c_ulong(1 << bind)
            assert not libc.syscall(SET_MEMPOLICY, BIND, ctypes.byref(mask), 64)

    file.evict()
    words = ["load", str(file.path), f"--to=fd:{fd}", f"--pages={pages}", "--json", "--quiet"]
    said = subprocess.run(
        [loads.dmafile, *words], pass_fds=[fd], preexec_fn=bound, check=True, stdout=subprocess.PIPE
    )
    loads.count += 1
    assert os.pread(fd, SIZE, 0) == file.data, f"{pages}: wrong bytes"
    found = lies(fd)
    os.close(fd)
    reasons = [one for one in json.loads(said.stdout)["reasons"] if one["about"] == "node"]
    if bind is not None:
        # A memory policy is obeyed.
        assert not reasons and set(found) == {bind}, f"{pages}: {reasons}, {found}"
    else:
        chosen = [int(one["choice"]) for one in reasons]
        assert chosen == list(found), f"{pages}: on {chosen}, and it lies on {found}"
    return found


libc = ctypes.CDLL(None)


def main() -> None:
    loads, folder = Loads(*sys.argv[1:3]), Path(sys.argv[3])
    file = File(folder / "file", BLOB * (SIZE // len(BLOB)))
    file.path.write_bytes(file.data)
    for pages in ("base", "thp"):
        seen = [load(loads, file, pages) for _ in range(4)]
        print(f"# {pages}: {seen}")
        for node in (0, 1):
            load(loads, file, pages, bind=node)
    print(f"{loads.count} loads checked")


if __name__ == "__main__":
    main()
