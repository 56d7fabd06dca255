"""Documents show measured values, and bench/results has only samples and quoted tables."""

import csv
import re
from pathlib import Path

import pytest

from bench import documents, runs
from bench.documents import DOCUMENTS, made, path_of, quoted, rows_of
from bench.runs import MACHINE, RESULTS, ROOT, RUNS, Run
from bench.words import with_tables

WRITE = "write them: .venv/bin/python -m bench.documents"
SHOWING = [path for path in DOCUMENTS if "<!-- table: " in path.read_text()]


@pytest.mark.parametrize("document", SHOWING, ids=lambda path: path.name)
def test_tables_in_documents_match_the_samples(document: Path) -> None:
    text = document.read_text()
    assert with_tables(text, made) == text, WRITE


@pytest.mark.parametrize("name", quoted())
def test_quoted_csv_files_match_the_samples(name: str) -> None:
    rows = rows_of(name)
    with path_of(name).open(newline="") as file:
        assert list(csv.reader(file)) == [list(rows[0]), *map(list, rows[1])], WRITE


def test_documents_have_tables_of_every_benchmark() -> None:
    benches = {Run.read(runs.kept(name.split("/")[0])).machine["bench"] for name in quoted()}
    assert benches == set(documents.MAKERS)


def test_results_have_only_raw_samples_and_quoted_tables() -> None:
    shown = {path_of(name) for name in quoted()}
    text = "".join(document.read_text() for document in DOCUMENTS)
    for folder in RESULTS.iterdir():
        files = {path.name for path in folder.iterdir() if path not in shown}
        assert files == {MACHINE, RUNS}, folder
        linked = f"bench/results/{folder.name}" in text
        assert linked or any(path.parent == folder for path in shown), f"{folder} is in no document"
        assert all(Run.read(folder).samples), folder


def test_links_to_results_exist() -> None:
    for document in DOCUMENTS:
        for link in re.findall(r"\]\(((?:\.\./)?bench/[^)#]*)\)", document.read_text()):
            assert (document.parent / link).exists(), f"{document.relative_to(ROOT)}: {link}"


def test_a_new_run_replaces_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    run = Run({"bench": "seconds"}, [{"candidate": "one", "seconds": 0.5}, {"refused": "µ"}])
    assert runs.keep(run, "2026-11-23", "vm-quick") == tmp_path / "2026-11-23-vm-quick"
    assert runs.keep(run, "2026-11-23", "vm") == tmp_path / "2026-11-23-vm"
    newer = runs.keep(run, "2026-11-24", "vm-quick")
    assert runs.kept("vm-quick") == newer and Run.read(newer) == run
    assert len((newer / RUNS).read_text().splitlines()) == 2
    assert {one.name for one in tmp_path.iterdir()} == {"2026-11-23-vm", "2026-11-24-vm-quick"}
    runs.Run({}, []).write(tmp_path / "2026-11-25-vm-quick")
    with pytest.raises(AssertionError, match="2 runs"):
        runs.kept("vm-quick")
