"""Builds small kernels from Debian's source of Linux 6.12 into the cache; see kernel/config.

The drivers that vm/run needs are built in. The kernels are not installed.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from vm import debian, series
from vm.host import ROOT, Unavailable, alone, cache, environment, need

CONFIG = ROOT / "kernel" / "config"
CONFIGS = {
    "base": ("base",),
    "base-debug": ("base", "debug"),
    "base-kcsan": ("base", "kcsan"),
    "series": ("base", "series"),
    "series-unpinned": ("base", "series", "unpinned"),
    "series-debug": ("base", "debug", "series", "series-debug"),
}
"""The files in CONFIG for each kernel; a later file overrides an earlier one."""
PATCHED = ("series", "series-unpinned", "series-debug")

Settings = Mapping[str, str]
"""The value of each option: y, m, n, a number, or a quoted string."""


def find(name: str) -> Path:
    """The image of that kernel with the present settings, built unless it is in the cache."""
    linux = debian.linux_source()
    wanted = settings_of(name)
    key = hashlib.sha256(json.dumps([linux.parent.name, sorted(wanted.items())]).encode())
    place = cache() / name / key.hexdigest()[:12]
    # One process builds a kernel at a time. Other kernels can be fetched and booted.
    with alone(name):
        patches = series.digest() if name in PATCHED else ""
        applied = place / "applied"
        if not (place / "boot").exists() or (patches and applied.read_text() != patches):
            place.mkdir(parents=True, exist_ok=True)
            applied.write_text(patches)
            with series.tree(linux) if patches else contextlib.nullcontext(linux) as tree:
                build(name, tree, wanted, place)
    [image] = (place / "boot").iterdir()
    return image


def settings_of(name: str) -> Settings:
    texts = [(CONFIG / f"{one}.config").read_text() for one in CONFIGS[name]]
    return settings("\n".join([f'CONFIG_LOCALVERSION="-dmafile-{name}"', *texts]))


def settings(text: str) -> Settings:
    found = {}
    for line in text.splitlines():
        if match := re.fullmatch(r"(CONFIG_\w+)=(.+)", line):
            found[match[1]] = match[2]
        elif match := re.fullmatch(r"# (CONFIG_\w+) is not set", line):
            found[match[1]] = "n"
    return found


def build(name: str, linux: Path, wanted: Settings, place: Path) -> None:
    """Configures and builds a kernel; the folders are the same as for Debian's kernels.

    An interrupted build continues where it stopped, so place/boot is created last. A kernel of the
    series keeps its object files, so building it with a changed patch takes minutes.
    """
    # There must be no image during a build.
    shutil.rmtree(place / "boot", ignore_errors=True)
    for package, command in (("build-essential", "cc"), ("bc", "bc"), ("perl", "perl")):
        need(package, "command", "-v", command)
    for package in ("flex", "bison"):
        need(package, "command", "-v", package)
    need("kmod", "command", "-v", "depmod")
    need("libelf-dev", "test", "-e", "/usr/include/libelf.h")
    version = linux.parent.name.partition("_")[2]
    tree = place / "build"
    print(
        f"vm: building {name} from Linux {version} (10 to 15 minutes on two idle cores, once; "
        f"log: {place / 'log'})",
        file=sys.stderr,
    )
    tree.mkdir(parents=True, exist_ok=True)
    with (place / "log").open("w+") as log:
        file = place / "wanted"
        file.write_text("".join(f"{name}={value}\n" for name, value in wanted.items()))
        make = ["make", "-C", str(linux), f"O={tree}"]
        step([*make, f"KCONFIG_ALLCONFIG={file}", "alldefconfig"], log.fileno())
        compare(wanted, settings((tree / ".config").read_text()))
        jobs = f"-j{len(os.sched_getaffinity(0))}"
        step([*make, jobs, "bzImage", "modules"], log.fileno())
        step([*make, f"INSTALL_MOD_PATH={place}", "modules_install"], log.fileno())
    release = (tree / "include" / "config" / "kernel.release").read_text().strip()
    if name not in PATCHED:
        prune(tree)
    partial = place / "partial"
    partial.mkdir(exist_ok=True)
    shutil.copyfile(tree / "arch" / "x86" / "boot" / "bzImage", partial / f"vmlinuz-{release}")
    partial.rename(place / "boot")


def step(command: list[str], log: int) -> None:
    names = {"KBUILD_BUILD_USER": "dmafile", "KBUILD_BUILD_HOST": "vm"}
    result = subprocess.run(command, stdout=log, stderr=log, env={**environment(), **names})
    if result.returncode:
        end = os.pread(log, 4000, max(0, os.fstat(log).st_size - 4000)).decode(errors="replace")
        raise Unavailable(f"`{' '.join(command)}` failed:\n{end}")


def compare(wanted: Settings, got: Settings) -> None:
    """Reports settings that Linux silently dropped because a dependency is missing."""
    lost = [
        f"{name} is {got.get(name, 'n')}, not {value}"
        for name, value in wanted.items()
        if got.get(name, "n") != value
    ]
    if lost:
        raise Unavailable(f"this Linux cannot be configured as in kernel/config: {lost}")


def prune(tree: Path) -> None:
    """Deletes object files; building modules needs only the tools and headers."""
    for top in tree.iterdir():
        if top.name not in ("include", "scripts", "tools"):
            for path in (top, *top.rglob("*")):
                if path.suffix in (".o", ".a", ".cmd") and path.is_file():
                    path.unlink()


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] not in CONFIGS:
        sys.exit(f"usage: python3 -m vm.small {'|'.join(CONFIGS)}")
    try:
        print(find(sys.argv[1]))
    except Unavailable as error:
        sys.exit(f"vm: {error}")


if __name__ == "__main__":
    main()
