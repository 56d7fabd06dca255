"""The files of this folder equal those that make.py writes."""

from pathlib import Path

import make


def test_the_files_equal_those_that_make_py_writes(tmp_path: Path) -> None:
    make.main(tmp_path)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    here = Path(make.__file__).parent
    kept = {path.name: path.read_bytes() for path in here.iterdir() if path.name in made}
    assert made == kept
    assert all(len(content) < 4096 for content in made.values())
