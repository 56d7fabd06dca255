"""Models that transformers makes from lazy tensors equal those that it reads itself."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import dmafile
import pytest

from conftest import bytes_read
from loaders import tiny

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "tied"])
def model(folder: Path, request: pytest.FixtureRequest) -> Path:
    # Matrices of up to 2 MiB, and small tensors that are read through the page cache.
    return tiny.llama(folder / f"llama-{request.param}", hidden=512, tied=request.param)


def made(path: Path, weights: Mapping[str, Any], **options: Any) -> Any:
    config = transformers.LlamaConfig.from_pretrained(path)
    return transformers.LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=weights, **options
    )


def check_same(ours: Any, theirs: Any) -> None:
    got, want = ours.state_dict(), theirs.state_dict()
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name
    tokens = torch.arange(8)[None]
    generated = [
        model.generate(tokens, max_new_tokens=8, do_sample=False) for model in (ours, theirs)
    ]
    assert torch.equal(*generated)


def test_a_model_from_lazy_tensors_equals_one_of_transformers(model: Path) -> None:
    theirs = transformers.LlamaForCausalLM.from_pretrained(model)
    check_same(made(model, dmafile.transformers.state_dict(model)), theirs)
    files = sorted(model.glob("*.safetensors"))
    check_same(made(model, dmafile.transformers.state_dict(files, method="threads")), theirs)
    tied = theirs.config.tie_word_embeddings
    ours = made(model, dmafile.transformers.state_dict(model))
    same = ours.lm_head.weight.data_ptr() == ours.model.embed_tokens.weight.data_ptr()
    assert same == tied


@pytest.mark.parametrize("dtype", [torch.bfloat16, "auto"])
def test_a_requested_dtype_is_used(model: Path, dtype: Any) -> None:
    theirs = transformers.LlamaForCausalLM.from_pretrained(model, dtype=dtype)
    check_same(made(model, dmafile.transformers.state_dict(model), dtype=dtype), theirs)


def test_dtype_auto_uses_the_dtype_of_the_tensors(model: Path) -> None:
    config = transformers.LlamaConfig.from_pretrained(model)
    config.dtype = None
    weights = dmafile.transformers.state_dict(model)
    ours = transformers.LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=weights, dtype="auto"
    )
    assert ours.dtype == torch.float32


class Seen(Mapping[str, Any]):
    """Remembers which threads have read which tensors."""

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self.weights = weights
        self.reads: list[tuple[str, str]] = []

    def __getitem__(self, name: str) -> Any:
        lazy, reads = self.weights[name], self.reads

        class Lazy:
            def get_shape(self) -> list[int]:
                return list(lazy.get_shape())

            def __getitem__(self, index: Any) -> Any:
                reads.append((threading.current_thread().name, name))
                return lazy[index]

        return Lazy()

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def test_several_threads_read_each_tensor_once(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = transformers.LlamaForCausalLM.from_pretrained(model)
    monkeypatch.delenv("HF_DEACTIVATE_ASYNC_LOAD", raising=False)
    weights = Seen(dmafile.transformers.state_dict(model))
    nbytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    before = bytes_read()
    ours = made(model, weights)
    grown = bytes_read() - before
    check_same(ours, theirs)
    names = [name for _, name in weights.reads]
    assert sorted(names) == sorted(weights)
    if (os.cpu_count() or 1) > 1:
        assert len({thread for thread, _ in weights.reads}) > 1
    assert grown <= 1.02 * nbytes


def test_missing_and_unexpected_tensors_are_named(model: Path) -> None:
    weights = dict(dmafile.transformers.state_dict(model))
    weights["surplus"] = weights.pop("model.norm.weight")
    _, said = made(model, weights, output_loading_info=True)
    assert set(said["missing_keys"]) == {"model.norm.weight"}
    assert set(said["unexpected_keys"]) == {"surplus"}


def test_a_truncated_file_is_an_error(folder: Path) -> None:
    model = tiny.llama(folder / "short", hidden=512)
    weights = dmafile.transformers.state_dict(model)
    last = sorted(model.glob("*.safetensors"))[-1]
    os.truncate(last, last.stat().st_size // 2)
    with pytest.raises(Exception, match=r"ENODATA|EIO|ends"):
        made(model, weights)


def mapped() -> set[str]:
    """The files that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "/" in line}


def test_code_that_needs_a_path_reads_the_folder_of_a_hold(model: Path, tmp_path: Path) -> None:
    theirs = transformers.LlamaForCausalLM.from_pretrained(model)
    held = tmp_path / "held"
    with dmafile.hold(model, socket=tmp_path / "socket", folder=held):
        ours = transformers.AutoModelForCausalLM.from_pretrained(held)
    check_same(ours, theirs)
    # The tensors are views of the memory that was held.
    names = [name for name in mapped() if name.endswith(".safetensors (deleted)")]
    assert len(names) == tiny.SHARDS and all(name.startswith("/memfd:") for name in names)


PARALLEL = """
import os, sys, torch, torch.distributed as dist, dmafile.transformers
from transformers import LlamaConfig, LlamaForCausalLM
folder, store = sys.argv[1:]
# Forked, because to import PyTorch takes longer than all that is done with it.
child = os.fork()
rank = int(child == 0)
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
weights = dmafile.transformers.state_dict(folder)
config = LlamaConfig.from_pretrained(folder)
model = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights, tp_plan="auto")
whole = LlamaForCausalLM.from_pretrained(folder)
parts = 0
for name, tensor in whole.state_dict().items():
    ours = model.state_dict()[name]
    if hasattr(ours, "full_tensor"):
        parts += ours.to_local().numel() < tensor.numel()
        ours = ours.full_tensor()
    assert torch.equal(ours, tensor), name
assert parts >= 14, parts
tokens = torch.arange(8)[None]
made = [one.generate(tokens, max_new_tokens=8, do_sample=False) for one in (model, whole)]
assert torch.equal(*made)
dist.destroy_process_group()
if rank:
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_tensor_parallel_ranks_load_their_parts(model: Path, tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-c", PARALLEL, model, tmp_path / "store"],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
