"""Measures how long it takes to fetch an object of S3 into memory, and what it costs the client.

dmafile is compared with bare recv(2) into the same kind of memory and with installed clients. The
server sends from memory that is present, and only the client's CPU time counts. As root, the server
is in a network namespace of its own, and memory is on huge pages. With dmafile-remote and the
clients installed (obstore, awscrt, s3torchconnector, runai-model-streamer-s3):

    python -m bench.stores [--tls]

Also how long the command takes until it connects.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench import documents
from bench.arguments import add_keep, parser_of, program
from bench.runs import ROOT, Rows, Run
from bench.seconds import facts
from bench.seconds.commands import script
from bench.seconds.files import MIB
from bench.seconds.programs.fetch import CONNECTIONS, HUGE, WAYS
from bench.words import compared, ratio, spread

BARE = "recv(2)"
OURS = "dmafile"
RIVALS = ("Run:ai", "obstore", "awscrt", "s3torchconnector")
TENSORS = 64
NAMESPACE = "dmafile-bench"
BOTH = "certificate-and-key"
POOL = Path("/proc/sys/vm/nr_hugepages")


def make_model(path: Path, mib: int) -> str:
    """Writes a safetensors file; returns the digest of the bytes of its tensors."""
    each = mib * MIB // TENSORS
    header = {
        f"{number:03}": {"dtype": "U8", "shape": [each], "data_offsets": [at, at + each]}
        for number, at in enumerate(range(0, TENSORS * each, each))
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    tensors = hashlib.sha256()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number in range(TENSORS):
            tensor = random.Random(number).randbytes(each)
            tensors.update(tensor)
            file.write(tensor)
    return tensors.hexdigest()


@contextlib.contextmanager
def network() -> Iterator[tuple[list[str], str]]:
    """The words before a command that make it run where the server is, and the server's address."""
    if os.geteuid():
        yield [], "127.0.0.1"
        return

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    inside = ["ip", "netns", "exec", NAMESPACE]
    ip("netns", "add", NAMESPACE)
    try:
        ip("link", "add", "dmafile0", "type", "veth", "peer", "name", "store")
        ip("link", "set", "store", "netns", NAMESPACE)
        for before, name, address in ([], "dmafile0", 2), (["-n", NAMESPACE], "store", 1):
            ip(*before, "address", "add", f"10.78.0.{address}/24", "dev", name)
            ip(*before, "link", "set", name, "up")
        yield inside, "10.78.0.1"
    finally:
        # With its end of the link.
        ip("netns", "del", NAMESPACE)


@contextlib.contextmanager
def huge_pages(size: int) -> Iterator[bool]:
    """Reserves huge pages for an object, if this user may."""
    before = POOL.read_text()
    wanted = int(before) + size // HUGE + 64
    if os.geteuid():
        yield False
        return
    try:
        POOL.write_text(str(wanted))
        yield int(POOL.read_text()) >= wanted
    finally:
        POOL.write_text(before)


@contextlib.contextmanager
def server(
    inside: Sequence[str], address: str, folder: Path, certificate: Sequence[Path]
) -> Iterator[str]:
    command = [*inside, sys.executable, str(ROOT / "python/tests/stores.py"), address]
    command += [str(folder), *(str(one.with_name(BOTH)) for one in certificate)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()


def certificate(folder: Path, address: str) -> Path:
    """A certificate for this address; a file beside it has its key, too."""
    key, made = folder / "key", folder / "certificate"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=store"
    words += f" -addext subjectAltName=IP:{address} -addext basicConstraints=critical,CA:FALSE"
    words += f" -keyout {key} -out {made}"
    subprocess.run(["openssl", *words.split()], check=True, capture_output=True)
    (folder / BOTH).write_text(made.read_text() + key.read_text())
    return made


class Client:
    """What fetches the object."""

    def __init__(
        self, url: str, path: Path, huge: bool, scratch: Path, certificate: Sequence[Path]
    ) -> None:
        self.path, self.size = path, path.stat().st_size
        self.pages = "huge" if huge else "base"
        self.environment = os.environ | {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "me",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        for one in certificate:
            self.environment |= dict.fromkeys(("SSL_CERT_FILE", "AWS_CA_BUNDLE"), str(one))
        where = urlsplit(url)
        assert where.hostname is not None
        self.recv = [str(scratch / "recv"), where.hostname, str(where.port)]
        self.recv += [f"/bucket/{path.name}", str(self.size), str(CONNECTIONS), self.pages]
        source = ROOT / "bench" / "recv.c"
        subprocess.run(
            ["cc", "-O2", "-Wall", "-Werror", "-o", self.recv[0], str(source), "-pthread"],
            check=True,
        )

    def fetch(self, way: str, *more: str) -> dict[str, Any]:
        words = ("bucket", self.path.name, str(self.size), self.pages)
        command = self.recv if way == BARE else script("fetch.py", way, *words, *more)
        done = subprocess.run(command, env=self.environment, capture_output=True, timeout=600)
        if done.returncode != 0:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            raise RuntimeError(lines[-1] if lines else f"exit status {done.returncode}")
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return said


def label(way: str) -> str:
    if way == BARE or not WAYS[way].package:
        return way
    return f"{way} {importlib.metadata.version(WAYS[way].package)}"


def checked(client: Client, tensors: str, tls: bool) -> list[str]:
    """Those that get the right bytes here; says why others do not."""
    whole = hashlib.sha256(client.path.read_bytes()).hexdigest()
    right = [] if tls else [BARE]
    for way in WAYS:
        try:
            name = label(way)
            digest = client.fetch(way, "check=1")["digest"]
        except (RuntimeError, importlib.metadata.PackageNotFoundError) as error:
            print(f"skipping {way}: {error}", file=sys.stderr)
            continue
        assert digest == (whole if WAYS[way].whole else tensors), f"{name}: wrong bytes"
        right.append(way)
    return right


def measure(
    client: Client, ways: list[str], rounds: int, draw: random.Random
) -> list[dict[str, Any]]:
    samples = []
    for number in range(1, rounds + 1):
        draw.shuffle(ways)
        for way in ways:
            own = {"way": way, "name": label(way), "round": number, "size": client.size}
            samples.append({**own, **client.fetch(way)})
        print(f"round {number} of {rounds}", file=sys.stderr)
    return samples


def starts(command: Sequence[str], recv: str, rounds: int) -> list[dict[str, float]]:
    """Milliseconds from the start of the command until it connects, and of recv.c beside it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        ours = [*command, "load", "--quiet", f"http://127.0.0.1:{port}/object"]
        bare = [recv, "127.0.0.1", port, "/object", "4096", "1", "base"]

        def until_connected(words: Sequence[str]) -> float:
            began = time.perf_counter()
            quiet = subprocess.DEVNULL
            with subprocess.Popen(words, stdout=quiet, stderr=quiet) as process:
                taken, _ = listener.accept()
                spent = time.perf_counter() - began
                process.kill()
                taken.close()
            return 1000 * spent

        both = ((until_connected(ours), until_connected(bare)) for _ in range(4 * rounds))
        return [{"ours": ours, "bare": bare} for ours, bare in both]


def tables(run: Run) -> dict[str, Rows]:
    by_way: dict[str, list[Any]] = {}
    for one in run.samples:
        by_way.setdefault(one["way"], []).append(one)

    def of(way: str, what: str) -> list[float]:
        return [one[what] for one in by_way[way]]

    rows = []
    for way in (one for one in (BARE, *WAYS) if one in by_way):
        size = by_way[way][0]["size"]
        row = [
            by_way[way][0]["name"],
            spread([size / one / (1 << 30) for one in of(way, "seconds")]),
        ]
        row.append(spread([one * (1 << 30) / size for one in of(way, "cpu")]))
        row.append(f"{statistics.median(one - size for one in of(way, 'peak')) / MIB:.0f}")
        beside = ["", ""]
        if way != OURS and OURS in by_way:
            beside[0] = compared(of(way, "seconds"), of(OURS, "seconds"))
            beside[1] = f"{ratio(of(OURS, 'cpu'), of(way, 'cpu')):.2f}"
        rows.append([*row, *beside])
    head = ["", "GiB/s", "CPU-s of the client for 1 GiB", "memory beyond the object, MiB"]
    head += ["time / dmafile's", "dmafile's CPU / its"]
    begun = run.machine["starts"]
    row = [spread([one[which] for one in begun]) for which in ("ours", "bare")]
    row.append(f"{statistics.median(one['ours'] - one['bare'] for one in begun):.2f}")
    first = ["dmafile load URL, ms until it connects", "recv.c", "dmafile's beyond that"]
    return {"stores": (head, rows), "connects": (first, [row])}


def main() -> None:
    parser = parser_of("bench.stores", __doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of the object [1024]")
    parser.add_argument("--tls", action="store_true", help="by HTTPS")
    parser.add_argument("--program", help="path of the command dmafile [from PATH]")
    add_keep(parser)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as made,
        tempfile.TemporaryDirectory() as scratch,
        huge_pages((args.mib + 1) * MIB) as huge,
        network() as (inside, address),
    ):
        path = Path(made) / "model.safetensors"
        tensors = make_model(path, args.mib)
        command = program(args.program)
        described = facts.described(command, Path(scratch), Path(scratch))
        about = {**described, "mib": args.mib, "huge": huge, "namespace": bool(inside)}
        own = [certificate(Path(scratch), address)] if args.tls else []
        with server(inside, address, Path(made), own) as url:
            client = Client(url, path, huge, Path(scratch), own)
            ways = checked(client, tensors, args.tls)
            samples = measure(client, ways, args.rounds, random.Random(args.seed))
        begun = starts(command, client.recv[0], args.rounds)
    name = "stores-tls" if args.tls else "stores"
    found = {"bench": name, "machine": about, "seed": args.seed, "starts": begun}
    run = Run(found, samples)
    documents.finish(run, name, tables(run), kept=args.keep)


if __name__ == "__main__":
    main()
