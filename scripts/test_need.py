"""scripts/need, with placeholders for all programs that it runs."""

import shutil
import subprocess
from pathlib import Path

import pytest

NEED = Path(__file__).with_name("need")


class Machine:
    """A PATH with only the programs of a test, and a tool that the package would install."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.tool = folder / "tool"
        self.log = folder / "log"
        for name in ("env", "test"):
            (self.bin / name).symlink_to(str(shutil.which(name)))

    def has(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def has_apt(self, effect: str) -> None:
        self.has("apt-get", f'echo "$*" >> {self.log}\ncase $1 in install) {effect};; esac')

    def need(self) -> subprocess.CompletedProcess[str]:
        command = ["/bin/sh", str(NEED), "a-package", "test", "-e", str(self.tool)]
        environment = {"PATH": str(self.bin)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_nothing_is_done_if_the_tool_is_installed(machine: Machine) -> None:
    machine.tool.touch()
    done = machine.need()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_root_installs_the_package(machine: Machine) -> None:
    machine.has("id", "echo 0")
    machine.has_apt(f": > {machine.tool}")
    assert machine.need().returncode == 0
    assert machine.log.read_text().splitlines() == [
        "update -qq",
        "install -qq --no-install-recommends a-package",
    ]


def test_other_users_see_the_command_even_with_passwordless_sudo(machine: Machine) -> None:
    machine.has("id", "echo 1000")
    machine.has("sudo", f'echo sudo >> {machine.log}; shift; "$@"')
    machine.has_apt(f": > {machine.tool}")
    done = machine.need()
    assert done.returncode == 1
    assert "apt-get update && apt-get install a-package" in done.stderr
    assert not machine.log.exists()


def test_a_failed_or_useless_installation_is_an_error(machine: Machine) -> None:
    machine.has("id", "echo 0")
    machine.has_apt("exit 100")
    assert "installing a-package failed" in machine.need().stderr
    machine.has_apt("")
    done = machine.need()
    assert done.returncode == 1
    assert "still fails" in done.stderr


def test_without_apt_the_package_is_named(machine: Machine) -> None:
    done = machine.need()
    assert done.returncode == 1
    assert "a-package" in done.stderr
