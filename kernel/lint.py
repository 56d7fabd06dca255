"""Checks the kernel part: gcc's and sparse's warnings on Debian's kernels, and its style.

`make kernel-lint`. On the stock kernels, the newest, and the oldest and newest headers of each line
that Debian has. Nothing may be said; what is said is printed, and the exit status is 1.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from vm import kernels, ko
from vm.debian import linux_source
from vm.host import Unavailable, need

CHECKPATCH = ["--no-tree", "--strict", "--terse", "--show-types", "--no-summary", "--file"]
DRIVERS = ko.SOURCES / "tests" / "vm"
"""Where drivers for tests are."""
# They ask for the kernel's version: nothing finds out for them what differs.
OF_DRIVERS = ["--ignore=LINUX_VERSION_CODE,CONSTANT_COMPARISON"]
# Linux formats its tracepoints differently.
OF_TRACEPOINTS = re.compile(
    r".*include/trace/events/.* CHECK:(OPEN_ENDED_LINE|PARENTHESIS_ALIGNMENT): .*\n"
)


def main() -> None:
    try:
        need("sparse", "command", "-v", "sparse")
        trees = [kernels.find(name).build for name in (*kernels.STOCK, kernels.NEWEST)]
        # Of those that are in both, one is enough.
        by_name = {tree.name: tree for tree in (*trees, *kernels.lines())}
        for tree in by_name.values():
            release = tree.name.removeprefix("linux-headers-")
            print(f"kernel-lint: gcc and sparse, {release}{where(tree)}", flush=True)
            warnings(tree)
        print(f"kernel-lint: {len(by_name)} kernels without a warning; checkpatch", flush=True)
        said = style()
    except Unavailable as error:
        sys.exit(f"kernel-lint: {error}")
    if said:
        sys.exit(f"kernel-lint: checkpatch:\n{said}")


def where(tree: Path) -> str:
    """In which other release's root it's built, in brackets."""
    release, *_ = kernels.needs(tree) or ("",)
    return f" ({release})" if release else ""


def warnings(tree: Path) -> None:
    """Unavailable with what gcc (W=1) and sparse (C=2) have to say."""
    with tempfile.TemporaryDirectory(prefix="dmafile-lint-") as folder:
        ko.build(tree, Path(folder), ["W=1", "C=2"])


def style() -> str:
    """What checkpatch has to say of all C under kernel/."""
    need("perl", "command", "-v", "perl")
    checkpatch = linux_source() / "scripts" / "checkpatch.pl"
    files = sorted(ko.SOURCES.rglob("*.[ch]"))
    drivers = [path for path in files if path.is_relative_to(DRIVERS)]
    others = [path for path in files if not path.is_relative_to(DRIVERS)]
    said = ""
    for options, checked in (([], others), (OF_DRIVERS, drivers)):
        if checked:
            command: list[str | Path] = [checkpatch, *CHECKPATCH, *options, *checked]
            result = subprocess.run(command, capture_output=True, text=True)
            said += result.stdout + result.stderr
    return OF_TRACEPOINTS.sub("", said)


if __name__ == "__main__":
    main()
