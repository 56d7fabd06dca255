"""The parts that could silently mislead, and whole runs with small files."""

import importlib.util
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import ways
from bench.arguments import program
from bench.candidates import BY_PAGE_CACHE, LIMIT, RECORDS, TO_DISK
from bench.runs import MACHINE, ROOT, RUNS, Run
from bench.seconds import memory
from bench.seconds.commands import Output, bare, baseline, script, way
from bench.seconds.files import MIB, cached, evict, file_system, fill_cache, make_file
from bench.seconds.process import Failed, Slow, run
from bench.seconds.programs.save import POOL
from bench.seconds.rounds import Cell
from bench.seconds.run import TABLES, run_all, tables
from bench.seconds.tables import Job, Place
from bench.words import decided, ratios, spread, table


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in the checkout: the temporary folder may be a tmpfs, whose files are never cold."""
    if file_system(ROOT) in ("tmpfs", "ramfs"):
        pytest.skip("the checkout is on a tmpfs")
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".bench-test-") as name:
        yield Path(name)


def test_an_evicted_file_has_no_cached_page(folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(bytes(3 * MIB + 1))  # dirty, so that evict must write it back
    fill_cache(path)
    assert cached(path) > 3 * MIB
    evict(path)
    assert cached(path) == 0


def test_a_file_that_stays_cached_is_an_error() -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(bytes(MIB))
        file.flush()
        with pytest.raises(SystemExit, match="stays in the page cache"):
            evict(Path(file.name))


def test_a_file_is_made_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    make_file(path, b"head", 40 * MIB)
    made = path.read_bytes()
    assert len(made) == 4 + 40 * MIB
    assert made.startswith(b"head")
    # All pages are different.
    pages = [made[start : start + 4096] for start in range(0, 40 * MIB, 4096)]
    assert len(set(pages)) == len(pages)

    stamp = path.stat().st_mtime_ns
    make_file(path, b"head", 40 * MIB)
    assert path.stat().st_mtime_ns == stamp
    assert list(islice(path.parent.iterdir(), 2)) == [path]


def test_a_full_disk_is_an_error_before_writing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(SystemExit, match="make room"):
        make_file(path, b"", 1 << 60)
    assert not any(tmp_path.iterdir())


def test_a_run_reports_its_own_memory_and_time() -> None:
    held = "x = bytearray(200 << 20)"
    spent = run([sys.executable, "-S", "-c", held])
    assert 200 * MIB < spent.peak < 300 * MIB
    assert 0 < spent.cpu < spent.wall + 0.1


def test_a_peak_excludes_earlier_memory_of_this_process() -> None:
    held = b"x" * (600 * MIB)
    del held
    assert run(["true"]).peak < 600 * MIB


def test_slow_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "fastest_touch", 0.0)
    assert not memory.touch_memory(MIB)
    monkeypatch.setattr(memory, "fastest_touch", math.inf)
    assert memory.touch_memory(MIB)


def test_what_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "TOUCH", "import time; time.sleep(3600)")
    assert not memory.touch_memory(MIB, 0.1)
    with pytest.raises(Slow, match="was ended"):
        run(["sleep", "3600"], seconds=0.1)
    with pytest.raises(Slow, match="was ended"):
        make_file(tmp_path / "file", b"", MIB, seconds=-1)
    assert not any(tmp_path.iterdir())


def test_a_failed_run_says_why() -> None:
    with pytest.raises(Failed, match="exit status 3"):
        run(["sh", "-c", "exit 3"])
    with pytest.raises(Failed, match="No such file"):
        run(["no-such-command"])


def test_the_baseline_holds_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    make_file(path, b"", 100 * MIB + 1)
    assert run(baseline(path)).peak > 100 * MIB
    assert subprocess.run([*baseline(path), "100001"], check=False).returncode == 0


def test_spread_shows_median_minimum_and_maximum() -> None:
    assert spread([3.0, 1.0, 2.25, 9.0, 2.0]) == "2.25 [1.00–9.00]"
    assert spread([3.0, 1.0], digits=0) == "2 [1–3]"


def test_columns_of_a_table_are_aligned() -> None:
    assert table(["", "GB/s"], [["read()", "1.25"], ["ours", "10.00"]]).splitlines() == [
        "|        |   GB/s |",
        "|:-------|-------:|",
        "| read() |   1.25 |",
        "| ours   |  10.00 |",
    ]


def test_runs_of_an_interrupted_round_count() -> None:
    assert ratios([2.0, 3.0, 4.0], [1.0, 1.0]) == [2.0, 3.0]


def test_candidates_that_change_order_are_undecided() -> None:
    assert decided([2.0, 3.0], [1.0, 2.0]) and decided([1.0, 2.0], [2.0, 3.0])
    assert not decided([2.0, 1.0], [1.0, 2.0])


# With the build of `cargo test`, from the root of the tree.
BENCH = [sys.executable, "-m", "bench", "--profile=dev"]


def bench(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [*BENCH, f"--dir={folder}", f"--out={folder / 'out'}", "--most=8", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ways.build(tmp_path_factory.mktemp("ways"), "dev")


@pytest.mark.slow
def test_results_have_every_run(folder: Path) -> None:
    done = bench(folder, "limit", "peers", "--seed=7")
    assert done.returncode == 0, done.stderr
    out = folder / "out"
    kept = Run.read(out)
    assert kept.machine["seed"] == 7
    samples = [one for one in kept.samples if "refused" not in one]
    runs = Counter((one["candidate"], one["size"], one["warm"]) for one in samples)
    assert set(runs.values()) == {5}, runs
    # Each candidate runs once per round.
    every = [one for one in samples if one["table"] == "limit"]
    orders = [[one["candidate"] for one in every if one["round"] == n] for n in range(1, 6)]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert any(order != orders[0] for order in orders), orders
    lines = kept.machine["tables"]["limit"]["candidates"]
    assert lines["dmafile, memfd"] == LIMIT["dmafile, memfd"]
    for one in every:
        assert one["cached_after"] == 0, one
        assert 0 < one["seconds"] < one["wall"], one
    ours = [one for one in samples if one["candidate"].startswith("dmafile ") and not one["warm"]]
    assert ours and all(one["cached_after"] < MIB for one in ours)
    made = tables(kept)
    assert {path.name for path in out.iterdir()} == {
        MACHINE,
        RUNS,
        *(f"{name}.csv" for name in made),
    }
    assert list(made) == ["limit", "peers-cold", "peers-warm"]
    for head, rows in made.values():
        assert table(head, rows) in done.stdout
    for row in (*LIMIT, "allocation alone, memfd, base", "safetensors, mmap ", "read()", "gguf "):
        assert f"\n| {row}" in done.stdout, row
    if importlib.util.find_spec("torch") is None:
        assert "torch.load: not installed (pip install torch)" in done.stdout
    assert "round 1 of 5" in done.stderr
    assert re.search(r"^round 5 of 5, \d+\.\d minutes left$", done.stderr, re.MULTILINE)
    assert f"All runs: {out}" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not os.access(POOL, os.W_OK), reason="only root can reserve huge pages")
def test_saves_are_compared_with_fio_and_the_page_cache(folder: Path) -> None:
    done = bench(folder, "saves", "--seed=7")
    assert done.returncode == 0, done.stderr
    # The bytes of each candidate were compared when it was probed.
    for row in (*TO_DISK, *RECORDS, "`dmafile.numpy.save_file`", "`safetensors.numpy.save_file`"):
        assert f"\n| {row}" in done.stdout, done.stdout
    for one in Run.read(folder / "out").samples:
        cached = one["candidate"] == BY_PAGE_CACHE or "`, `fsync()`" in one["candidate"]
        assert (one["cached_after"] > 0) == cached, one
        assert one["seconds"] > 0, one


@pytest.mark.slow
def test_an_interrupt_keeps_the_measurements(folder: Path) -> None:
    process = subprocess.Popen(
        [*BENCH, "limit", f"--dir={folder}", f"--out={folder / 'out'}", "--most=8", "--rounds=200"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # As in a terminal; in a background job of a shell, SIGINT would be ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stderr is not None
    # After the first round, there are measurements to keep.
    for line in process.stderr:
        if line.startswith("round 2 of"):
            break
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 130, said + errors
    kept = Run.read(folder / "out")
    assert kept.machine["tables"]["limit"]["interrupted"]
    assert {one["round"] for one in kept.samples if "round" in one} >= {1}


@pytest.mark.slow
def test_a_failure_keeps_earlier_measurements(
    folder: Path, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ways.c fails because of an invalid number."""
    size = 8 * MIB
    place = Place(program(None), built, folder, tmp_path, size)
    good, bad = (
        Cell(way(built, name, place.file_of(size), line))
        for name, line in (("good", "load to=memfd"), ("odd", "load to=memfd chunk=many"))
    )
    jobs = {"limit": Job([good], 1), "saves": Job([bad], 1), "peers": Job([good], 1)}
    for name, job in jobs.items():
        module = SimpleNamespace(job=lambda *_, job=job: job, results=lambda _: [])
        monkeypatch.setitem(TABLES, name, module)
    assert run_all(list(jobs), place, tmp_path / "out", 7, None) == 1
    kept = Run.read(tmp_path / "out")
    assert [one["candidate"] for one in kept.samples] == ["good"]
    assert "many: not a number" in kept.machine["tables"]["saves"]["failed"]
    assert "peers" not in kept.machine["tables"]


LINES = [
    "load to=memfd",
    "load to=anon pages=base method=threads io=buffered queue-depth=2 block=65536",
    "copy to=memfd method=read io=buffered",
    "copy to=memfd method=sendfile io=direct",
    "store from=memfd pages=thp",
    "save from=memfd pages=base method=write io=buffered",
    "save from=memfd pages=thp method=write io=direct block=1048576",
]


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES)
def test_wrong_bytes_are_an_error(built: Path, folder: Path, tmp_path: Path, line: str) -> None:
    path, other, said = folder / "file", folder / "other", tmp_path / "said"
    make_file(path, b"", 2 * MIB)
    candidate = way(built, "one", path, line)
    assert run([*candidate.command, candidate.checks], said).wall > 0
    output = candidate.parse(said)
    assert isinstance(output, Output) and output.seconds > 0
    assert set(output.phases) == {"create", "fill", "close"}
    if line.startswith(("load ", "store ")):
        assert output.report["bytes"] == 2 * MIB
    other.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(Failed, match="wrong bytes"):
        run([*candidate.command, str(other)], said)
    other.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Failed, match="different size"):
        run([*candidate.command, str(other)], said)


@pytest.mark.slow
def test_an_unavailable_candidate_gives_the_reason(built: Path, tmp_path: Path) -> None:
    path = tmp_path / "file"
    make_file(path, b"", MIB)
    for line in ("copy to=heap method=heap-read io=direct", "load to=heap:none"):
        candidate = way(built, "one", path, line)
        run(candidate.command, tmp_path / "said")
        why = candidate.parse(tmp_path / "said")
        assert isinstance(why, str) and len(why) > 10, why
    for line in ("burn to=memfd", "load to=memfd chunk=many", "load to", "copy pace=high"):
        with pytest.raises(Failed):
            run(way(built, "one", path, line).command, tmp_path / "said")


TRAP = "import os, sys; os.write(2, b'HIJACKED'); sys.exit(9)"


def test_no_code_of_the_current_folder_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of a downloaded model may contain any file."""
    # Use the module of this Python, not another dmafile command.
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / "model.noise"
    make_file(path, b"", MIB)
    for name in ("dmafile", "json", "numpy", "tqdm", "bench", "sitecustomize", "mmap"):
        (tmp_path / f"{name}.py").write_text(TRAP)
    commands = [
        bare("read_into_memfd.py", str(path)),
        script("peer.py", "read()", str(ROOT / "attacks" / "gap.safetensors")),
        [*program(None), "--version"],
    ]
    for command in commands:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert "HIJACKED" not in done.stderr, (command, done.stderr)


def test_usage_errors_are_reported() -> None:
    wrong = {
        ("--rounds=4",): "at least 5",
        ("heap",): "invalid choice",
        ("--out=a", "--keep=b"): "cannot be combined",
    }
    for words, said in wrong.items():
        done = subprocess.run([*BENCH, "limit", *words], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2 and said in done.stderr
