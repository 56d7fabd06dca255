"""Vulkan's software driver (lavapipe) imports memfds on the host, and dma-bufs in a machine.

`make test-all PARTS=consumers` downloads Mesa (70 MB) from Debian and unpacks it in the cache.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vm.programs import INSIDE, Programs
from vm import debian
from vm.fixtures import missing, passed, vm
from vm.host import Unavailable, alone, cache, replacing

pytestmark = pytest.mark.skipif(
    not os.environ.get("CONSUMERS"), reason="make test-all PARTS=consumers"
)

WANTED = ("mesa-vulkan-drivers", "libvulkan1", "libvulkan-dev")
OF_THE_HOST = ("libc6", "libgcc", "libstdc++", "libtinfo", "libzstd", "zlib")
"""Packages whose libraries are those of the host or the machine."""


def closure(apt: debian.Apt) -> list[str]:
    """The packages and the libraries that they depend on."""
    found = list(WANTED)
    for name in found:
        more = apt.depends(name, ("lib",))
        names = (one.partition("=")[0] for one in more)
        found += [one for one in names if one not in found and not one.startswith(OF_THE_HOST)]
    return found


def fetched() -> Path:
    """The folder in the cache with Mesa in it."""
    release = debian.host()
    place = cache() / f"mesa-{release}"
    with alone("mesa"):
        if not place.exists():
            backports = f"{release}-backports"
            apt = debian.Apt("apt-mesa", debian.sources((release, backports)))
            # The version in bookworm is too old to import memory.
            apt.options += ["-o", f"APT::Default-Release={backports}"]
            with replacing(place) as partial:
                apt.unpack(closure(apt), partial)
    return place


@pytest.fixture(scope="module")
def vulkan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The program, with Mesa in its environment."""
    try:
        mesa = fetched()
    except Unavailable as error:
        missing(error)
    [libraries] = mesa.glob("usr/lib/*-linux-gnu")
    [driver] = mesa.glob("usr/share/vulkan/icd.d/lvp_icd*.json")
    program = tmp_path_factory.mktemp("vulkan") / "vulkan"
    words: list[str | Path] = [
        "cc",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-missing-field-initializers",
    ]
    words += [f"-I{mesa}/usr/include", f"-Wl,-rpath-link,{libraries}", f"-L{libraries}"]
    words += ["-o", program, INSIDE / "vulkan.c", "-l:libvulkan.so.1"]
    subprocess.run(words, check=True)
    script = program.with_name("run")
    # Some of Debian's older packages have libraries in /lib.
    path = ":".join(map(str, [libraries, *mesa.glob("lib/*-linux-gnu")]))
    environment = f"LD_LIBRARY_PATH={path} VK_DRIVER_FILES={driver}"
    script.write_text(f'#!/bin/sh\n{environment} exec {program} "$@"\n')
    script.chmod(0o755)
    yield script


@pytest.mark.parametrize("how", ["fd", "host"])
def test_a_memfd_is_imported(vulkan: Path, programs: Programs, tmp_path: Path, how: str) -> None:
    file = tmp_path / "file"
    file.write_bytes(data := os.urandom(5 << 20))
    command: list[str | Path] = [programs.dmafile, "load", file, "--quiet", "--", vulkan, how]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == data


@pytest.mark.usefixtures("ready")
def test_dma_bufs_are_imported(vulkan: Path, programs: Programs) -> None:
    kinds = ("memfd", "udmabuf", "heap:system", "module")
    python = ("python3", "-E", "-S", "-m", "tests.vm.inside.vulkan")
    options = ("--module", "--kernel=6.12", "--memory=3G", "--fs=ext4")
    words = (programs.dmafile, programs.helpers, vulkan, "/mnt", *kinds)
    passed(vm(*options, "--", *python, *words), "8 imports checked")
