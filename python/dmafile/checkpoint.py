"""Checkpoints for torch.distributed.checkpoint: written atomically, read into place."""

import ctypes
import errno
import os
import pickle
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, Unpack

import torch
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ._load import open_model
from ._save import SaveOptions, save
from ._scatter import Files, Piece, Place, read, saved_place
from .torch import _dtype

__all__ = ["StorageReader", "StorageWriter"]

# Type checks run without PyTorch.
_Tensor: TypeAlias = Any

_METADATA = ".metadata"
_SUFFIX = ".distcp"
_ROWS = 64 << 10
"""Pieces of a tensor that are shorter, in bytes, are read together with what is between them."""
_COPIED = 256 << 20
"""Maximum number of bytes, unless one tensor is larger, that are read into other memory and then
copied."""
_LARGE = 64 << 10
"""Smaller tensors are copied; nothing else that `torch.save` writes is as large."""


def _done(result: Any) -> Any:
    future: Any = Future()
    future.set_result(result)
    return future


class StorageReader(FileSystemReader):  # type: ignore[misc]
    """Reads checkpoints that this `StorageWriter` or torch's own has written, and safetensors
    models, for `torch.distributed.checkpoint.load`.

    >>> dcp.load(state, storage_reader=dmafile.checkpoint.StorageReader("step-100/"))

    The parts of a file that a rank needs are read in the order of the file, adjacent ones together.
    They go directly into its tensors if these are contiguous, on the CPU and of the type in the
    file; otherwise they are read into memory and copied. If a tensor is cut in a dimension other
    than the first, whole rows are read, unless the pieces have 64 KiB or more.

    Args:
        path: The folder of a checkpoint; or a model, as in `dmafile.open_tensors`.

    Raises:
        Error: ENODATA for a file that is shorter than its checkpoint says, otherwise the errno of
            the call that failed. `torch.distributed.checkpoint` raises it as a CheckpointException.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Describes what can be loaded."""
        if Path(self._get_metadata_path(kwargs.get("rank"))).exists():
            return super().read_metadata(*args, **kwargs)
        try:
            model = open_model(self.path)
        except IsADirectoryError:
            # Neither a model nor a checkpoint: report the checkpoint's missing file.
            return super().read_metadata(*args, **kwargs)
        shards = iter(model.shards())
        file, start, size = next(shards)
        described: dict[str, Any] = {}
        places: dict[Any, Place] = {}
        for name, dtype, shape, at, nbytes in model.table():
            while at + nbytes > start + size:
                file, start, size = next(shards)
            chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
            properties = TensorProperties(dtype=_dtype(dtype))
            described[name] = TensorStorageMetadata(properties, chunk.sizes, [chunk])
            index = MetadataIndex(name, chunk.offsets)
            places[index] = Place(file, at - start, properties.dtype, chunk.sizes)
        meta = StorageMeta(checkpoint_id=self.path, load_id=self.load_id)
        return Metadata(described, storage_data=places, storage_meta=meta)

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Reads what the plan of this rank needs."""
        placed: list[tuple[Place, Any]] = []
        others = []
        with Files() as files:
            for item in plan.items:
                place = self._place(files, item)
                if place is None:
                    others.append(item)
                else:
                    placed.append((place, item))
            placed.sort(key=lambda one: (one[0].file, one[0].offset))
            for some in _batches(placed, planner):
                read(files, [piece for one in some for piece in one.pieces])
                for one in some:
                    if one.rows is not None:
                        one.target.copy_(one.rows)
                    planner.commit_tensor(one.item, one.target)
        # torch's own reader handles everything else.
        return super().read_data(LoadPlan(others), planner) if others else _done(None)

    def _place(self, files: Files, item: Any) -> Place | None:
        """Where the bytes of a tensor are in a file, if they are stored as they are."""
        stored = self.storage_data[item.storage_index]
        if isinstance(stored, Place):
            return stored
        if item.type == LoadItemType.BYTE_IO or stored.transform_descriptors:
            return None
        file = Path(self.path) / stored.relative_path
        return saved_place(files, file, stored.offset, stored.length)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns True if this could be a checkpoint or a model."""
        return Path(checkpoint_id).exists()


@dataclass
class _Wanted:
    """A part of a tensor to read."""

    item: Any
    target: _Tensor
    pieces: list[Piece]
    rows: _Tensor | None
    """The part in other memory, if it is not read directly into its place."""
    copied: int
    """The size of that memory in bytes."""


def _batches(placed: list[tuple[Place, Any]], planner: Any) -> Iterator[list[_Wanted]]:
    """Groups parts that are read together: all of them, if they are read directly into their
    places."""
    some: list[_Wanted] = []
    for place, item in placed:
        one = _wanted(place, item, planner.resolve_tensor(item).detach())
        if some and sum(other.copied for other in some) + one.copied > _COPIED:
            yield some
            some = []
        some.append(one)
    if some:
        yield some


def _wanted(place: Place, item: Any, target: _Tensor) -> _Wanted:
    sizes, offsets, lengths = place.sizes, item.storage_offsets, item.lengths
    if target.size() != lengths:
        name = item.storage_index.fqn
        raise ValueError(
            f"{name}: a shape of {list(lengths)} cannot be read into one of {list(target.size())}"
        )
    if 0 in lengths:
        return _Wanted(item, target, [], None, 0)
    width = place.dtype.itemsize
    # The last dimension that is cut, and the number of contiguous bytes from there on.
    cut = max((i for i in range(len(sizes)) if lengths[i] != sizes[i]), default=0)
    run = (lengths[cut] if sizes else 1) * sizes[cut + 1 :].numel() * width
    if not any(lengths[i] > 1 for i in range(cut)) or run >= _ROWS:
        rows = None if _is_plain(target, place.dtype) else torch.empty(lengths, dtype=place.dtype)
        memory = _bytes(target if rows is None else rows)
        pieces = [
            Piece(place.file, place.offset + start, memory[number * run : (number + 1) * run])
            for number, start in enumerate(_starts(sizes, offsets, lengths, cut, width))
        ]
        return _Wanted(item, target, pieces, rows, 0 if rows is None else rows.nbytes)
    whole = torch.empty([lengths[0], *sizes[1:]], dtype=place.dtype)
    first = place.offset + offsets[0] * sizes[1:].numel() * width
    rows = whole
    for dimension in range(1, len(sizes)):
        rows = rows.narrow(dimension, offsets[dimension], lengths[dimension])
    piece = Piece(place.file, first, _bytes(whole))
    return _Wanted(item, target, [piece], rows, whole.nbytes)


def _is_plain(tensor: _Tensor, dtype: Any) -> bool:
    """Returns True if its memory has the same contents as the file."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return bool(tensor.dtype == dtype and tensor.is_cpu and tensor.is_contiguous() and not lazy)


def _starts(sizes: Any, offsets: Any, lengths: Any, cut: int, width: int) -> Iterator[int]:
    """Where each contiguous run starts in a tensor of which a part is requested."""
    strides = [sizes[i + 1 :].numel() * width for i in range(len(sizes))]
    base = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    counts = list(lengths[:cut])
    for number in range(torch.Size(counts).numel()):
        at = base
        for count, stride in zip(reversed(counts), reversed(strides[:cut]), strict=True):
            number, index = divmod(number, count)
            at += index * stride
        yield at


def _bytes(tensor: _Tensor) -> memoryview:
    """The memory of a contiguous tensor, which must outlive the result."""
    array = ctypes.c_ubyte * tensor.nbytes
    return memoryview(array.from_address(tensor.data_ptr())).cast("B")


class StorageWriter(FileSystemWriter):  # type: ignore[misc]
    """Writes checkpoints for `torch.distributed.checkpoint.save`, which this `StorageReader` and
    torch's own `FileSystemReader` load.

    >>> dcp.save(state, storage_writer=dmafile.checkpoint.StorageWriter("latest/"))

    Each rank writes one file. The disk reads tensors from their own memory where their address and
    their offset in the file are equally aligned; others are copied through a small buffer, and
    tensors that are not on the CPU, not contiguous or part of other memory are copied first. The
    file is new, and on the disk before the metadata, which name it, atomically replace those of an
    earlier checkpoint: if the save is killed or the power fails, the folder has either the earlier
    checkpoint or the new one, complete. After that the files of the earlier one, and what killed
    saves have left, are removed.

    Args:
        path: The folder; created if it does not exist.
        overwrite: Whether an existing checkpoint may be replaced.
        options: As in `dmafile.save`: `method`, `io`, `block`, `queue_depth`.

    Raises:
        Error: As `dmafile.save`. `torch.distributed.checkpoint` raises it as a CheckpointException.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = True,
        **options: Unpack[SaveOptions],
    ) -> None:
        super().__init__(path)
        self._replace = overwrite
        # torch's own check only warns, or raises an error without the name of the folder.
        self.overwrite = True
        if unknown := options.keys() - {"method", "io", "block", "queue_depth"}:
            raise TypeError(f"{min(unknown)!r} is not an option of a StorageWriter")
        self._options = options

    def prepare_local_plan(self, plan: Any) -> Any:
        """Creates the folder, and names the file of this rank if there is no coordinator."""
        Path(self.path).mkdir(parents=True, exist_ok=True)
        if not self._replace and self._metadata_exists():
            text = f"{self.path}: there is a checkpoint already (EEXIST); pass overwrite=True"
            raise FileExistsError(errno.EEXIST, text)
        if self.rank is not None and not self.use_collectives:
            return replace(plan, storage_data=_StoragePrefix(_prefix(self.rank)))
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Names the file of each rank."""
        return [
            plan
            if plan.storage_data is not None
            else replace(plan, storage_data=_StoragePrefix(_prefix(rank)))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Writes the file of this rank."""
        name = plan.storage_data.prefix + _SUFFIX
        file = _Parts()
        results = []
        for item in plan.items:
            start = file.nbytes
            data = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                file.write(data.getbuffer())
            else:
                file.save(_alone(data.detach().cpu()))
            length = file.nbytes - start
            results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
        if file.parts:
            save(file.parts, Path(self.path) / name, **self._options)
        return _done(results)

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        """Replaces the metadata, then removes files that they no longer name."""
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {one.index: one.storage_data for some in results for one in some}
        metadata.storage_meta = self.storage_meta()
        alone = not self.use_collectives and self.rank is not None
        save([pickle.dumps(metadata)], self._get_metadata_path(self.rank if alone else None))
        named = {one.relative_path for one in metadata.storage_data.values()}
        ranks = re.escape(f"__{self.rank}_") if alone else r"__\d+_"
        ours = re.compile(rf"{ranks}.*{re.escape(_SUFFIX)}")
        for file in Path(self.path).iterdir():
            if ours.fullmatch(file.name) and file.name not in named:
                file.unlink(missing_ok=True)


def _prefix(rank: int) -> str:
    """A name that no file of an earlier checkpoint has."""
    return f"__{rank}_{uuid.uuid4().hex}"


def _alone(tensor: _Tensor) -> _Tensor:
    """A tensor whose storage has only its elements, in order."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class _Parts:
    """The contents of a file: the memory of tensors in place, and the bytes between them."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.nbytes = 0
        self._tensors: list[_Tensor] = []

    def save(self, tensor: _Tensor) -> None:
        """Adds what `torch.save` writes."""
        self._tensors.append(tensor)
        torch.save(tensor, self)

    def write(self, data: Any) -> int:
        """Called by `torch.save` with small pieces, and with all bytes of a tensor."""
        view = memoryview(data)
        self.nbytes += view.nbytes
        if view.nbytes >= _LARGE and self._tensors and view.nbytes == self._tensors[-1].nbytes:
            self.parts.append(_bytes(self._tensors[-1]))
        elif self.parts and isinstance(self.parts[-1], bytearray):
            self.parts[-1] += view
        elif view.nbytes:
            self.parts.append(bytearray(view))
        return view.nbytes

    def flush(self) -> None:
        """Part of the file interface."""
