"""A server that answers as a web server, as the Hugging Face Hub and as S3 do.

stores.py ADDRESS[:PORT] FOLDER [CERTIFICATE]

serves the files of the folder in the bucket "bucket", with TLS if there is a file with a
certificate and its key, prints where it is, and then, for each line that it reads, how many bytes
it has sent since the last one.
"""

import hashlib
import json
import re
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

COMMIT = "c0ffee" * 6 + "beef"


SMALL = 1000
"""Smaller files are in git itself; others are only named there."""


@lru_cache
def tag_of(data: bytes) -> str:
    """As the hub has it."""
    if len(data) < SMALL:
        blob = b"blob %d\0" % len(data) + data
        return f'"{hashlib.sha1(blob).hexdigest()}"'
    return f'"{hashlib.sha256(data).hexdigest()}"'


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "Stores"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path, query = unquote(url.path), parse_qs(url.query)
        self.server.asked.append(path)
        if "list-type" in query:
            self.whole(self.listing(path.strip("/"), query.get("prefix", [""])[0]))
        elif found := re.fullmatch(r"/api/models/(.*)/revision/.*", path):
            start = f"/{found[1]}/resolve/{COMMIT}/"
            names = [name.removeprefix(start) for name in self.server.files if start in name]
            info = {"sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
            self.whole(json.dumps({"id": found[1], **info}).encode())
        elif found := re.fullmatch(r"/api/models/(.*)/tree/.*", path):
            start = f"/{found[1]}/resolve/{COMMIT}/"
            files = {
                name.removeprefix(start): data
                for name, data in self.server.files.items()
                if start in name
            }
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": tag_of(data).strip('"')}
                for name, data in files.items()
            ]
            self.whole(json.dumps(tree).encode())
        elif (data := self.server.files.get(path)) is None:
            self.send_error(404)
        else:
            self.part(data)

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.files[unquote(urlsplit(self.path).path)] = data
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.send_header("ETag", tag_of(data))
        self.end_headers()

    def do_DELETE(self) -> None:
        self.server.files.pop(unquote(urlsplit(self.path).path), None)
        self.send_response(204)
        self.end_headers()

    def listing(self, bucket: str, prefix: str) -> bytes:
        """The objects directly below a prefix, as ListObjectsV2 has them."""
        items = ""
        for name, data in self.server.files.items():
            key = name.removeprefix(f"/{bucket}/")
            if key != name and key.startswith(prefix) and "/" not in key[len(prefix) :]:
                items += (
                    f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size>"
                    f"<ETag>{escape(tag_of(data))}</ETag>"
                    "<LastModified>2026-11-28T00:00:00.000Z</LastModified></Contents>"
                )
        return (
            f"<ListBucketResult>{items}<IsTruncated>false</IsTruncated></ListBucketResult>".encode()
        )

    def whole(self, text: bytes) -> None:
        self.send_response(200)
        self.body(text)

    def part(self, data: bytes) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "")
        self.send_response(206 if asked else 200)
        body = memoryview(data)
        if asked:
            first, last = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
            body = body[first : last + 1]
        self.send_header("ETag", tag_of(data))
        self.send_header("X-Repo-Commit", COMMIT)
        self.body(body)

    def body(self, data: bytes | memoryview) -> None:
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
            with self.server.lock:
                self.server.sent += len(data)

    def log_message(self, *_: object) -> None:
        pass


class Stores(ThreadingHTTPServer):
    """What is at each path."""

    request_queue_size = 128

    def __init__(self, address: str, certificate: str | None) -> None:
        address, _, port = address.partition(":")
        super().__init__((address, int(port or 0)), Handler)
        self.tls = None
        if certificate is not None:
            self.tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self.tls.load_cert_chain(certificate)
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        """The paths of what has been asked for."""
        self.sent = 0
        """How many bytes of contents."""
        self.lock = threading.Lock()
        self.url = f"{'https' if certificate else 'http'}://{address}:{self.server_port}"

    def get_request(self) -> tuple[socket.socket, Any]:
        taken, address = super().get_request()
        if self.tls is not None:
            # The handshake is the business of the connection's thread.
            taken = self.tls.wrap_socket(taken, server_side=True, do_handshake_on_connect=False)
        return taken, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that has gone away is no error.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @classmethod
    @contextmanager
    def running(cls, address: str = "127.0.0.1", certificate: str | None = None) -> Iterator[Self]:
        stores = cls(address, certificate)
        thread = threading.Thread(target=stores.serve_forever)
        thread.start()
        try:
            yield stores
        finally:
            stores.shutdown()
            thread.join()
            stores.server_close()

    def environment(self) -> dict[str, str]:
        """Variables that lead programs here."""
        return {
            "HF_ENDPOINT": self.url,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "me",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }


def main(address: str, folder: str, certificate: str | None = None) -> None:
    with Stores.running(address, certificate) as stores:
        for path in Path(folder).iterdir():
            stores.files[f"/bucket/{path.name}"] = path.read_bytes()
        print(stores.url, flush=True)
        for _ in sys.stdin:
            with stores.lock:
                print(stores.sent, flush=True)
                stores.sent = 0


if __name__ == "__main__":
    main(*sys.argv[1:])
