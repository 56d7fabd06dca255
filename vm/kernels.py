"""Debian's kernels, unpacked into a cache and never installed, and virtme-ng, which boots them.

The headers for building modules are next to each kernel.
"""

import functools
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vm import debian, small
from vm.debian import CANDIDATE, Apt, Package
from vm.host import Unavailable, alone, cache, call, need, replacing

VIRTME = "virtme-ng==1.42"

STOCK = {"6.12": "linux-image-6.12-amd64", "6.1": "linux-image-amd64"}
"""The packages of Debian 12's kernels, which depend on the newest version."""
NEWEST = "newest"
"""The newest kernel in any suite of Debian that is not a release candidate."""
LINE = re.compile(r"\d+\.\d+")
"""Any other of Debian's kernels is named by the first two numbers of its version."""
HEADERS = "headers"
"""The folder with a Debian kernel's headers, next to its `boot`; empty if Debian has none."""
NEEDS = "needs"
"""A file in it: the release whose programs build with these headers, and the packages needed."""
OF_HEADERS = ("linux-headers-", "linux-kbuild-")
"""Packages built from the Linux source that headers depend on: common headers, and tools."""


@dataclass(frozen=True)
class Kernel:
    """An image that QEMU boots."""

    image: Path

    @property
    def modules(self) -> Path:
        """The nearest folder above the image that has lib/modules; virtme-ng uses the same one."""
        return next(
            one for one in self.image.parents if (one / "lib/modules").exists() or one.parent == one
        )

    @property
    def build(self) -> Path:
        """The tree for building modules: Debian's headers, or the kernel's build folder."""
        beside = self.image.parents[1]
        headers = [*(beside / HEADERS / "usr" / "src").glob("linux-headers-*"), beside / "build"]
        trees = [
            one for one in (*headers, *self.image.parents) if (one / "Module.symvers").exists()
        ]
        if not trees and (beside / HEADERS).exists():
            raise Unavailable(
                f"cannot build modules for {self.image.name}: Debian no longer has headers for "
                "this image"
            )
        if not trees:
            raise Unavailable(
                f"cannot build modules for {self.image}: no headers in ../{HEADERS}, and no "
                "Module.symvers in a folder above it"
            )
        return trees[0]


def find(name: str) -> Kernel:
    """The kernel of that name: the newest in the cache; fetched or built if the cache has none."""
    if name in STOCK:
        return cached(name) or fetch(name)
    if name == NEWEST or LINE.fullmatch(name):
        return cached(name) or fetch_line(name)
    if name in small.NAMES:
        return Kernel(small.find(name))
    image = Path(name).absolute()
    if not image.is_file():
        raise Unavailable(
            f"no kernel `{name}`: not one of {', '.join((*STOCK, NEWEST, *small.NAMES))}, not "
            "the first two numbers of a version that Debian has, and not the path of an image"
        )
    return Kernel(image)


def cached(name: str) -> Kernel | None:
    images = [one for one in (cache() / name).glob("*/boot/vmlinuz-*") if has_headers(one)]
    newest = max(images, key=lambda image: image.parents[1].stat().st_mtime, default=None)
    return Kernel(newest.resolve()) if newest else None


def has_headers(image: Path) -> bool:
    return (image.parents[1] / HEADERS).exists()


def fetch(name: str) -> Kernel:
    """Fetches the newest package of this kernel from the configured sources into the cache."""
    with alone():
        apt = Apt()
        version, package = apt.newest(STOCK[name])
        # linux-image-amd64 is 6.1 only on Debian 12.
        if not package.startswith(f"linux-image-{name}."):
            raise Unavailable(f"the configured sources have {package}, not Linux {name}")
        place = unpacked(apt, name, package, version)
        unpack_headers(apt, package.replace("image", "headers", 1), version, place)
        os.utime(place)
    return fetched(name)


def fetch_line(name: str) -> Kernel:
    """The same for a kernel of any Debian release."""
    with alone():
        apt = debian.debian()
        images = served(apt, "image")
        image = choose(images, name)
        if image is None:
            lines = sorted({line(one) for one in images}, key=numbers)
            raise Unavailable(f"Debian has no kernel `{name}`; it has {', '.join(lines)}")
        place = unpacked(apt, line(image), image.name, image.version)
        headers = {(one.name, one.version): one for one in served(apt, "headers")}
        one = headers.get((image.name.replace("image", "headers", 1), image.version))
        if one:
            unpack_headers(apt, one.name, one.version, place, debian.release(one.suite))
        else:
            (place / HEADERS).mkdir(exist_ok=True)
        os.utime(place)
        if name == NEWEST:
            link = cache() / name / place.name
            link.parent.mkdir(exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(Path("..") / line(image) / place.name)
    return fetched(name)


def fetched(name: str) -> Kernel:
    kernel = cached(name)
    if kernel is None:
        raise Unavailable(f"Debian's package for {name} contains no kernel image")
    return kernel


def served(apt: Apt, part: str) -> list[Package]:
    """All images, or all headers, of the generic flavour in apt's lists."""
    real = re.compile(rf"linux-{part}-\d[^-]*(-\d+)?-amd64")
    short = re.compile(rf"linux-{part}-\d+\.\d+-amd64")

    def is_metapackage(one: Package) -> bool:
        depends = apt.depends(f"{one.name}={one.version}", (f"linux-{part}-",))
        return any(real.fullmatch(name.partition("=")[0]) for name in depends)

    return [
        one
        for one in apt.versions(f"linux-{part}-")
        if real.fullmatch(one.name) and not (short.fullmatch(one.name) and is_metapackage(one))
    ]


def line(package: Package) -> str:
    match = LINE.match(package.version)
    assert match, package
    return match[0]


def numbers(name: str) -> tuple[int, ...]:
    return tuple(map(int, name.split(".")))


def choose(images: Iterable[Package], name: str) -> Package | None:
    """The newest image of a line; for `newest`, of all that are not release candidates."""
    wanted = [
        one
        for one in images
        if (CANDIDATE not in one.version if name == NEWEST else line(one) == name)
    ]
    return in_order(wanted)[-1] if wanted else None


def in_order(packages: Iterable[Package]) -> list[Package]:
    """Sorted by version, the oldest first."""
    by_version = functools.cmp_to_key(debian.order)
    return sorted(packages, key=lambda one: by_version(one.version))


def unpacked(apt: Apt, name: str, package: str, version: str) -> Path:
    """The folder in the cache with the unpacked image and its modules."""
    place = cache() / name / f"{package}_{version.replace('/', '_')}"
    if not place.exists():
        print(f"vm: fetching {package} {version} (100 MB, once)", file=sys.stderr)
        with replacing(place) as partial:
            # Since Linux 7.2 the image's package only depends on several others.
            parts = [one for one in apt.depends(f"{package}={version}", ("linux-",)) if "=" in one]
            apt.unpack([f"{package}={version}", *parts], partial)
            arrange(partial)
            [modules] = (partial / "lib/modules").iterdir()
            call(["depmod", "-b", str(partial), modules.name])
    return place


def arrange(folder: Path) -> None:
    """Moves the files of newer packages to where older packages have them."""
    if not (folder / "lib").exists():
        (folder / "lib").symlink_to("usr/lib")
    for image in (folder / "lib/modules").glob("*/vmlinuz"):
        (folder / "boot").mkdir(exist_ok=True)
        image.rename(folder / "boot" / f"vmlinuz-{image.parent.name}")


def unpack_headers(apt: Apt, package: str, version: str, place: Path, release: str = "") -> None:
    """Unpacks headers into a folder; RELEASE is the release whose programs build with them."""
    if (place / HEADERS).exists():
        return
    print(f"vm: fetching {package} {version} (15 MB, once)", file=sys.stderr)
    with replacing(place / HEADERS) as partial:
        parts = apt.depends(f"{package}={version}", OF_HEADERS)
        apt.unpack([f"{package}={version}", *parts], partial)
        relocate(partial / "usr" / "src" / package)
        add_sparse_check(partial)
        if release:
            needed = {
                name
                for one in (f"{package}={version}", *parts)
                for name in apt.depends(one, ("",))
                if not name.startswith("linux-") or name.startswith("linux-compiler-")
            }
            (partial / NEEDS).write_text(f"{' '.join([release, *sorted(needed)])}\n")


def add_sparse_check(headers: Path) -> None:
    """Adds a script that newer headers call, and that Debian's packages lack.

    The script reports that sparse is usable; otherwise the build would skip sparse. If sparse does
    not support the language of the headers, it prints errors.
    """
    for makefile in headers.glob("usr/src/linux-headers-*-common/Makefile"):
        script = makefile.parent / "scripts" / "checker-valid.sh"
        if script.name in makefile.read_text() and not script.exists():
            script.write_text("#!/bin/sh\necho 1\n")
            script.chmod(0o755)


def needs(tree: Path) -> Sequence[str]:
    """The release and the packages needed to build with these headers; empty for the host's."""
    file = tree.parent.parent.parent / NEEDS
    words = file.read_text().split() if file.exists() else []
    return words if words and words[0] != debian.host() else []


def lines() -> list[Path]:
    """The oldest and the newest headers of each line, for each of Debian's releases."""
    with alone():
        apt = debian.debian()
        groups: dict[tuple[str, str], dict[str, Package]] = {}
        for one in served(apt, "headers"):
            if CANDIDATE not in one.version:
                # Two suites of a release may have the same version.
                group = groups.setdefault((line(one), debian.release(one.suite)), {})
                group[one.version] = one
        trees = []
        for (_, release), group in sorted(groups.items(), key=lambda item: numbers(item[0][0])):
            ordered = in_order(group.values())
            for one in dict.fromkeys((ordered[0], ordered[-1])):
                place = cache() / "lines" / f"{one.name}_{one.version.replace('/', '_')}"
                unpack_headers(apt, one.name, one.version, place, release)
                trees.append(place / HEADERS / "usr" / "src" / one.name)
    return trees


def relocate(headers: Path) -> None:
    """Makes headers usable in their present folder; their other links are relative already."""
    makefile = headers / "Makefile"
    text = makefile.read_text()
    # make may be called from any folder, so included files are found relative to this one.
    here = "$(dir $(lastword $(MAKEFILE_LIST)))../"
    moved = text.replace("include /usr/src/", f"include {here}")
    # Since Linux 6.13. Expanded at once (:=), because later includes extend MAKEFILE_LIST.
    moved = moved.replace("KBUILD_OUTPUT=/usr/src/", f"KBUILD_OUTPUT := {here}")
    if "/usr/src" in moved or moved == text:
        raise Unavailable(f"unexpected Makefile in {headers.name}:\n{text}")
    makefile.write_text(moved)


def virtme_run() -> list[str]:
    """The command that starts virtme-ng, which is in a separate virtual environment."""
    place = cache() / VIRTME.replace("==", "-")
    if not place.exists():
        with alone():
            # Another process may have done it while this one waited for the lock.
            if not place.exists():
                print(f"vm: fetching {VIRTME}", file=sys.stderr)
                need("python3-venv", sys.executable, "-c", "import ensurepip, venv")
                with replacing(place) as partial:
                    call([sys.executable, "-m", "venv", str(partial)])
                    pip = [str(partial / "bin" / "python"), "-m", "pip"]
                    pip += ["--disable-pip-version-check", "install", "--quiet"]
                    call([*pip, VIRTME])
    # Called by its interpreter: the script's first line has the path before the rename.
    return [str(place / "bin" / name) for name in ("python", "virtme-run")]
