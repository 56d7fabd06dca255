"""Small roots of Debian's releases, to build modules for kernels of other releases.

The programs in header packages need their release's C library and compiler. A root consists of
packages that are unpacked but not installed. It cannot be booted.
"""

import contextlib
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from vm import debian, kernels
from vm.host import alone, cache, call, need, replacing

PACKAGES = ("?essential", "dkms", "make", "mawk")
"""Packages that a build needs in addition to those that the headers name; also for DKMS."""
SPARSE = "sparse"
"""For `make kernel-lint`. The newest version in any release: 0.6.4 does not support Linux 7.2's
`__typeof_unqual__`."""
LIST = "packages"
"""The file next to a root that lists its packages."""
PROGRAMS = ("bin", "etc", "lib", "lib64", "sbin", "usr")
"""The folders of a root that commands see; some are links."""


@contextlib.contextmanager
def build_prefix(tree: Path, *folders: Path) -> Iterator[Sequence[str]]:
    """Yields the words to put before a command that builds with headers; none if the host can.

    The command runs as the calling user. It sees the root instead of the host's files, and FOLDERS
    and the headers at their own paths.
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
            if wanted <= packages_of(place):
                yield bwrap(place / "root", tree.parents[2], folders)
                return
        with alone(f"roots-{release}"):
            if not wanted <= packages_of(place):
                make(release, wanted | packages_of(place), place)


def sparse() -> str:
    """The command of the newest sparse, which runs with its own C library."""
    place = cache() / "roots" / SPARSE
    with alone(f"roots-{SPARSE}"):
        if not place.exists():
            with replacing(place) as partial, alone():
                debian.debian().unpack([SPARSE, "libc6"], partial)
    [library] = place.rglob("libc.so.6")
    [loader] = library.parent.glob("ld-linux-*.so.*")
    return f"{loader} --library-path {library.parent} {place / 'usr' / 'bin' / SPARSE}"


def packages_of(place: Path) -> set[str]:
    file = place / LIST
    return set(file.read_text().split()) if file.exists() else set()


def make(release: str, packages: Iterable[str], place: Path) -> None:
    """Makes a root of these packages and their dependencies, which replaces an existing one."""
    need("mmdebstrap", "command", "-v", "mmdebstrap")
    print(f"vm: making a root of Debian's {release} (350 MB, once)", file=sys.stderr)
    with alone():
        sources = debian.sources(debian.releases()[release])
    with replacing(place) as partial:
        # Without chroot(2), which needs privilege.
        command = ["mmdebstrap", "--quiet", "--variant=extract", "--mode=chrootless"]
        # One option each: a list must not contain an apt pattern, such as ?essential.
        command += [f"--include={one}" for one in sorted(packages)]
        call([*command, release, str(partial / "root"), *sources])
        # Installing mawk would create this link.
        (partial / "root" / "usr" / "bin" / "awk").symlink_to("mawk")
        with alone():
            debian.debian().unpack([SPARSE], partial / "root")
        (partial / LIST).write_text("".join(f"{one}\n" for one in sorted(packages)))
        shutil.rmtree(place, ignore_errors=True)


def bwrap(root: Path, headers: Path, folders: Sequence[Path]) -> list[str]:
    """The bubblewrap command. It needs no privilege if users may create namespaces."""
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
