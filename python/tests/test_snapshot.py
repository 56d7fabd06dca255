"""Snapshots: loaded bytes, errors and the previous snapshot."""

import errno
import hashlib
import os
from pathlib import Path

import dmafile
import pytest

from conftest import file_sha256


@pytest.fixture
def snapshots(folder: Path) -> Path:
    inside = folder / "snapshots"
    inside.mkdir(exist_ok=True)
    for left in inside.iterdir():
        left.unlink()
    return inside


def digests(loaded: dict[str, dmafile.Buffer]) -> dict[str, str]:
    return {name: hashlib.sha256(memoryview(one)).hexdigest() for name, one in loaded.items()}


def test_every_source_is_loaded_again(file: Path, snapshots: Path) -> None:
    told: list[tuple[int, int]] = []
    empty = os.memfd_create("empty")
    data = file.read_bytes()
    with dmafile.load(file, offset=777, length=5001) as buffer, file.open("rb") as opened:
        report = dmafile.save_snapshot(
            {"buffer": buffer, "path": file, "file": opened, "empty": empty},
            bytes(snapshots),
            verify="sha256",
            block=1 << 16,
            progress=lambda done, total: told.append((done, total)),
        )
    os.close(empty)
    total = 5001 + 2 * len(data)
    assert (report["bytes"], report["generation"], report["sync"]) == (total, 1, True)
    assert told[-1] == (total, total)
    want = {
        "buffer": hashlib.sha256(data[777:5778]).hexdigest(),
        "path": file_sha256(file),
        "file": file_sha256(file),
        "empty": hashlib.sha256().hexdigest(),
    }
    for source in report["sources"]:
        saved = snapshots / f"{source['name']}.1.dmafile"
        assert file_sha256(saved) == source["verify"]["digest"] == want[source["name"]]
    for to in ("memfd", "anon"):
        told.clear()
        loaded = dmafile.load_snapshot(
            snapshots, to=to, progress=lambda done, total: told.append((done, total))
        )
        assert list(loaded) == list(want)
        assert digests(loaded) == want
        assert told[-1] == (total, total)
        how = loaded["path"].report
        assert how is not None and how["verify"]["matched"]
        assert loaded["path"].kind == to
        assert loaded["empty"].report is None and len(loaded["empty"]) == 0
        for buffer in loaded.values():
            buffer.close()


def test_errors_leave_the_previous_snapshot(file: Path, snapshots: Path) -> None:
    dmafile.save_snapshot({"a": file}, snapshots)
    before = sorted(snapshots.iterdir())
    with pytest.raises(FileNotFoundError):
        dmafile.save_snapshot({"a": file, "b": snapshots / "missing"}, snapshots)
    for sources in ({}, {"a/b": file}, {".a": file}):
        with pytest.raises(dmafile.UsageError, match=r"it has 0 sources|cannot be the name"):
            dmafile.save_snapshot(sources, snapshots)
    for wrong in ("md5", f"sha256={'0' * 64}"):
        with pytest.raises(dmafile.UsageError, match="verify"):
            dmafile.save_snapshot({"a": file}, snapshots, verify=wrong)
    with pytest.raises(dmafile.UsageError, match="block"):
        dmafile.save_snapshot({"a": file}, snapshots, block=1)

    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise Stop

    # After the first source, the save waits for a pipe that is never written.
    read, write = os.pipe()
    try:
        with pytest.raises(Stop):
            dmafile.save_snapshot({"a": file, "b": read}, snapshots, progress=stop)
    finally:
        os.close(read)
        os.close(write)
    assert sorted(snapshots.iterdir()) == before
    assert digests(dmafile.load_snapshot(snapshots)) == {"a": file_sha256(file)}
    with pytest.raises(dmafile.UsageError, match="pages"):
        dmafile.load_snapshot(snapshots, pages="5k")


def test_a_damaged_or_missing_file_is_an_error(file: Path, snapshots: Path) -> None:
    dmafile.save_snapshot({"a": file}, snapshots)
    saved = snapshots / "a.1.dmafile"
    with saved.open("r+b") as damaged:
        byte = damaged.read(1)
        damaged.seek(0)
        damaged.write(bytes([byte[0] ^ 1]))
    with pytest.raises(dmafile.Error, match=r"a\.1\.dmafile") as caught:
        dmafile.load_snapshot(snapshots)
    assert caught.value.errno == errno.EBADMSG
    saved.unlink()
    with pytest.raises(FileNotFoundError):
        dmafile.load_snapshot(snapshots)
