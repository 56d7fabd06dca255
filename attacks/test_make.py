"""Tests that the files of this folder are those that make.py writes."""

from pathlib import Path

import make


def test_the_files_are_up_to_date(tmp_path: Path) -> None:
    make.main(tmp_path)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    here = Path(make.__file__).parent
    kept = {path.name: path.read_bytes() for path in here.iterdir() if path.name in made}
    assert made == kept
    assert all(len(content) < 4096 for content in made.values())
