"""Servers of object stores, each with a bucket that is filled by the store's own client."""

import base64
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

import pytest

from tests.stores.relay import PATIENCE, Relay

boto3: Any = pytest.importorskip("boto3", reason="the clients of stores are not installed")
botocore: Any = pytest.importorskip("botocore")
blob: Any = pytest.importorskip("azure.storage.blob")
gcs: Any = pytest.importorskip("google.cloud.storage")
google: Any = pytest.importorskip("google.auth.credentials")
rsa: Any = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.rsa")
serialization: Any = pytest.importorskip("cryptography.hazmat.primitives.serialization")

PROGRAMS = Path(sys.executable).parent
"""Where scripts/stores has installed them."""
BUCKET = "bucket"
ACCESS, SECRET = "access", "hunter2hunter2"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
        assert isinstance(port, int)
        return port


class Store:
    """A server of objects, which dmafile reaches through a relay, and its client directly."""

    scheme = ""
    pages = False
    """Lists a folder in pages of 1,000 objects."""
    checks_secrets = True
    knows_buckets = True
    """Says that a bucket does not exist when a folder in it is asked for."""
    keeps = True
    """Has its objects after it was killed."""
    keeps_uploads = False
    """Has the parts of uploads after it was killed."""
    takes_saves = True
    lists_uploads = False

    def __init__(self, place: Path, relay: Relay) -> None:
        self.place, self.relay = place, relay
        self.process: subprocess.Popen[bytes] | None = None
        self.port = 0
        self.objects: dict[str, bytes] = {}

    @classmethod
    @contextlib.contextmanager
    def running(cls, place: Path) -> Iterator[Self]:
        place.mkdir()
        with Relay.running() as relay:
            store = cls(place, relay)
            try:
                store.relay.lead_to(store.start())
                store.make_bucket()
                yield store
            finally:
                store.kill()

    def command(self, port: int) -> list[str]:
        raise NotImplementedError

    def connect(self, url: str) -> None:
        """Makes the clients for the server at this URL."""
        raise NotImplementedError

    def make_bucket(self) -> None:
        raise NotImplementedError

    def upload(self, key: str, data: bytes) -> None:
        raise NotImplementedError

    def download(self, key: str) -> bytes:
        raise NotImplementedError

    def uploads(self) -> list[str]:
        """The keys of uploads in several parts that are not objects yet."""
        raise NotImplementedError

    def remove(self, key: str) -> None:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """Variables that lead dmafile here."""
        raise NotImplementedError

    def wrong(self) -> dict[str, str]:
        """The same with credentials that the server does not accept."""
        raise NotImplementedError

    def knows_absence(self, in_parts: bool) -> bool:
        """Saves an object only if there is none, when it is asked to."""
        return not in_parts

    def knows_versions(self, in_parts: bool) -> bool:
        """Replaces an object only if it has a version."""
        return not in_parts

    def keeps_digest(self) -> str | None:
        """The algorithm of the digest that the server has of an object which dmafile saved."""
        return None

    def put(self, key: str, data: bytes) -> str:
        """Stores an object, and returns its URL."""
        self.upload(key, data)
        self.objects[key] = data
        return self.url(key)

    def url(self, key: str = "") -> str:
        return f"{self.scheme}://{BUCKET}/{key}"

    def start(self) -> int:
        """Starts the server, makes its clients, and returns its port."""
        # Another program may get the port before the server does.
        for _ in range(3):
            port = free_port()
            with (self.place / "log").open("ab") as log:
                self.process = subprocess.Popen(
                    self.command(port),
                    cwd=self.place,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    process_group=0,
                    env={**os.environ, "PATH": f"{PROGRAMS}:{os.environ['PATH']}"},
                )
            if self.listens(port):
                self.port = port
                self.connect(f"http://127.0.0.1:{port}")
                return port
            self.kill()
        raise AssertionError((self.place / "log").read_text(errors="replace"))

    def listens(self, port: int) -> bool:
        assert self.process
        until = time.monotonic() + PATIENCE
        while self.process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                return True
            time.sleep(0.05)
        return False

    def kill(self) -> None:
        if self.process:
            # With its children: some commands are scripts.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(PATIENCE)
            self.process = None

    def settle(self) -> None:
        """Waits until a crash loses nothing."""

    def restart(self) -> None:
        """Ends the server in the middle of its answers, and starts it again with its objects."""
        self.settle()
        self.relay.refuse()
        self.kill()
        # Longer than the first pauses of a client that tries again.
        time.sleep(1)
        # However long the server takes to start, connections are not refused meanwhile: how often
        # they may be is limited.
        self.relay.wait()
        port = self.start()
        if not self.keeps:
            self.make_bucket()
            for key, data in self.objects.items():
                self.upload(key, data)
        self.relay.lead_to(port)


class S3(Store):
    scheme = "s3"
    pages = True
    lists_uploads = True

    def connect(self, url: str) -> None:
        self.client = boto3.client(
            "s3",
            endpoint_url=url,
            aws_access_key_id=ACCESS,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
            config=botocore.config.Config(proxies={}, s3={"addressing_style": "path"}),
        )

    def make_bucket(self) -> None:
        self.client.create_bucket(Bucket=BUCKET)

    def upload(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=data)

    def download(self, key: str) -> bytes:
        data = self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        assert isinstance(data, bytes)
        return data

    def uploads(self) -> list[str]:
        listed = self.client.list_multipart_uploads(Bucket=BUCKET)
        return [upload["Key"] for upload in listed.get("Uploads", [])]

    def remove(self, key: str) -> None:
        self.client.delete_object(Bucket=BUCKET, Key=key)

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.relay.url,
            "AWS_ACCESS_KEY_ID": ACCESS,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def knows_absence(self, in_parts: bool) -> bool:
        return True

    def knows_versions(self, in_parts: bool) -> bool:
        return True

    def keeps_digest(self) -> str | None:
        return "crc64nvme"

    def wrong(self) -> dict[str, str]:
        return {**self.environment(), "AWS_SECRET_ACCESS_KEY": f"not-{SECRET}"}


class Moto(S3):
    """It keeps objects in memory, and does not look at signatures."""

    checks_secrets = False
    keeps = False

    def knows_versions(self, in_parts: bool) -> bool:
        # It looks at them in a request for one object only.
        return not in_parts

    def keeps_digest(self) -> str | None:
        # It does not know this algorithm.
        return None

    def command(self, port: int) -> list[str]:
        return [str(PROGRAMS / "moto_server"), "-H", "127.0.0.1", "-p", str(port)]


class VersityGateway(S3):
    """Its objects are files, with extended attributes."""

    keeps_uploads = True

    def command(self, port: int) -> list[str]:
        folder = self.place / "objects"
        folder.mkdir(exist_ok=True)
        words = ["--port", f"127.0.0.1:{port}", "--access", ACCESS, "--secret", SECRET]
        return [str(PROGRAMS / "versitygw"), *words, "posix", str(folder)]


class Rclone(S3):
    """It answers ranges with the status 200, which is for all of an object."""

    def command(self, port: int) -> list[str]:
        folder = self.place / "objects"
        folder.mkdir(exist_ok=True)
        words = ["--addr", f"127.0.0.1:{port}", "--auth-key", f"{ACCESS},{SECRET}", "--config", ""]
        return [str(PROGRAMS / "rclone"), "serve", "s3", *words, str(folder)]


class Azurite(Store):
    scheme = "az"
    account = "devstoreaccount1"
    # The key that Azurite's documentation publishes.
    key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

    def command(self, port: int) -> list[str]:
        program = PROGRAMS.parent / "azurite" / "node_modules" / ".bin" / "azurite-blob"
        words = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--silent"]
        # Clients are often newer than it is.
        words += ["--skipApiVersionCheck", "--disableTelemetry"]
        return [str(program), *words, "--location", str(self.place / "objects")]

    def connect(self, url: str) -> None:
        service = blob.BlobServiceClient(f"{url}/{self.account}", credential=self.key)
        self.client = service.get_container_client(BUCKET)

    def make_bucket(self) -> None:
        self.client.create_container()

    def upload(self, key: str, data: bytes) -> None:
        self.client.upload_blob(key, data, overwrite=True)

    def download(self, key: str) -> bytes:
        data = self.client.download_blob(key).readall()
        assert isinstance(data, bytes)
        return data

    def remove(self, key: str) -> None:
        self.client.delete_blob(key)

    def environment(self) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": self.account,
            "AZURE_STORAGE_ACCOUNT_KEY": self.key,
            "AZURE_STORAGE_ENDPOINT": f"{self.relay.url}/{self.account}",
        }

    def settle(self) -> None:
        # It writes what it knows of blobs every few seconds, and of their places on their own.
        blobs, places = (
            self.place / "objects" / f"__azurite_db_blob{of}__.json" for of in ("", "_extent")
        )
        tags = {blob.name: blob.etag for blob in self.client.list_blobs()}
        until = time.monotonic() + PATIENCE
        while True:
            known = blobs.read_text() if blobs.exists() else ""
            found = re.findall(r'"persistency":{"id":"([^"]+)"', known)
            written = places.read_text() if places.exists() else ""
            if all(tag.strip('"') in known for tag in tags.values()) and all(
                place in written for place in found
            ):
                return
            assert time.monotonic() < until, "Azurite writes nothing"
            time.sleep(0.1)

    def emulator(self) -> dict[str, str]:
        """The shorter way of leading to it."""
        return {
            "AZURE_STORAGE_USE_EMULATOR": "true",
            "AZURITE_BLOB_STORAGE_URL": self.relay.url,
        }

    def wrong(self) -> dict[str, str]:
        key = base64.b64encode(SECRET.encode()).decode()
        return {**self.environment(), "AZURE_STORAGE_ACCOUNT_KEY": key}

    def signed(self) -> str:
        """A signature for reading that is valid for an hour."""
        token = blob.generate_container_sas(
            self.account,
            BUCKET,
            account_key=self.key,
            permission=blob.ContainerSasPermissions(read=True, list=True),
            expiry=datetime.now(UTC) + timedelta(hours=1),
        )
        assert isinstance(token, str)
        return token


class FakeGcs(Store):
    """It does not look at tokens, nor at conditions, and saves by one of two interfaces."""

    scheme = "gs"
    pages = True
    checks_secrets = False
    # It fails, with status 500.
    knows_buckets = False
    takes_saves = False

    def command(self, port: int) -> list[str]:
        folder = self.place / "objects"
        folder.mkdir(exist_ok=True)
        words = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
        # Names of buckets are in the path only at this host.
        words += ["-public-host", "127.0.0.1", "-log-level", "warn"]
        words += ["-backend", "filesystem", "-filesystem-root", str(folder)]
        return [str(PROGRAMS / "fake-gcs-server"), *words]

    def connect(self, url: str) -> None:
        client = gcs.Client(
            project="project",
            credentials=google.AnonymousCredentials(),
            client_options={"api_endpoint": url},
        )
        self.client = client.bucket(BUCKET)

    def make_bucket(self) -> None:
        self.client.create()

    def upload(self, key: str, data: bytes) -> None:
        self.client.blob(key).upload_from_string(data, "application/octet-stream")

    def download(self, key: str) -> bytes:
        data = self.client.blob(key).download_as_bytes()
        assert isinstance(data, bytes)
        return data

    def remove(self, key: str) -> None:
        self.client.blob(key).delete()

    def environment(self) -> dict[str, str]:
        return {"GOOGLE_BASE_URL": self.relay.url, "GOOGLE_SKIP_SIGNATURE": "true"}

    def account(self) -> Path:
        """The file of a service account, with a key that has just been made."""
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        text = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        account = {
            "type": "service_account",
            "client_email": "me@project.iam.gserviceaccount.com",
            "private_key": text.decode(),
            "private_key_id": "1",
        }
        file = self.place / "account.json"
        file.write_text(json.dumps(account))
        return file
