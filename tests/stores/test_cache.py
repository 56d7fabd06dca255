"""What is in a cache is not fetched again, and is what the store has, or had if it cannot be asked.

What is written into a cache is complete when the next load of it begins: that one waits.
"""

import json
import os
from pathlib import Path

import pytest

from tests.stores.common import SHARDS, digest, noise, refused, safetensors
from tests.stores.conftest import Dmafile
from tests.stores.servers import Store

pytestmark = pytest.mark.slow

LARGE = (9 << 20) + 777
HEADS = 100_000
"""More than the answers have that say which versions there are, and less than any file."""


def stored(store: Store, prefix: str, seed: int = 41) -> dict[str, bytes]:
    """A model of two shards and its configuration."""
    files = {SHARDS[0]: safetensors(seed, "a", "b"), SHARDS[1]: safetensors(seed + 1, "c")}
    for name, data in files.items():
        store.put(prefix + name, data)
    store.put(f"{prefix}config.json", b'{"a": 1}')
    return {**files, "config.json": b'{"a": 1}'}


def sums(files: dict[str, bytes]) -> dict[str, str]:
    return {name: digest(data) for name, data in files.items()}


def kept(cache: Path) -> list[str]:
    """The digests of what is in a cache."""
    return sorted(digest(blob.read_bytes()) for blob in cache.glob("*/blobs/*"))


def method(dmafile: Dmafile, *words: object) -> str:
    report = json.loads(dmafile.prints("load", "-q", "--json", *words))
    assert isinstance(report["method"], str)
    return report["method"]


def test_a_folder_is_fetched_once(store: Store, dmafile: Dmafile, tmp_path: Path) -> None:
    files = stored(store, "cached/model/")
    load = ("load", "-q", store.url("cached/model/"), "--cache", tmp_path)
    before = store.relay.received
    assert dmafile.sums(*load) == sums(files)
    assert store.relay.received - before > sum(map(len, files.values()))
    for _ in range(2):
        before = store.relay.received
        assert dmafile.sums(*load) == sums(files)
        assert store.relay.received - before < HEADS
    assert kept(tmp_path) == sorted(sums(files).values())


def test_a_shard_that_is_replaced_is_fetched(
    store: Store, dmafile: Dmafile, tmp_path: Path
) -> None:
    files = stored(store, "cached/replaced/")
    load = ("load", "-q", store.url("cached/replaced/"), "--cache", tmp_path)
    for _ in range(2):
        assert dmafile.sums(*load) == sums(files)
    # Of the same size.
    files[SHARDS[1]] = safetensors(50, "c")
    store.put(f"cached/replaced/{SHARDS[1]}", files[SHARDS[1]])
    assert dmafile.sums(*load) == sums(files)
    before = store.relay.received
    assert dmafile.sums(*load) == sums(files)
    assert store.relay.received - before < HEADS


def test_an_object_that_is_replaced_is_fetched(
    store: Store, dmafile: Dmafile, tmp_path: Path
) -> None:
    for seed in (51, 52):
        data = noise(LARGE, seed)
        url = store.put("cached/one.bin", data)
        words = (url, "--cache", tmp_path)
        assert method(dmafile, *words) == "fetch"
        assert method(dmafile, *words) != "fetch"
        assert dmafile.sum(*words) == digest(data)
    assert len(kept(tmp_path)) == 2
    # The older version has not been used for longer, and neither was used just now.
    for blob in tmp_path.glob("*/blobs/*"):
        os.utime(blob, (blob.stat().st_atime - 3600, blob.stat().st_mtime - 3600))
    third = noise(LARGE, 53)
    store.put("cached/one.bin", third)
    assert dmafile.sum(url, "--cache", tmp_path, "--cache-limit", 2 * LARGE) == digest(third)
    assert dmafile.sum(url, "--cache", tmp_path) == digest(third)
    assert kept(tmp_path) == sorted([digest(data), digest(third)])


def test_what_was_saved_is_cached(store: Store, dmafile: Dmafile, tmp_path: Path) -> None:
    if not store.takes_saves:
        pytest.skip("the server does not have the interface that objects are saved by")
    url = store.url("cached/saved.bin")
    file, cache = tmp_path / "file", tmp_path / "cache"
    for seed in (54, 55):
        file.write_bytes(noise(1 << 20, seed))
        dmafile.prints("save", "-q", file, url)
        for _ in range(2):
            assert dmafile.sum(url, "--cache", cache) == digest(file.read_bytes())


def test_a_cache_is_loaded_from_without_its_store(
    store: Store, dmafile: Dmafile, tmp_path: Path
) -> None:
    files = stored(store, "cached/offline/")
    data = noise(LARGE, 56)
    folder, url = store.url("cached/offline/"), store.put("cached/offline.bin", data)
    cache = ("--cache", tmp_path)
    for _ in range(2):
        assert dmafile.sums("load", "-q", folder, *cache) == sums(files)
        assert dmafile.sum(url, *cache) == digest(data)
    other = store.put("cached/other.bin", noise(1000, 57))
    store.relay.refuse()
    try:
        before = store.relay.received
        assert dmafile.sums("load", "-q", folder, *cache, "--offline") == sums(files)
        assert dmafile.sum(url, *cache, "--offline") == digest(data)
        refused(dmafile.run("load", other, *cache, "--offline"), "ENOENT", other)
        assert store.relay.received == before
    finally:
        store.relay.wait()
        store.relay.lead_to(store.port)
