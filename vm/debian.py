"""What comes from Debian: packages, by an apt with lists of its own, and the source of Linux."""

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from vm.host import alone, cache, call, need, replacing

SOURCE = "linux-source-6.12"


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


def linux_source() -> Path:
    """Debian's source of Linux 6.12: the newest in the cache, fetched if there is none."""
    with alone(SOURCE):
        return unpacked() or unpack()


def unpacked() -> Path | None:
    """The newest source in the cache, in a folder that says its version."""
    trees = list((cache() / "source").glob(f"{SOURCE}_*/{SOURCE}"))
    return max(trees, key=lambda tree: tree.parent.stat().st_mtime, default=None)


def unpack() -> Path:
    """Brings the newest source into the cache."""
    need("xz-utils", "command", "-v", "xz")
    with alone():
        apt = Apt()
        version = apt.fields(SOURCE)["Version"]
        place = cache() / "source" / f"{SOURCE}_{version.replace('/', '_')}"
        print(f"vm: fetching {SOURCE} {version} (150 MB, unpacked 1.6 GB, once)", file=sys.stderr)
        with replacing(place) as partial:
            apt.unpack([f"{SOURCE}={version}"], partial)
            archive = partial / "usr" / "src" / f"{SOURCE}.tar.xz"
            call(["tar", "-C", str(partial), "-xf", str(archive)])
            shutil.rmtree(partial / "usr")
    return place / SOURCE
