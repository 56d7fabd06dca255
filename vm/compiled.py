"""Compiles C programs for guests without libraries."""

from pathlib import Path

from vm.host import call


def static(source: Path, folder: Path, *flags: str) -> Path:
    """Compiles a program into FOLDER, named after its source; a warning is an error."""
    program = folder / source.stem
    command = ["cc", "-O2", "-Wall", "-Werror", "-static", "-pthread", *flags]
    call([*command, "-o", str(program), str(source)])
    return program
