"""The examples of the documentation work."""

import re
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

PAGES = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["python", "safetensors"])
def test_the_examples_of_the_documentation_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = PAGES / f"{name}.md"
    examples = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    assert examples
    monkeypatch.chdir(tmp_path)
    weight = np.arange(400 * 256, dtype=np.float32).reshape(400, 256)
    arrays = {"large.weight": weight, "large.bias": weight[0], "a.norm.weight": weight[1]}
    safetensors.numpy.save_file(arrays, "model.safetensors")
    Path("sockets").mkdir(mode=0o700)
    names: dict[str, object] = {}
    for example in examples:
        exec(compile(example, str(page), "exec"), names)
    assert capsys.readouterr().out
    assert np.array_equal(np.asarray(names["rows"]), weight[100:116])
    if name != "python":
        return
    some = names["some"]
    assert isinstance(some, dict) and set(some) == {"large.bias", "a.norm.weight"}
