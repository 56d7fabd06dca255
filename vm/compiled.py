"""Compiles C programs for guests without libraries."""

from pathlib import Path

from vm.host import call


def static(source: Path, folder: Path, *flags: str, compiler: str = "cc") -> Path:
    """Compiles a program into FOLDER, named after its source; a warning is an error."""
    program = folder / source.stem
    command = [compiler, "-O2", "-Wall", "-Werror", "-static", "-pthread", *flags]
    call([*command, "-o", str(program), str(source)])
    return program
