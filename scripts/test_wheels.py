"""The check of wheels, on libraries that are built here."""

import subprocess
import zipfile
from pathlib import Path

from scripts import wheels


def wheel(folder: Path, source: str, text: str = "", licences: str = "\nrustix 1.0.0: MIT") -> Path:
    """With the library of a C source, a file of that text, and licences."""
    library = folder / "library.so"
    (folder / "library.c").write_text(source)
    compiler = ["cc", "-shared", "-fPIC", "-o", str(library), str(folder / "library.c")]
    subprocess.run(compiler, check=True)
    path = folder / "package.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(library, "package/library.so")
        archive.writestr("package/file", text)
        archive.writestr("package-1.dist-info/licenses/LICENSE-THIRD-PARTY", licences)
    return path


USES = """
int puts(const char *);
long PyLong_AsLong(void *);
long %s(void);
long use(void *object) { return puts("") + PyLong_AsLong(object) + %s(); }
"""


def test_a_symbol_without_a_version_is_found(tmp_path: Path) -> None:
    made = wheel(tmp_path, USES % ("preadv3", "preadv3"))
    assert wheels.inside(made) == ["needs preadv3, of no version"]


def test_symbols_of_python_and_of_versions_pass(tmp_path: Path) -> None:
    assert wheels.inside(wheel(tmp_path, USES % ("getpid", "getpid"))) == []


def test_a_folder_of_this_machine_is_found(tmp_path: Path) -> None:
    source = USES % ("getpid", "getpid")
    made = wheel(tmp_path, source, f"built in {wheels.ROOT}/target")
    assert wheels.inside(made) == [f"package/file names {wheels.ROOT}"]
    made = wheel(tmp_path, source + f'const char place[] = "{wheels.CARGO}/registry";\n')
    assert wheels.inside(made) == [f"package/library.so names {wheels.CARGO}"]


def test_a_wheel_without_licences_is_found(tmp_path: Path) -> None:
    made = wheel(tmp_path, USES % ("getpid", "getpid"), licences="MIT")
    assert wheels.inside(made) == [f"has no {wheels.LICENCES} that names the crates in it"]
