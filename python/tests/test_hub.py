"""What dmafile loads from a hub is what the hub's own client downloads from it."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dmafile
import numpy as np
import pytest
from stores import COMMIT, Stores

hub: Any = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
writer: Any = pytest.importorskip("safetensors.numpy")

COMMAND = Path(sys.executable).parent / "dmafile"
MODEL = "owner/model"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stores]:
    with Stores.running() as stores:
        for name in ("HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE"):
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


def files_of(stores: Stores) -> dict[str, bytes]:
    start = f"/{MODEL}/resolve/{COMMIT}/"
    return {path.removeprefix(start): data for path, data in stores.files.items()}


def fetched(stores: Stores) -> list[str]:
    return [path for path in stores.asked if "/resolve/" in path]


def load(name: str, cache: Path, *options: str) -> dict[str, Any]:
    """Loads a file, and returns the report."""
    words = ("load", "-q", "--json", f"hf://{MODEL}/{name}", "--cache", str(cache))
    command = [str(COMMAND), *words, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert isinstance(report, dict)
    return report


def content(cache: Path, *options: str) -> dict[str, bytes]:
    """Loads the model, and returns what is in the folder that COMMAND gets."""
    copy = Path(tempfile.mkdtemp(dir=cache.parent)) / "copy"
    words = ("load", "-q", f"hf://{MODEL}", "--cache", str(cache))
    command = [str(COMMAND), *words, *options, "--", "cp", "-rL", "{}", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    paths = [path for path in copy.rglob("*") if path.is_file()]
    return {str(path.relative_to(copy)): path.read_bytes() for path in paths}


def test_the_hubs_client_finds_what_is_in_the_cache(stores: Stores, tmp_path: Path) -> None:
    cache, files = tmp_path / "cache", files_of(stores)
    model = {name: data for name, data in files.items() if "/" not in name}
    # The second load begins when all that the first one writes is there.
    assert content(cache) == content(cache) == model
    load("odd names/a +b ü%41.bin", cache)
    for revision in ("main", COMMIT):
        place = hub.snapshot_download(
            MODEL, revision=revision, cache_dir=cache, local_files_only=True
        )
        for name, data in files.items():
            assert (Path(place) / name).read_bytes() == data, name
    found = hub.try_to_load_from_cache(MODEL, SHARDS[0], cache_dir=cache)
    assert Path(found) == Path(place) / SHARDS[0]
    scanned = hub.scan_cache_dir(cache)
    assert not scanned.warnings, scanned.warnings
    assert scanned.size_on_disk == sum(map(len, files.values()))
    (repository,) = scanned.repos
    assert (repository.repo_id, repository.repo_type) == (MODEL, "model")
    (revision,) = repository.revisions
    assert revision.commit_hash == COMMIT and revision.refs == {"main"}
    sizes = {str(file.file_path.relative_to(place)): file.size_on_disk for file in revision.files}
    assert sizes == {name: len(data) for name, data in files.items()}
    # Nor does it download anything again when it may.
    stores.asked.clear()
    hub.snapshot_download(MODEL, endpoint=stores.url, cache_dir=cache)
    assert not fetched(stores)


def test_what_the_hubs_client_downloaded_is_not_fetched(stores: Stores, tmp_path: Path) -> None:
    cache, files = tmp_path / "cache", files_of(stores)
    hub.snapshot_download(MODEL, endpoint=stores.url, cache_dir=cache)
    stores.asked.clear()
    for options in ((), ("--verify", "store"), ("--offline",)):
        # The folder is the client's own.
        assert content(cache, *options) == files
        for name in (SHARDS[1], "odd names/a +b ü%41.bin"):
            report = load(name, cache, *options)
            assert report["method"] != "fetch" and report["bytes"] == len(files[name]), report
        assert not fetched(stores)
        assert bool(stores.asked) == (options != ("--offline",))
        stores.asked.clear()
