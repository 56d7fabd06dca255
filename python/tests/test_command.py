"""The package installs the whole command."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import dmafile
import pytest

from conftest import file_sha256

COMMAND = Path(sys.executable).parent / "dmafile"


def run(*args: object, **options: object) -> "subprocess.CompletedProcess[str]":
    command = [str(COMMAND), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload, no-any-return]


def test_the_command_loads_and_reports(file: Path) -> None:
    done = run("load", file, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["bytes"] == file.stat().st_size
    assert run("--version").stdout == f"dmafile {dmafile.__version__}\n"
    module = subprocess.run([sys.executable, "-m", "dmafile", "--version"], capture_output=True)
    assert module.stdout.decode() == f"dmafile {dmafile.__version__}\n"


def test_exit_statuses_are_those_of_the_command(file: Path) -> None:
    failed = run("load", "no/such/file")
    assert failed.returncode == 1
    assert failed.stderr.startswith("dmafile: cannot open: no/such/file")
    assert run("load", file, "--block", "1").returncode == 2
    assert run().returncode == 2
    assert run("load", file, "--", "no-such-command").returncode == 127
    assert run("load", file, "--", "sh", "-c", "exit 7").returncode == 7


def test_a_command_inherits_only_the_buffer(file: Path) -> None:
    script = "sha256sum /proc/self/fd/$DMAFILE_FD; ls /proc/self/fd; grep Sig /proc/self/status"
    done = run("load", file, "--quiet", "--pages=base", "--", "bash", "-c", script)
    digest, *rest = done.stdout.splitlines()
    assert digest.split()[0] == file_sha256(file)
    # stdin, stdout, stderr, the buffer, and the folder that ls reads.
    assert len([line for line in rest if line.isdigit()]) == 5
    ignored = next(line.split()[1] for line in rest if line.startswith("SigIgn"))
    assert int(ignored, 16) & (1 << (signal.SIGINT - 1) | 1 << (signal.SIGPIPE - 1)) == 0


@pytest.mark.slow
def test_bench_imports_nothing_from_the_current_folder(file: Path, tmp_path: Path) -> None:
    """Every measured run is a separate process of this Python."""
    for name in ("dmafile.py", "dmafile_bench.py", "signal.py"):
        (tmp_path / name).write_text("open('ran', 'w').close()\n")
    done = run("bench", file, "--json", "--quiet", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert {line["way"] for line in json.loads(done.stdout)["table"]} > {"dmafile"}
    assert not (tmp_path / "ran").exists()


def test_ctrl_c_ends_the_command_with_status_130(slow: Path) -> None:
    for send in (signal.SIGINT, signal.SIGTERM):
        command = [
            str(COMMAND),
            "load",
            "--verbose",
            str(slow),
            "--method",
            "threads",
            "--io",
            "direct",
            "--block",
            "4096",
            "--queue-depth",
            "1",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            # The plan is printed before the first read.
            process.stdout.readline()
            process.send_signal(send)
            assert process.wait(timeout=60) == 130


@pytest.mark.parametrize("ignored", [False, True])
def test_an_ignored_signal_stays_ignored(file: Path, ignored: bool) -> None:
    trap = "trap '' INT; " if ignored else ""
    script = f"{trap}exec {COMMAND} load {file} -q -- grep SigIgn /proc/self/status"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    mask = int(done.stdout.split()[1], 16)
    assert bool(mask & 1 << (signal.SIGINT - 1)) == ignored
