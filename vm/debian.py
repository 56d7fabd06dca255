"""Packages from Debian, fetched by apt with separate package lists, and the source of Linux."""

import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vm.host import Unavailable, alone, cache, call, need, replacing

RELEASES = ("oldstable", "stable")
"""Current releases, by names that move from one release to the next. On a mirror these names may
have older contents than the codename, so the codename is looked up."""
UNSTABLE = "sid"
CANDIDATE = "~rc"
"""Marks the version of a release candidate."""
SECURITY = "-security"
ARCHIVE, SECURITY_ARCHIVE = "Debian", "Debian-Security"
"""The labels of Debian's archives."""
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


@dataclass(frozen=True)
class Package:
    """One version of a package, and the suite that contains it."""

    name: str
    version: str
    suite: str


class Apt:
    """apt-get with separate lists: it needs no root, and changes nothing in the system."""

    def __init__(
        self,
        name: str = "apt",
        sources: Sequence[str] = (),
        *,
        packages: bool = True,
        architecture: str = "",
    ) -> None:
        """SOURCES are lines of a sources.list that replace the system's configuration.

        Without PACKAGES only the archives' Release files are fetched. ARCHITECTURE is the
        system's if not given.
        """
        place = cache() / name
        state, store = place / "lists", place / "cache"
        for folder in (state, store / "archives"):
            (folder / "partial").mkdir(parents=True, exist_ok=True)
        options = {
            "Dir::State::lists": state,
            "Dir::Cache": store,
            # Containers often disable these caches; then each call reads all lists.
            "Dir::Cache::pkgcache": "pkgcache.bin",
            "Dir::Cache::srcpkgcache": "srcpkgcache.bin",
            # By default apt fetches as the user _apt, which cannot enter a home folder.
            "APT::Sandbox::User": "root",
        }
        if sources:
            (place / "sources.list").write_text("".join(f"{line}\n" for line in sources))
            options |= {
                "Dir::Etc::SourceList": place / "sources.list",
                "Dir::Etc::SourceParts": "/dev/null",
                "Dir::Etc::Preferences": "/dev/null",
                "Dir::Etc::PreferencesParts": "/dev/null",
                "Dir::State::status": "/dev/null",
                "Acquire::Languages": "none",
                "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled": "false",
            }
        if not packages:
            options["Acquire::IndexTargets::deb::Packages::DefaultEnabled"] = "false"
        if architecture:
            options |= {"APT::Architecture": architecture, "APT::Architectures": architecture}
        self.lists = state
        self.options = [word for item in options.items() for word in ("-o", "{}={}".format(*item))]
        call(["apt-get", *self.options, "-qq", "update"])

    def newest(self, name: str) -> tuple[str, str]:
        """The version of a metapackage, and the name of the package that it depends on."""
        fields = self.fields(name)
        return fields["Version"], fields["Depends"].split()[0]

    def depends(self, package: str, prefixes: tuple[str, ...]) -> list[str]:
        """Dependencies of a package (NAME=VERSION) that begin with one of the prefixes.

        An exact version is kept, as NAME=VERSION.
        """
        return named(self.fields(package).get("Depends", ""), prefixes)

    def versions(self, prefix: str) -> list[Package]:
        """All versions of all packages whose names begin with PREFIX."""
        names = call(["apt-cache", *self.options, "pkgnames", prefix]).split()
        lines = call(["apt-cache", *self.options, "madison", *names]).splitlines() if names else []
        found = []
        for line in lines:
            name, version, source = (part.strip() for part in line.split("|"))
            # As in: URI SUITE/main amd64 Packages
            found.append(Package(name, version, source.split()[1].partition("/")[0]))
        return found

    def archives(self, *columns: str) -> list[list[str]]:
        """The values of these columns (apt's names) for all archives in the lists."""
        form = "\t".join(f"$({column})" for column in columns)
        words = ["indextargets", "--format", form, "Created-By: Packages"]
        lines = call(["apt-get", *self.options, *words]).splitlines()
        return [line.split("\t") for line in lines]

    def codenames(self) -> list[str]:
        """The archives' codenames, in the order of their files."""
        texts = [path.read_text() for path in sorted(self.lists.glob("*Release"))]
        return re.findall(r"^Codename: (\S+)$", "\n".join(texts), re.MULTILINE)

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


def named(depends: str, prefixes: tuple[str, ...]) -> list[str]:
    """The packages of a Depends field that begin with a prefix; of alternatives, the first."""
    found = []
    for one in depends.split(", "):
        name, _, version = one.partition(" | ")[0].partition(" ")
        if name and name.startswith(prefixes):
            exact = re.fullmatch(r"\(= (.*)\)", version)
            found.append(f"{name}={exact[1]}" if exact else name)
    return found


@functools.cache
def releases() -> Mapping[str, Sequence[str]]:
    """Debian's current releases, by codename, and the suites that belong to each.

    The programs of a suite are built for the C library of its release.
    """
    apt = Apt("apt-releases", sources(RELEASES), packages=False)
    named_after = {
        name: (name, f"{name}{SECURITY}", f"{name}-backports") for name in apt.codenames()
    }
    return {**named_after, UNSTABLE: (UNSTABLE, "experimental")}


@functools.cache
def mirrors() -> Mapping[str, str]:
    """The mirror that the system's apt uses for each archive, by label."""
    return dict(Apt().archives("LABEL", "REPO_URI"))


def sources(suites: Iterable[str]) -> list[str]:
    """Lines of a sources.list. Suites that seldom change may be past their expiry date.

    Security suites are left out if the system has no mirror of their archive.
    """
    need("debian-archive-keyring", "test", "-e", KEYRING)
    if ARCHIVE not in mirrors():
        raise Unavailable("apt has no mirror of Debian: add one to /etc/apt/sources.list.d")
    labels = {suite: SECURITY_ARCHIVE if suite.endswith(SECURITY) else ARCHIVE for suite in suites}
    return [
        f"deb [signed-by={KEYRING} check-valid-until=no] {mirrors()[label]} {suite} main"
        for suite, label in labels.items()
        if label in mirrors()
    ]


@functools.cache
def debian() -> Apt:
    """apt for all current releases of Debian, whichever of them this system runs."""
    return Apt("apt-debian", sources(suite for suites in releases().values() for suite in suites))


def release(suite: str) -> str:
    """The release that a suite belongs to."""
    return next(name for name, suites in releases().items() if suite in suites)


def host() -> str:
    """The codename of this system's release; empty if it has none."""
    file = Path("/etc/os-release")
    lines = file.read_text().splitlines() if file.exists() else []
    return dict(line.partition("=")[::2] for line in lines).get("VERSION_CODENAME", "")


def order(one: str, other: str) -> int:
    """Negative, 0 or positive, by Debian's order of versions."""
    if one == other:
        return 0
    below = subprocess.run(["dpkg", "--compare-versions", one, "lt", other]).returncode == 0
    return -1 if below else 1


def linux_source(version: str = "6.12") -> Path:
    """Debian's source of this version: the newest in the cache; fetched if the cache has none."""
    name = f"linux-source-{version}"
    with alone(name):
        return unpacked(name) or unpack(name)


def unpacked(name: str) -> Path | None:
    """The newest source in the cache; the name of its folder has the version."""
    trees = list((cache() / "source").glob(f"{name}_*/{name}"))
    return max(trees, key=lambda tree: tree.parent.stat().st_mtime, default=None)


def unpack(name: str) -> Path:
    """Fetches the newest source that any of Debian's suites has into the cache."""
    need("xz-utils", "command", "-v", "xz")
    with alone():
        apt = debian()
        released = [one.version for one in apt.versions(name) if CANDIDATE not in one.version]
        if not released:
            raise Unavailable(f"Debian no longer has {name}")
        version = sorted(released, key=functools.cmp_to_key(order))[-1]
        place = cache() / "source" / f"{name}_{version.replace('/', '_')}"
        print(f"vm: fetching {name} {version} (160 MB, unpacked 1.7 GB, once)", file=sys.stderr)
        with replacing(place) as partial:
            apt.unpack([f"{name}={version}"], partial)
            archive = partial / "usr" / "src" / f"{name}.tar.xz"
            call(["tar", "-C", str(partial), "-xf", str(archive)])
            shutil.rmtree(partial / "usr")
    return place / name
