"""Servers that run, and the command that loads from them."""

import importlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest

from tests.stores.relay import PATIENCE
from tests.vm.programs import TARGET
from vm.host import ROOT

if TYPE_CHECKING:
    from tests.stores.servers import Store

SUM = """tail -c "+$((DMAFILE_OFFSET + 1))" "/proc/self/fd/$DMAFILE_FD" |
    head -c "$DMAFILE_BYTES" | sha256sum | cut -d' ' -f1"""
"""Prints the digest of the bytes that a command gets: they may begin within a page."""
SUMS = """cd "$0" && for name in *; do sha256sum < "$name" | cut -d' ' -f1; echo "$name"; done"""
"""The same of the files in a folder, with their names."""


@dataclass(frozen=True)
class Done:
    """What a command has printed, and its exit status."""

    status: int
    out: str
    err: str


@dataclass
class Dmafile:
    """The command, in an environment."""

    program: Path
    env: dict[str, str] = field(default_factory=dict)

    def start(
        self,
        *words: object,
        env: Mapping[str, str] | None = None,
        stdin: int | IO[bytes] = subprocess.DEVNULL,
        fds: Sequence[int] = (),
    ) -> "Running":
        command = [str(self.program), *map(str, words)]
        return Running(command, {**self.env, **(env or {})}, stdin, fds)

    def run(
        self,
        *words: object,
        env: Mapping[str, str] | None = None,
        stdin: int | IO[bytes] = subprocess.DEVNULL,
        fds: Sequence[int] = (),
    ) -> Done:
        with self.start(*words, env=env, stdin=stdin, fds=fds) as running:
            return running.done()

    def prints(self, *words: object, env: Mapping[str, str] | None = None) -> str:
        done = self.run(*words, env=env)
        assert done.status == 0, done.err
        return done.out

    def sum(self, *words: object, env: Mapping[str, str] | None = None) -> str:
        return self.prints("load", "-q", *words, "--", "sh", "-c", SUM, env=env).strip()

    def sums(self, *words: object, env: Mapping[str, str] | None = None) -> dict[str, str]:
        said = self.prints(*words, "--", "sh", "-c", SUMS, "{}", env=env).splitlines()
        return dict(zip(said[1::2], said[::2], strict=True))


class Running:
    """A command that runs, and ends at the latest with the block."""

    def __init__(
        self, command: list[str], env: dict[str, str], stdin: int | IO[bytes], fds: Sequence[int]
    ) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            pass_fds=fds,
        )

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE)

    def line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline()

    def done(self) -> Done:
        out, err = self.process.communicate(timeout=PATIENCE)
        return Done(self.process.returncode, out, err)


@pytest.fixture(scope="session")
def program() -> Path:
    words = ["build", "--quiet", "--locked", "-p", "dmafile-cli", "--features", "remote"]
    subprocess.run(["cargo", *words], cwd=ROOT, check=True)
    return TARGET / "debug" / "dmafile"


@pytest.fixture(scope="session")
def plain() -> dict[str, str]:
    """This process's environment without what leads to other stores."""
    start = ("AWS_", "AZURE_", "AZURITE_", "GOOGLE_", "HF_")
    proxies = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(start) and name.lower() not in proxies
    }
    # A machine in a cloud has a role, and a user a token.
    return {**kept, "AWS_EC2_METADATA_DISABLED": "true", "HOME": "/nonexistent"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for a server, on the disk of the checkout: /tmp may have no extended attributes."""
    folder = TARGET / f"stores-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(
    scope="module", params=["Moto", "VersityGateway", "Azurite", "FakeGcs"], ids=str.lower
)
def store(request: pytest.FixtureRequest, place: Path) -> Iterator["Store"]:
    # Not before a test needs it: where the clients are not installed, that test is skipped.
    servers = importlib.import_module("tests.stores.servers")
    with getattr(servers, request.param).running(place / request.param) as store:
        yield store


@pytest.fixture
def dmafile(program: Path, plain: dict[str, str], store: "Store") -> Dmafile:
    return Dmafile(program, {**plain, **store.environment()})
