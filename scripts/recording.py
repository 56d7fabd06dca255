"""Draws docs/terminal.svg: what a terminal shows of `explain` and `load`, on this machine.

    .venv/bin/python -m scripts.recording [--dmafile PATH]

Needs 1 GiB of disk and of memory. The picture is what the commands print, and not a
mock-up: run it again when their output changes.
"""

import argparse
import io
import os
import re
import subprocess
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/terminal.svg"
COMMANDS = (
    "dmafile explain model.safetensors",
    "dmafile load model.safetensors -- sh -c 'sha256sum < /proc/self/fd/$DMAFILE_FD'",
    "sha256sum model.safetensors",
)
COLUMNS = 124
BYTES = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws docs/terminal.svg.")
    parser.add_argument("--dmafile", type=Path, default=ROOT / "target/release/dmafile")
    options = parser.parse_args()
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), color_system=None)
    with tempfile.TemporaryDirectory(dir=ROOT / "target") as folder:
        make(Path(folder) / "model.safetensors")
        path = f"{options.dmafile.resolve().parent}:{os.environ['PATH']}"
        # A virtual machine may have to get its memory from its host first.
        for _ in range(3):
            quiet = [options.dmafile, "load", "model.safetensors", "--quiet"]
            subprocess.run(quiet, cwd=folder, check=True)
        for command in COMMANDS:
            done = subprocess.run(
                ["sh", "-c", f"{command} 2>&1"],
                cwd=folder,
                env={**os.environ, "PATH": path},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            console.print(Text.assemble(("$ ", "green"), (command, "bold")), no_wrap=True)
            console.print(Text(done.stdout), no_wrap=True, crop=True)
    picture = console.export_svg(title="dmafile", unique_id="dmafile")
    # Fonts from a server would be fetched when the page is read.
    PICTURE.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))


def make(path: Path) -> None:
    """A file of random bytes that is not in the page cache."""
    with path.open("wb") as file:
        for _ in range(BYTES >> 20):
            file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
