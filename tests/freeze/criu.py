"""Debian's criu, on any release: its programs and libraries are unpacked, and not installed."""

import os
import shutil
from pathlib import Path

from vm import debian
from vm.host import alone, cache, call, need, replacing

RELEASE = os.environ.get("CRIU_RELEASE", "trixie")
"""Debian 13 has criu 4.1.1, sid 4.2.1, experimental 4.3."""
EXPERIMENTAL = "experimental"


def folder() -> Path:
    """A folder with the command criu, unpacked if it is not in the cache (28 MB), or $CRIU."""
    if own := os.environ.get("CRIU"):
        return Path(own)
    # Experimental has only some packages.
    release = debian.UNSTABLE if RELEASE == EXPERIMENTAL else RELEASE
    place = cache() / f"criu-{RELEASE}"
    with alone(place.name):
        if not place.exists():
            need("mmdebstrap", "command", "-v", "mmdebstrap")
            with alone():
                sources = debian.sources(debian.releases()[release])
            with replacing(place) as partial:
                command = ["mmdebstrap", "--quiet", "--variant=extract", "--mode=chrootless"]
                command.append(f'--aptopt=APT::Default-Release "{RELEASE}"')
                call([*command, "--include=criu", release, str(partial / "root"), *sources])
                write(partial, place)
                shutil.rmtree(place, ignore_errors=True)
    return place / "bin"


def write(partial: Path, place: Path) -> None:
    """The command, which starts the program with its own libraries."""
    command = partial / "bin" / "criu"
    command.parent.mkdir()
    [loader] = (partial / "root" / "usr" / "lib").rglob("ld-linux-*.so.*")
    libraries = loader.parent if list(loader.parent.glob("libc.so*")) else None
    if libraries is None:
        [library] = (partial / "root" / "usr" / "lib").rglob("libc.so.6")
        libraries = library.parent
    here = [str(place / path.relative_to(partial)) for path in (loader, libraries)]
    [found] = (partial / "root" / "usr").glob("*bin/criu")
    program = place / found.relative_to(partial)
    command.write_text(f'#!/bin/sh\nexec {here[0]} --library-path {here[1]} {program} "$@"\n')
    command.chmod(0o755)
