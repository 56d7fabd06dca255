"""Loads from a store behind a network with latency and loss, which goes away and comes back.

    network.py DMAFILE HELPERS   in the machine, as root

The store is in a network namespace of its own. Fails with an assertion that names the case, or
prints the number of cases.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.vm.inside.loads import BLOB, MIB, PATIENCE, Loads, settles
from tests.vm.inside.nfs import call

SERVER = "python/tests/stores.py"
ADDRESS, PORT = "10.79.0.1", 9000
DATA = BLOB[: 6 * MIB + 777]
HEADERS = 64 << 10
"""What the server may count beside the object."""


class Store:
    """A bucket, in a namespace."""

    def __init__(self) -> None:
        self.folder = Path("/tmp/bucket")
        self.folder.mkdir()
        self.write(DATA)
        call("modprobe", "-a", "veth", "sch_netem")
        call("ip", "netns", "add", "store")
        call("ip", "link", "add", "near", "type", "veth", "peer", "name", "far", "netns", "store")
        for where, name, address in ((), "near", "10.79.0.2"), (("-n", "store"), "far", ADDRESS):
            call("ip", *where, "address", "add", f"{address}/24", "dev", name)
            call("ip", *where, "link", "set", name, "up")
        self.start()

    def write(self, data: bytes) -> None:
        (self.folder / "object").write_bytes(data)

    def start(self) -> None:
        inside = ["ip", "netns", "exec", "store"]
        command = [*inside, "python3", "-E", "-S", SERVER, f"{ADDRESS}:{PORT}", str(self.folder)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url, "the store has ended"

    def sent(self) -> int:
        """How many bytes since the last call."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def shape(*words: str) -> None:
    """What the network does in both directions."""
    for where, name in ([], "near"), (["ip", "netns", "exec", "store"], "far"):
        call(*where, "tc", "qdisc", "replace", "dev", name, "root", "netem", *words)


def started(loads: Loads, store: Store, *words: str) -> "subprocess.Popen[bytes]":
    loads.count += 1
    # Of the last load.
    store.sent()
    environment = {
        "AWS_ENDPOINT_URL": store.url,
        "AWS_ACCESS_KEY_ID": "me",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }
    command = [loads.dmafile, "load", "s3://bucket/object", "--quiet", *words, "--", "sh", "-c"]
    command.append("exec head -c $DMAFILE_BYTES /proc/self/fd/$DMAFILE_FD")
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, env=os.environ | environment)


def ends(process: "subprocess.Popen[bytes]", case: str, said: str = "") -> None:
    """Asserts that a load ends with the bytes of the object, or with a line that says this."""
    out, errors = process.communicate(timeout=PATIENCE)
    line = errors.decode()
    told = f"{case}: {process.returncode}: {len(out)} bytes: {line}"
    if said:
        assert (process.returncode, out) == (1, b""), told
        assert len(line.splitlines()) == 1 and said in line, told
    else:
        assert process.returncode == 0 and out == DATA, told
    print(case, flush=True)


def some(store: Store, process: "subprocess.Popen[bytes]") -> None:
    """Waits until some of the object has been sent, and not all."""
    sent = [0]

    def more() -> int:
        sent[0] += store.sent()
        return sent[0]

    settles(more, lambda sent: sent > MIB, "nothing is sent")
    assert process.poll() is None and sent[0] < len(DATA), "it was over too early"


LATE = ("delay", "20ms", "5ms")
LOSSY = (*LATE, "loss", "2%")
SLOWLY = ("--limit=1M/s", "--block=256K", "--queue-depth=4")


def networks(loads: Loads, store: Store) -> None:
    for words in (LATE, LOSSY, (*LOSSY, "duplicate", "1%", "reorder", "5%", "corrupt", "0.1%")):
        shape(*words)
        ends(started(loads, store), f"network: {' '.join(words)}")
        # What is lost is sent again by TCP: each byte is asked for once.
        sent = store.sent()
        assert len(DATA) <= sent <= len(DATA) + HEADERS, f"{words}: {sent} bytes were sent"


def away_and_back(loads: Loads, store: Store) -> None:
    shape(*LOSSY)
    process = started(loads, store, *SLOWLY)
    some(store, process)
    call("ip", "link", "set", "near", "down")
    time.sleep(3)
    call("ip", "link", "set", "near", "up")
    ends(process, "the link is down for 3 s")
    process = started(loads, store, *SLOWLY)
    some(store, process)
    store.kill()
    time.sleep(3)
    store.start()
    ends(process, "the store is killed, and restarted after 3 s")
    process = started(loads, store, *SLOWLY)
    some(store, process)
    store.kill()
    store.write(bytes(len(DATA)))
    store.start()
    ends(process, "the object is another one after that", "(ESTALE)")
    store.write(DATA)
    process = started(loads, store)
    store.kill()
    ends(process, "there is no store any more", "(ECONNREFUSED)")


def main(dmafile: str, helpers: str, *_: Sequence[str]) -> None:
    loads = Loads(dmafile, helpers)
    store = Store()
    networks(loads, store)
    away_and_back(loads, store)
    print(f"{loads.count} cases checked")


if __name__ == "__main__":
    main(*sys.argv[1:])
