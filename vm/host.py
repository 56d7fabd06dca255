"""The host: its programs and packages, and the cache in which what takes long to make is kept."""

import contextlib
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent

MAKE = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")

# Where Debian keeps what a user rarely calls.
os.environ["PATH"] += ":/usr/sbin:/sbin"


class Unavailable(Exception):
    """What is needed to boot isn't here and can't be installed."""


def cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser().absolute() / "dmafile" / "vm"


def need(package: str, *check: str) -> None:
    """Makes sure that a command succeeds, with a Debian package if it takes one."""
    # apt-get fails where another one is at work.
    with alone("packages"):
        result = subprocess.run([str(ROOT / "scripts" / "need"), package, *check])
    if result.returncode:
        raise Unavailable(f"the Debian package {package} is missing")


def call(command: Sequence[str], folder: Path | None = None) -> str:
    """What a command prints; Unavailable, with what it complained of, when it fails."""
    try:
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:
        raise Unavailable(f"there is no {command[0]} here") from None
    if result.returncode:
        raise Unavailable(f"`{' '.join(command)}` failed:\n{result.stderr.strip()}")
    return result.stdout


def environment() -> dict[str, str]:
    """Ours, without what a surrounding make(1) wants of those that it calls itself."""
    return {name: value for name, value in os.environ.items() if name not in MAKE}


@contextlib.contextmanager
def alone(part: str = "", *, only_using: bool = False) -> Iterator[None]:
    """Keeps others from filling the cache, or one part of it, at the same time.

    Any number may use it at a time, while none fills it.
    """
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / f"lock{part and '-'}{part}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH if only_using else fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def replacing(place: Path) -> Iterator[Path]:
    """A folder to fill, that comes to its place when it is whole."""
    partial = cache() / f"partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        place.parent.mkdir(parents=True, exist_ok=True)
        partial.rename(place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
