"""What one process holds another takes, and a driver imports it there when its holder is dead.

held.py DMAFILE HELPERS FOLDER [KIND...]    in the machine, as root; memfds are held in any case
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.vm.inside.importers import FRAME, ways_in
from tests.vm.inside.loads import File, Loads, difference

SOCKET = Path("/run/held/socket")


def held(loads: Loads, file: File, kind: str, ways: Sequence[Sequence[str]]) -> None:
    """Holds a file, takes it once for each way in, kills the holder, and lets them import it."""
    where = ["--name=file", f"--at={SOCKET}", f"--to={kind}"]
    # Of huge pages Linux 6.12 shows drivers the wrong ones (importers.py).
    where += ["--pages=4k"] if kind == "udmabuf" else []
    file.evict()
    holder = subprocess.Popen(
        [loads.dmafile, "hold", str(file.path), *where], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    line = json.loads(holder.stdout.readline())
    assert line["files"][0]["kind"] == kind and line["sealed"] == (kind == "memfd"), line
    take = [loads.dmafile, "take", "file", f"--at={SOCKET}", "--quiet", "--"]
    wait = ["sh", "-c", 'echo >&2 && read go && exec "$@"', "sh"]
    pipe = subprocess.PIPE
    takers = [
        subprocess.Popen([*take, *wait, *how], stdin=pipe, stdout=pipe, stderr=pipe) for how in ways
    ]
    for taker in takers:
        assert taker.stderr is not None and taker.stderr.read(1) == b"\n"
    holder.kill()
    holder.wait()
    # One after the other: vivid has one output.
    for taker, how in zip(takers, ways, strict=True):
        seen, said = taker.communicate(b"go\n")
        case = f"{kind}, {how[1]}"
        assert taker.returncode == 0, f"{case}: {said!r}"
        assert seen == file.data, f"{case}: {difference(seen, file.data)}"
        loads.count += 1


def main(dmafile: str, helpers: str, folder: str, *kinds: str) -> None:
    loads = Loads(dmafile, helpers)
    SOCKET.parent.mkdir(mode=0o755)
    file = File.of(Path(folder) / "file", FRAME)
    importer = str(loads.helpers / "importer")
    ways = ways_in(importer) if kinds else []
    # Another process maps it, as anything else than a dma-buf's driver does.
    held(loads, file, "memfd", [[importer, "send", importer, "receive"]])
    for kind in kinds:
        held(loads, file, kind, ways)
    print(f"{loads.count} imports checked")


if __name__ == "__main__":
    main(*sys.argv[1:])
