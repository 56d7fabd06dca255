"""The examples of the documentation of loaders work."""

import re
from pathlib import Path
from typing import Any

import pytest

from loaders import tiny

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

PAGE = Path(__file__).parents[3] / "docs/loaders.md"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_examples_of_the_documentation_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert len(examples) == 3
    monkeypatch.chdir(tmp_path)
    tiny.llama(tmp_path / "model")
    names: dict[str, Any] = {}
    for example in examples:
        exec(compile(example, str(PAGE), "exec"), names)
    assert "lm_head.weight" in capsys.readouterr().out
    assert names["state"]["step"] == 100 and (tmp_path / "latest/.metadata").exists()
