"""Small roots of Debian's releases: where modules are built for kernels of other releases.

The programs that come with headers need their release's C library and compiler. A root is made of
packages that are unpacked and not installed: nothing in it is for starting a system.
"""

import contextlib
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from vm import debian, kernels
from vm.host import alone, cache, call, need, replacing

PACKAGES = ("?essential", "dkms", "make", "mawk")
"""What a build takes beside what the headers name, for DKMS as well."""
SPARSE = "sparse"
"""For `make kernel-lint`, of the release that has the newest: 0.6.4 doesn't know the language of
Linux 7.2 (`__typeof_unqual__`)."""
LIST = "packages"
"""The file beside a root that says what it is made of."""
PROGRAMS = ("bin", "etc", "lib", "lib64", "sbin", "usr")
"""The folders of a root that are seen; some are links."""


@contextlib.contextmanager
def beside(tree: Path, *folders: Path) -> Iterator[Sequence[str]]:
    """Words before a command that builds with headers, in folders: none if the host can do that.

    The command runs as the caller, sees the root in the place of the host, and the folders and the
    headers where they are.
    """
    release, *packages = kernels.needs(tree) or ("",)
    if not release:
        yield ()
        return
    need("bubblewrap", "command", "-v", "bwrap")
    wanted = {*PACKAGES, *packages}
    place = cache() / "roots" / release
    while True:
        with alone(f"roots-{release}", only_using=True):
            if wanted <= made_of(place):
                yield words(place / "root", tree.parents[2], folders)
                return
        with alone(f"roots-{release}"):
            if not wanted <= made_of(place):
                make(release, wanted | made_of(place), place)


def made_of(place: Path) -> set[str]:
    file = place / LIST
    return set(file.read_text().split()) if file.exists() else set()


def make(release: str, packages: Iterable[str], place: Path) -> None:
    """Puts a root of these packages, and what they depend on, into the place of another one."""
    need("mmdebstrap", "command", "-v", "mmdebstrap")
    print(f"vm: making a root of Debian's {release} (350 MB, once)", file=sys.stderr)
    with alone():
        sources = debian.sources(debian.releases()[release])
    with replacing(place) as partial:
        # Without changing root, which users may not.
        command = ["mmdebstrap", "--quiet", "--variant=extract", "--mode=chrootless"]
        # One by one: it takes no list that has one of apt's patterns in it.
        command += [f"--include={one}" for one in sorted(packages)]
        call([*command, release, str(partial / "root"), *sources])
        # The link that installing it would make.
        (partial / "root" / "usr" / "bin" / "awk").symlink_to("mawk")
        with alone():
            debian.debian().unpack([SPARSE], partial / "root")
        (partial / LIST).write_text("".join(f"{one}\n" for one in sorted(packages)))
        shutil.rmtree(place, ignore_errors=True)


def words(root: Path, headers: Path, folders: Sequence[Path]) -> list[str]:
    """Bubblewrap's, which takes no privilege where users may have namespaces of their own."""
    found = ["bwrap", "--die-with-parent", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
    for part in (root / name for name in PROGRAMS):
        if part.is_symlink():
            found += ["--symlink", str(part.readlink()), f"/{part.name}"]
        elif part.is_dir():
            found += ["--ro-bind", str(part), f"/{part.name}"]
    found += ["--ro-bind", str(headers), str(headers)]
    for folder in folders:
        found += ["--bind", str(folder), str(folder)]
    return [*found, "--setenv", "PATH", "/usr/sbin:/usr/bin:/sbin:/bin", "--chdir", "/"]
