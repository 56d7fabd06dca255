"""The drop-in API for NumPy behaves like that of safetensors."""

# The stubs of safetensors lack some types.
# mypy: disable-error-code="no-untyped-call"

import errno
import gc
import inspect
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dmafile
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from dmafile._safetensors import NAMES
from numpy.typing import NDArray

from conftest import Run, open_files

Arrays = dict[str, NDArray[Any]]
ATTACKS = Path(__file__).parents[2] / "attacks"


def same(left: Any, right: Any) -> bool:
    """Whether both are arrays with the same bits."""
    assert type(left) is type(right) is np.ndarray
    said = (left.dtype, left.shape) == (right.dtype, right.shape)
    return said and left.tobytes() == right.tobytes()


@pytest.fixture(scope="module")
def written() -> Arrays:
    random = np.random.default_rng(27)
    dtypes = (np.bool_, np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64)
    arrays: Arrays = {
        np.dtype(dtype).name: random.integers(0, 2, (3, 5)).astype(dtype) for dtype in dtypes
    }
    arrays |= {
        "int64": random.integers(-9, 9, (10, 5)),
        "float16": random.standard_normal((2, 3, 4)).astype(np.float16),
        "float64": random.standard_normal(7),
        "complex64": np.array([[1 + 2j]], np.complex64),
        "large": random.standard_normal((700, 128)).astype(np.float32),
        "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 4), np.float16),
        "also empty": np.zeros((2, 0), np.int8),
    }
    return arrays


@pytest.fixture(scope="module")
def model(folder: Path, written: Arrays) -> Path:
    path = folder / "dropin.safetensors"
    safetensors.numpy.save_file(written, path, {"format": "np"})
    return path


def arguments(function: Callable[..., object]) -> list[tuple[str, Any, bool]]:
    """Name and default of each argument, and whether it can be positional."""
    return [
        (one.name, one.default, one.kind is one.POSITIONAL_OR_KEYWORD)
        for one in inspect.signature(function).parameters.values()
        if one.kind is not one.VAR_KEYWORD
    ]


@pytest.mark.parametrize("name", ["load", "load_file", "save", "save_file"])
def test_arguments_have_the_same_names_positions_and_defaults(name: str) -> None:
    ours, theirs = (
        arguments(getattr(module, name)) for module in (dmafile.numpy, safetensors.numpy)
    )
    # Additional arguments of dmafile come after those of safetensors, and are keywords.
    assert ours[: len(theirs)] == theirs
    assert not any(place for _, _, place in ours[len(theirs) :])


def test_arguments_of_the_package_are_the_same() -> None:
    for name in ("serialize", "serialize_file", "deserialize", "TensorSpec"):
        ours, theirs = (arguments(getattr(one, name)) for one in (dmafile, safetensors))
        assert ours == theirs, name
    names = [name for name, _, _ in arguments(safetensors.safe_open)]
    places = [("filename", True), ("framework", True), ("device", True), ("backend", False)]
    ours = arguments(dmafile.safe_open)
    assert [name for name, _, _ in ours] == names
    assert [(name, place) for name, _, place in ours] == places
    assert [default for _, default, _ in ours[2:]] == ["cpu", "mmap"]
    for module in (dmafile, dmafile.numpy):
        for name in ("safe_open", "serialize", "serialize_file", "deserialize", "TensorSpec"):
            assert getattr(module, name) is getattr(dmafile, name)


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_files_are_read_as_by_safetensors(model: Path, written: Arrays, backend: str) -> None:
    loaded = dmafile.numpy.load_file(str(model), backend=backend)
    theirs = safetensors.numpy.load_file(str(model), backend=backend)
    with (
        dmafile.safe_open(model, "np", backend=backend) as ours,
        safetensors.safe_open(model, "np", backend=backend) as open_there,
    ):
        assert ours.keys() == open_there.keys()
        assert list(loaded) == list(theirs) == ours.offset_keys() == open_there.offset_keys()
        assert ours.metadata() == open_there.metadata() == {"format": "np"}
        together = ours.get_tensors()
        assert list(together) == list(theirs)
        for name, array in written.items():
            one, part = ours.get_tensor(name), ours.get_slice(name)
            assert same(one, array) and one.flags.writeable
            assert same(loaded[name], theirs[name]) and same(together[name], array), name
            there = open_there.get_slice(name)
            assert (part.get_shape(), part.get_dtype()) == (there.get_shape(), there.get_dtype())
            assert type(part.get_shape()) is type(there.get_shape())


def test_bytes_are_read_as_by_safetensors(model: Path) -> None:
    data = model.read_bytes()
    theirs = safetensors.numpy.load(data)
    for given in (data, bytearray(data), memoryview(data)):
        ours = dmafile.numpy.load(given)
        assert ours.keys() == theirs.keys()
        for name, array in theirs.items():
            assert same(ours[name], array) and ours[name].flags.writeable
    ours["int64"][:] = 1
    assert same(dmafile.numpy.load(data)["int64"], theirs["int64"]), "the array is not a copy"
    there = dict(safetensors.deserialize(data))
    assert dict(dmafile.deserialize(data)) == there
    # Checked without either package: the JSON header has the location of the bytes.
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "np"}
    for name, tensor in dmafile.deserialize(data):
        start, end = header[name]["data_offsets"]
        assert bytes(tensor["data"]) == data[8 + length + start : 8 + length + end]
        assert (tensor["dtype"], tensor["shape"]) == (header[name]["dtype"], header[name]["shape"])


def test_float4_and_bfloat16_are_read_as_by_safetensors(folder: Path) -> None:
    path = folder / "narrow"
    packed = bytes(range(12))
    tensors: dict[str, Any] = {
        "packed": {"dtype": "float4_e2m1fn_x2", "shape": [3, 4], "data": packed},
        "brain": {"dtype": "bfloat16", "shape": [2], "data": b"\x80\x3f\x00\x40"},
    }
    dmafile.serialize_file(tensors, path)
    for loaded in (dmafile.numpy.load_file(path), dmafile.numpy.load(path.read_bytes())):
        assert loaded["packed"].tobytes() == packed and loaded["packed"].shape == (3, 4)
        assert loaded["brain"].dtype == ml_dtypes.bfloat16 and list(loaded["brain"]) == [1, 2]
    with safetensors.safe_open(path, "np") as theirs, dmafile.safe_open(path, "np") as ours:
        for part in (theirs.get_slice("packed"), ours.get_slice("packed")):
            assert (part.get_dtype(), part.get_shape()) == ("F4", [3, 8])
    assert dict(dmafile.deserialize(path.read_bytes())) == dict(
        safetensors.deserialize(path.read_bytes())
    )


INDICES = [
    np.s_[:], np.s_[()], np.s_[...], np.s_[3], np.s_[-1], np.s_[2:], np.s_[:2], np.s_[2:5],
    np.s_[1:9:3], np.s_[:, :2], np.s_[0, :2], np.s_[2:, 0], np.s_[2:, -1], np.s_[..., 1],
    np.s_[2, ...], np.s_[3:3], np.s_[9:10], np.s_[3, 4], np.s_[np.int64(3), 1:4:2], [],
    np.s_[:, 1:1], np.s_[2:4, ..., 1:3], np.s_[..., 0, 0], np.s_[0:10, 0:5],
]  # fmt: skip
WRONG = [
    np.s_[10], np.s_[-11], np.s_[:11], np.s_[10:], np.s_[0, 5], np.s_[0, -6], np.s_[:, :6],
    np.s_[2:, 20], np.s_[0, 0, 0], np.s_[::-1], np.s_[::0], [0, 1], [True], np.s_[None],
    np.s_[..., ...], np.s_["a"], np.s_[1.5], np.arange(2), (np.arange(2), 1), np.s_[0, [1]],
    np.s_[11:12],
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_slices_equal_those_of_safetensors(model: Path, written: Arrays, index: Any) -> None:
    with dmafile.safe_open(model, "np") as ours, safetensors.safe_open(model, "np") as theirs:
        got, there = ours.get_slice("int64")[index], theirs.get_slice("int64")[index]
        assert same(got, there)
        assert same(got, np.asarray(written["int64"][index]))


@pytest.mark.parametrize("index", WRONG, ids=str)
def test_invalid_slices_are_refused_as_by_safetensors(model: Path, index: Any) -> None:
    with dmafile.safe_open(model, "np") as ours, safetensors.safe_open(model, "np") as theirs:
        with pytest.raises(safetensors.SafetensorError):
            theirs.get_slice("int64")[index]
        with pytest.raises(dmafile.SafetensorError, match="int64") as caught:
            ours.get_slice("int64")[index]
        assert isinstance(caught.value, safetensors.SafetensorError)
        assert isinstance(caught.value, IndexError)


def test_slice_bounds_may_be_negative(model: Path, written: Arrays) -> None:
    with dmafile.safe_open(model, "np") as file:
        part = file.get_slice("int64")
        for index in (np.s_[-3:], np.s_[:-2], np.s_[2:-1, -2:], np.s_[5:2]):
            assert same(part[index], written["int64"][index])


def test_slices_of_elements_and_scalars_equal_those_of_safetensors(model: Path) -> None:
    with dmafile.safe_open(model, "np") as ours, safetensors.safe_open(model, "np") as theirs:
        assert same(ours.get_slice("float64")[2], theirs.get_slice("float64")[2])
        for index in (np.s_[()], np.s_[...]):
            assert same(ours.get_slice("scalar")[index], theirs.get_slice("scalar")[index])
        for file in (ours, theirs):
            with pytest.raises(safetensors.SafetensorError):
                file.get_slice("scalar")[0]


def refused(ours: Callable[[], object], theirs: Callable[[], object]) -> dmafile.Error:
    """Asserts that both fail, with errors that the same `except` catches."""
    with pytest.raises(safetensors.SafetensorError):
        theirs()
    with pytest.raises(dmafile.SafetensorError) as caught:
        ours()
    assert isinstance(caught.value, safetensors.SafetensorError)
    assert isinstance(caught.value, dmafile.Error)
    return caught.value


BAD = {
    "nothing": b"",
    "too short": b"\x02\0\0",
    "a header that is longer than the file": b"\xff\0\0\0\0\0\0\0{}",
    "a header of 2 EiB": b"\0\0\0\0\0\0\0\x20{}",
    "not UTF-8": b"\x03\0\0\0\0\0\0\0{\xff}",
    "not JSON": b"\x02\0\0\0\0\0\0\0[}",
    "not an object": b"\x02\0\0\0\0\0\0\0[]",
    "bytes of no tensor": b"\x02\0\0\0\0\0\0\0{}x",
    **{path.name: path.read_bytes() for path in sorted(ATTACKS.glob("*.safetensors"))},
}


@pytest.mark.parametrize(
    "header",
    [
        *(f"{text}{{TENSOR}}" for text in (" ", "\t", "\r", "\n", " \t\r\n", "\0", "\v", "\xa0")),
        *(f"{{TENSOR}}{text}" for text in (" ", "\t", "\r", "\n", " \t\r\n", "\0", "\f", "x")),
        *(f'{{"__metadata__":{text},TENSOR}}' for text in ("null", "{}", "[]", "1", '{"a":null}')),
        '{TENSOR,"__metadata__":null}',
        '{"__metadata__":null,"__metadata__":{},TENSOR}',
        '{"__metadata__":{},"__metadata__":null,TENSOR}',
    ],
)
def test_unusual_headers_are_read_or_refused_as_by_safetensors(folder: Path, header: str) -> None:
    tensor = '"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'
    text = header.replace("TENSOR", tensor).encode()
    path = folder / "unusual"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"wxyz")

    def told(use: Any, arrays: Any) -> object:
        try:
            with use.safe_open(path, "np") as file:
                return file.keys(), file.metadata(), arrays.load_file(path)["a"].tobytes()
        except use.SafetensorError:
            return None

    assert told(dmafile, dmafile.numpy) == told(safetensors, safetensors.numpy)


# Files that safetensors reads, although the format does not allow them.
LET_PASS = (
    "metadata-twice.safetensors",
    "name-twice-escaped.safetensors",
    "shape-overflows-behind-0.safetensors",
)


@pytest.mark.parametrize("name", BAD)
def test_invalid_files_raise_the_errors_of_safetensors(folder: Path, name: str) -> None:
    path = folder / "bad"
    path.write_bytes(BAD[name])
    uses: list[tuple[Callable[[], object], Callable[[], object]]] = [
        (lambda: dmafile.safe_open(path, "np"), lambda: safetensors.safe_open(path, "np")),
        (lambda: dmafile.numpy.load_file(path), lambda: safetensors.numpy.load_file(path)),
        (lambda: dmafile.numpy.load(BAD[name]), lambda: safetensors.numpy.load(BAD[name])),
        (lambda: dmafile.deserialize(BAD[name]), lambda: safetensors.deserialize(BAD[name])),
    ]
    for ours, theirs in uses:
        with pytest.raises(dmafile.SafetensorError) as caught:
            ours()
        assert caught.value.errno in (errno.EBADMSG, errno.ENODATA)
        try:
            theirs()
        except safetensors.SafetensorError:
            assert isinstance(caught.value, safetensors.SafetensorError)
        except ValueError:
            assert name in LET_PASS, "NumPy refuses this shape"
        else:
            assert name in LET_PASS


def test_missing_files_and_tensors_raise_other_errors_than_invalid_files(model: Path) -> None:
    for use in (dmafile.safe_open, safetensors.safe_open):
        with pytest.raises(FileNotFoundError) as caught:
            use("no/such/file", "np")
        assert not isinstance(caught.value, dmafile.SafetensorError)
    with pytest.raises(FileNotFoundError):
        dmafile.numpy.load_file("no/such/file")
    with dmafile.safe_open(model, "np") as ours, safetensors.safe_open(model, "np") as theirs:
        for name in ("get_tensor", "get_slice"):
            error = refused(
                lambda n=name: getattr(ours, n)("other"),  # type: ignore[misc]
                lambda n=name: getattr(theirs, n)("other"),  # type: ignore[misc]
            )
            assert isinstance(error, KeyError) and str(error).startswith("there is no tensor")
            for file in (ours, theirs):
                with pytest.raises(TypeError):
                    getattr(file, name)(1)


def test_unknown_frameworks_devices_and_backends_are_refused(model: Path) -> None:
    for framework in ("numpy", "np"):
        assert dmafile.safe_open(model, framework, None).get_tensor("scalar") == 2.5
    cases: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        (("np", "cuda:0"), {}),
        (("np", 0), {}),
        (("np", "nowhere"), {}),
        (("word",), {}),
        (("np",), {"backend": "word"}),
    ]
    for given, named in cases:
        error = refused(
            lambda g=given, n=named: dmafile.safe_open(model, *g, **n),  # type: ignore[misc]
            lambda g=given, n=named: safetensors.safe_open(model, *g, **n),  # type: ignore[misc]
        )
        assert isinstance(error, dmafile.UsageError)
    with pytest.raises(dmafile.SafetensorError):
        dmafile.numpy.load_file(model, backend="word")
    for framework in ("tf", "flax", "mlx", "paddle"):
        with pytest.raises(dmafile.SafetensorError, match=framework):
            dmafile.safe_open(model, framework)  # type: ignore[arg-type]


def test_only_slices_work_after_a_file_is_closed(model: Path, written: Arrays) -> None:
    gc.collect()
    before = open_files()
    ours, theirs = dmafile.safe_open(model, "np"), safetensors.safe_open(model, "np")
    with ours as one, theirs as other:
        assert one is ours and other is theirs
        slices = [one.get_slice("int64"), other.get_slice("int64")]
    for name in ("keys", "offset_keys", "metadata", "get_tensors"):
        error = refused(getattr(ours, name), getattr(theirs, name))
        assert isinstance(error, ValueError)
    refused(lambda: ours.get_tensor("int64"), lambda: theirs.get_tensor("int64"))
    refused(lambda: ours.get_slice("int64"), lambda: theirs.get_slice("int64"))
    for part in slices:
        assert same(part[2:4], written["int64"][2:4])
    del part, slices
    assert open_files() == before


def test_an_exception_closes_the_file_and_is_raised(model: Path) -> None:
    with pytest.raises(ZeroDivisionError), dmafile.safe_open(model, "np") as file:
        raise ZeroDivisionError
    with pytest.raises(dmafile.SafetensorError):
        file.keys()


@pytest.mark.parametrize("metadata", [None, {}, {"a": "b"}])
def test_empty_metadata_is_not_none(
    folder: Path, written: Arrays, metadata: dict[str, str] | None
) -> None:
    ours, theirs = folder / "ours", folder / "theirs"
    dmafile.numpy.save_file({"a": written["int64"]}, ours, metadata)
    # safetensors writes invalid JSON for no tensors with empty metadata.
    safetensors.numpy.save_file({"a": written["int64"]}, theirs, metadata)
    assert ours.read_bytes() == theirs.read_bytes()
    for path in (ours, theirs):
        with dmafile.safe_open(path, "np") as one, safetensors.safe_open(path, "np") as other:
            assert one.metadata() == other.metadata() == metadata


def test_failed_saves_raise_the_errors_of_safetensors(folder: Path, written: Arrays) -> None:
    array = written["int64"]
    nowhere = folder / "no" / "folder"
    error = refused(
        lambda: dmafile.numpy.save_file({"a": array}, nowhere),
        lambda: safetensors.numpy.save_file({"a": array}, nowhere),
    )
    assert isinstance(error, FileNotFoundError) and error.errno == errno.ENOENT
    text = np.array(["a"])
    error = refused(
        lambda: dmafile.numpy.save({"a": text}), lambda: safetensors.numpy.save({"a": text})
    )
    assert isinstance(error, TypeError)
    for use in (dmafile, safetensors):
        numbers: Any = {"a": use.TensorSpec(dtype="int8", shape=[3], data_ptr=0, data_len=2)}
        with pytest.raises(safetensors.SafetensorError):
            use.serialize(numbers)
    wrong: list[Any] = [{1: array}, {None: array}]
    for tensors in wrong:
        for save in (dmafile.numpy.save, safetensors.numpy.save):
            with pytest.raises(TypeError):
                save(tensors)
    texts: list[Any] = [{"a": 1}, {1: "a"}, {"a": None}]
    for metadata in texts:
        for save in (dmafile.numpy.save, safetensors.numpy.save):
            with pytest.raises(TypeError):
                save({"a": array}, metadata)
    assert not nowhere.parent.exists()


def test_tensor_specs_equal_those_of_safetensors() -> None:
    names = [*NAMES]
    for shape in ([], [3], (2, 5), np.zeros((4, 2)).shape):
        for dtype in names:
            given: dict[str, Any] = {
                "dtype": dtype,
                "shape": shape,
                "data_ptr": 4096,
                "data_len": 8,
            }
            ours, theirs = dmafile.TensorSpec(**given), safetensors.TensorSpec(**given)
            for name in ("dtype", "shape", "data_ptr", "data_len"):
                assert getattr(ours, name) == getattr(theirs, name), (dtype, name)
                with pytest.raises(AttributeError):
                    setattr(ours, name, 1)
    unknown: dict[str, Any] = {"dtype": "nonsense", "shape": [1], "data_ptr": 0, "data_len": 0}
    refused(lambda: dmafile.TensorSpec(**unknown), lambda: safetensors.TensorSpec(**unknown))
    with pytest.raises(TypeError):
        dmafile.TensorSpec("int8", [1], 0, 0)  # type: ignore[call-arg]


def test_specs_of_either_package_are_serialized(folder: Path, written: Arrays) -> None:
    given: dict[str, dict[str, Any]] = {
        name: {
            "dtype": array.dtype.name,
            "shape": array.shape,
            "data_ptr": array.ctypes.data,
            "data_len": array.nbytes,
        }
        for name, array in written.items()
    }
    ours = {name: dmafile.TensorSpec(**one) for name, one in given.items()}
    theirs = {name: safetensors.TensorSpec(**one) for name, one in given.items()}
    want = safetensors.serialize(theirs, {"a": "b"})
    for specs in (ours, theirs):
        assert dmafile.serialize(specs, {"a": "b"}) == want
        dmafile.serialize_file(specs, folder / "specs", {"a": "b"})
        assert (folder / "specs").read_bytes() == want
    with pytest.raises(TypeError):
        dmafile.serialize(given)  # type: ignore[arg-type]


def test_errors_can_be_pickled(folder: Path, model: Path) -> None:
    caught: list[dmafile.Error] = []
    bad = folder / "bad"
    bad.write_bytes(b"\xff" * 100)
    with dmafile.safe_open(model, "np") as file:
        uses: list[Callable[[], object]] = [
            lambda: file.get_tensor("other"),
            lambda: file.get_slice("int64")[99],
            lambda: dmafile.safe_open(bad, "np"),
            lambda: dmafile.safe_open(model, "word"),  # type: ignore[arg-type]
            lambda: dmafile.numpy.save_file({}, folder / "no" / "folder"),
            lambda: dmafile.numpy.save({"a": np.array(["a"])}),
        ]
        for use in uses:
            with pytest.raises(dmafile.SafetensorError) as one:
                use()
            caught.append(one.value)
    for error in caught:
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error)
        assert (again.errno, again.filename) == (error.errno, error.filename)
        assert type(error).__module__ == "dmafile"


def test_everything_works_without_the_safetensors_package(python: Run, model: Path) -> None:
    program = """
import pickle, sys
sys.modules["safetensors"] = None
from dmafile import SafetensorError, safe_open
from dmafile.numpy import load_file
try:
    safe_open(sys.argv[2], "np")
except SafetensorError as error:
    print(type(error).__mro__[1].__name__, type(pickle.loads(pickle.dumps(error))).__name__)
print(len(load_file(sys.argv[1])))
del sys.modules["safetensors"]
try:
    safe_open(sys.argv[2], "np")
except SafetensorError as error:
    print("safetensors" in sys.modules)
import safetensors
try:
    safe_open(sys.argv[2], "np")
except safetensors.SafetensorError as error:
    print(type(error).__name__, isinstance(error, SafetensorError))
sys.modules["safetensors"] = sys.modules["dmafile"]
import safetensors
try:
    safetensors.safe_open(sys.argv[2], "np")
except safetensors.SafetensorError as error:
    print(type(error).__name__)
"""
    done = python(program, model, ATTACKS / "gap.safetensors")
    want = "Error SafetensorError\n16\nFalse\nSafetensorError True\nSafetensorError\n"
    assert done.stdout == want, done.stderr
