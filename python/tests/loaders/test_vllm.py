"""The load format for vLLM, with vLLM's CPU build."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from stores import Stores

from conftest import Run, write
from loaders import tiny

vllm: Any = pytest.importorskip("vllm", reason="vLLM is not installed")

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    # Large compared with what a process reads of its own code at the same time.
    made = tiny.llama(folder / "vllm", hidden=2048)
    tiny.tokenizer(made)
    return made


def generate(
    model: Path, environment: dict[str, str], **options: Any
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, HERE / "generate.py", model, json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=540,
        env=os.environ | environment,
    )


def tokens(done: "subprocess.CompletedProcess[str]") -> list[list[int]]:
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("TOKENS "))
    made: list[list[int]] = json.loads(line.removeprefix("TOKENS "))
    return made


ALONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# Each rank has its own CPU instead of a NUMA node.
TWO = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture(scope="module")
def theirs(model: Path) -> list[list[int]]:
    made = tokens(generate(model, ALONE, load_format="auto"))
    assert [len(one) for one in made] == [16, 16]
    return made


def test_one_rank_generates_the_same_tokens(model: Path, theirs: list[list[int]]) -> None:
    extra = {"budget": 100_000, "verify": "xxh3", "share": "off"}
    options: dict[str, Any] = {"load_format": "dmafile", "model_loader_extra_config": extra}
    done = generate(model, ALONE, **options)
    assert tokens(done) == theirs
    assert "Loading weights took" in done.stdout + done.stderr


@pytest.mark.parametrize("share", [None, "off"])
def test_two_ranks_generate_the_same_tokens(
    model: Path, theirs: list[list[int]], share: str | None
) -> None:
    files = list(model.glob("*.safetensors"))
    for file in files:
        write(file, file.read_bytes())
    extra = {"share": share} if share else {}
    options: dict[str, Any] = {"load_format": "dmafile", "model_loader_extra_config": extra}
    done = generate(model, TWO, tensor_parallel_size=2, **options)
    assert tokens(done) == theirs
    said = done.stdout + done.stderr
    assert ("Weights of 2 ranks on 1 nodes: " in said) == (share is None)
    # Each byte is read once, unless each rank reads for itself.
    read = [int(nbytes) for nbytes in re.findall(r"READ (\d+)", said)]
    size = sum(file.stat().st_size for file in files)
    assert len(read) == 2
    if share is None:
        assert sum(read) <= 1.02 * size
        # Without direct reads more may be read, and from memory nothing.
        assert sum(read) >= 0.98 * size or sum(read) == 0


def test_vllm_finds_the_entry_point_and_the_load_format() -> None:
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name="dmafile")
    assert {one.value for one in found} == {"dmafile.vllm:register"}
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    next(iter(found)).load()()
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    loader = get_model_loader(LoadConfig(load_format="dmafile"))
    assert type(loader).__module__ == "dmafile._vllm"


WRONG: list[tuple[Any, str]] = [
    ({"bugdet": 1, "shares": "node"}, "has no bugdet, shares; it has budget, verify, share"),
    ({"budget": 0}, "budget: 0 is not a number of bytes"),
    ({"budget": True}, "budget: True is not a number"),
    ({"budget": "1G"}, "budget: '1G' is not a number"),
    ({"verify": 1}, "verify: 1 is not a checksum"),
    ({"share": "all"}, "share: 'all' is not 'off' or 'node'"),
]


@pytest.mark.parametrize("extra,text", WRONG)
def test_invalid_extra_config_is_named(extra: Any, text: str) -> None:
    from dmafile._vllm import Loader
    from vllm.config.load import LoadConfig

    config = LoadConfig(load_format="dmafile", model_loader_extra_config=extra)
    with pytest.raises(ValueError, match=text):
        Loader(config)


def iterated(model: Path, **source: Any) -> dict[str, Any]:
    from dmafile._vllm import Loader
    from vllm.config.load import LoadConfig

    loader = Loader(LoadConfig(load_format="dmafile"))
    experts = source.pop("experts", None)
    loader.local_expert_ids = experts
    began = time.perf_counter()
    where = Loader.Source(str(model), None, **source)
    weights = dict(loader._get_weights_iterator(where))
    assert loader.counter_before_loading_weights >= began
    return weights


def test_tensors_that_vllm_filters_are_left_out(model: Path, folder: Path) -> None:
    import safetensors.numpy

    whole = iterated(model, prefix="outer.")
    names = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    assert whole.keys() == {f"outer.{name}" for name in names}
    first = {name for name, file in names.items() if "00001" in file}
    assert iterated(model, is_unused_weight=first.__contains__).keys() == names.keys() - first
    # A file that the index does not list.
    extra = folder / "vllm-extra"
    extra.mkdir()
    for file in model.iterdir():
        (extra / file.name).symlink_to(file)
    array = next(iter(safetensors.numpy.load_file(next(model.glob("*.safetensors"))).values()))
    safetensors.numpy.save_file({"other": array}, extra / "consolidated.safetensors")
    assert iterated(extra).keys() == names.keys()
    # Experts of other ranks.
    experts = folder / "vllm-experts"
    experts.mkdir()
    weights = {f"model.layers.0.mlp.experts.{n}.up_proj.weight": array for n in range(4)}
    scales = {f"model.layers.0.mlp.experts.{n}.up_proj.scale": array for n in range(4)}
    safetensors.numpy.save_file(weights | scales, experts / "model.safetensors")
    mine = {name for name in weights if ".1." in name or ".3." in name}
    assert iterated(experts, experts={1, 3}).keys() == mine | scales.keys()


def test_the_entry_point_imports_nothing_and_never_raises(python: Run) -> None:
    done = python(
        """
import sys
from dmafile.vllm import register
assert not {"torch", "vllm", "numpy"} & sys.modules.keys(), sys.modules.keys()
sys.modules["vllm"] = None
register()
"""
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.count("\n") == 1 and "no load format dmafile" in done.stderr, done.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_come_from_a_store(
    model: Path, theirs: list[list[int]], folder: Path, ranks: int
) -> None:
    # Without weights, which vLLM then could not load itself.
    small = shutil.copytree(
        model,
        folder / f"vllm-small-{ranks}",
        ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"),
    )
    with Stores.running() as store:
        for file in model.iterdir():
            store.files[f"/bucket/model/{file.name}"] = file.read_bytes()
        extra = {"weights": "s3://bucket/model/", "verify": "xxh3"}
        options: dict[str, Any] = {"load_format": "dmafile", "model_loader_extra_config": extra}
        environment = (ALONE if ranks == 1 else TWO) | store.environment()
        done = generate(small, environment, tensor_parallel_size=ranks, **options)
        assert tokens(done) == theirs
        files = [data for name, data in store.files.items() if name.endswith(".safetensors")]
        size = sum(map(len, files))
        # Each rank reads the headers, in the first MiB.
        assert size <= store.sent <= size + ranks * len(files) * (1 << 20) + (64 << 10)
