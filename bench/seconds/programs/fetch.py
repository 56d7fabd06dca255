"""Fetches an object of S3 into memory with one client.

The client is called as its documentation recommends, in a separate process, with the endpoint and
credentials in the environment.

    fetch.py WAY BUCKET KEY BYTES huge|base [check=1]

Clients that return bytes copy them into a memfd, on huge pages or not. Prints one JSON object:
`seconds` and `cpu` from before the first request until all bytes are in memory, without imports,
and `peak`, the most memory meanwhile, in bytes more than before; with check=1 also the SHA-256 of
the bytes.
"""

import hashlib
import json
import mmap
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HUGE = 2 << 20
BLOCK = 8 << 20
CONNECTIONS = 16

Fetch = Callable[[], Any]
"""Fetches the object, and returns its bytes: one piece, or several in order."""


@dataclass(frozen=True)
class Wanted:
    bucket: str
    key: str
    size: int
    huge: bool

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.key}"

    def memory(self) -> mmap.mmap:
        """A memfd that takes the object."""
        fd = os.memfd_create("object", os.MFD_CLOEXEC | (os.MFD_HUGETLB if self.huge else 0))
        whole = -(-self.size // HUGE) * HUGE
        os.ftruncate(fd, whole)
        memory = mmap.mmap(fd, whole)
        os.close(fd)
        return memory


def dmafile(wanted: Wanted) -> Fetch:
    import dmafile

    return lambda: dmafile.load(wanted.url, pages="huge" if wanted.huge else "base")


def runai(wanted: Wanted) -> Fetch:
    """Its buffer, which it allocates itself: the bytes of the tensors."""
    os.environ |= {
        "RUNAI_STREAMER_CONCURRENCY": str(CONNECTIONS),
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        "RUNAI_STREAMER_MEMORY_LIMIT": "-1",
    }
    from runai_model_streamer import SafetensorsStreamer

    def fetch() -> Any:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(wanted.url)
            tensors = dict(streamer.get_tensors())
            return [tensors[name].numpy() for name in sorted(tensors)]

    return fetch


def obstore(wanted: Wanted) -> Fetch:
    from obstore import get_range
    from obstore.store import S3Store

    # It does not look at SSL_CERT_FILE.
    options: Any = {"allow_http": True, "allow_invalid_certificates": True}
    store = S3Store(wanted.bucket, client_options=options, virtual_hosted_style_request=False)

    def fetch() -> Any:
        memory = wanted.memory()

        def part(at: int) -> None:
            end = min(at + BLOCK, wanted.size)
            memory[at:end] = memoryview(get_range(store, wanted.key, start=at, end=end))

        with ThreadPoolExecutor(CONNECTIONS) as threads:
            list(threads.map(part, range(0, wanted.size, BLOCK)))
        return memory

    return fetch


def awscrt(wanted: Wanted) -> Fetch:
    from awscrt.auth import AwsCredentialsProvider
    from awscrt.http import HttpHeaders, HttpRequest
    from awscrt.io import (
        ClientBootstrap,
        ClientTlsContext,
        DefaultHostResolver,
        EventLoopGroup,
        TlsConnectionOptions,
        TlsContextOptions,
    )
    from awscrt.s3 import (
        S3Client,
        S3RequestTlsMode,
        S3RequestType,
        create_default_s3_signing_config,
    )

    loops = EventLoopGroup()
    bootstrap = ClientBootstrap(loops, DefaultHostResolver(loops))
    credentials = AwsCredentialsProvider.new_environment()
    region = os.environ["AWS_REGION"]
    scheme, _, host = os.environ["AWS_ENDPOINT_URL"].partition("://")
    tls: dict[str, Any] = {"tls_mode": S3RequestTlsMode.DISABLED}
    if scheme == "https":
        context = TlsContextOptions()
        context.override_default_trust_store_from_path(None, os.environ["AWS_CA_BUNDLE"])
        connection = TlsConnectionOptions(ClientTlsContext(context))
        connection.set_server_name(host.partition(":")[0])
        tls = {"tls_mode": S3RequestTlsMode.ENABLED, "tls_connection_options": connection}
    client = S3Client(
        bootstrap=bootstrap,
        region=region,
        signing_config=create_default_s3_signing_config(
            region=region, credential_provider=credentials
        ),
        **tls,
        part_size=BLOCK,
        throughput_target_gbps=25,
    )

    def fetch() -> Any:
        memory = wanted.memory()

        def body(chunk: bytes, offset: int, **_: Any) -> None:
            memory[offset : offset + len(chunk)] = chunk

        headers = HttpHeaders([("host", host)])
        request = HttpRequest("GET", f"/{wanted.bucket}/{wanted.key}", headers)
        asked = client.make_request(request=request, type=S3RequestType.GET_OBJECT, on_body=body)
        asked.finished_future.result()
        return memory

    return fetch


def s3torchconnector(wanted: Wanted) -> Fetch:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client

    config = S3ClientConfig(part_size=BLOCK, force_path_style=True)
    client = S3Client(
        os.environ["AWS_REGION"], endpoint=os.environ["AWS_ENDPOINT_URL"], s3client_config=config
    )

    def fetch() -> Any:
        memory = wanted.memory()
        client.get_object(wanted.bucket, wanted.key).readinto(memoryview(memory)[: wanted.size])
        return memory

    return fetch


def http_client(wanted: Wanted) -> Fetch:
    """Python's own client, which reads into memory; it signs nothing."""
    from http.client import HTTPConnection

    host = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    own = threading.local()

    def fetch() -> Any:
        memory = wanted.memory()
        view = memoryview(memory)

        def part(at: int) -> None:
            end = min(at + BLOCK, wanted.size)
            if not hasattr(own, "connection"):
                own.connection = HTTPConnection(host)
            ranged = {"Range": f"bytes={at}-{end - 1}"}
            own.connection.request("GET", f"/{wanted.bucket}/{wanted.key}", headers=ranged)
            answer = own.connection.getresponse()
            while at < end and (got := answer.readinto(view[at:end])):
                at += got

        with ThreadPoolExecutor(CONNECTIONS) as threads:
            list(threads.map(part, range(0, wanted.size, BLOCK)))
        return memory

    return fetch


@dataclass(frozen=True)
class Way:
    start: Callable[[Wanted], Fetch]
    """Imports what it needs, and returns the function that is timed."""
    package: str
    """The package whose version is shown; empty for Python's own."""
    whole: bool = True
    """Whether it returns the whole object, not only the tensors in it."""


WAYS = {
    "dmafile": Way(dmafile, "dmafile"),
    "http.client": Way(http_client, ""),
    "Run:ai": Way(runai, "runai-model-streamer", whole=False),
    "obstore": Way(obstore, "obstore"),
    "awscrt": Way(awscrt, "awscrt"),
    "s3torchconnector": Way(s3torchconnector, "s3torchconnector"),
}


def memory_of(names: str) -> int:
    """The sum of fields of /proc/self/status, in bytes."""
    found = re.findall(
        rf"^(?:{names}):\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE
    )
    return 1024 * sum(map(int, found))


def busy() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def digest(made: Any, size: int) -> str:
    found = hashlib.sha256()
    pieces = made if isinstance(made, list) else [memoryview(made)[:size]]
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


def main(way: str, bucket: str, key: str, size: str, pages: str, *more: str) -> None:
    fetch = WAYS[way].start(Wanted(bucket, key, int(size), pages == "huge"))
    # So that it is the peak from here on.
    Path("/proc/self/clear_refs").write_text("5")
    before, cpu, began = memory_of("VmRSS|HugetlbPages"), busy(), time.perf_counter()
    made = fetch()
    seconds, cpu = time.perf_counter() - began, busy() - cpu
    # The peak leaves hugetlb pages out, of which there are never more than at the end.
    said: dict[str, Any] = {"seconds": seconds, "cpu": cpu}
    said["peak"] = memory_of("VmHWM|HugetlbPages") - before
    if more:
        said["digest"] = digest(made, int(size))
    print(json.dumps(said))
    sys.stdout.flush()
    # Some clients wait for their threads.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
