"""Lazy state dicts for transformers: each tensor is read when the model uses it."""

from collections.abc import Iterator, Mapping
from typing import Any, Unpack

from ._load import ModelPath, Options
from ._tensors import TensorFile, TensorSlice
from .torch import _dtype

__all__ = ["LazyTensor", "state_dict"]


class LazyTensor(TensorSlice):
    """A tensor that is read, completely or in part, when it is indexed: `lazy[...]`, `lazy[2:4,
    1]`."""

    @property
    def dtype(self) -> Any:
        """The dtype of the result."""
        return _dtype(self._dtype)

    def is_floating_point(self) -> bool:
        """Returns True for a floating point type."""
        return bool(self.dtype.is_floating_point)


class _StateDict(Mapping[str, LazyTensor]):
    """The tensors of an open model by name, in the order of their bytes."""

    def __init__(self, file: TensorFile) -> None:
        self._file = file
        self._names = dict.fromkeys(file.offset_keys())

    def __getitem__(self, name: str) -> LazyTensor:
        return LazyTensor(self._file, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def state_dict(path: ModelPath, **options: Unpack[Options]) -> Mapping[str, LazyTensor]:
    """Opens a model for `from_pretrained`, which then reads each tensor, or with tensor parallelism
    the rows that a rank needs, directly into separate memory.

    >>> config = LlamaConfig.from_pretrained("model/")
    >>> weights = dmafile.transformers.state_dict("model/")
    >>> model = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights)

    For transformers 5, whose threads may read several tensors at the same time. Name the model's
    class, because `AutoModel…` does not accept None as the path. The files stay open until the last
    reference to the mapping and its tensors is gone. A truncated file raises an error when a tensor
    is read, so from `from_pretrained`.

    Args:
        path, options: As in `dmafile.open_tensors`; or a list of all files of one model.

    Raises:
        Error: As `dmafile.open_tensors`.
        TypeError: This PyTorch has no dtype for a tensor; raised when it is read.
    """
    return _StateDict(TensorFile(path, "torch", options))
