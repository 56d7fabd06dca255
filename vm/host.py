"""The host: its programs and packages, and the cache for what takes long to build or fetch."""

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

# Debian keeps administration programs in these folders, which a user's PATH lacks.
os.environ["PATH"] += ":/usr/sbin:/sbin"


class Unavailable(Exception):
    """Something needed to boot is missing and cannot be installed."""


def cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser().absolute() / "dmafile" / "vm"


def need(package: str, *check: str) -> None:
    """Installs a Debian package unless the command CHECK succeeds without it."""
    # apt-get fails while another one runs.
    with alone("packages"):
        result = subprocess.run([str(ROOT / "scripts" / "need"), package, *check])
    if result.returncode:
        raise Unavailable(f"the Debian package {package} is missing")


def call(command: Sequence[str], folder: Path | None = None) -> str:
    """The output of a command. Raises Unavailable with its error output if it fails."""
    try:
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:
        raise Unavailable(f"command not found: {command[0]}") from None
    if result.returncode:
        raise Unavailable(f"`{' '.join(command)}` failed:\n{result.stderr.strip()}")
    return result.stdout


def environment() -> dict[str, str]:
    """This process's environment without the variables of a surrounding make(1)."""
    return {name: value for name, value in os.environ.items() if name not in MAKE}


@contextlib.contextmanager
def alone(part: str = "", *, only_using: bool = False) -> Iterator[None]:
    """Holds a lock on the cache, or on one part of it: exclusive, to fill it.

    ONLY_USING takes a shared lock, which excludes those that fill it.
    """
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / f"lock{part and '-'}{part}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH if only_using else fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def replacing(place: Path) -> Iterator[Path]:
    """Yields a folder to fill, and renames it to PLACE when it is complete."""
    partial = cache() / f"partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        place.parent.mkdir(parents=True, exist_ok=True)
        partial.rename(place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
