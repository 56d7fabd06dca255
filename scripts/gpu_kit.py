"""Builds a folder with all that a machine with a GPU needs to test dmafile, and to measure it:
`python -m scripts.gpu_kit [--others MACHINE] PACKAGE FOLDER`.

PACKAGE is a wheel, or `python/dmafile` with a built extension. pytest is copied from the Python
that runs this. With --others, other loaders are downloaded; if that fails, the kit has none.
"""

import argparse
import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("conftest", "double", "test_cuda", "test_stream", "test_torch", "test_torch_device")
# Pure Python.
PYTEST = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
OTHERS = ("safetensors", "fastsafetensors", "runai-model-streamer", "humanize", "instanttensor")
VERSIONS = ("3.11", "3.12", "3.13", "3.14")


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--others", metavar="MACHINE", help="download other loaders")
    parser.add_argument("package", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(words)
    folder = args.folder
    shutil.rmtree(folder, ignore_errors=True)
    lib, tests = folder / "lib", folder / "tests"
    tests.mkdir(parents=True)
    shutil.copy(ROOT / "packaging" / "gpu-run", folder / "run")
    shutil.copy(ROOT / "bench" / "gpu.py", folder)
    for name in TESTS:
        shutil.copy(ROOT / "python" / "tests" / f"{name}.py", tests)
    if args.package.is_dir():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(args.package, lib / "dmafile", ignore=ignored)
    else:
        zipfile.ZipFile(args.package).extractall(lib)
    if not list((lib / "dmafile").glob("_dmafile*.so")):
        sys.exit(f"gpu_kit: {args.package} has no extension: build it by `make extension`")
    for name in PYTEST:
        copy(importlib.metadata.distribution(name), folder / "pytest")
    if args.others:
        download(folder / "others", args.others)


def copy(package: importlib.metadata.Distribution, to: Path) -> None:
    """Copies an installed package."""
    for file in package.files or ():
        if ".." in file.parts or "__pycache__" in file.parts:
            continue
        assert file.suffix != ".so", f"{file} is not for every Python"
        (to / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(str(package.locate_file(file)), to / file)


def download(to: Path, machine: str) -> None:
    """Unpacks other loaders: into `any`, or into a folder for their version of Python."""
    tags = ("manylinux_2_28", "manylinux_2_17", "manylinux2014")
    platforms = [f"--platform={tag}_{machine}" for tag in tags]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    pip += ["--retries=1", "--no-deps", "--only-binary=:all:", *platforms]
    missing = []
    with tempfile.TemporaryDirectory() as folder:
        for version in VERSIONS:
            for name in OTHERS:
                command = [*pip, f"--python-version={version}", f"--dest={folder}", name]
                if subprocess.run(command).returncode:
                    missing.append(f"{name} for {version}")
        for wheel in sorted(Path(folder).glob("*.whl")):
            *_, python, abi, _ = wheel.stem.split("-")
            where = to / ("any" if abi in ("abi3", "none") else python)
            zipfile.ZipFile(wheel).extractall(where)
            print(f"gpu_kit: {wheel.name}")
    if missing:
        print("gpu_kit: not downloaded, so not in the kit:", ", ".join(missing))


if __name__ == "__main__":
    main(sys.argv[1:])
