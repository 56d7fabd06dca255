"""`dmafile bench`: the parts that could mislead quietly, and all of it on small files."""

import html
import importlib.util
import json
import math
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from dmafile_bench import memory
from dmafile_bench.candidates import baseline, plain
from dmafile_bench.files import MIB, cached, evict, file_system, fill_cache, make_file
from dmafile_bench.process import Failed, run
from dmafile_bench.way import compare
from dmafile_bench.words import decided, ratios, spread, table

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder beside the code: the system's temporary one may be memory, which can't be cold."""
    if file_system(ROOT) in ("tmpfs", "ramfs"):
        pytest.skip("the checkout is in memory")
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".bench-test-") as name:
        yield Path(name)


def test_evicted_means_not_one_page_cached(folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(bytes(3 * MIB + 1))  # dirty, which evict has to deal with
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
    # No page is like another.
    pages = [made[start : start + 4096] for start in range(0, 40 * MIB, 4096)]
    assert len(set(pages)) == len(pages)

    stamp = path.stat().st_mtime_ns
    make_file(path, b"head", 40 * MIB)
    assert path.stat().st_mtime_ns == stamp
    assert list(islice(path.parent.iterdir(), 2)) == [path]


def test_a_full_disk_is_said_before_writing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(SystemExit, match="make room"):
        make_file(path, b"", 1 << 60)
    assert not any(tmp_path.iterdir())


def test_a_run_is_accounted_for_its_own_memory_and_time() -> None:
    held = "x = bytearray(200 << 20)"
    spent = run([sys.executable, "-S", "-c", held])
    assert 200 * MIB < spent.peak < 300 * MIB
    assert 0 < spent.cpu < spent.wall + 0.1


def test_a_peak_is_not_that_of_what_this_process_once_held() -> None:
    held = b"x" * (600 * MIB)
    del held
    assert run(["true"]).peak < 600 * MIB


def test_memory_that_does_not_become_quick_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "fastest_touch", 0.0)
    assert not memory.touch_memory(MIB)
    monkeypatch.setattr(memory, "fastest_touch", math.inf)
    assert memory.touch_memory(MIB)


def test_a_failed_run_says_why() -> None:
    with pytest.raises(Failed, match="ended with 3"):
        run(["sh", "-c", "exit 3"])
    with pytest.raises(Failed, match="No such file"):
        run(["no-such-command"])


def test_the_baseline_holds_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    make_file(path, b"", 100 * MIB + 1)
    assert run(baseline(path)).peak > 100 * MIB
    assert subprocess.run([*baseline(path), "100001"], check=False).returncode == 0


def test_spread_is_median_least_most() -> None:
    assert spread([3.0, 1.0, 2.25, 9.0, 2.0]) == "2.25 [1.00–9.00]"
    assert spread([3.0, 1.0], digits=0) == "2 [1–3]"


def test_table_lines_up() -> None:
    assert table(["", "GB/s"], [["read()", "1.25"], ["ours", "10.00"]]).splitlines() == [
        "|        |  GB/s |",
        "| ------ | ----: |",
        "| read() |  1.25 |",
        "| ours   | 10.00 |",
    ]


def test_a_round_that_was_interrupted_counts_for_those_who_ran() -> None:
    assert ratios([2.0, 3.0, 4.0], [1.0, 1.0]) == [2.0, 3.0]


def test_an_order_that_changes_is_undecided() -> None:
    assert decided([2.0, 3.0], [1.0, 2.0]) and decided([1.0, 2.0], [2.0, 3.0])
    assert not decided([2.0, 1.0], [1.0, 2.0])


BENCH = [sys.executable, "-m", "dmafile_bench"]
"""As root's PATH may have another dmafile: this Python's own."""


def bench(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [*BENCH, f"--dir={folder}", f"--out={folder / 'out'}", "--most=8", *words]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_report_has_every_run_and_stands_alone(folder: Path) -> None:
    done = bench(folder, "--seed=7")
    assert done.returncode == 0, done.stderr
    out = folder / "out"
    raw = json.loads((out / "runs.json").read_text())
    assert raw["seed"] == 7
    samples = raw["tables"]["quick"]["samples"]
    runs = Counter((one["candidate"], one["warm"]) for one in samples)
    assert runs["dmafile, memfd", False] == runs["read() into a memfd", True] == 5, runs
    # By turns: no candidate runs twice before all others have run.
    orders = [
        [one["candidate"] for one in samples if one["round"] == number and not one["warm"]]
        for number in range(1, 6)
    ]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert any(order != orders[0] for order in orders), orders
    for one in samples:
        assert one["cached_after"] == 0 or one["warm"] or one["candidate"].startswith("read()"), one
        assert 0 < one["seconds"] < one["wall"], one
    page = (out / "report.html").read_text()
    slow = sum(not one["quick_memory"] for one in samples)
    assert (f"before {slow} runs it never became" in page) == (slow > 0)
    # It opens without a network.
    links = re.findall(r'(?:src|href)\s*=\s*"(?!#)([^"]*)"|url\((?!#)([^)]*)\)', page)
    assert not links, links
    assert page.count("<svg") == len(list(out.glob("*.png"))) > 3
    names = [name for name, _ in runs]
    assert all(html.escape(name) in page for name in names)
    assert len(list(out.glob("*.csv"))) == 2
    assert "round 1 of 5" in done.stderr and "round 5 of 5, 0.0 minutes left" in done.stderr
    assert "use `dmafile load" in done.stdout or "use read()" in done.stdout
    assert f"Report: {out / 'report.html'}" in done.stdout


def test_rows_that_cannot_run_say_why(folder: Path) -> None:
    done = bench(folder, "--table=copy", "--most=32")
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if re.match(r"\| \d+ ", line)]
    assert len(rows) == 23
    for row in rows:
        name = row.split("|")[1].strip()
        if "can't run here" in row:
            assert re.search(rf"Can't run here: .*{re.escape(name)}.*\(E[A-Z]+\)", done.stdout), row
    assert any("can't run" not in row for row in rows)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("heap", ["normal: heap, mmap, read()", "dmafile, memfd", "udmabuf, read(), direct"]),
        ("limit", ["dmafile, memfd", "dmafile, anon", "allocation alone, memfd, 4k"]),
        ("scale", ["dmafile, memfd, 8 MiB", "two loads at once"]),
        ("extras", ["no checksum", "sha256", "10000 tensors: to open"]),
        ("peers", ["dmafile ", "safetensors, mmap ", "read()", "gguf "]),
    ],
)
def test_each_table_has_its_rows(folder: Path, name: str, rows: list[str]) -> None:
    done = bench(folder, f"--table={name}", "--seed=7", "--least=8")
    assert done.returncode == 0, done.stderr
    for row in rows:
        assert f"\n| {row}" in done.stdout, done.stdout
    raw = json.loads((folder / "out" / "runs.json").read_text())["tables"][name]
    runs = Counter((one["candidate"], one["size"], one["warm"]) for one in raw["samples"])
    assert set(runs.values()) == {5}, runs
    if name == "heap":
        assert {size for _, size, _ in runs} == {8 * MIB}
    if name == "peers" and importlib.util.find_spec("torch") is None:
        assert "torch.load: not installed (pip install torch)" in done.stdout


def test_interrupted_it_tells_what_was_measured(folder: Path) -> None:
    process = subprocess.Popen(
        [*BENCH, f"--dir={folder}", f"--out={folder / 'out'}", "--most=8", "--rounds=200"],
        stdout=subprocess.PIPE,
        text=True,
        # As in a terminal: not ignored, as it would be in a background job of a shell.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    time.sleep(8)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "Report: " in said
    assert json.loads((folder / "out" / "runs.json").read_text())["tables"]["quick"]["interrupted"]


def test_what_was_measured_outlives_a_failure(folder: Path) -> None:
    # Its words are none of dmafile's, which it says by a traceback.
    done = bench(folder, "--table=extras", "--table=quick", "--candidate=odd=to=memfd gather=many")
    assert done.returncode == 1, done.stdout
    assert "cannot measure on: odd: " in done.stderr
    page = (folder / "out" / "report.html").read_text()
    assert "It did not come to its end: odd: " in page and "10000 tensors" in page


def test_too_few_bytes_are_wrong_ones(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    compare({}, [b"a", b"bc"], str(path), 3)
    with pytest.raises(SystemExit, match="2 bytes, not 3"):
        compare({}, [b"ab"], str(path), 3)


def test_wrong_bytes_end_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    make_file(path, b"", 2 * MIB)
    way = plain("way", path, 2 * MIB, "to=memfd method=read io=buffered check=1").command
    assert run(way, tmp_path / "said").wall > 0
    # What it compares with is another file's.
    other = tmp_path / "other"
    other.write_bytes(bytes(2 * MIB))
    script = way[3]
    text = Path(script).read_text().replace("with open(path, ", f"with open({str(other)!r}, ")
    wrong = tmp_path / "way.py"
    wrong.write_text(text)
    with pytest.raises(Failed, match="wrong bytes"):
        run([*way[:3], str(wrong), *way[4:]], tmp_path / "said")


def test_bad_usage_is_told() -> None:
    for word, said in (("--rounds=4", "at least 5"), ("--least=3073", "0 to 3072")):
        done = subprocess.run([*BENCH, word], capture_output=True, text=True)
        assert done.returncode == 2 and said in done.stderr
