"""Debian's kernels, unpacked into a cache and never installed, and virtme-ng, which boots them.

Beside each kernel lies what modules for it are built with.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from vm import small
from vm.debian import Apt
from vm.host import Unavailable, alone, cache, call, need, replacing

VIRTME = "virtme-ng==1.42"

STOCK = {"6.12": "linux-image-6.12-amd64", "6.1": "linux-image-amd64"}
"""What each of Debian's kernels is called, whichever version is the newest."""
HEADERS = "headers"
"""The folder with a stock kernel's headers, beside its `boot`."""


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


def find(name: str) -> Kernel:
    """The kernel of that name: the newest in the cache, fetched or built if there is none."""
    if name in STOCK:
        return cached(name) or fetch(name)
    if name in small.CONFIGS:
        return Kernel(small.find(name))
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


def virtme_run() -> list[str]:
    """The launcher of virtme-ng, in a virtual environment of its own, as the words of a command."""
    place = cache() / VIRTME.replace("==", "-")
    if not place.exists():
        with alone():
            # Others may have waited for the same.
            if not place.exists():
                print(f"vm: fetching {VIRTME}", file=sys.stderr)
                need("python3-venv", sys.executable, "-c", "import ensurepip, venv")
                with replacing(place) as partial:
                    call([sys.executable, "-m", "venv", str(partial)])
                    pip = [str(partial / "bin" / "python"), "-m", "pip"]
                    pip += ["--disable-pip-version-check", "install", "--quiet"]
                    call([*pip, VIRTME])
    # By its interpreter: what the script itself names is where it was installed first.
    return [str(place / "bin" / name) for name in ("python", "virtme-run")]
