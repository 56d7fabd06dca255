"""Checkpoints: saved and loaded by different numbers of ranks, and saves that are killed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import dmafile
import pytest

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
dcp: Any = pytest.importorskip("torch.distributed.checkpoint")
safetensors: Any = pytest.importorskip("safetensors.torch")

HERE = Path(__file__).parent
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def ranks(folder: Path, *tasks: str) -> None:
    done = subprocess.run(
        [sys.executable, HERE / "ranks.py", folder, *tasks],
        capture_output=True,
        text=True,
        timeout=540,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def place(folder: Path, request: pytest.FixtureRequest) -> Path:
    return folder / str(request.node.name)


def test_three_ranks_load_what_four_saved(place: Path) -> None:
    ranks(place, "4:save", "3:load")
    names = sorted(file.name for file in place.iterdir())
    assert len(names) == 5 and names[0] == ".metadata", "one file per rank, and the metadata"
    # A save to the same place replaces it.
    ranks(place, "3:save", "4:load")
    assert len(list(place.iterdir())) == 4


def test_checkpoints_of_torch_are_loaded(place: Path) -> None:
    ranks(place, "2:save-theirs", "3:load")


def test_a_safetensors_model_is_loaded(place: Path) -> None:
    # This import needs torch.
    from loaders.ranks import whole

    tensors = whole()
    place.mkdir()
    for number, names in enumerate([["rows", "half", "few"], sorted(tensors)]):
        some = {name: tensors[name] for name in names if number == 0 or name not in "rows half few"}
        safetensors.save_file(some, place / f"model-{number}.safetensors")
    ranks(place, "2:load-model")


def test_the_previous_checkpoint_is_whole_after_a_kill(place: Path) -> None:
    done = subprocess.run(
        [sys.executable, HERE / "killed.py", place, os.environ.get("KILLS", "10")],
        capture_output=True,
        text=True,
        timeout=540,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    files, saved = map(int, done.stdout.split())
    assert files == 2, "the metadata and the file of one rank"
    assert saved >= 1


KINDS = {
    "transposed": lambda: torch.arange(60.0).reshape(5, 12).T,
    "strided": lambda: torch.arange(100)[::3],
    "a view": lambda: torch.arange(100_000.0)[500:90_000],
    "bfloat16": lambda: torch.arange(70_000).to(torch.bfloat16),
    "float8": lambda: torch.arange(70_000).to(torch.float8_e4m3fn),
    "uint16": lambda: torch.arange(7).to(torch.uint16),
    "complex": lambda: torch.randn(100_000, dtype=torch.complex64),
    "conjugated": lambda: torch.randn(100_000, dtype=torch.complex64).conj(),
    "bool": lambda: torch.arange(9) > 4,
    "scalar": lambda: torch.tensor(3.5),
    "empty": lambda: torch.zeros(4, 0),
    "parameter": lambda: torch.nn.Parameter(torch.randn(300, 300)),
}


def equal(left: Any, right: Any) -> bool:
    same = (left.dtype, left.shape) == (right.dtype, right.shape)
    left, right = (one.detach().resolve_conj().contiguous() for one in (left, right))
    return same and bytes(left.reshape(-1).view(torch.uint8).tolist()) == bytes(
        right.reshape(-1).view(torch.uint8).tolist()
    )


@pytest.mark.parametrize("writer", ["ours", "theirs"])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_every_kind_are_saved_and_loaded(tmp_path: Path, kind: str, writer: str) -> None:
    saved = KINDS[kind]()
    made = {"ours": dmafile.checkpoint.StorageWriter, "theirs": dcp.FileSystemWriter}[writer]
    dcp.save({"it": saved, "between": torch.ones(3)}, storage_writer=made(tmp_path), no_dist=True)
    for reader in (dmafile.checkpoint.StorageReader, dcp.FileSystemReader):
        for target in (torch.zeros_like(saved), torch.zeros(saved.T.shape, dtype=saved.dtype).T):
            state = {"it": target.detach(), "between": torch.zeros(3)}
            dcp.load(state, storage_reader=reader(tmp_path), no_dist=True)
            assert equal(state["it"], saved), reader
            assert torch.equal(state["between"], torch.ones(3))


def test_memory_for_copies_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint: Any = dmafile.checkpoint
    saved = {f"{n}": torch.full((100, 1000), float(n)) for n in range(9)}
    dcp.save(saved, storage_writer=dmafile.checkpoint.StorageWriter(tmp_path), no_dist=True)
    monkeypatch.setattr(checkpoint, "_COPIED", 2 * 400_000)
    reads: list[int] = []
    read = checkpoint.read

    def counted(files: Any, pieces: Any) -> None:
        reads.append(len(pieces))
        read(files, pieces)

    monkeypatch.setattr(checkpoint, "read", counted)
    # Targets of another type need a copy; those of the same type are read into directly.
    for dtype, want in ((torch.float64, [2, 2, 2, 2, 1]), (torch.float32, [9])):
        state = {name: torch.zeros_like(tensor, dtype=dtype) for name, tensor in saved.items()}
        reads.clear()
        dcp.load(state, storage_reader=dmafile.checkpoint.StorageReader(tmp_path), no_dist=True)
        assert reads == want
        assert all(torch.equal(state[name], tensor.to(dtype)) for name, tensor in saved.items())


def test_overwrite_false_keeps_an_existing_checkpoint(tmp_path: Path) -> None:
    writer = dmafile.checkpoint.StorageWriter(tmp_path, overwrite=False, method="threads")
    dcp.save({"it": torch.ones(3)}, storage_writer=writer, no_dist=True)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(dcp.CheckpointException, match="EEXIST"):
        dcp.save({"it": torch.zeros(3)}, storage_writer=writer, no_dist=True)
    assert before == {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(TypeError, match="magic"):
        dmafile.checkpoint.StorageWriter(tmp_path, magic=1)  # type: ignore[call-arg]


def test_missing_and_truncated_files_are_errors(tmp_path: Path) -> None:
    folder = tmp_path / "it"
    state = {"it": torch.ones(1000, 1000)}
    dcp.save(state, storage_writer=dmafile.checkpoint.StorageWriter(folder), no_dist=True)
    file = next(folder.glob("*.distcp"))
    with file.open("r+b") as opened:
        opened.truncate(1 << 20)
    reader = dmafile.checkpoint.StorageReader(folder)
    with pytest.raises(dcp.CheckpointException):
        dcp.load({"it": torch.zeros(1000, 1000)}, storage_reader=reader, no_dist=True)
    file.unlink()
    with pytest.raises(dcp.CheckpointException, match=file.name):
        dcp.load({"it": torch.zeros(1000, 1000)}, storage_reader=reader, no_dist=True)
    shutil.rmtree(folder)
    with pytest.raises(dcp.CheckpointException, match="metadata"):
        dcp.load({"it": torch.zeros(1000, 1000)}, storage_reader=reader, no_dist=True)
    folder.touch()
    with pytest.raises(dcp.CheckpointException, match=r"EEXIST|exists"):
        dcp.save(state, storage_writer=dmafile.checkpoint.StorageWriter(folder), no_dist=True)
