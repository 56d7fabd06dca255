"""Tensors that are read on request."""

import operator
from collections.abc import Callable
from importlib import import_module
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, Unpack

from . import _dmafile
from ._errors import make
from ._hold import HeldModel, held_name
from ._load import ModelPath, Options, open_model

Index: TypeAlias = Any
"""An index of a NumPy array or a PyTorch tensor: integers, slices, `...`, None, arrays, masks."""
Framework: TypeAlias = Literal["numpy", "np", "torch", "pt", "pytorch"]

_FRAMEWORKS = {
    "numpy": "numpy",
    "np": "numpy",
    "torch": "torch",
    "pt": "torch",
    "pytorch": "torch",
}


_GAP = 64 << 10
"""Rows that are at least this many bytes apart are read one by one."""


def _integer(index: object) -> int | None:
    """An index that is one integer; not a bool, which is a mask, and not an array with one
    element."""
    if isinstance(index, bool) or hasattr(index, "__len__"):
        return None
    try:
        return operator.index(index)  # type: ignore[arg-type]
    except TypeError:
        return None


class TensorFile:
    """An open model whose tensors are read on request; see `open_tensors`."""

    def __init__(self, path: ModelPath, framework: str, options: Options) -> None:
        if framework not in _FRAMEWORKS:
            text = f"framework: {framework!r} is not supported; use numpy or torch"
            raise make("request", None, text)
        if "verify" in options:
            raise TypeError("'verify' is not an option of open_tensors: digests are of whole files")
        _dmafile.check(options)
        arrays = import_module(f"dmafile.{_FRAMEWORKS[framework]}")
        self._arrays = arrays
        self._array: Callable[..., Any] = arrays._array
        self._check: Callable[[str], None] = arrays._check
        self._options = options
        self._open: _dmafile.Model | HeldModel | None
        name = held_name(path)
        if name is None:
            self._open = open_model(path)
        else:
            private = _FRAMEWORKS[framework] == "torch"
            self._open = HeldModel.taken(name, options, private=private)

    @property
    def _model(self) -> _dmafile.Model | HeldModel:
        if self._open is None:
            raise make("closed", None, "the file is closed")
        return self._open

    @property
    def format(self) -> str:
        """`safetensors` or `gguf`."""
        return self._model.format

    def keys(self) -> list[str]:
        """The names of the tensors, sorted."""
        return sorted(self._model.names())

    def offset_keys(self) -> list[str]:
        """The names of the tensors, in the order of their bytes in the file."""
        return self._model.names()

    def metadata(self) -> dict[str, Any] | None:
        """Everything in the header besides the tensors; None if there is nothing."""
        return self._model.metadata()

    def get_tensor(self, name: str) -> Any:
        """Reads a tensor into separate memory.

        Raises a SafetensorError that is also a KeyError if there is no tensor with this name.
        """
        return TensorSlice(self, name)._rows(None)

    def get_tensors(self) -> dict[str, Any]:
        """Reads all tensors, as `load_file` does: views of one buffer, in the order of their bytes
        in the file."""
        model = self._model
        if isinstance(model, HeldModel):
            return {name: self.get_tensor(name) for name in model.names()}
        rows = model.table()
        views: Callable[..., dict[str, Any]] = self._arrays._views
        if not any(row[4] for row in rows):
            return views(None, rows)
        return views(lambda: model.load(None, self._options, None), rows)

    def get_slice(self, name: str) -> "TensorSlice":
        """A tensor of which parts can be read.

        Raises a SafetensorError that is also a KeyError if there is no tensor with this name.
        """
        return TensorSlice(self, name)

    def close(self) -> None:
        """Closes the files. Tensors that have been read stay valid; tensors from `get_slice` keep
        their files open."""
        self._open = None

    def __enter__(self) -> Self:
        _ = self._model
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class TensorSlice:
    """A tensor of which parts can be read: `part[2:4]`, `part[7, :, 3]`, `part[...]`."""

    def __init__(self, file: TensorFile, name: str) -> None:
        self._file = file
        # The slice keeps the model open when the file is closed.
        self._model = file._model
        self._name = name
        try:
            self._said = self._model.described(name)
        except KeyError:
            raise make("name", None, f"there is no tensor {name!r} in the file") from None
        self._dtype, self._shape, self._nbytes = self._model.viewed(name)

    def get_shape(self) -> list[int]:
        """The sizes of its dimensions, as in the header."""
        return list(self._said[1])

    def get_dtype(self) -> str:
        """The type of the elements, as in the header: `F32`, `BF16`, `Q4_K`."""
        return self._said[0]

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Any:
        """A part of the tensor: the same as indexing the result of `get_tensor`.

        If the index of the first dimension is an integer or a slice, only the requested rows are
        kept, and only they are read, except for short gaps between them; other dimensions are cut
        in memory. Any other index (a mask, an array, `...`) reads the whole tensor.
        """
        first, *rest = index if isinstance(index, tuple) and index else (index,)
        if not self._shape:
            return self._rows(None)[index]
        count = self._shape[0]
        if isinstance(first, slice):
            rows = range(*first.indices(count))
            if not rows:
                return self._rows(range(0))[(slice(None), *rest)]
            part = self._stepped(rows if rows.step > 0 else rows[::-1])
            # A plain slice is what has been read; PyTorch does not support negative steps.
            within = slice(None) if rows.step > 0 else slice(None, None, -1)
            return part[(within, *rest)]
        row = _integer(first)
        if row is not None:
            if not -count <= row < count:
                text = f"{self._name}: index {row} is out of range for dimension 0 of {count}"
                raise make("index", None, text)
            row %= count
            return self._rows(range(row, row + 1))[(0, *rest)]
        return self._rows(None)[index]

    def _stepped(self, rows: range) -> Any:
        """Reads one or more rows in ascending steps: if the rows between them are short, they are
        read along, several rows per read."""
        step, count = rows.step, self._shape[0]
        stride = self._nbytes // count * step
        if step == 1 or stride == 0 or len(rows) == 1:
            return self._rows(range(rows[0], rows[-1] + 1))
        shape = (len(rows), *self._shape[1:])
        whole = self._file._array(bytearray(len(rows) * stride // step), self._dtype, shape)
        several = max(1, _GAP // stride)
        for at in range(0, len(rows), several):
            some = rows[at : at + several]
            whole[at : at + len(some)] = self._rows(range(some[0], some[-1] + 1))[::step]
        return whole

    def _rows(self, rows: range | None) -> Any:
        """Reads some rows, or all of it."""
        # Checked here, so that the header can be used without the package for the dtype.
        self._file._check(self._dtype)
        shape, start, nbytes = self._shape, 0, self._nbytes
        if rows is not None:
            row_bytes = nbytes // shape[0] if shape[0] else 0
            start, nbytes = rows.start * row_bytes, len(rows) * row_bytes
            shape = (len(rows), *shape[1:])
        if nbytes == 0:
            return self._file._array(None, self._dtype, shape)
        buffer = self._model.load_part(self._name, start, nbytes, self._file._options)
        return self._file._array(buffer, self._dtype, shape)


class _Slice(TensorSlice):
    """A tensor of `safe_open`, of which parts can be read."""

    _file: "safe_open"

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Any:
        """A part of the tensor, on the device that `safe_open` was given.

        PyTorch tensors accept any index that PyTorch does. NumPy arrays accept what safetensors
        accepts: integers, slices with a step of 1 or more, and `...`, none of them out of range;
        otherwise the result is a SafetensorError that is also an IndexError.
        """
        if self._file._arrays.__name__ == "dmafile.numpy":
            index = self._within(index)
        return self._file._put(super().__getitem__(index))

    def _within(self, index: Index | tuple[Index, ...]) -> tuple[Index, ...]:
        """The same index, if safetensors would accept it."""

        def wrong(why: str) -> Exception:
            return make("index", None, f"{self._name}: {why}")

        shape = self._shape
        if isinstance(index, list) and not index:
            index = slice(0, 0)
        given = list(index) if isinstance(index, tuple) else [index]
        if any(one is ... for one in given):
            at = next(at for at, one in enumerate(given) if one is ...)
            given[at : at + 1] = [slice(None)] * (len(shape) + 1 - len(given))
        if len(given) > len(shape):
            raise wrong(f"{len(given)} indices are too many for {len(shape)} dimensions")
        for at, (one, count) in enumerate(zip(given, shape, strict=False)):
            if isinstance(one, slice):
                if one.step is not None and one.step < 1:
                    raise wrong(f"the step {one.step} of dimension {at} is less than 1")
                last = [one.start + 1 if one.start else 0, one.stop or 0]
            elif isinstance(one, bool) or hasattr(one, "__len__") or not hasattr(one, "__index__"):
                raise wrong(f"an index is not an integer, a slice or ...: {one!r}")
            else:
                given[at] = one = operator.index(one)
                last = [one + 1 if one >= 0 else -one]
            if max(last) > count:
                raise wrong(f"index {one} is out of range for dimension {at} of {count}")
        return tuple(given)


class safe_open(TensorFile):
    """Opens a model as `safetensors.safe_open` does, and reads its header; each tensor is read on
    request, into separate memory.

    >>> with dmafile.safe_open("model.safetensors", framework="pt") as file:
    ...     for name in file.keys():
    ...         tensor = file.get_tensor(name)

    It differs from `open_tensors` in that it has the arguments of safetensors, puts tensors on
    `device`, and its slices of NumPy arrays refuse what safetensors refuses.

    Args:
        filename: A file; or a model, as in `open_tensors`.
        framework: `pt`, `torch` or `pytorch`; `np` or `numpy`.
        device: The device for PyTorch's tensors: `cpu`, `cuda:1`, a number, a `torch.device`.
        backend: `mmap` or `pread`. Accepted, but has no effect: dmafile reads.
        options: As in `open_tensors`.

    Raises:
        FileNotFoundError: There is no such file.
        SafetensorError: The file is not a valid model; the framework, the device or the backend is
            not one of those above, or this machine does not have the device.
        Error: As `open_tensors`.
    """

    def __init__(
        self,
        filename: ModelPath,
        framework: Framework,
        device: Any = "cpu",
        *,
        backend: str = "mmap",
        **options: Unpack[Options],
    ) -> None:
        check_backend(backend)
        super().__init__(filename, framework, options)
        self._device = self._arrays._device(device)

    def _put(self, tensor: Any) -> Any:
        return self._arrays._put(tensor, self._device)

    def get_tensor(self, name: str) -> Any:
        """Reads a tensor; raises a SafetensorError if there is no tensor with this name."""
        return self._put(super().get_tensor(name))

    def get_tensors(self) -> dict[str, Any]:
        """Reads all tensors, in the order of their bytes in the file."""
        return {name: self._put(tensor) for name, tensor in super().get_tensors().items()}

    def get_slice(self, name: str) -> TensorSlice:
        """A tensor of which parts can be read; raises a SafetensorError if there is no tensor with
        this name."""
        return _Slice(self, name)


def _safe_open_handle(
    f: Any, framework: Framework, device: Any = "cpu", *, backend: str = "mmap"
) -> safe_open:
    """As `safe_open`, for an open file."""
    return safe_open(f.name, framework, device, backend=backend)


def check_backend(backend: str) -> None:
    """Raises an error for a backend that safetensors does not have."""
    if backend not in ("mmap", "pread"):
        raise make("request", None, f"backend: {backend!r} is not supported; use mmap or pread")


def open_tensors(
    path: ModelPath, *, framework: Framework = "numpy", **options: Unpack[Options]
) -> TensorFile:
    """Opens a model and reads its headers; each tensor is read on request.

    >>> with dmafile.open_tensors("model.safetensors") as model:
    ...     for name in model.offset_keys():
    ...         array = model.get_tensor(name)
    ...     rows = model.get_slice("wte.weight")[1000:1016]

    `safe_open` does the same with the arguments of safetensors. Each tensor gets separate private
    memory; for all or most of them `dmafile.numpy.load_file` is faster. The files stay open, so
    that the headers and the tensors belong to the same files.

    Args:
        path: A safetensors or GGUF file, a `*.safetensors.index.json`, the first file of a split
            GGUF, or a folder with one of these; or a list of all files of one model. Tensors of
            `held:NAME` and `held:NAME@SOCKET` are views of the memory that another process holds
            under that name, as in `load_file`.
        framework: The type of the tensors: `numpy` arrays or `torch` tensors.
        options: As in `dmafile.load`: `pages`, `method`, `io`, `allocation`, `chunk`, `block`,
            `queue_depth`, `check_memory`.

    Raises:
        UsageError: An option or the framework is invalid.
        Error: As `dmafile.load`; EBADMSG for files that are not a valid model.
        ImportError: The framework, or `ml_dtypes` for a dtype that NumPy lacks, is missing.
    """
    return TensorFile(path, framework, options)
