"""What the documentation shows works."""

import re
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

PAGE = Path(__file__).parents[2] / "docs/python.md"


def test_the_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert examples
    monkeypatch.chdir(tmp_path)
    weight = np.arange(400 * 256, dtype=np.float32).reshape(400, 256)
    arrays = {"large.weight": weight, "large.bias": weight[0], "a.norm.weight": weight[1]}
    safetensors.numpy.save_file(arrays, "model.safetensors")
    Path("sockets").mkdir(mode=0o700)
    names: dict[str, object] = {}
    for example in examples:
        exec(compile(example, str(PAGE), "exec"), names)
    assert capsys.readouterr().out
    assert np.array_equal(np.asarray(names["rows"]), weight[100:116])
    some = names["some"]
    assert isinstance(some, dict) and set(some) == {"large.bias", "a.norm.weight"}
