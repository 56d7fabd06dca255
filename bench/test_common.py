"""The parts of the demo and the benchmark that could mislead quietly."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from common import (
    MIB,
    baseline,
    cached,
    evict,
    file_system,
    fill_cache,
    make_file,
    run,
    spread,
    table,
)

ROOT = Path(__file__).resolve().parent.parent


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


def test_a_failed_run_ends_everything() -> None:
    with pytest.raises(SystemExit, match="ended with 3"):
        run(["sh", "-c", "exit 3"])
    with pytest.raises(SystemExit, match="No such file"):
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
