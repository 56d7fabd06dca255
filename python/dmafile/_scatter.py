"""Reads many pieces of files, each into its place."""

import errno
import os
import pickle
import struct
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from ._errors import make

_GAP = 64 << 10
"""Gaps between pieces that are shorter, in bytes, cost less to read than another call."""
_LONGEST = 16 << 20
_MOST = 512
"""Limits of one read, in bytes and in destinations; the kernel accepts 1024 of these (IOV_MAX)."""
_THREADS = 4


@dataclass(frozen=True)
class Place:
    """Where the bytes of a whole tensor are in a file, in C order."""

    file: Path
    offset: int
    dtype: Any
    sizes: Any


class Piece(NamedTuple):
    """Bytes of a file, and their destination."""

    file: Path
    offset: int
    memory: memoryview


class Files:
    """Files, opened on first use and closed at the end of a `with` block."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def __getitem__(self, file: Path) -> int:
        if file not in self._open:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            self._open[file] = descriptor
            # No read-ahead: only what is requested is read.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return self._open[file]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)


def read(files: Files, pieces: list[Piece]) -> None:
    """Fills all pieces. Adjacent ones of a file share a read, and several reads run at the same
    time."""
    ordered = sorted(pieces, key=lambda piece: (piece.file, piece.offset))
    with ThreadPoolExecutor(_THREADS, "dmafile") as threads:
        reads = [
            threads.submit(_fill, files[file], file, start, views)
            for file, start, views in _merged(ordered)
        ]
        try:
            for one in reads:
                one.result()
        finally:
            for one in reads:
                one.cancel()


def _merged(ordered: list[Piece]) -> Iterator[tuple[Path, int, list[memoryview]]]:
    """Reads of adjacent pieces, including the gaps between them, which are discarded."""
    between = memoryview(bytearray(_GAP))
    file, start, end = Path(), 0, 0
    views: list[memoryview] = []
    for piece in ordered:
        for at in range(0, piece.memory.nbytes, _LONGEST):
            memory, offset = piece.memory[at : at + _LONGEST], piece.offset + at
            gap = offset - end
            fits = offset + memory.nbytes - start <= _LONGEST and len(views) + 2 <= _MOST
            if views and piece.file == file and 0 <= gap < _GAP and fits:
                if gap:
                    views.append(between[:gap])
            else:
                if views:
                    yield file, start, views
                file, start, views = piece.file, offset, []
            views.append(memory)
            end = offset + memory.nbytes
    if views:
        yield file, start, views


def _fill(descriptor: int, file: Path, offset: int, views: list[memoryview]) -> None:
    while views:
        got = os.preadv(descriptor, views, offset)
        if got == 0:
            text = f"cannot read: {file}, byte {offset}: the file ends there (ENODATA)"
            raise make("failed", errno.ENODATA, text, os.fsdecode(file), "save it again")
        offset += got
        while views and got >= views[0].nbytes:
            got -= views.pop(0).nbytes
        if got:
            views[0] = views[0][got:]


class _Window:
    """A range of a file, as a file object for reading."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        self._descriptor, self._start, self._length, self._at = descriptor, start, length, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self._length - self._at, 0)
        data = os.pread(
            self._descriptor, left if size < 0 else min(size, left), self._start + self._at
        )
        self._at += len(data)
        return data


def saved_place(files: Files, file: Path, start: int, length: int) -> Place | None:
    """Where the elements of one tensor are in what `torch.save` wrote; None for anything but a
    plain tensor whose elements are there in C order, uncompressed."""
    window: Any = _Window(files[file], start, length)
    try:
        with zipfile.ZipFile(window) as archive:
            records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            with archive.open(records["data.pkl"]) as pickled:
                stored = _Tensors(pickled).load()
            if not isinstance(stored, _Stored):
                return None
            data, order = records[f"data/{stored.key}"], records.get("byteorder")
            if order is not None and archive.read(order) != b"little":
                return None
        window.seek(data.header_offset)
        signature, name, extra = struct.unpack("<4s22xHH", window.read(30))
    except (zipfile.BadZipFile, pickle.UnpicklingError, KeyError, struct.error):
        return None
    width = stored.dtype.itemsize
    first = data.header_offset + 30 + name + extra + stored.first * width
    end = first + stored.sizes.numel() * width
    plain = signature == b"PK\3\4" and data.compress_type == zipfile.ZIP_STORED
    if not plain or end > length:
        return None
    return Place(file, start + first, stored.dtype, stored.sizes)


@dataclass
class _Stored:
    """A tensor, as described in a pickle."""

    dtype: Any
    key: str
    first: int
    sizes: Any


class _Tensors(pickle.Unpickler):
    """Unpickles the description of one plain tensor by `torch.save`. Anything else is an error, and
    nothing that the file names is executed."""

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("torch._utils", "_rebuild_tensor_v2"): _typed,
            ("torch._utils", "_rebuild_tensor_v3"): _untyped,
            ("collections", "OrderedDict"): dict,
            ("torch.storage", "UntypedStorage"): None,
        }
        if (module, name) in known:
            return known[module, name]
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        if found is not None and name.endswith("Storage"):
            return found.dtype
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a plain tensor")

    def persistent_load(self, pid: Any) -> Any:
        """The type of a storage, and the name of its bytes."""
        return pid[1:3]


def _typed(storage: Any, first: int, sizes: Any, strides: Any, *more: Any) -> _Stored:
    return _stored(storage[0], storage[1], first, sizes, strides, more[2:])


def _untyped(storage: Any, first: int, sizes: Any, strides: Any, *more: Any) -> _Stored:
    return _stored(more[2], storage[1], first, sizes, strides, more[3:])


def _stored(dtype: Any, key: str, first: int, sizes: Any, strides: Any, more: Any) -> _Stored:
    dense = [torch.Size(sizes[i + 1 :]).numel() for i in range(len(sizes))]
    together = zip(sizes, strides, dense, strict=True)
    # Further values say that the elements must be negated or conjugated.
    if any(more) or any(size > 1 and have != want for size, have, want in together):
        raise pickle.UnpicklingError("the elements are not stored as plain numbers")
    return _Stored(dtype, key, first, torch.Size(sizes))
