"""Finds PyTorch tensors that share memory; has the names that programs import from safetensors."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

# Type checks run without PyTorch.
_Tensor: TypeAlias = Any


def storage_ptr(tensor: _Tensor) -> int:
    """The address of the storage that a tensor is a view of; 0 for a tensor without one."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except NotImplementedError:
        return 0


def storage_size(tensor: _Tensor) -> int:
    """The size of that storage in bytes."""
    try:
        return int(tensor.untyped_storage().nbytes())
    except NotImplementedError:
        return int(tensor.nbytes)


def _end_ptr(tensor: _Tensor) -> int:
    """The address of the first byte after the last element of a tensor."""
    end = int(tensor.data_ptr())
    if tensor.numel():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((count - 1) * step for count, step in steps)
        end += (last + 1) * tensor.element_size()
    return end


def _is_complete(tensor: _Tensor) -> bool:
    """Returns True if a tensor covers its whole storage."""
    whole = (storage_ptr(tensor), storage_size(tensor))
    return (tensor.data_ptr(), tensor.numel() * tensor.element_size()) == whole


def _find_shared_tensors(state_dict: Mapping[str, _Tensor]) -> list[set[str]]:
    """The names of the tensors, grouped by common bytes."""
    storages = defaultdict(list)
    for name, tensor in state_dict.items():
        storage = (tensor.device, storage_ptr(tensor), storage_size(tensor))
        if tensor.device.type != "meta" and all(storage[1:]):
            storages[storage].append((int(tensor.data_ptr()), _end_ptr(tensor), name))
    groups: list[set[str]] = []
    for areas in storages.values():
        reached = 0
        for start, end, name in sorted(areas):
            if start >= reached:
                groups.append(set())
            groups[-1].add(name)
            reached = max(reached, end)
    return groups


def _remove_duplicate_names(
    state_dict: Mapping[str, _Tensor],
    *,
    preferred_names: Iterable[str] | None = None,
    discard_names: Iterable[str] | None = None,
) -> dict[str, list[str]]:
    """For tensors that share memory: the name of the one to keep, and those of the others, sorted.

    The one to keep covers its whole storage. It is one of `preferred_names` if possible, else one
    that is not in `discard_names` if possible; of several the first by name.

    Raises a RuntimeError if none of the tensors covers the storage.
    """
    preferred, discard = set(preferred_names or ()), set(discard_names or ())
    removed = {}
    for names in _find_shared_tensors(state_dict):
        whole = {name for name in names if _is_complete(state_dict[name])}
        if not whole:
            raise RuntimeError(
                f"{', '.join(sorted(names))}: views of memory that none of them covers, so that the"
                " rest would be lost; replace them with their .clone()"
            )
        kept = min(whole & preferred or whole - discard or whole)
        if others := sorted(names - {kept}):
            removed[kept] = others
    return removed
