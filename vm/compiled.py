"""Programs in C for machines that have no libraries."""

from pathlib import Path

from vm.kernels import call


def static(source: Path, folder: Path, *flags: str) -> Path:
    """The program, compiled into the folder under the source's name without a warning."""
    program = folder / source.stem
    command = ["cc", "-O2", "-Wall", "-Werror", "-static", "-pthread", *flags]
    call([*command, "-o", str(program), str(source)])
    return program
