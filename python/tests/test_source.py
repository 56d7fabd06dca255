"""Objects of Python, and URLs, in place of files."""

import errno
import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import dmafile
import pytest
from stores import Stores


class Bytes:
    """An object that has its bytes in memory."""

    def __init__(self, data: bytes, most: int = 1 << 30) -> None:
        self.data, self.most = data, most
        self.size = len(data)
        self.name = "my://bytes"
        self.threads: set[int] = set()

    def read_into(self, offset: int, memory: memoryview) -> int:
        self.threads.add(threading.get_ident())
        part = self.data[offset : offset + min(len(memory), self.most)]
        memory[: len(part)] = part
        return len(part)


def digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("to", ["memfd", "anon"])
@pytest.mark.parametrize("size", [1, 4097, (9 << 20) + 5])
def test_an_object_is_loaded_as_it_is(to: str, size: int) -> None:
    data = os.urandom(size)
    buffer = dmafile.load(source=Bytes(data), to=to)
    assert digest(memoryview(buffer)) == digest(data)
    assert buffer.report and buffer.report["method"] == "fetch"
    part = dmafile.load(source=Bytes(data), offset=size // 2, to=to)
    assert digest(memoryview(part)) == digest(data[size // 2 :])


def test_an_object_may_return_less_or_nothing() -> None:
    data = os.urandom(300_000)

    class Quiet(Bytes):
        def read_into(self, offset: int, memory: memoryview) -> None:  # type: ignore[override]
            memory[:] = self.data[offset : offset + len(memory)]

    few = Bytes(data, most=1000)
    assert digest(memoryview(dmafile.load(source=few))) == digest(data)
    assert digest(memoryview(dmafile.load(source=Quiet(data)))) == digest(data)


def test_several_readers_are_as_many_as_are_asked_for() -> None:
    source = Bytes(os.urandom(8 << 20))
    dmafile.load(source=source, block=1 << 20, queue_depth=1)
    assert len(source.threads) == 1


def test_what_an_object_raises_ends_the_load() -> None:
    class Bad(Bytes):
        error: Exception

        def read_into(self, offset: int, memory: memoryview) -> int:
            if offset == 0:
                return super().read_into(offset, memory)
            raise self.error

    source = Bad(os.urandom(3 << 20))
    for error, text, number in [
        (ValueError("it is on fire"), "it is on fire", None),
        (OSError(errno.EHOSTUNREACH, "x"), "EHOSTUNREACH", errno.EHOSTUNREACH),
    ]:
        source.error = error
        with pytest.raises(dmafile.Error, match=text) as raised:
            dmafile.load(source=source, block=1 << 20)
        assert raised.value.errno == number
        assert "my://bytes" in str(raised.value)
    for got in (0, 1 << 40, "x"):

        class Wrong(Bytes):
            result: object = got

            def read_into(self, offset: int, memory: memoryview) -> int:
                return self.result  # type: ignore[return-value]

        with pytest.raises(dmafile.Error):
            dmafile.load(source=Wrong(b"abc"))


def test_a_view_that_is_kept_is_not_of_the_buffer() -> None:
    kept: list[memoryview] = []

    class Keeper(Bytes):
        def read_into(self, offset: int, memory: memoryview) -> int:
            kept.append(memory)
            return super().read_into(offset, memory)

    data = os.urandom(1 << 20)
    buffer = dmafile.load(source=Keeper(data))
    kept[0][:10] = bytes(10)
    assert digest(memoryview(buffer)) == digest(data)
    buffer.close()
    assert len(bytes(kept[0])) == 1 << 20


def test_a_path_or_a_source_is_given() -> None:
    with pytest.raises(TypeError):
        dmafile.load()
    with pytest.raises(TypeError):
        dmafile.load("x", source=Bytes(b"x"))
    with pytest.raises(AttributeError):
        dmafile.load(source=b"x")  # type: ignore[arg-type]


@pytest.fixture
def stores() -> Iterator[Stores]:
    with Stores.running() as stores:
        yield stores


@pytest.fixture
def bucket(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> Stores:
    """Where s3:// leads."""
    for name, value in stores.environment().items():
        monkeypatch.setenv(name, value)
    return stores


def test_urls_are_loaded(stores: Stores) -> None:
    data = os.urandom((3 << 20) + 7)
    stores.files["/x.bin"] = data
    with dmafile.load(f"{stores.url}/x.bin?signature=secret", verify="sha256") as buffer:
        assert digest(memoryview(buffer)) == digest(data)
    with pytest.raises(FileNotFoundError, match="no such object") as raised:
        dmafile.load(f"{stores.url}/none?signature=secret")
    assert "secret" not in str(raised.value)
    header = b'{"a":{"dtype":"U8","shape":[5],"data_offsets":[0,5]}}'
    stores.files["/m.safetensors"] = len(header).to_bytes(8, "little") + header + b"hello"
    with dmafile.open_tensors(f"{stores.url}/m.safetensors") as tensors:
        assert list(tensors.keys()) == ["a"]
    assert dmafile.numpy.load_file(f"{stores.url}/m.safetensors")["a"].tobytes() == b"hello"
    got = b"".join(bytes(part[1]) for part in dmafile.stream(f"{stores.url}/x.bin"))
    assert digest(got) == digest(data)


def test_urls_are_held_and_shared(stores: Stores, tmp_path: Path) -> None:
    data = os.urandom((2 << 20) + 7)
    stores.files["/x.bin"] = data
    url = f"{stores.url}/x.bin"
    (tmp_path / "s").mkdir(mode=0o700)
    socket = tmp_path / "s/socket"
    with (
        dmafile.hold(url, name="x", socket=socket) as holder,
        dmafile.take("x", socket=socket) as held,
    ):
        assert holder.files[0]["file"] == url
        assert digest(memoryview(held.files[0].buffer)) == digest(data)
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o700)
    with dmafile.shared(url, folder=folder) as one, dmafile.shared(url, folder=folder) as two:
        assert digest(memoryview(two.files[0].buffer)) == digest(data)
        inodes = [os.fstat(held.files[0].buffer.fileno()).st_ino for held in (one, two)]
        assert inodes[0] == inodes[1]
        # Another version is another file.
        stores.files["/x.bin"] = data[1:]
        with dmafile.shared(url, folder=folder) as other:
            assert digest(memoryview(other.files[0].buffer)) == digest(data[1:])


def test_a_snapshot_is_saved_to_a_folder_of_a_store_and_loaded(
    bucket: Stores, tmp_path: Path
) -> None:
    data = os.urandom(300_001)
    path = tmp_path / "file"
    path.write_bytes(data)
    url = "s3://bucket/task/"
    told: list[tuple[int, int]] = []
    with dmafile.load(path, offset=777, length=5001) as part:
        for _ in range(2):
            report = dmafile.save_snapshot(
                {"part": part, "whole": path},
                url,
                queue_depth=2,
                progress=lambda done, total: told.append((done, total)),
            )
    assert (report["to"], report["generation"]) == ("s3://bucket/task", 2)
    assert told[-1] == (305_002, 305_002)
    loaded = dmafile.load_snapshot(url)
    assert {name: bytes(memoryview(one)) for name, one in loaded.items()} == {
        "part": data[777:5778],
        "whole": data,
    }
    names = sorted(name.removeprefix("/bucket/task/") for name in bucket.files)
    assert names == ["dmafile-snapshot.json", "part.2.dmafile", "whole.2.dmafile"]
    with pytest.raises(dmafile.UsageError, match="for saves to files"):
        dmafile.save_snapshot({"whole": path}, url, sync=False)
    with pytest.raises(dmafile.UsageError, match="for saves to files"):
        dmafile.save_snapshot({"whole": path}, url, io="direct")
    for use in (dmafile.load_snapshot, lambda url: dmafile.save_snapshot({"a": path}, url)):
        with pytest.raises(dmafile.UsageError, match="slash"):
            use("s3://bucket/task")


def test_memory_and_files_are_saved_as_objects(bucket: Stores, tmp_path: Path) -> None:
    data = os.urandom(300_001)
    path = tmp_path / "file"
    path.write_bytes(data)
    url = "s3://bucket/saved"
    with dmafile.load(path) as buffer:
        for source in (buffer, path, data, [data[:1000], data[1000:]]):
            bucket.files.clear()
            report = dmafile.save(source, url, verify="sha256")
            assert bucket.files == {"/bucket/saved": data}
            assert report["bytes"] == len(data)
            assert report["digest"] == f"sha256 {hashlib.sha256(data).hexdigest()}"
    with dmafile.load(url) as buffer:
        assert bytes(memoryview(buffer)) == data
    bucket.files.clear()
    with pytest.raises(dmafile.Error, match="wrong digest") as wrong:
        dmafile.save(path, url, verify="crc32c=00000000")
    assert wrong.value.errno == errno.EBADMSG
    for options in ({"offset": 0}, {"sync": False}, {"method": "threads"}, {"block": 4096}):
        with pytest.raises(dmafile.UsageError, match="it is for saves to files"):
            dmafile.save(path, url, **options)
    with pytest.raises(dmafile.UsageError, match="only objects of stores"):
        dmafile.save(path, "https://host/x")
    assert not bucket.files


def test_an_error_names_a_url_without_its_secrets() -> None:
    url = "http://me:secret@127.0.0.1:1/model.gguf?signature=secret"
    with pytest.raises(dmafile.Error) as caught:
        dmafile.load(url)
    assert caught.value.filename == "http://127.0.0.1:1/model.gguf"
    assert "secret" not in f"{caught.value!r} {caught.value}"


def test_a_model_is_fetched_into_a_cache_once(bucket: Stores, tmp_path: Path) -> None:
    size = 300_000
    header = b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (size, size)
    weights = len(header).to_bytes(8, "little") + header + os.urandom(size)
    files = {"config.json": b"{}", "one.safetensors": weights}
    for name, data in files.items():
        bucket.files[f"/bucket/model/{name}"] = data
    done: list[tuple[int, int]] = []
    url = "s3://bucket/model/"
    path = dmafile.fetch(url, tmp_path, progress=lambda now, total: done.append((now, total)))
    assert {one.name: one.read_bytes() for one in path.iterdir()} == files
    assert done[-1] == (sum(map(len, files.values())),) * 2
    # Before it is fetched, to open it, and to find it in the cache.
    assert bucket.asked.count("/bucket") == 3
    bucket.sent = 0
    assert dmafile.fetch(url, tmp_path) == path
    assert bucket.sent < 4096, "it was fetched again"
    assert dmafile.fetch(url, tmp_path, offline=True) == path
    with pytest.raises(FileNotFoundError):
        dmafile.fetch("s3://bucket/other/", tmp_path, offline=True)
    one = dmafile.fetch("s3://bucket/model/one.safetensors", tmp_path)
    assert one.read_bytes() == files["one.safetensors"]
    # Another version is fetched.
    bucket.files["/bucket/model/config.json"] = b"{ }"
    assert (dmafile.fetch(url, tmp_path) / "config.json").read_bytes() == b"{ }"
