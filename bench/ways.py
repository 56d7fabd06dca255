"""Builds ways.c, the program that runs the candidates."""

import os
import re
import subprocess
from pathlib import Path

from bench.runs import ROOT

TARGET = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target").absolute()
SOURCE = ROOT / "bench" / "ways.c"


def build(folder: Path, profile: str = "release") -> Path:
    """Builds the program in FOLDER, with the library of a Cargo profile."""
    command = ["cargo", "build", "--quiet", "--locked", "--package", "dmafile-capi"]
    subprocess.run([*command, "--profile", profile], cwd=ROOT, check=True)
    built = TARGET / ("debug" if profile == "dev" else profile)
    program = folder / SOURCE.stem
    # The system libraries that the archive needs, as in crates/capi/dmafile.pc.
    system = re.search(
        r"^SYSTEM *:= (.*)$", (ROOT / "crates/capi/Makefile").read_text(), re.MULTILINE
    )
    assert system is not None
    command = ["cc", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'crates/capi/include'}"]
    command += ["-o", str(program), str(SOURCE)]
    subprocess.run([*command, str(built / "libdmafile_capi.a"), *system[1].split()], check=True)
    return program
