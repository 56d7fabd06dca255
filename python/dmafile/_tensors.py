"""Tensors that are read when they are asked for."""

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
"""What a NumPy array or a PyTorch tensor takes: integers, slices, `...`, None, arrays, masks."""
Framework: TypeAlias = Literal["numpy", "np", "torch", "pt"]

_FRAMEWORKS = {"numpy": "numpy", "np": "numpy", "torch": "torch", "pt": "torch"}


_GAP = 64 << 10
"""Rows this many bytes apart, or more, are read one by one."""


def _integer(index: object) -> int | None:
    """An index that is one integer: no truth value, which is a mask, and no array of one."""
    if isinstance(index, bool) or hasattr(index, "__len__"):
        return None
    try:
        return operator.index(index)  # type: ignore[arg-type]
    except TypeError:
        return None


class TensorFile:
    """An open model whose tensors are read when they are asked for; see `open_tensors`."""

    def __init__(self, path: ModelPath, framework: str, options: Options) -> None:
        if framework not in _FRAMEWORKS:
            text = f"framework: {framework!r} is none of numpy, torch"
            raise make("usage", None, text, None, "")
        if "verify" in options:
            raise TypeError("'verify' is no option of open_tensors: a digest is a file's")
        _dmafile.check(options)
        arrays = import_module(f"dmafile.{_FRAMEWORKS[framework]}")
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
            raise ValueError("the file is closed")
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
        """What the header says besides the tensors; None where it says nothing."""
        return self._model.metadata() or None

    def get_tensor(self, name: str) -> Any:
        """Reads a tensor into memory of its own; a KeyError where there is none of this name."""
        return self.get_slice(name)._rows(None)

    def get_slice(self, name: str) -> "TensorSlice":
        """A tensor of which parts can be read; a KeyError where there is none of this name."""
        return TensorSlice(self, name)

    def close(self) -> None:
        """Closes the files. What has been read stays."""
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
        self._name = name
        self._said = file._model.described(name)
        self._dtype, self._shape, self._nbytes = file._model.viewed(name)

    def get_shape(self) -> list[int]:
        """Elements by dimension, as the header says."""
        return list(self._said[1])

    def get_dtype(self) -> str:
        """The type of the elements, as the header names it: `F32`, `BF16`, `Q4_K`."""
        return self._said[0]

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Any:
        """A part of what `get_tensor` gives, as its own index would give it.

        Where the first dimension gets an integer or a slice, only the rows that are asked for are
        kept, and only they are read, but for short gaps between them; the other dimensions are cut
        in memory. Any other index (a mask, an array, `...`) reads all of it.
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
            # A plain slice is what has been read; PyTorch knows no negative steps.
            within = slice(None) if rows.step > 0 else slice(None, None, -1)
            return part[(within, *rest)]
        row = _integer(first)
        if row is not None:
            if not -count <= row < count:
                raise IndexError(f"row {row} of a tensor with {count}")
            row %= count
            return self._rows(range(row, row + 1))[(0, *rest)]
        return self._rows(None)[index]

    def _stepped(self, rows: range) -> Any:
        """Reads rows, at least one, that ascend in steps: with those between them where these are
        few bytes, then several in a read."""
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
        # Not earlier: what the header says can be asked for without the package for the dtype.
        self._file._check(self._dtype)
        model, shape, start, nbytes = self._file._model, self._shape, 0, self._nbytes
        if rows is not None:
            row_bytes = nbytes // shape[0] if shape[0] else 0
            start, nbytes = rows.start * row_bytes, len(rows) * row_bytes
            shape = (len(rows), *shape[1:])
        if nbytes == 0:
            return self._file._array(None, self._dtype, shape)
        buffer = model.load_part(self._name, start, nbytes, self._file._options)
        return self._file._array(buffer, self._dtype, shape)


def open_tensors(
    path: ModelPath, *, framework: Framework = "numpy", **options: Unpack[Options]
) -> TensorFile:
    """Opens a model and reads its headers; a tensor is read when it is asked for.

    >>> with dmafile.open_tensors("model.safetensors") as model:
    ...     for name in model.offset_keys():
    ...         array = model.get_tensor(name)
    ...     rows = model.get_slice("wte.weight")[1000:1016]

    The shape of `safetensors.safe_open`. Each tensor gets private memory of its own; for all or
    most of them `dmafile.numpy.load_file` is faster. The files stay open, so that what is read is
    what the headers describe.

    Args:
        path: A safetensors or GGUF file, a `*.safetensors.index.json`, the first file of a split
            GGUF, or a folder with one of these; or a list of files, all of one model. Tensors of
            `held:NAME` are views of the memory that another process holds under that name, as those
            of `load_file`.
        framework: What tensors are given as: `numpy` arrays or `torch` tensors.
        options: As in `dmafile.load`: `pages`, `method`, `io`, `allocation`, `gather`,
            `block`, `queue_depth`, `memory_check`.

    Raises:
        UsageError: An option, or the framework, is none.
        Error: As `dmafile.load`; EBADMSG for files that are no sound model.
        ImportError: The framework, or `ml_dtypes` for a dtype that NumPy lacks, is missing.
    """
    return TensorFile(path, framework, options)
