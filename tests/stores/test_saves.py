"""What is saved in a real server is what that store's client then reads, or nothing is changed.

Each server runs as a process of its own; Python's digests say what the bytes should be.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stores.common import digest, noise, refused
from tests.stores.conftest import Dmafile, Done
from tests.stores.servers import BUCKET, SECRET, FakeGcs, Store

pytestmark = pytest.mark.slow

PART = 8 << 20
"""The most that is sent in one request."""
LARGE = 25 * (1 << 20) + 777


@pytest.fixture(autouse=True)
def takes_saves(request: pytest.FixtureRequest) -> None:
    if "store" in request.fixturenames and not request.getfixturevalue("store").takes_saves:
        pytest.skip("the server does not have the interface that objects are saved by")


@contextlib.contextmanager
def piped(data: bytes) -> Iterator[int]:
    """The end of a pipe that another process fills."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        with subprocess.Popen(["cat"], stdin=file, stdout=subprocess.PIPE) as cat:
            assert cat.stdout
            try:
                yield cat.stdout.fileno()
            finally:
                cat.kill()


@contextlib.contextmanager
def memory(data: bytes) -> Iterator[int]:
    fd = os.memfd_create("source")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        yield fd
    finally:
        os.close(fd)


def save(dmafile: Dmafile, source: str, data: bytes, *words: object) -> Done:
    """Saves bytes from a source of this kind."""
    command = ("save", "-q", "--json")
    if source == "pipe":
        with piped(data) as pipe:
            return dmafile.run(*command, "-", *words, stdin=pipe)
    if source == "memfd":
        with memory(data) as fd:
            return dmafile.run(*command, f"fd:{fd}", *words, fds=[fd])
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return dmafile.run(*command, file.name, *words)


def saved(dmafile: Dmafile, source: str, data: bytes, *words: object) -> dict[str, object]:
    done = save(dmafile, source, data, *words)
    assert done.status == 0, done.err
    report = json.loads(done.out)
    assert report["bytes"] == len(data), report
    assert isinstance(report, dict)
    return report


@pytest.mark.parametrize("source", ["file", "pipe", "memfd"])
@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, LARGE])
def test_the_stores_client_reads_what_was_saved(
    store: Store, dmafile: Dmafile, source: str, size: int
) -> None:
    if source == "memfd" and size == 0:
        pytest.skip("it is the same as an empty file")
    data = noise(size, seed=size + len(source))
    key = f"saved/{source}-{size}.bin"
    report = saved(dmafile, source, data, store.url(key), "--verify", "sha256")
    assert report["digest"] == f"sha256 {digest(data)}"
    assert report["parts"] == max(1, -(-size // PART)), report
    assert digest(store.download(key)) == digest(data)


@pytest.mark.parametrize("size", [1000, LARGE])
def test_a_saved_key_may_have_any_letters(store: Store, dmafile: Dmafile, size: int) -> None:
    data = noise(size, seed=20)
    key = f"saved na mes+ä/ö a+b é 漢字 50%25 {size}.bin"
    saved(dmafile, "file", data, store.url(key))
    assert digest(store.download(key)) == digest(data)
    assert dmafile.sum(store.url(key)) == digest(data)


def test_a_saved_object_replaces_the_old_one(store: Store, dmafile: Dmafile) -> None:
    url = store.put("saved/old.bin", noise(PART + 5, seed=21))
    for size in (1000, LARGE):
        data = noise(size, seed=22)
        saved(dmafile, "file", data, url)
        assert digest(store.download("saved/old.bin")) == digest(data)


@pytest.mark.parametrize("size", [1000, LARGE])
def test_no_object_is_saved_in_a_bucket_that_does_not_exist(
    store: Store, dmafile: Dmafile, size: int
) -> None:
    url = store.url("x.bin").replace(BUCKET, "no-bucket")
    refused(save(dmafile, "file", noise(size), url), "ENOENT", url)


@pytest.mark.parametrize("size", [1000, LARGE])
def test_nothing_is_saved_with_wrong_credentials(store: Store, dmafile: Dmafile, size: int) -> None:
    if not store.checks_secrets:
        pytest.skip("the server does not look at them")
    old = noise(2000, seed=23)
    url = store.put("saved/secret.bin", old)
    wrong = Dmafile(dmafile.program, {**dmafile.env, **store.wrong()})
    refused(save(wrong, "file", noise(size, seed=24), url), "EACCES", url)
    assert store.download("saved/secret.bin") == old


@pytest.mark.parametrize("size", [1000, LARGE])
def test_a_save_may_demand_that_there_is_no_object(
    store: Store, dmafile: Dmafile, size: int
) -> None:
    if not store.knows_absence(size > PART):
        pytest.skip("the server has no such condition")
    key = f"saved/new-{size}.bin"
    first, second = noise(size, seed=25), noise(size, seed=26)
    saved(dmafile, "file", first, store.url(key), "--if-none-match")
    done = save(dmafile, "file", second, store.url(key), "--if-none-match")
    refused(done, "EEXIST", store.url(key))
    assert digest(store.download(key)) == digest(first)
    assert not store.lists_uploads or store.uploads() == []


@pytest.mark.parametrize("size", [1000, LARGE])
def test_a_save_may_demand_a_version(store: Store, dmafile: Dmafile, size: int) -> None:
    if not store.knows_versions(size > PART):
        pytest.skip("the server has no such condition")
    key = f"saved/version-{size}.bin"
    url = store.url(key)
    first, second = noise(size, seed=27), noise(size, seed=28)
    version = saved(dmafile, "file", first, url)["version"]
    assert version
    second_version = saved(dmafile, "file", second, url, "--if-match", version)["version"]
    assert digest(store.download(key)) == digest(second)
    refused(save(dmafile, "file", first, url, "--if-match", version), "ESTALE", url)
    assert digest(store.download(key)) == digest(second)
    assert second_version != version
    assert not store.lists_uploads or store.uploads() == []


def test_a_wrong_digest_leaves_the_old_object(store: Store, dmafile: Dmafile) -> None:
    old = noise(2000, seed=29)
    url = store.put("saved/digest.bin", old)
    for size in (1000, LARGE):
        words = ("--verify", "crc32c=00000000")
        done = save(dmafile, "pipe", noise(size, seed=30), url, *words)
        assert done.status == 1 and "(EBADMSG)" in done.err, done
        assert done.err.count("\n") == 1, done
        assert store.download("saved/digest.bin") == old
        assert not store.lists_uploads or store.uploads() == []


@pytest.mark.parametrize("size", [1000, LARGE])
def test_a_load_compares_what_the_store_keeps_of_a_saved_object(
    store: Store, dmafile: Dmafile, size: int
) -> None:
    data = noise(size, seed=31)
    url = store.url(f"saved/verified-{size}.bin")
    saved(dmafile, "file", data, url)
    done = dmafile.run("load", "-q", "--json", url, "--verify", "store")
    if kept := store.keeps_digest():
        assert done.status == 0, done.err
        verified = json.loads(done.out)["verify"]
        assert verified["algorithm"] == kept and verified["matched"] is True, verified
    else:
        refused(done, "EINVAL", url)


@pytest.mark.parametrize("source", ["file", "pipe"])
def test_a_save_that_is_ended_leaves_the_old_object(
    store: Store, dmafile: Dmafile, source: str
) -> None:
    old = noise(2000, seed=32)
    url = store.put("saved/ended.bin", old)
    store.relay.stop_after(PART // 2, of_server=False)
    with contextlib.ExitStack() as stack:
        if source == "file":
            # It takes long enough that the signal comes before its end.
            file = stack.enter_context(tempfile.NamedTemporaryFile())
            file.truncate(1 << 30)
            running = dmafile.start("save", "-q", file.name, url)
        else:
            # It does not end as long as this process may write.
            read, write = os.pipe()
            stack.callback(os.close, write)
            running = dmafile.start("save", "-q", "-", url, stdin=read)
            os.close(read)
        with running:
            if source == "pipe":
                part = noise(3 * PART // 2, seed=33)
                # Should nobody read it, this test does not wait.
                threading.Thread(target=os.write, args=(write, part), daemon=True).start()
            store.relay.wait_until_stopped()
            running.process.send_signal(signal.SIGTERM)
            store.relay.release()
            done = running.done()
    assert done.status == 130 and SECRET not in done.err, done
    assert store.download("saved/ended.bin") == old
    assert not store.lists_uploads or store.uploads() == []


@pytest.mark.parametrize("depth", [1, 8])
def test_a_server_may_be_killed_during_a_save(
    store: Store, dmafile: Dmafile, tmp_path: Path, depth: int
) -> None:
    old, new = noise(2000, seed=34), noise(LARGE, seed=35)
    url = store.put("saved/restarted.bin", old)
    file = tmp_path / "file"
    file.write_bytes(new)
    store.relay.stop_after(PART + PART // 2, of_server=False)
    words = ("--queue-depth", depth)
    with dmafile.start("save", "-q", "--json", file, url, *words) as running:
        store.relay.wait_until_stopped()
        store.restart()
        store.relay.release()
        done = running.done()
    now = store.download("saved/restarted.bin")
    if done.status == 0:
        assert digest(now) == digest(new)
    else:
        # It may have lost what it knew of the upload.
        assert not store.keeps_uploads, done
        assert done.status == 1 and done.err.count("\n") == 1, done
        assert url in done.err and SECRET not in done.err, done
        assert digest(now) == digest(old)
    # A later save is not disturbed by what is left.
    saved(dmafile, "file", new, url)
    assert digest(store.download("saved/restarted.bin")) == digest(new)


def test_a_server_that_takes_no_saves_is_named(
    program: Path, plain: dict[str, str], place: Path, tmp_path: Path
) -> None:
    with FakeGcs.running(place / "no saves") as store:
        dmafile = Dmafile(program, {**plain, **store.environment()})
        file = tmp_path / "file"
        url = store.put("x.bin", b"old")
        for size in (1000, LARGE):
            file.write_bytes(noise(size))
            done = dmafile.run("save", file, url)
            refused(done, "EIO", url)
            # What the server says. Without credentials, nobody is asked for any.
            assert "invalid uploadType" in done.err, done
            refused(dmafile.run("save", file, url, "--if-match", "x"), "EOPNOTSUPP", url)
        no_bucket = url.replace(BUCKET, "no-bucket")
        file.write_bytes(b"new")
        refused(dmafile.run("save", file, no_bucket), "ENOENT", no_bucket)
        assert store.download("x.bin") == b"old"


def test_a_snapshot_replaces_the_one_before(store: Store, dmafile: Dmafile, tmp_path: Path) -> None:
    if not store.knows_absence(False) or not store.knows_versions(False):
        pytest.skip("the server has no such conditions")
    url = store.url("saved/task/")
    for seed, generation in [(40, 1), (50, 2)]:
        sources = {
            name: noise(size, seed=seed + number)
            for number, (name, size) in enumerate([("large", LARGE), ("small", 1000), ("none", 0)])
        }
        for name, data in sources.items():
            (tmp_path / name).write_bytes(data)
        words = [f"{tmp_path / name}={name}" for name in sources]
        report = json.loads(dmafile.prints("save", "-q", "--json", *words, url))
        assert report["generation"] == generation
        assert dmafile.sums("load", "-q", url) == {
            name: digest(data) for name, data in sources.items()
        }
        for name, data in sources.items():
            key = f"saved/task/{name}.{generation}.dmafile"
            assert digest(store.download(key)) == digest(data)
    old = store.url("saved/task/large.1.dmafile")
    refused(dmafile.run("load", "-q", old), "ENOENT", old)
