"""Checks the kernel part with gcc, sparse and checkpatch (`make kernel-lint`).

gcc and sparse run with the stock kernels, the newest one, and the oldest and newest headers of each
kernel line in Debian. If there is any warning, it is printed, and the exit status is 1.
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
"""The drivers for tests."""
# They use the kernel's version, since they have no probes.
OF_DRIVERS = ["--ignore=LINUX_VERSION_CODE,CONSTANT_COMPARISON"]
# Linux formats its tracepoints differently.
OF_TRACEPOINTS = re.compile(
    r".*include/trace/events/.* CHECK:(OPEN_ENDED_LINE|PARENTHESIS_ALIGNMENT): .*\n"
)


def main() -> None:
    try:
        need("sparse", "command", "-v", "sparse")
        trees = [kernels.find(name).build for name in (*kernels.STOCK, kernels.NEWEST)]
        # Check trees that are in both lists only once.
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
    """The release whose root the build uses, in brackets, if it is not the host's."""
    release, *_ = kernels.needs(tree) or ("",)
    return f" ({release})" if release else ""


def warnings(tree: Path) -> None:
    """Builds with gcc (W=1) and sparse (C=2). Raises Unavailable with their warnings."""
    with tempfile.TemporaryDirectory(prefix="dmafile-lint-") as folder:
        ko.build(tree, Path(folder), ["W=1", "C=2"])


def style() -> str:
    """The output of checkpatch for all C files under kernel/."""
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
