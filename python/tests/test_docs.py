"""The examples of the documentation work."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from stores import COMMIT, Stores

from conftest import file_sha256

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "kernel", "kernel/docs", "vm")
PAGES = [
    ROOT / "README.md",
    *(page for folder in FOLDERS for page in sorted((ROOT / folder).glob("*.md"))),
]


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.M | re.S)
    return [text for name, text in found if name == language]


@pytest.mark.parametrize("name", ["README.md", "docs/python.md", "docs/safetensors.md"])
def test_the_python_examples_of_the_documentation_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = ROOT / name
    examples = blocks(page, "python")
    assert examples
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    weight = np.arange(400 * 256, dtype=np.float32).reshape(400, 256)
    arrays = {"large.weight": weight, "large.bias": weight[0], "a.norm.weight": weight[1]}
    safetensors.numpy.save_file(arrays, "model.safetensors")
    Path("sockets").mkdir(mode=0o700)
    names: dict[str, object] = {}
    for example in examples:
        # Root's holds are those of the whole machine.
        example = re.sub(r"\bllama\b", f"llama-{os.getpid()}", example)
        exec(compile(example, str(page), "exec"), names)
    if name == "README.md":
        tensors = names["tensors"]
        assert isinstance(tensors, dict) and np.array_equal(tensors["large.weight"], weight)
        assert file_sha256(Path("copy.safetensors")) == file_sha256(Path("model.safetensors"))
        return
    assert capsys.readouterr().out
    assert np.array_equal(np.asarray(names["rows"]), weight[100:116])
    if name == "docs/python.md":
        some = names["some"]
        assert isinstance(some, dict) and set(some) == {"large.bias", "a.norm.weight"}


ELSEWHERE = {
    "MATRIX=1": "tests/vm/test_crashes.py",
    "adduser": "kernel/tests/vm/test_kernel.py, as udev does it",
    "apt": "packaging/test",
    "apt-get": "kernel/tests/vm/test_kernel.py, the headers it builds with",
    "cargo": "packaging/test-crates",
    "cc": "crates/capi/tests/install.rs",
    "insmod": "kernel/tests/vm/test_module.py",
    "kernel/apply": "vm/test_series.py",
    "make": "the targets' own tests",
    "mokutil": "nothing: no machine here has Secure Boot",
    "pip": "packaging/test-wheels, packaging/test-sdist",
    "python3": "packaging/test-sdist, the environment that it installs into",
    "reboot": "nothing",
    "systemctl": "crates/cli/tests/systemd.rs plays systemd",
    "venv/bin/pip": "packaging/test-wheels, packaging/test-sdist",
    "vllm": "python/tests/loaders/test_vllm.py",
    "vm/run": "vm/, tests/vm/",
}
"""Where the commands are tested that install, boot or need another package."""

IN_MACHINES = {"dmafile pins --pages", "dmafile pins --record", "dmafile pins --watch=60"}
"""These need root and a kernel with /proc/kcore, BPF and kprobes: tests/vm/test_pins.py."""

PROGRAMS = {
    # Each program that a page starts checks that it gets the bytes of the model.
    "serve": """
number=${DMAFILE_FD%%,*}
test "$(head --bytes="${DMAFILE_BYTES%%,*}" "/proc/self/fd/$number" | sha256sum)" = "$WANTED  -"
""",
    "resume": """
test "$(cat "/proc/self/fd/${DMAFILE_FD%%,*}" | sha256sum)" = "$WANTED  -"
""",
    "llama-server": """
test "$1" = -m
test -f "$2" || set -- "$1" "$2/model.safetensors"
test "$(sha256sum < "$2")" = "$WANTED  -"
""",
    "python3": """
test "${2#--model=}" != "$2"
test "$(sha256sum < "${2#--model=}/model.safetensors")" = "$WANTED  -"
""",
    "camera": """
exec cat model.safetensors
""",
}


def commands(block: str) -> list[str]:
    """The commands of a block, without their comments."""
    lines = [re.sub(r"\s+#.*", "", line.removeprefix("$ ")) for line in block.splitlines()]
    first = {"dmafile", "./camera", "cd", *ELSEWHERE}
    return [line for line in lines if line.partition(" ")[0] in first]


def is_elsewhere(lines: list[str]) -> bool:
    return any(line.partition(" ")[0] in ELSEWHERE for line in lines)


def test_blocks_without_a_language_are_commands_output_or_settings() -> None:
    for page in PAGES:
        for block in blocks(page, ""):
            assert block.startswith(("# ", "[")) or commands(block), f"{page}: {block}"


@pytest.mark.parametrize("name", ["README.md", "docs/python.md"])
def test_packages_are_installed_into_a_virtual_environment(name: str) -> None:
    """Debian's own Python refuses them (PEP 668)."""
    lines = [line for block in blocks(ROOT / name, "") for line in commands(block)]
    installs = [line for line in lines if "pip install" in line]
    assert lines.index("python3 -m venv venv") < lines.index(installs[0])
    assert all(line.startswith("venv/bin/pip install ") for line in installs)


@pytest.fixture
def stores() -> Iterator[Stores]:
    with Stores.running() as stores:
        yield stores


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the files, models and programs that the pages name."""
    arrays = {f"model.layers.{n}.weight": np.arange(1 << 18, dtype=np.float32) for n in range(2)}
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    (tmp_path / "model").mkdir()
    for copy in ("model.gguf", "model/model.safetensors"):
        shutil.copy(tmp_path / "model.safetensors", tmp_path / copy)
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "serve.py").touch()
    (tmp_path / "task.snapshot").mkdir()
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "disk").write_bytes(b"")
    os.truncate(tmp_path / "disk", 2 << 30)
    (tmp_path / "bin").mkdir()
    for name, script in PROGRAMS.items():
        path = tmp_path / "bin" / name
        path.write_text("#!/bin/sh -e\n" + script)
        path.chmod(0o755)
        (tmp_path / name).symlink_to(path)
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_the_documentation_run(page: Path, place: Path, stores: Stores) -> None:
    """Each command runs in one folder, with a memfd of the model as descriptors 3 and 4."""
    groups = [commands(block) for block in blocks(page, "")]
    lines = [line for group in groups if not is_elsewhere(group) for line in group]
    model = place / "model.safetensors"
    wanted = file_sha256(model)
    path = f"{place}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "XDG_RUNTIME_DIR": str(place / "run")}
    environment |= {"WANTED": wanted}
    environment |= {"HOME": str(place)}
    environment |= stores.environment()
    for start in (f"/Qwen/Qwen3-0.6B/resolve/{COMMIT}/", "/bucket/models/qwen/"):
        stores.files[f"{start}model.safetensors"] = model.read_bytes()
        stores.files[f"{start}config.json"] = b"{}"
    stores.files["/model.gguf"] = stores.files["/bucket/model.gguf"] = model.read_bytes()
    first = os.memfd_create("model")
    memory = fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(first)
    os.write(memory, model.read_bytes())
    holders = []
    try:
        for line in lines:
            if line in IN_MACHINES or ("jq " in line and shutil.which("jq") is None):
                continue
            if "--to dma-buf" in line and not os.access("/dev/udmabuf", os.R_OK | os.W_OK):
                continue
            line = line.replace("sha256=…", f"sha256={wanted}")
            line = line.replace("/dev/nvme0n1p2", "disk").replace("https://host/", f"{stores.url}/")
            line = line.replace("/nvme/models", "models")
            # Root's holds are those of the whole machine.
            line = re.sub(r"\bllama\b(?!-)", f"llama-{os.getpid()}", line)
            script = f"exec 3<&{memory} 4<&{memory}; exec {memory}<&-; {line}"
            if line.startswith("dmafile hold "):
                holder = subprocess.Popen(
                    ["bash", "-c", f"exec {line}"],
                    cwd=place,
                    env=environment,
                    stdout=subprocess.PIPE,
                )
                holders.append(holder)
                assert holder.stdout is not None
                assert json.loads(holder.stdout.readline())
                continue
            done = subprocess.run(
                ["bash", "-o", "pipefail", "-c", script],
                cwd=place,
                env=environment,
                pass_fds=[memory],
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
    finally:
        os.close(memory)
        for holder in holders:
            holder.send_signal(signal.SIGTERM)
            holder.communicate()
    saved = {"capture.bin", "copy.gguf", "recording.raw"} if page.stem == "saving" else set()
    assert {name for name in saved if file_sha256(place / name) != wanted} == set()


PRELUDE = """
#include <dmafile.h>
#include <stdio.h>
#include <stdint.h>
void import(int fd, uint64_t offset, uint64_t len);
void copy(uint64_t at, const void *from, uint64_t bytes);
void use(const char *name, const void *data, uint64_t len);
extern char header[512], *memory;
extern uint64_t length, room;
extern int memfd, dma_buf;
extern struct dmafile_options options;
extern struct dmafile_buffer *buffer;
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs/c.md"], ids=["README", "c"])
def test_the_c_examples_of_the_documentation_compile(page: Path, tmp_path: Path) -> None:
    examples = blocks(page, "c")
    assert examples
    functions = [f"int f{n}(void)\n{{\n{code}\nreturn 0;\n}}\n" for n, code in enumerate(examples)]
    source = tmp_path / "examples.c"
    source.write_text(PRELUDE + "\n".join(functions))
    include = f"-I{ROOT / 'crates/capi/include'}"
    # An example may leave a result unused.
    command = ["cc", "-std=c99", "-Wall", "-Werror", "-Wno-unused", "-fsyntax-only", include]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def headings(page: Path) -> set[str]:
    """What links to the sections of a page end with."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    words = (re.sub(r"\]\([^)]*\)", "", title) for title in re.findall(r"^#+ (.+)$", text, re.M))
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in words}


def test_links_lead_to_a_place() -> None:
    found = 0
    for page in PAGES:
        for name, section in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)", page.read_text()):
            target = page.parent / name if name else page
            assert target.exists(), f"{page}: {name}"
            if section and target.suffix == ".md":
                assert section in headings(target), f"{page}: {name}#{section}"
                found += 1
    assert found


def test_each_cited_point_of_a_proposal_is_explained() -> None:
    """Each page with such a number links to the page that explains it."""
    cited, page = re.compile(r"\b(?:AR|PW|CF|PM|PT)-\d+"), ROOT / "kernel" / "docs" / "proposals.md"
    rows = [line.split("|")[1] for line in page.read_text().splitlines() if line.startswith("| ")]
    explained: set[str] = set()
    for found in filter(None, map(cited.findall, rows)):
        first, last = int(found[0][3:]), int(found[-1][3:])
        explained |= {f"{found[0][:2]}-{number}" for number in range(first, last + 1)}
    for other in PAGES:
        here = set(cited.findall(other.read_text()))
        assert here <= explained, (other, here - explained)
        assert not here or other == page or "proposals.md" in other.read_text(), other
    for folder in ("tests", "kernel/tests", "kernel/bench", "bench"):
        for source in (ROOT / folder).rglob("*"):
            if source.suffix in (".py", ".c", ".h"):
                assert set(cited.findall(source.read_text())) <= explained, source
