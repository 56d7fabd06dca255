"""Builds small kernels from Debian's source of Linux into the cache; see kernel/config.

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
from dataclasses import dataclass
from pathlib import Path

from vm import debian, series
from vm.host import ROOT, Unavailable, alone, cache, environment, need

CONFIG = ROOT / "kernel" / "config"
KINDS = ("base", "series")
"""Linux as it is, and with the patches of kernel/linux-VERSION."""
BOOTED = ("", "debug", "kcsan", "liveupdate", "rt", "unpinned")
"""Variants for vm/run. Each is a file in CONFIG, on top of base.config."""
BUILT = ("no-dma-buf", "no-block", "no-numa", "options-off", "i386", "arm64", "arm64-64k")
"""Variants that show that the patches compile: files on top of small.config. vm.arm64 boots one."""
SINCE = {"liveupdate": "7.3"}
"""The first version with what a variant is for."""
NAMES = tuple(
    "-".join(filter(None, (kind, version, variant)))
    for kind in KINDS
    for version in series.VERSIONS
    for variant in (*BOOTED, *BUILT)
    if version >= SINCE.get(variant, "")
)
COMPILERS = {"arm64": "aarch64-linux-gnu-"}
"""The prefixes of compilers for other architectures."""

Settings = Mapping[str, str]
"""The value of each option: y, m, n, a number, or a quoted string."""


@dataclass(frozen=True)
class Small:
    """A small kernel, by the parts of its name."""

    kind: str
    version: str
    variant: str

    @property
    def patched(self) -> bool:
        return self.kind == "series"

    @property
    def arch(self) -> str:
        first = self.variant.partition("-")[0]
        return first if first in ("arm64", "i386") else "x86_64"

    @property
    def compiler(self) -> str:
        """The C compiler for programs that run on it."""
        return f"{COMPILERS[self.arch]}gcc" if self.arch in COMPILERS else "cc"

    @property
    def image(self) -> str:
        """The file, in the build folder, that boots, or that shows that all could be linked."""
        if self.variant in BOOTED:
            return "arch/x86/boot/bzImage"
        return "arch/arm64/boot/Image" if self.arch == "arm64" else "vmlinux"

    def configs(self) -> list[Path]:
        """Its files in CONFIG; a later file overrides an earlier one."""
        first = "base" if self.variant in BOOTED else "small"
        names = [first, f"{first}-{self.version}", self.variant, f"{self.variant}-{self.version}"]
        if self.patched:
            names += ["series", f"series-{self.variant}"]
        files = [CONFIG / f"{name}.config" for name in names if name]
        return [file for file in files if file.exists()]

    def make(self, linux: Path, tree: Path) -> list[str]:
        """The command that builds in the folder TREE, without its targets."""
        words = ["make", "-C", str(linux), f"O={tree}", f"ARCH={self.arch}"]
        prefix = COMPILERS.get(self.arch)
        return [*words, f"CROSS_COMPILE={prefix}"] if prefix else words


def parse(name: str) -> Small:
    kind, version, variant = (*name.split("-", 2), "")[:3]
    return Small(kind, version, variant)


def find(name: str) -> Path:
    """The image of that kernel with the present settings, built unless it is in the cache."""
    small = parse(name)
    linux = debian.linux_source(small.version)
    wanted = settings_of(name)
    key = hashlib.sha256(json.dumps([linux.parent.name, sorted(wanted.items())]).encode())
    place = cache() / name / key.hexdigest()[:12]
    # One process builds a kernel at a time. Other kernels can be fetched and booted.
    with alone(name):
        patches = series.digest(series.patches(small.version)) if small.patched else ""
        applied = place / "applied"
        if not (place / "boot").exists() or (patches and applied.read_text() != patches):
            place.mkdir(parents=True, exist_ok=True)
            applied.write_text(patches)
            source = series.tree(small.version, linux) if patches else contextlib.nullcontext(linux)
            with source as tree:
                build(name, tree, wanted, place)
    [image] = (place / "boot").iterdir()
    return image


def settings_of(name: str) -> Settings:
    texts = [file.read_text() for file in parse(name).configs()]
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
    small = parse(name)
    # There must be no image during a build.
    shutil.rmtree(place / "boot", ignore_errors=True)
    for package in ("bc", "perl"):
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
        configure(small, linux, wanted, tree, log.fileno())
        make, booted = small.make(linux, tree), small.variant in BOOTED
        image = Path(small.image)
        targets = [image.name, "modules"] if booted else [image.name]
        step([*make, f"-j{len(os.sched_getaffinity(0))}", *targets], log.fileno())
        if booted:
            step([*make, f"INSTALL_MOD_PATH={place}", "modules_install"], log.fileno())
    release = (tree / "include" / "config" / "kernel.release").read_text().strip()
    if not small.patched:
        prune(tree)
    partial = place / "partial"
    partial.mkdir(exist_ok=True)
    shutil.copyfile(tree / image, partial / f"vmlinuz-{release}")
    partial.rename(place / "boot")


def configure(small: Small, linux: Path, wanted: Settings, tree: Path, log: int) -> None:
    """Writes the configuration of a kernel to the folder TREE."""
    need("build-essential", "command", "-v", "cc")
    for package in ("flex", "bison"):
        need(package, "command", "-v", package)
    if small.arch in COMPILERS:
        # The compiler is asked what it can do.
        need("gcc-aarch64-linux-gnu", "command", "-v", small.compiler)
    file = tree / "wanted"
    file.write_text("".join(f"{name}={value}\n" for name, value in wanted.items()))
    defaults = "alldefconfig" if small.variant in BOOTED else "allnoconfig"
    step([*small.make(linux, tree), f"KCONFIG_ALLCONFIG={file}", defaults], log)
    compare(wanted, settings((tree / ".config").read_text()))


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
    if len(sys.argv) != 2 or sys.argv[1] not in NAMES:
        sys.exit(f"usage: python3 -m vm.small {'|'.join(NAMES)}")
    try:
        print(find(sys.argv[1]))
    except Unavailable as error:
        sys.exit(f"vm: {error}")


if __name__ == "__main__":
    main()
