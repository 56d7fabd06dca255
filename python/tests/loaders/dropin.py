"""Runs the test suite of the package safetensors on dmafile, with changed imports and little else.

dropin.py FOLDER [ARGUMENT...]      (FOLDER keeps the suite; arguments are for pytest)

The suite is in the source distribution on PyPI. CHANGES lists what is changed in it; LEFT_OUT lists
what is left out, with the reason.
"""

import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "0.8.0"
DIGEST = "fabaf3e0f18a6618d9b36560682562157f77c2b71fcffc7b432be2baed9d753d"

CHANGES = [
    ("imports", r"\b(from|import) safetensors\b", r"\1 dmafile"),
    # Errors are compared by class. Their texts differ: those of dmafile name the file and a remedy.
    (
        "texts of errors, of which there only has to be one",
        r"assertEqual\(\s*str\((ctx|cm)\.exception\),",
        r"assertTrue(str(\1.exception),",
    ),
]

LEFT_OUT = {
    "test_flax_comparison.py": "for JAX",
    "test_mlx_comparison.py": "for MLX",
    "test_paddle_comparison.py": "for PaddlePaddle",
    "test_tf_comparison.py": "for TensorFlow",
}

# An import of the package itself would fail.
CONFTEST = """
import sys

sys.modules["safetensors"] = None
"""


def fetch(folder: Path) -> Path:
    """Downloads the source distribution once; returns its path."""
    path = folder / f"safetensors-{VERSION}.tar.gz"
    if not path.exists():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
        only = ["--no-deps", "--no-binary=safetensors", f"--dest={folder}"]
        subprocess.run([*pip, *only, f"safetensors=={VERSION}"], check=True)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != DIGEST:
        sys.exit(f"dropin: {path} has the SHA-256 {digest}, not {DIGEST}; remove it")
    return path


def unpack(archive: Path, to: Path) -> None:
    """Unpacks the tests with the changes."""
    changed = dict.fromkeys((what for what, _, _ in CHANGES), 0)
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            path = Path(member.name)
            file = tar.extractfile(member)
            if path.parts[1:4] != ("bindings", "python", "tests") or file is None:
                continue
            text = file.read().decode()
            for what, pattern, instead in CHANGES:
                text, count = re.subn(pattern, instead, text)
                changed[what] += 0 if path.name in LEFT_OUT else count
            place = to.joinpath(*path.parts[3:])
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
    (to / "conftest.py").write_text(CONFTEST)
    for what, count in changed.items():
        print(f"dropin: changed {count} {what}")
    for name, why in LEFT_OUT.items():
        print(f"dropin: left out {name}: {why}")


def main(folder: Path, *arguments: str) -> int:
    archive = fetch(folder)
    with tempfile.TemporaryDirectory(prefix="dmafile-dropin-") as to:
        unpack(archive, Path(to))
        ignored = [f"--ignore=tests/{name}" for name in LEFT_OUT]
        pytest = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider"]
        command = [*pytest, *ignored, *arguments, "tests"]
        return subprocess.run(command, cwd=to, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
