"""Objects of real servers are loaded byte for byte, or refused in one line.

Each server runs as a process of its own, the objects are stored by the client of that store, and
sha256sum reads what has been loaded.
"""

import json
import os
from pathlib import Path

import pytest

from tests.stores.common import SHARDS, digest, noise, refused, safetensors
from tests.stores.conftest import SUM, Dmafile, Running
from tests.stores.servers import BUCKET, SECRET, Azurite, FakeGcs, Rclone, Store

pytestmark = pytest.mark.slow

FIRST = 256 << 10
"""How much the first request asks for."""
ODD = (5 << 20) + 4321
LARGE = (48 << 20) + 77
"""Many blocks, so that most have not been asked for when a load is stopped."""


@pytest.mark.parametrize("size", [1, FIRST - 1, FIRST, FIRST + 1, ODD])
def test_an_object_is_loaded_as_it_is(store: Store, dmafile: Dmafile, size: int) -> None:
    data = noise(size)
    url = store.put(f"sizes/{size}.bin", data)
    assert dmafile.sum(url) == digest(data)


@pytest.mark.parametrize("offset, length", [(0, 1), (777, 3 << 20), (ODD - 1, 1), (ODD // 2, None)])
def test_a_range_of_an_object_is_loaded(
    store: Store, dmafile: Dmafile, offset: int, length: int | None
) -> None:
    data = noise(ODD)
    url = store.put("range.bin", data)
    end = ODD if length is None else offset + length
    words = [] if length is None else ["--length", length]
    assert dmafile.sum(url, "--offset", offset, *words) == digest(data[offset:end])


def test_a_range_beyond_the_end_is_refused(store: Store, dmafile: Dmafile) -> None:
    url = store.put("short.bin", noise(1000))
    done = dmafile.run("load", url, "--offset", 999, "--length", 2)
    assert done.status != 0 and done.err.count("\n") == 1, done


def test_an_empty_object_is_refused(store: Store, dmafile: Dmafile) -> None:
    url = store.put("empty.bin", b"")
    refused(dmafile.run("load", url), "ENODATA", url)


@pytest.mark.parametrize(
    "name",
    [
        "with space.bin",
        "a+b.bin",
        "50%25.bin",
        "ä ö+ü é 漢字.bin",
        "a&b=c;d,e@f$g!h'i(j)k.bin",
        "question?mark#hash.bin",
        "tilde~[brackets].bin",
    ],
)
def test_a_key_may_have_any_letters(store: Store, dmafile: Dmafile, name: str) -> None:
    data = noise(300_001, seed=len(name))
    url = store.put(f"na mes+ä/{name}", data)
    assert dmafile.sum(url) == digest(data)


def test_a_folder_may_have_any_letters(store: Store, dmafile: Dmafile) -> None:
    files = {"ä +é.safetensors": safetensors(3, "a"), "to ken+ü.json": b"{}"}
    for name, data in files.items():
        store.put(f"fol der+ö/{name}", data)
    sums = dmafile.sums("load", "-q", store.url("fol der+ö/"))
    assert sums == {name: digest(data) for name, data in files.items()}


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
def test_a_folder_of_shards_is_a_model(store: Store, dmafile: Dmafile, indexed: bool) -> None:
    prefix = f"models/{'with' if indexed else 'without'}/"
    files = {SHARDS[0]: safetensors(1, "a", "b"), SHARDS[1]: safetensors(2, "c")}
    files["config.json"] = b'{"a": 1}'
    if indexed:
        places = {"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1]}
        files[INDEX] = json.dumps({"metadata": {}, "weight_map": places}).encode()
    for name, data in files.items():
        store.put(prefix + name, data)
    # Neither of these is in the folder.
    store.put(f"{prefix}deeper/other.safetensors", safetensors(4, "d"))
    store.put(f"{prefix[:-1]}-2/other.safetensors", safetensors(4, "e"))
    url = store.url(prefix)
    shown = dmafile.prints("show", url)
    assert "3 tensors" in shown and "2 files" in shown, shown
    sums = dmafile.sums("load", "-q", url)
    assert sums == {name: digest(data) for name, data in files.items()}


def test_a_mark_of_a_folder_is_not_a_file_in_it(store: Store, dmafile: Dmafile) -> None:
    """Consoles make an empty object when one creates a folder."""
    data = safetensors(5, "a")
    store.put("marked/", b"")
    store.put("marked/x.safetensors", data)
    assert dmafile.sums("load", "-q", store.url("marked/")) == {"x.safetensors": digest(data)}


def test_a_folder_has_more_objects_than_one_answer(store: Store, dmafile: Dmafile) -> None:
    if not store.pages:
        pytest.skip("its answers are longer")
    # Their names are those of weights, so that they are not loaded next to the model.
    for number in range(1001):
        store.put(f"many/{number:04}.bin", b"x")
    data = safetensors(6, "a")
    store.put("many/z.safetensors", data)
    assert dmafile.sums("load", "-q", store.url("many/")) == {"z.safetensors": digest(data)}


def test_what_does_not_exist_is_refused(store: Store, dmafile: Dmafile) -> None:
    url = store.url("missing.bin")
    refused(dmafile.run("load", url), "ENOENT", url)
    folder = store.url("missing/")
    refused(dmafile.run("load", folder), "ENOENT", folder.rstrip("/"))
    for key in ("x.bin", "x/") if store.knows_buckets else ("x.bin",):
        url = store.url(key).replace(BUCKET, "no-bucket")
        refused(dmafile.run("load", url), "ENOENT", url.rstrip("/"))


def test_wrong_credentials_are_refused(store: Store, dmafile: Dmafile) -> None:
    if not store.checks_secrets:
        pytest.skip("the server does not look at them")
    url = store.put("secret.safetensors", safetensors(7, "a"))
    refused(dmafile.run("load", url, env=store.wrong()), "EACCES", url)
    folder = store.url()
    refused(dmafile.run("load", folder, env=store.wrong()), "EACCES", folder.rstrip("/"))


def stopped(store: Store, dmafile: Dmafile, url: str, *words: object) -> Running:
    """A load that has received a part, and waits for the rest."""
    store.relay.stop_after(8 << 20)
    command = ["load", "-q", url, "--block", "1M", *words]
    running = dmafile.start(*command, "--", "sh", "-c", SUM)
    store.relay.wait_until_stopped()
    return running


@pytest.mark.parametrize("same_size", [True, False])
def test_an_object_that_is_replaced_is_not_mixed(
    store: Store, dmafile: Dmafile, same_size: bool
) -> None:
    url = store.put("replaced.bin", noise(LARGE, seed=8))
    with stopped(store, dmafile, url) as running:
        other = noise(LARGE + (not same_size), seed=9)
        store.put("replaced.bin", other)
        store.relay.release()
        refused(running.done(), "ESTALE", url)
    assert dmafile.sum(url) == digest(other)


def test_an_object_that_is_removed_is_refused(store: Store, dmafile: Dmafile) -> None:
    url = store.put("removed.bin", noise(LARGE, seed=8))
    with stopped(store, dmafile, url) as running:
        store.remove("removed.bin")
        store.relay.release()
        done = running.done()
    # Some servers say that the condition does not hold.
    refused(done, "ENOENT" if "ENOENT" in done.err else "ESTALE", url)


@pytest.mark.parametrize("depth", [1, 4, 16])
def test_a_server_may_be_killed_and_started_again(
    store: Store, dmafile: Dmafile, depth: int
) -> None:
    data = noise(LARGE, seed=10)
    url = store.put("restarted.bin", data)
    with stopped(store, dmafile, url, "--queue-depth", depth) as running:
        store.restart()
        store.relay.release()
        done = running.done()
    assert done.status == 0, done.err
    assert done.out.strip() == digest(data)


def test_a_url_is_held_and_taken(store: Store, dmafile: Dmafile, tmp_path: Path) -> None:
    files = {SHARDS[0]: safetensors(11, "a"), SHARDS[1]: safetensors(12, "b")}
    for name, data in files.items():
        store.put(f"held/{name}", data)
    tmp_path.chmod(0o700)
    socket = ("--socket", tmp_path / "socket")
    expected = {name: digest(data) for name, data in files.items()}
    with dmafile.start("hold", store.url("held/"), "--name", "m", *socket) as holder:
        assert SHARDS[0] in holder.line()
        # The memory does not change with the object.
        store.put(f"held/{SHARDS[0]}", safetensors(13, "a"))
        for _ in range(2):
            assert dmafile.sums("take", "-q", "m", *socket) == expected
        dmafile.prints("release", "m", *socket)
        assert holder.done().status == 0


def test_python_loads_a_url(
    store: Store, plain: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import dmafile

    for name in set(os.environ) - set(plain):
        monkeypatch.delenv(name)
    for name, value in {**plain, **store.environment()}.items():
        monkeypatch.setenv(name, value)
    data = noise(ODD, seed=14)
    with dmafile.load(store.put("python.bin", data), verify="sha256") as buffer:
        assert digest(memoryview(buffer)) == digest(data)
        assert buffer.report and buffer.report["verify"]["digest"] == digest(data)
    files = {SHARDS[0]: safetensors(15, "a"), SHARDS[1]: safetensors(16, "b")}
    for name, file in files.items():
        store.put(f"python/{name}", file)
    arrays = dmafile.numpy.load_file(store.url("python/"))
    expected = {name: file[-100_003:] for name, file in zip("ab", files.values(), strict=True)}
    assert {name: array.tobytes() for name, array in arrays.items()} == expected
    with pytest.raises(FileNotFoundError):
        dmafile.load(store.url("missing.bin"))


def test_google_keeps_a_digest_of_each_object(
    program: Path, plain: dict[str, str], place: Path
) -> None:
    with FakeGcs.running(place / "digests") as store:
        dmafile = Dmafile(program, {**plain, **store.environment()})
        for size in (1, ODD):
            url = store.put("kept.bin", noise(size, seed=19))
            words = ("load", "-q", "--json", url, "--verify", "store")
            verified = json.loads(dmafile.prints(*words))["verify"]
            assert verified["algorithm"] == "crc32c" and verified["matched"] is True, verified


def test_other_credentials_of_azure_are_used(
    program: Path, plain: dict[str, str], place: Path
) -> None:
    with Azurite.running(place / "other") as store:
        url, data = store.put("x/x.safetensors", safetensors(17, "a")), store.objects
        expected = {"x.safetensors": digest(data["x/x.safetensors"])}
        signed = {**store.environment(), "AZURE_STORAGE_SAS_TOKEN": store.signed()}
        del signed["AZURE_STORAGE_ACCOUNT_KEY"]
        for settings in (store.emulator(), signed):
            dmafile = Dmafile(program, {**plain, **settings})
            assert dmafile.sum(url) == expected["x.safetensors"]
            assert dmafile.sums("load", "-q", store.url("x/")) == expected
        # The signature is valid for reading, and only as it is.
        wrong = signed["AZURE_STORAGE_SAS_TOKEN"].replace("sp=rl", "sp=rwl")
        dmafile = Dmafile(program, {**plain, **signed, "AZURE_STORAGE_SAS_TOKEN": wrong})
        done = dmafile.run("load", url)
        refused(done, "EACCES", url)
        assert "sig=" not in done.err, done


def test_a_service_account_of_google_is_used(
    program: Path, plain: dict[str, str], place: Path
) -> None:
    with FakeGcs.running(place / "account") as store:
        data = safetensors(18, "a")
        url = store.put("x/x.safetensors", data)
        account = store.account()
        account_with_a_bad_key = place / "bad.json"
        text = account.read_text().replace("PRIVATE KEY-----", f"PRIVATE KEY-----{SECRET}")
        account_with_a_bad_key.write_text(text)
        for variable in ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_APPLICATION_CREDENTIALS"):
            env = {**plain, "GOOGLE_BASE_URL": store.relay.url, variable: str(account)}
            dmafile = Dmafile(program, env)
            assert dmafile.sum(url) == digest(data)
            assert dmafile.sums("load", "-q", store.url("x/")) == {"x.safetensors": digest(data)}
            # The server does not look at tokens; without a key, there is none to send.
            done = dmafile.run("load", url, env={variable: str(account_with_a_bad_key)})
            assert done.status == 1 and done.err.count("\n") == 1, done
            assert SECRET not in done.err and "GOOGLE_APPLICATION_CREDENTIALS" in done.err, done


def test_a_server_that_ignores_ranges_is_refused(
    program: Path, plain: dict[str, str], place: Path
) -> None:
    with Rclone.running(place / "rclone") as store:
        dmafile = Dmafile(program, {**plain, **store.environment()})
        url = store.put("large.bin", noise(ODD))
        done = dmafile.run("load", url)
        refused(done, "EPROTO", url)
        assert "the server answers a range with status 200" in done.err, done
