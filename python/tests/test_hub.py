"""What dmafile loads from a hub is what the hub's own client downloads from it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dmafile
import numpy as np
import pytest
from stores import COMMIT, Stores

hub: Any = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
writer: Any = pytest.importorskip("safetensors.numpy")

MODEL = "owner/model"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stores]:
    with Stores.running() as stores:
        for name in ("HF_TOKEN", "HF_TOKEN_PATH"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_ENDPOINT", stores.url)
        random = np.random.default_rng(1)
        files = {
            name: writer.save({key: random.integers(0, 255, (1001, 777), np.uint8)})
            for name, key in zip(SHARDS, "ab", strict=True)
        }
        files["config.json"] = b"{}"
        files["odd names/a +b ü%41.bin"] = os.urandom((1 << 20) + 7)
        for name, data in files.items():
            stores.files[f"/{MODEL}/resolve/{COMMIT}/{name}"] = data
        yield stores


def test_files_are_those_that_the_hubs_client_downloads(stores: Stores, tmp_path: Path) -> None:
    place = hub.snapshot_download(
        MODEL, endpoint=stores.url, local_dir=tmp_path / "model", cache_dir=tmp_path / "cache"
    )
    files = {
        str(path.relative_to(place)): path.read_bytes()
        for path in Path(place).rglob("*")
        if path.is_file() and ".cache" not in path.parts
    }
    assert len(files) == len(stores.files)
    for name, data in files.items():
        for revision in ("", "@main", f"@{COMMIT}"):
            with dmafile.load(f"hf://{MODEL}{revision}/{name}") as buffer:
                assert bytes(buffer) == data, name
    arrays = dmafile.numpy.load_file(f"hf://{MODEL}")
    theirs: dict[str, Any] = {}
    for shard in SHARDS:
        theirs |= writer.load_file(Path(place) / shard)
    assert arrays.keys() == theirs.keys()
    for name, array in theirs.items():
        assert np.array_equal(arrays[name], array), name
