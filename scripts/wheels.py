"""Checks wheels: `python -m scripts.wheels TAG WHEEL...`, where TAG is such as manylinux_2_28.

auditwheel looks at versions of symbols only. A library may also need a symbol without a version,
which an older C library lacks: the import would fail. So only Python's symbols may have none.
No file of a wheel may name a folder of the machine that built it. The licences of the crates that
are linked into it must be there.
"""

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = re.compile(r" (?P<bind>GLOBAL|WEAK) .* UND (?P<name>\w+)(?P<version>@\S+)?")
CARGO = os.environ.get("CARGO_HOME", str(Path.home() / ".cargo"))
PLACES = (str(ROOT), CARGO)
LICENCES = ".dist-info/licenses/LICENSE-THIRD-PARTY"
# A crate that is linked into every binary.
LINKED = b"\nrustix "


def main(tag: str, *wheels: str) -> int:
    faults = []
    for wheel in map(Path, wheels):
        strongest = audit(wheel)
        print(f"wheels: {wheel.name}, {wheel.stat().st_size:,} bytes; auditwheel: {strongest}")
        if not strongest.startswith(tag) or strongest not in wheel.name:
            faults.append(f"{wheel.name}: auditwheel says {strongest}")
        faults += [f"{wheel.name}: {fault}" for fault in inside(wheel)]
    for fault in faults:
        print(f"wheels: {fault}", file=sys.stderr)
    return 1 if faults else 0


def audit(wheel: Path) -> str:
    """The oldest platform that its versioned symbols allow."""
    said = run(sys.executable, "-m", "auditwheel", "show", str(wheel))
    found = re.search(r'following\s+platform\s+tag:\s+"(\w+)"', said)
    assert found, said
    return found[1]


def inside(wheel: Path) -> list[str]:
    faults = []
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
        if len(libraries) != 1:
            faults.append(f"has {len(libraries)} libraries instead of one: {libraries}")
        for name in libraries:
            library = archive.extract(name, folder)
            faults += [f"needs {symbol}, of no version" for symbol in unversioned(library)]
        for name in archive.namelist():
            content = archive.read(name)
            faults += [f"{name} names {place}" for place in PLACES if place.encode() in content]
        licences = [name for name in archive.namelist() if name.endswith(LICENCES)]
        if not any(LINKED in archive.read(name) for name in licences):
            faults.append(f"has no {LICENCES} that names the crates in it")
    return faults


def unversioned(library: str) -> list[str]:
    """Symbols without a version that must be there when it is loaded, other than Python's."""
    needed = list(NEEDED.finditer(run("readelf", "--dyn-syms", "--wide", library)))
    assert any(symbol["version"] for symbol in needed), library
    return [
        symbol["name"]
        for symbol in needed
        if symbol["bind"] == "GLOBAL"
        and not symbol["version"]
        and not symbol["name"].startswith(("Py", "_Py"))
    ]


def run(*command: str) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
