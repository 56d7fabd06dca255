"""Debian's criu, on any release: its programs and libraries are unpacked, and not installed."""

import os
import shutil
from pathlib import Path

from vm import debian
from vm.host import alone, cache, call, need, replacing

RELEASE = "trixie"


def folder() -> Path:
    """A folder with the command criu, unpacked if it is not in the cache (28 MB), or $CRIU."""
    if own := os.environ.get("CRIU"):
        return Path(own)
    place = cache() / f"criu-{RELEASE}"
    with alone(place.name):
        if not place.exists():
            need("mmdebstrap", "command", "-v", "mmdebstrap")
            with alone():
                sources = debian.sources(debian.releases()[RELEASE])
            with replacing(place) as partial:
                command = ["mmdebstrap", "--quiet", "--variant=extract", "--mode=chrootless"]
                call([*command, "--include=criu", RELEASE, str(partial / "root"), *sources])
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
    program = place / "root" / "usr" / "sbin" / "criu"
    command.write_text(f'#!/bin/sh\nexec {here[0]} --library-path {here[1]} {program} "$@"\n')
    command.chmod(0o755)
