"""The demo on machines that are too slow for all of it."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.seconds import memory
from bench.seconds.files import file_system
from bench.seconds.model import Shape, make_model
from bench.ways import TARGET
from demo import demo

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def folder() -> Iterator[Path]:
    """In the checkout: the temporary folder may be a tmpfs, whose files are never cold."""
    if file_system(ROOT) in ("tmpfs", "ramfs"):
        pytest.skip("the checkout is on a tmpfs")
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".demo-test-") as name:
        yield Path(name)


@pytest.fixture
def said(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> str:
    """The output of the demo with these options, with small models."""
    model = folder / "model.safetensors"
    make_model(model, Shape(1, 256, 64, 512, 1024))
    monkeypatch.setattr(demo, "packaged_model", lambda: model)
    monkeypatch.setattr(demo, "PROBE", 1 << 20)
    words = ["demo", f"--dmafile={TARGET / 'debug/dmafile'}", f"--folder={folder}", *request.param]
    monkeypatch.setattr(sys, "argv", words)
    demo.main()
    return capsys.readouterr().out


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Touching memory takes an hour."""
    monkeypatch.setattr(memory, "TOUCH", "import time; time.sleep(3600)")
    monkeypatch.setattr(demo, "TOUCH_SECONDS", 0.1)
    monkeypatch.setattr(demo, "SIZES", (64,))


@pytest.mark.usefixtures("stuck")
@pytest.mark.parametrize("said", [["--seconds=300"]], indirect=True)
def test_memory_that_stays_slow_is_said_beside_the_table(said: str) -> None:
    assert said.count("Before 6 runs, memory was still slow") == 2, said
    assert said.count("; the same bytes") == 2, said


@pytest.mark.parametrize("said", [["--seconds=0"]], indirect=True)
def test_what_there_is_no_time_for_is_left_out(said: str) -> None:
    assert "Not compared with read()" in said, said
    assert "is left out" in said.splitlines()[-1], said
