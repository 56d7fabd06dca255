"""Documents show the tables in the results, and the results have nothing else."""

import re
from pathlib import Path

import pytest

from bench import documents, runs
from bench.documents import DOCUMENTS, made, path_of, quoted
from bench.runs import KEPT, MACHINE, RUNS, Run
from bench.words import with_tables

SHOWING = [path for path in DOCUMENTS if "<!-- table: " in path.read_text()]


@pytest.mark.parametrize("document", SHOWING, ids=lambda path: path.name)
def test_tables_in_documents_are_those_in_the_results(document: Path) -> None:
    text = document.read_text()
    assert with_tables(text, made) == text, "write them: .venv/bin/python -m bench.documents"


def test_results_have_only_the_machine_and_quoted_tables() -> None:
    shown = {path_of(name) for name in quoted()}
    for folder in (run for results in KEPT for run in results.iterdir()):
        files = set(folder.iterdir())
        assert files - shown == {folder / MACHINE}, folder
        assert files & shown, f"{folder} is in no document"


def test_links_to_results_exist() -> None:
    for document in DOCUMENTS:
        for link in re.findall(r"\]\(((?:\.\./)*bench/[^)#]*)\)", document.read_text()):
            assert (document.parent / link).exists(), f"{document}: {link}"


def test_a_run_is_written_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "RAW", tmp_path)
    monkeypatch.setattr(runs, "KEPT", (tmp_path / "results",))
    monkeypatch.setattr(documents, "update", lambda: None)
    (tmp_path / "results").mkdir()
    rows = (["", "GB/s"], [["read(), twice", "1.25"]])
    older, newer = Run({"bench": "vm"}, [{"seconds": 2}, {"why": "–"}]), Run({"bench": "new"}, [])
    older.write(tmp_path / "2026-11-23-vm", {"first": rows, "second": rows})
    newer.write(tmp_path / "2026-11-24-vm", {"first": rows})
    assert Run.read(tmp_path / "2026-11-23-vm") == older and runs.latest("vm") == newer
    assert runs.latest("v") is None
    for date in ("2026-11-23", "2026-11-24"):
        place = documents.keep(tmp_path / f"{date}-vm", date, "vm", tmp_path / "results")
        assert runs.kept("vm") == place and not (place / RUNS).exists()
    assert {path.name for path in place.iterdir()} == {MACHINE, "first.csv"}
    assert runs.read_csv(place / "first.csv") == rows
    (tmp_path / "results" / "2026-11-25-vm").mkdir()
    with pytest.raises(AssertionError, match="2 runs"):
        runs.kept("vm")
