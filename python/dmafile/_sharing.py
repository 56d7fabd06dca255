"""Tensors of PyTorch that share memory, by the names that programs take from safetensors."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

# PyTorch is not there to type-check against.
_Tensor: TypeAlias = Any


def storage_ptr(tensor: _Tensor) -> int:
    """The address of the memory of which a tensor is the whole or a part; 0 for one without."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except NotImplementedError:
        return 0


def storage_size(tensor: _Tensor) -> int:
    """How many bytes that memory has."""
    try:
        return int(tensor.untyped_storage().nbytes())
    except NotImplementedError:
        return int(tensor.nbytes)


def _end_ptr(tensor: _Tensor) -> int:
    """The address behind the last element of a tensor."""
    end = int(tensor.data_ptr())
    if tensor.numel():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((count - 1) * step for count, step in steps)
        end += (last + 1) * tensor.element_size()
    return end


def _is_complete(tensor: _Tensor) -> bool:
    """Whether a tensor is the whole of its memory."""
    whole = (storage_ptr(tensor), storage_size(tensor))
    return (tensor.data_ptr(), tensor.numel() * tensor.element_size()) == whole


def _find_shared_tensors(state_dict: Mapping[str, _Tensor]) -> list[set[str]]:
    """The names of tensors, those together that have bytes in common."""
    memories = defaultdict(list)
    for name, tensor in state_dict.items():
        memory = (tensor.device, storage_ptr(tensor), storage_size(tensor))
        if tensor.device.type != "meta" and all(memory[1:]):
            memories[memory].append((int(tensor.data_ptr()), _end_ptr(tensor), name))
    groups: list[set[str]] = []
    for areas in memories.values():
        reached = 0
        for start, end, name in sorted(areas):
            # One alone in its memory need not have bytes: it is a group as well.
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
    """Of tensors that share memory, the one to keep, and the names of the others, sorted.

    One is kept that is the whole of the memory: of `preferred_names` where there is one, else one
    that is not of `discard_names` where there is one; of several the first by its name.

    Raises a RuntimeError where no tensor is the whole of the memory.
    """
    preferred, discard = set(preferred_names or ()), set(discard_names or ())
    removed = {}
    for names in _find_shared_tensors(state_dict):
        whole = {name for name in names if _is_complete(state_dict[name])}
        if not whole:
            raise RuntimeError(
                f"none of {', '.join(sorted(names))} is the whole of the memory that they are parts"
                " of; save their .clone()"
            )
        kept = min(whole & preferred or whole - discard or whole)
        if others := sorted(names - {kept}):
            removed[kept] = others
    return removed
