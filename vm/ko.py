"""Builds dmafile.ko for a kernel from a copy of the sources, and keeps it in the cache."""

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from vm import roots
from vm.host import ROOT, Unavailable, cache, environment, need
from vm.kernels import Kernel, needs

SOURCES = ROOT / "kernel"
PARTS = ("core", "module", "uapi")
"""The folders with the module's sources, below SOURCES."""
SUFFIXES = (".c", ".h", "Kbuild", "Makefile")

# BTF is not used here, and not all headers have what it needs.
NO_BTF = "CONFIG_DEBUG_INFO_BTF_MODULES="


def find(kernel: Kernel) -> Path:
    """The module for this kernel, built from the present sources unless it is in the cache."""
    key = hashlib.sha256(str(kernel.build).encode())
    # The symbols that the kernel exports, and its configuration.
    for path in (kernel.build / "Module.symvers", kernel.build / ".config"):
        key.update(path.read_bytes())
    for path in sources():
        key.update(f"{path.relative_to(SOURCES)} {path.stat().st_size}\n".encode())
        key.update(path.read_bytes())
    place = cache() / "module" / key.hexdigest()[:16] / "dmafile.ko"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        # If several processes build the same module, the last one's stays.
        with tempfile.TemporaryDirectory(prefix="partial-", dir=place.parents[1]) as name:
            build(kernel.build, Path(name)).rename(place)
    return place


def build(tree: Path, folder: Path, words: Sequence[str] = ()) -> Path:
    """Copies the sources to a folder and builds there; WORDS are arguments of make(1).

    Any output of the build is a warning or an error, and raises Unavailable.
    """
    tools(tree)
    for path in sources():
        target = folder / path.relative_to(SOURCES)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    command = ["make", "--silent", "-C", str(folder / "module"), f"KDIR={tree}", NO_BTF, *words]
    with roots.build_prefix(tree, folder) as before:
        result = subprocess.run(
            [*before, *command, "modules"], capture_output=True, text=True, env=environment()
        )
    said = (result.stdout + result.stderr).replace(str(folder), "kernel")
    if result.returncode or said:
        raise Unavailable(f"building dmafile.ko for {tree} failed or printed warnings:\n{said}")
    return folder / "module" / "dmafile.ko"


def other(source: Path, tree: Path, folder: Path) -> Path:
    """Builds another module, whose sources are in the folder SOURCE, in a copy below FOLDER."""
    tools(tree)
    place = folder / source.name
    shutil.copytree(source, place)
    command = ["make", "--silent", "-C", str(tree), f"M={place}", NO_BTF, "modules"]
    with roots.build_prefix(tree, folder) as before:
        subprocess.run([*before, *command], check=True, env=environment())
    return place / f"{source.name}.ko"


def sources() -> list[Path]:
    """All source files of the module, without files left by an earlier build."""
    return sorted(
        path
        for part in PARTS
        for path in (SOURCES / part).rglob("*")
        if path.name.endswith(SUFFIXES) and not path.name.endswith(".mod.c")
    )


def tools(tree: Path) -> None:
    """Installs the compiler that Debian's headers name, and the libraries that their tools need.

    A root of another release already has them.
    """
    if needs(tree):
        return
    need("build-essential", "command", "-v", "make")
    variables = tree / ".kernelvariables"
    if variables.exists() and "gcc-12" in variables.read_text():
        need("gcc-12", "command", "-v", "x86_64-linux-gnu-gcc-12")
    objtool = tree / "tools" / "objtool" / "objtool"
    need("libelf1", "sh", "-c", '! ldd "$1" | grep -q "not found"', "sh", str(objtool))
