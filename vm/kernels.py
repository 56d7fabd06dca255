"""Debian's kernels, unpacked into a cache and never installed, and virtme-ng, which boots them.

Beside each kernel lies what modules for it are built with.
"""

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
VIRTME = "virtme-ng==1.42"

STOCK = {"6.12": "linux-image-6.12-amd64", "6.1": "linux-image-amd64"}
"""What each of Debian's kernels is called, whichever version is the newest."""
HEADERS = "headers"
"""The folder with a stock kernel's headers, beside its `boot`."""

MAKE = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")

# Where Debian keeps what a user rarely calls.
os.environ["PATH"] += ":/usr/sbin:/sbin"


class Unavailable(Exception):
    """What is needed to boot isn't here, and can't be had."""


@dataclass(frozen=True)
class Kernel:
    """An image that QEMU boots."""

    image: Path

    @property
    def modules(self) -> Path:
        """The nearest folder above the image with a lib/modules, as virtme-ng looks for it too."""
        return next(
            one for one in self.image.parents if (one / "lib/modules").exists() or one.parent == one
        )

    @property
    def build(self) -> Path:
        """The tree that modules for it are built with: Debian's headers, or where it was built."""
        beside = self.image.parents[1]
        headers = [*(beside / HEADERS / "usr" / "src").glob("linux-headers-*"), beside / "build"]
        trees = [
            one for one in (*headers, *self.image.parents) if (one / "Module.symvers").exists()
        ]
        if not trees:
            raise Unavailable(
                f"no modules can be built for {self.image}: neither are its headers in "
                f"../{HEADERS}, nor is there a Module.symvers in a folder above it"
            )
        return trees[0]


def cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser().absolute() / "dmafile" / "vm"


def find(name: str) -> Kernel:
    """The kernel of that name: the newest in the cache, fetched or built if there is none."""
    # It needs what this module has.
    from vm import small

    if name in STOCK:
        return cached(name) or fetch(name)
    if name in small.CONFIGS:
        return small.find(name)
    image = Path(name).absolute()
    if not image.is_file():
        raise Unavailable(
            f"no kernel `{name}`: neither {', '.join((*STOCK, *small.CONFIGS))}, nor an image at "
            "that path"
        )
    return Kernel(image)


def cached(name: str) -> Kernel | None:
    images = [one for one in (cache() / name).glob("*/boot/vmlinuz-*") if has_headers(one)]
    newest = max(images, key=lambda image: image.parents[1].stat().st_mtime, default=None)
    return Kernel(newest) if newest else None


def has_headers(image: Path) -> bool:
    return (image.parents[1] / HEADERS).exists()


def fetch(name: str) -> Kernel:
    """Brings the newest package of this kernel from the configured sources into the cache."""
    with alone():
        apt = Apt()
        version, package = apt.newest(STOCK[name])
        # linux-image-amd64 is 6.1 on Debian 12 only.
        if not package.startswith(f"linux-image-{name}."):
            raise Unavailable(f"the configured sources have {package} where {name} was looked for")
        place = cache() / name / f"{package}_{version.replace('/', '_')}"
        if not place.exists():
            print(f"vm: fetching {package} {version} (100 MB, once)", file=sys.stderr)
            with replacing(place) as partial:
                apt.unpack([f"{package}={version}"], partial)
                [modules] = (partial / "lib/modules").iterdir()
                call(["depmod", "-b", str(partial), modules.name])
        if not (place / HEADERS).exists():
            headers = package.replace("image", "headers", 1)
            print(f"vm: fetching {headers} {version} (15 MB, once)", file=sys.stderr)
            with replacing(place / HEADERS) as partial:
                # Of its dependencies those that Linux is the source of: headers common to all
                # flavours, and the tools of a build. The compiler is looked for where it's called.
                parts = apt.depends(f"{headers}={version}", ("linux-headers-", "linux-kbuild-"))
                apt.unpack([f"{headers}={version}", *parts], partial)
                relocate(partial / "usr" / "src" / headers)
        os.utime(place)
    kernel = cached(name)
    if kernel is None:
        raise Unavailable(f"{package} {version} holds no kernel image")
    return kernel


def relocate(headers: Path) -> None:
    """Lets headers be used where they are; their other links are relative already."""
    makefile = headers / "Makefile"
    text = makefile.read_text()
    # It may be called from anywhere, so what it includes is looked for beside it.
    here = "include $(dir $(lastword $(MAKEFILE_LIST)))../"
    moved = text.replace("include /usr/src/", here)
    if moved == text:
        raise Unavailable(f"{headers.name} is built in another way than expected:\n{text}")
    makefile.write_text(moved)


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


class Apt:
    """apt-get with lists of its own: needs no root, and changes nothing of the system's."""

    def __init__(self) -> None:
        state, store = cache() / "apt" / "lists", cache() / "apt" / "cache"
        for folder in (state, store / "archives"):
            (folder / "partial").mkdir(parents=True, exist_ok=True)
        # apt would fetch as a user of its own, who can't enter a home folder.
        options = {"Dir::State::lists": state, "Dir::Cache": store, "APT::Sandbox::User": "root"}
        self.options = [word for item in options.items() for word in ("-o", "{}={}".format(*item))]
        call(["apt-get", *self.options, "-qq", "update"])

    def newest(self, name: str) -> tuple[str, str]:
        """The version of a package that only stands for another one, and that one's name."""
        fields = self.fields(name)
        return fields["Version"], fields["Depends"].split()[0]

    def depends(self, package: str, prefixes: tuple[str, ...]) -> list[str]:
        """What a package, NAME=VERSION, depends on and begins so; with a version where it's one."""
        found = []
        for one in self.fields(package)["Depends"].split(", "):
            name, _, version = one.partition(" ")
            if name.startswith(prefixes):
                exact = re.fullmatch(r"\(= (.*)\)", version)
                found.append(f"{name}={exact[1]}" if exact else name)
        return found

    def fields(self, package: str) -> dict[str, str]:
        words = ["apt-cache", *self.options, "show", "--no-all-versions", package]
        fields: dict[str, str] = {}
        for line in call(words).split("\n"):
            key, _, value = line.partition(": ")
            fields.setdefault(key, value)
        return fields

    def unpack(self, packages: Sequence[str], folder: Path) -> None:
        """Downloads packages, each NAME or NAME=VERSION, and unpacks them; installs nothing."""
        call(["apt-get", *self.options, "-qq", "download", *packages], folder)
        for archive in folder.glob("*.deb"):
            call(["dpkg-deb", "-x", str(archive), str(folder)])
            archive.unlink()


def virtme_run() -> Path:
    """The launcher of virtme-ng, in a virtual environment of its own."""
    place = cache() / VIRTME.replace("==", "-")
    launcher = place / "bin" / "virtme-run"
    if not launcher.exists():
        with alone():
            print(f"vm: fetching {VIRTME}", file=sys.stderr)
            need("python3-venv", sys.executable, "-c", "import ensurepip, venv")
            call([sys.executable, "-m", "venv", "--clear", str(place)])
            pip = [str(place / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
            call([*pip, "install", "--quiet", VIRTME])
    return launcher


def need(package: str, *check: str) -> None:
    """Makes sure that a command succeeds, with a Debian package if it takes one."""
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
def alone(part: str = "") -> Iterator[None]:
    """Keeps others from filling the cache, or one part of it, at the same time."""
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / f"lock{part and '-'}{part}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
