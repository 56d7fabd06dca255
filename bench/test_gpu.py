"""bench/gpu.py, which needs a GPU: its arguments, its limits of time, its results and tables; and
the kit of it, with the double as the driver of the machine."""

import hashlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import gpu

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu, "EACH", 1 << 20)
    path = tmp_path / "model.safetensors"
    gpu.make(path, 3 << 20, time.monotonic() + 60)
    return path


def test_arguments() -> None:
    args = gpu.arguments([])
    assert (args.gib, args.rounds, args.only, args.json) == (4, 3, None, None)
    args = gpu.arguments(["--gib", "32", "--only", "pinned", "--rounds=1", "--json", "a.json"])
    assert (args.gib, args.rounds, args.only, args.json) == (32, 1, ["pinned"], Path("a.json"))
    with pytest.raises(SystemExit):
        gpu.arguments(["--gib", "much"])


def test_the_file_is_that_of_the_digest(model: Path, tmp_path: Path) -> None:
    data = model.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    rows = json.loads(data[8:start])
    parts = [
        data[start + at : start + end] for at, end in (r["data_offsets"] for r in rows.values())
    ]
    assert len(set(parts)) == 3 and b"".join(parts) == data[start:] and start % 4096 == 0
    again = gpu.make(tmp_path / "again", 3 << 20, time.monotonic() + 60)
    assert again == hashlib.sha256(data[start:]).hexdigest()
    with pytest.raises(SystemExit, match="smaller --gib"):
        gpu.make(tmp_path / "late", 3 << 20, time.monotonic() - 1)


WAYS = {
    "works": """
used = first(lambda: 0)
begin()
end()
check(lambda name: open(path, "rb").read()[places[name]])
""",
    "is wrong": 'begin()\nend()\ncheck(lambda name: b"")\n',
    "fails": 'print("something")\nraise ValueError("broken")\n',
    "is killed": "os.kill(os.getpid(), 9)\n",
    "says nothing": "os._exit(0)\n",
    "hangs": 'import subprocess\nsubprocess.run(["sleep", "1000"])\n',
}


def test_every_end_of_a_process_is_a_result(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "WAYS", WAYS)
    results = {way: gpu.run(way, model, "auto", True, 60) for way in WAYS if way != "hangs"}
    works = results["works"]
    assert isinstance(works, dict)
    assert works["seconds"] >= 0 and works["bytes"] == model.stat().st_size and "taken" in works
    assert results["fails"] == "ValueError: broken"
    assert results["is killed"] == "it ended with -9 and without a message"
    assert results["says nothing"] == "it ended with 0 and without a message"
    assert gpu.run("hangs", model, "auto", True, 1) == "stopped after 1 seconds"


def test_what_is_installed_is_used_before_what_the_kit_carries(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("carried", "pytest"):
        (tmp_path / f"{name}.py").write_text("mine = True\n")
    way = 'import carried, pytest\nbegin()\nend()\nsaid["mine"] = hasattr(pytest, "mine")\n'
    monkeypatch.setattr(gpu, "WAYS", {"one": way})
    said = gpu.run("one", model, "auto", False, 60, ("cuda:0", str(tmp_path)))
    assert isinstance(said, dict) and said["mine"] is False
    said = gpu.run("one", model, "auto", False, 60)
    assert said == "ModuleNotFoundError: No module named 'carried'"


def main(monkeypatch: pytest.MonkeyPatch, to: Path, ways: dict[str, str], *words: str) -> Any:
    """The JSON of a benchmark of other ways, on a small file."""
    monkeypatch.setattr(gpu, "EACH", 1 << 20)
    monkeypatch.setattr(gpu, "WAYS", ways)
    monkeypatch.setattr(gpu, "machine", lambda: {"double": True, "gpus": ["cuda:0, a double"]})
    monkeypatch.setattr(gpu, "missing", lambda way, size, gpu: None)
    monkeypatch.setattr(gpu, "jobs_of", lambda way: [(way, way, gpu.evict, "auto")])
    file = to / "all.json"
    gpu.main(["--dir", str(to), "--gib", "0.001", "--json", str(file), *words])
    assert list(to.iterdir()) == [file]
    return json.loads(file.read_text())


def test_a_benchmark_ends_in_time_whatever_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now, given = [0.0], []

    def run(*how: Any) -> str:
        way, seconds = str(how[0]), float(how[4])
        given.append(seconds)
        now[0] += seconds if way.startswith("hangs") else min(seconds, 100)
        return "it was stopped"

    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ways = dict.fromkeys(["hangs", "slow", "hangs, too", "hangs as well", "waits"], "")
    said = main(monkeypatch, tmp_path, ways)
    assert now == [540]
    # Each gets what is left, and at most a third of the whole.
    assert given[:2] == [180, 180] and max(given) == 180
    assert said["runs"] == {} and said["refused"].keys() == ways.keys()
    assert sorted(set(said["refused"].values())) == ["it was stopped", "no time left"]
    assert capsys.readouterr().out.count("no time left") == len(ways) - len(given)


def test_samples_are_written_after_each_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = gpu.run, []

    def run(*how: Any) -> Any:
        file = tmp_path / "all.json"
        seen.append(json.loads(file.read_text())["runs"] if file.exists() else {})
        if len(seen) == 3:
            raise KeyboardInterrupt
        return real(*how)

    monkeypatch.setattr(gpu, "run", run)
    with pytest.raises(KeyboardInterrupt):
        main(monkeypatch, tmp_path, {"works": WAYS["works"]})
    assert [len(runs.get("works", [])) for runs in seen] == [0, 1, 2]
    assert [one["sha256"] is None for one in seen[2]["works"]] == [False, True]


def test_wrong_bytes_are_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as end:
        main(monkeypatch, tmp_path, WAYS, "--only", "w")
    assert end.value.code == 1
    said = json.loads((tmp_path / "all.json").read_text())
    assert said["refused"] == {"is wrong": "WRONG BYTES"} and len(said["runs"]["works"]) == 3


def test_a_table_is_made_of_samples() -> None:
    sample = {"bytes": 1 << 30, "cpu": 0.5, "peak": 3 << 20, "taken": 4 << 20, "pinned": 2 << 20}
    results: dict[str, list[gpu.Sample]] = {
        "one": [sample | {"seconds": n, "first": n / 10} for n in (3.0, 1.0, 2.0)],
        "disk: fio": [sample | {"seconds": 0.5, "peak": None, "pinned": None}],
        "pinned: registered after, thp, cold": [
            sample | {"seconds": 0.25, "pages": "thp", "bytes": 2 << 30}
        ],
    }
    assert [" ".join(line.split()) for line in gpu.table(results)] == [
        "seconds GB/s CPU s/GB first use s peak MiB pinned MiB taken MiB",
        "disk: fio 0.500 [0.500-0.500] 2.15 0.466 4",
        "one 2.000 [1.000-3.000] 0.54 0.466 0.200 3 2 4",
        "pinned: registered after, thp, cold 0.250 [0.250-0.250] 8.59 0.233 3 2 4",
        "pinned: registered after, thp, cold: 0.1250 seconds per GiB on pages of kind thp",
    ]
    assert len({len(line) for line in gpu.table(results)[:4]}) == 1


def test_memory_is_compared_with_the_state_before_the_load() -> None:
    states = [(0, 900, 0), (1, 1000, 5), (2, 300, 25), (3, 800, 15), (9, 0, 99)]
    assert gpu.used(states, 1.5, 3) == {"taken": 700, "pinned": 20}
    assert gpu.used([(at, free, None) for at, free, _ in states], 1.5, 3) == {
        "taken": 700,
        "pinned": None,
    }
    # A load between two looks.
    assert gpu.used(states, 1.5, 1.6) == {"taken": 0, "pinned": 0}


def test_pinned_memory_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr(gpu, "memory", lambda: (40 << 30, None))
    size = (32 << 30) + 4096
    assert gpu.missing("pinned: dmafile", size) is None
    assert gpu.missing("dmafile.cuda", size) is None
    why = "needs 65 GiB of memory, and 40 GiB are available"
    assert gpu.missing("pinned: torch.empty + readinto", size) == why
    assert gpu.missing("pinned: dmafile", 40 << 30) is not None


def test_what_cannot_run_is_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = {"double": False, "gpus": [], "refused": ["libcuda.so.1: no such file"]}
    monkeypatch.setattr(gpu, "machine", lambda: where)
    with pytest.raises(SystemExit) as end:
        gpu.main(["--dir", str(tmp_path)])
    assert end.value.code == gpu.NO_GPU
    assert "no GPU that can be used here: libcuda.so.1: no such file" in capsys.readouterr().err
    where["gpus"] = ["cuda:0, one", "cuda:1, two"]
    with pytest.raises(SystemExit, match=r"has room for .* GiB, and the file needs 1000000\.0 GiB"):
        gpu.main(["--dir", str(tmp_path), "--gib", "1e6"])
    gpu.main(["--check"])
    assert capsys.readouterr().out.endswith("gpu: there is a GPU: cuda:0, one; cuda:1, two\n")


def test_a_failing_test_is_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = {"double": False, "gpus": ["cuda:0, one"]}
    monkeypatch.setattr(gpu, "machine", lambda: where)
    tests, file = tmp_path / "tests", tmp_path / "all.json"
    tests.mkdir()
    (tests / "test_it.py").write_text(
        "import os\ndef test_it(): assert os.environ['DMAFILE_GPU'] != 'real', 'broken'\n"
    )
    how = [f"--dir={tmp_path}", f"--tests={tests}", f"--json={file}", "--rounds=0"]
    with pytest.raises(SystemExit) as end:
        gpu.main(how)
    said = json.loads(file.read_text())["tests"]
    assert (end.value.code, said["passed"]) == (1, False)
    assert said["result"].startswith("1 failed in ") and "broken" in said["output"]
    (tests / "test_it.py").write_text("import time\ndef test_it(): time.sleep(1000)\n")
    with pytest.raises(SystemExit):
        gpu.main([*how, "--minutes=0.05"])
    assert json.loads(file.read_text())["tests"]["result"] == "stopped after 1 seconds"


def offline() -> list[str]:
    """Runs a command without a network, if that is possible here."""
    alone = ["unshare", "--map-root-user", "--net"]
    is_possible = shutil.which("unshare") and not subprocess.run([*alone, "true"]).returncode
    return alone if is_possible else []


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As on another machine: built from this checkout's extension, packed and unpacked."""
    folder = tmp_path_factory.mktemp("kit")
    command = [sys.executable, "-m", "scripts.gpu_kit", "python/dmafile", str(folder / "built/kit")]
    subprocess.run(command, cwd=ROOT, check=True)
    shutil.make_archive(str(folder / "archive"), "gztar", folder / "built")
    shutil.rmtree(folder / "built")
    shutil.unpack_archive(folder / "archive.tar.gz", folder, filter="data")
    return folder / "kit"


def driver(folder: Path) -> None:
    """Builds the double of CUDA's driver, with one GPU, into a folder."""
    name = "libcuda.so.1"
    build = ["cc", "-O2", "-shared", "-fPIC", "-pthread", "-DVISIBLE=1", f"-Wl,-soname,{name}"]
    source = ROOT / "tests" / "double" / "driver.c"
    subprocess.run([*build, str(source), "-o", str(folder / name)], check=True)


def python3() -> str:
    """The system's Python, which has no packages: not the one that runs the tests."""
    found = "/usr/bin/python3"
    check = "import sys; sys.exit(sys.version_info < (3, 11))"
    if not Path(found).exists() or subprocess.run([found, "-c", check]).returncode:
        pytest.skip(f"{found} is not Python 3.11 or later")
    return found


@pytest.mark.slow
def test_the_kit_runs_without_anything_else(kit: Path, tmp_path: Path) -> None:
    """With the double as the driver of the machine, with one GPU, and no test that controls it."""
    file, report = tmp_path / "all.json", tmp_path / "report"
    driver(tmp_path)
    env = ["env", "-i", "PATH=/usr/bin:/bin", f"LD_LIBRARY_PATH={tmp_path}"]
    env += [f"GPU_PYTHON={python3()}", f"DOUBLE_REPORT={report}"]
    options = [f"--dir={tmp_path}", "--gib=0.07", "--rounds=1", f"--json={file}", "--minutes=60"]
    done = subprocess.run(
        [*offline(), *env, str(kit / "run"), *options], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "THE DRIVER IS A DOUBLE" in done.stdout
    said = json.loads(file.read_text())
    ways = {"copy: from pinned memory", "dmafile.cuda, cold", "dmafile.cuda, cached"}
    ways |= {f"pinned: {how}, base, cold" for how in ("dmafile", "registered after")}
    # fio and huge pages may be there or not.
    assert said["runs"].keys() >= ways, said["refused"]
    assert all(said["runs"][way][0]["first"] > 0 for way in ways)
    digests = {one["sha256"] for way in ways for one in said["runs"][way] if "sha256" in one}
    assert len(digests) == 1 and None not in digests
    assert said["refused"]["safetensors"] == "torch is not installed"
    assert "  safetensors: torch is not installed\n" in done.stdout
    # The tests ran, and what they left is known to the double.
    assert said["tests"]["passed"] and "test_cuda.py" in said["tests"]["output"]
    assert int(said["tests"]["result"].split(" passed")[0].split()[-1]) > 10
    ended = [json.loads(line) for line in report.read_text().splitlines()]
    assert max(one["copies"] for one in ended) > 100
    assert [one["complaint"] for one in ended if one["complaint"]] == []


def test_the_kit_names_what_is_missing(kit: Path, tmp_path: Path) -> None:
    env = ["env", "-i", "PATH=/usr/bin:/bin", "GPU_PYTHON=/bin/false"]
    done = subprocess.run([*env, str(kit / "run")], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "/bin/false is not Python 3.11 or later" in done.stderr
    env[-1] = f"GPU_PYTHON={python3()}"
    where = [*env, "LD_LIBRARY_PATH=/nowhere", str(kit / "run"), "--check"]
    done = subprocess.run(where, cwd=tmp_path, capture_output=True, text=True)
    if done.returncode == 0:
        pytest.skip("there is a GPU here")
    assert done.returncode == gpu.NO_GPU
    assert (
        "there is no GPU that can be used here: " in done.stderr and "libcuda.so.1" in done.stderr
    )
    assert list(tmp_path.iterdir()) == []
