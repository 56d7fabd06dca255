"""`dmafile load MODEL -- COMMAND {}`: programs read a loaded model without knowing dmafile."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.numpy

COMMAND = Path(sys.executable).parent / "dmafile"

# Each program prints as JSON what it has read, which must be the same without dmafile. No program
# contains a pair of braces, because `dmafile load` would replace it by the path.
SAFETENSORS = """
import hashlib, json, sys
from pathlib import Path
import safetensors

path = Path(sys.argv[1])
files = [path]
if path.is_dir():
    names = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"].values()
    files = sorted({path / name for name in names})
    files_beside = [(path / "config.json").read_text(), (path / "more" / "README").read_text()]
    assert files_beside == ['{"layers": 2}', "read me"]
elif path.name.endswith(".index.json"):
    files = sorted(path.parent.glob("model-*.safetensors"))
digests = dict()
for file in files:
    with safetensors.safe_open(file, framework="np") as model:
        for name in model.keys():
            digests[name] = hashlib.sha256(model.get_tensor(name).tobytes()).hexdigest()
print(json.dumps([path.name, len(files), digests]))
"""
GGUF = """
import hashlib, json, sys
import gguf

tensors = gguf.GGUFReader(sys.argv[1]).tensors
print(json.dumps({one.name: hashlib.sha256(one.data.tobytes()).hexdigest() for one in tensors}))
"""
MAP = """
import hashlib, json, mmap, os, sys

with open(sys.argv[1], "rb") as file:
    size = os.fstat(file.fileno()).st_size
    whole = mmap.mmap(file.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ)
    tail = mmap.mmap(file.fileno(), size - 4096, mmap.MAP_PRIVATE, mmap.PROT_READ, offset=4096)
    print(json.dumps([size, *(hashlib.sha256(view).hexdigest() for view in (whole, tail))]))
"""
# A program that starts another one without inheriting descriptors, as subprocess does.
NESTED = """
import subprocess, sys

sys.exit(subprocess.run([sys.executable, "-c", *sys.argv[1:]], close_fds=True).returncode)
"""
LLAMA = """
import json, sys
import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx, params.n_parallel, params.warmup, params.cpuparams.n_threads = 64, 1, False, 1
server = xllamacpp.Server(params)
answer = server.handle_completions({"prompt": "hello", "max_tokens": 12, "temperature": 0.0})
answer = answer if isinstance(answer, dict) else json.loads(answer)
with open("/proc/self/maps") as maps:
    shared = [line.split()[1] for line in maps if "llama" in line and ".gguf" in line]
print(json.dumps([answer["choices"][0]["text"], shared]))
"""


def run(*words: object) -> Any:
    """The JSON that a program prints."""
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def same(program: str, model: Path, *options: str) -> Any:
    """What a program reads from a model; asserts that it reads the same without dmafile."""
    python = (sys.executable, "-c", program)
    plain = run(*python, model)
    handed = run(COMMAND, "load", model, "--quiet", *options, "--", *python, "{}")
    assert handed == plain
    return handed


@pytest.fixture(scope="module")
def sharded(folder: Path) -> Path:
    """A model as the Hugging Face libraries store it: three shards, an index and other files."""
    random = np.random.default_rng(9)
    model = folder / "sharded"
    (model / "more").mkdir(parents=True)
    (model / "more" / "README").write_text("read me")
    (model / "config.json").write_text('{"layers": 2}')
    placed = {}
    for number in (1, 2, 3):
        name = f"model-{number:05}-of-00003.safetensors"
        shape = (number * 1000, 33)
        arrays = {
            f"layer.{number}.{part}": random.standard_normal(shape).astype(np.float32)
            for part in ("a", "b")
        }
        safetensors.numpy.save_file(arrays, model / name)
        placed.update(dict.fromkeys(arrays, name))
    index = json.dumps({"metadata": {}, "weight_map": placed})
    (model / "model.safetensors.index.json").write_text(index)
    return model


@pytest.fixture(scope="module")
def llama(folder: Path) -> Path:
    return language_model(folder / "llama.gguf", width=64, inner=128)


def language_model(path: Path, width: int, inner: int) -> Path:
    """A language model of two layers with bytes as tokens and random weights."""
    random = np.random.default_rng(5)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(2)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // 4)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([2, 3, 3, *[6] * 256])
    shapes = {
        "token_embd": (len(tokens), width),
        "output_norm": (width,),
        "output": (len(tokens), width),
    }
    for block in ("blk.0", "blk.1"):
        square = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (width, width))
        wide = {"ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner)}
        norms = dict.fromkeys(("attn_norm", "ffn_norm"), (width,))
        for name, shape in {**square, **wide, **norms}.items():
            shapes[f"{block}.{name}"] = shape
    for name, shape in shapes.items():
        values = random.standard_normal(shape).astype(np.float32) / 10
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_safetensors_opens_a_file_a_folder_and_an_index(sharded: Path) -> None:
    assert same(SAFETENSORS, sharded / "model-00002-of-00003.safetensors")[1] == 1
    assert same(SAFETENSORS, sharded)[:2] == ["sharded", 3]
    assert same(SAFETENSORS, sharded / "model.safetensors.index.json")[1] == 3


def test_each_file_is_described_and_verified(sharded: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    script = 'echo "[\\"$DMAFILE_NAMES\\", \\"$DMAFILE_FD\\", \\"$DMAFILE_BYTES\\"]"'
    options = ("--quiet", "--verify=sha256", f"--json={report}")
    told = run(COMMAND, "load", sharded, *options, "--", "sh", "-c", script, "{}")
    names, fds, sizes = (text.split(",") for text in told)
    assert len(set(fds)) == 3
    files = json.loads(report.read_text())["files"]
    assert [Path(one["file"]).name for one in files] == names
    for name, size, one in zip(names, sizes, files, strict=True):
        path = sharded / name
        assert path.stat().st_size == int(size) == one["bytes"]
        command = ["sha256sum", str(path)]
        digest = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert one["verify"]["digest"] == digest.split()[0]


@pytest.mark.slow
def test_gguf_opens_a_file_and_a_split_model(folder: Path, llama: Path) -> None:
    assert len(same(GGUF, llama)) == 21
    split = folder / "split"
    split.mkdir()
    for number in (0, 1):
        part = split / f"part-{number + 1:05}-of-00002.gguf"
        writer = gguf.GGUFWriter(part, "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", 2)
        writer.add_tensor(f"weight.{number}", np.full((7, 33), number, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    first = split / "part-00001-of-00002.gguf"
    assert list(same(GGUF, first)) == ["weight.0"]
    beside = "import sys; sys.argv[1] = sys.argv[1].replace('00001-of', '00002-of')\n"
    assert list(same(beside + GGUF, first)) == ["weight.1"]


def test_programs_map_the_memory_by_path(file: Path) -> None:
    assert same(MAP, file)[0] == file.stat().st_size


def test_child_processes_of_a_command_open_the_path(file: Path) -> None:
    plain = run(sys.executable, "-c", MAP, file)
    command = (sys.executable, "-c", NESTED, MAP, "{}")
    assert run(COMMAND, "load", file, "--quiet", "--", *command) == plain


def test_llama_cpp_maps_the_memory_and_generates_the_same_text(llama: Path) -> None:
    pytest.importorskip("xllamacpp", reason="pip install --no-deps xllamacpp")
    text, shared = same(LLAMA, llama)
    assert text
    # A shared mapping, first of the file and then of the memory.
    assert shared == ["r--s"]
