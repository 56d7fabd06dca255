"""The parts of `make test-all`, and which of them a change concerns.

    python3 -m scripts.parts [list | NAME...]    runs all, or these
    python3 -m scripts.parts --ci SECONDS        after `make test`, which took so long

With --ci, the parts whose files changed since they last passed run first, and then the others, the
longest unchecked first. A part begins only if it is expected to end within the hour, and is ended
after LIMIT, which is no failure. When a part last passed is kept in the cache.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOUR, LIMIT = 3600, 74 * 60
"""Seconds for all that .ci/run does: when nothing new begins, and when it is over."""
USUAL = 480
"""Seconds that `make test` takes; if it took longer, parts will, too."""

PYTEST = ".venv/bin/python -m pytest --quiet -rs"
# A virtual machine uses one CPU, so two run at a time. Tests of a file run one after the other.
MACHINES = f"{PYTEST} --numprocesses=2 --dist=loadfile --no-loadscope-reorder"
LONG = "--durations=0 --durations-min=5"
PACKAGES = "make -f packaging/Makefile"

CORE = ("crates/", "Cargo.toml", "Cargo.lock")
PACKAGE = (*CORE, "python/")

# What a part needs, found by trying.
ROOT_USER = "test $(id -u) = 0"
PIP = (
    ".venv/bin/python -m pip --disable-pip-version-check download --quiet --no-deps "
    "--dest target/reachable iniconfig"
)
APT = "mkdir -p target/reachable && cd target/reachable && apt-get download -qq hostname"
TOOLS = "make need-rust-tools need-test-tools .venv/dev .venv/demo"
VALGRIND = (
    "{ scripts/need valgrind command -v valgrind && scripts/need libc6-dbg valgrind -q true; } || :"
)
"""Without it, fewer tests run."""
EXTENSION = "make extension"
ARM = "rustup target add aarch64-unknown-linux-gnu"
CXX = "scripts/need build-essential command -v c++"


@dataclass(frozen=True)
class Part:
    """One line of `make test-all`."""

    name: str
    what: str
    minutes: float
    """On two idle CPUs, with all downloads and builds that are kept there already."""
    command: str
    paths: Sequence[str]
    """Files that it tests: folders end in a slash."""
    needs: Sequence[str] = (TOOLS,)
    """Commands; if one fails, the part is skipped."""
    ci: bool = True
    """Whether .ci/run runs it: it ends well within an hour, and passes every time."""


PARTS = (
    Part(
        "rust",
        "all tests of the crates, and the C library under valgrind",
        8,
        "cargo test --workspace --features dmafile-cli/bpf,dmafile-cli/remote --locked "
        "--no-fail-fast",
        (*CORE, "tests/double/", "tests/interference/"),
        (TOOLS, VALGRIND),
    ),
    Part(
        "python",
        "the Python tests that `make test` leaves out, except in machines",
        5,
        f"{PYTEST} -m slow --ignore=bench/instructions attacks bench demo python scripts",
        (*PACKAGE, "attacks/", "bench/", "demo/", "scripts/", "docs/"),
        (TOOLS, EXTENSION),
    ),
    Part(
        "machines",
        "loads, saves, and vm/run itself on Debian's kernels in QEMU, without KVM",
        15,
        f"{MACHINES} vm tests/vm kernel bench/instructions",
        (*PACKAGE, "vm/", "tests/vm/", "kernel/", "bench/instructions/", "bench/candidates.py"),
        (TOOLS, EXTENSION),
    ),
    Part(
        "freeze",
        "processes frozen and thawed by Debian's criu",
        2,
        f"{PYTEST} -m slow tests/freeze",
        (*CORE, "tests/freeze/"),
        (TOOLS, ROOT_USER),
    ),
    Part(
        "kexec",
        "memory that outlives the kernel, in QEMU (and once 15 minutes for a kernel)",
        5,
        f"{PYTEST} -m slow tests/kexec",
        ("crates/hold/", "crates/sys/", "crates/cli/", "tests/kexec/", "kernel/config/"),
        (TOOLS, ROOT_USER),
    ),
    Part(
        "remote",
        "10,000 random schedules of faults of a web server",
        40,
        "SCHEDULES=10000 cargo test --locked -p dmafile-remote random_faults -- --nocapture",
        ("crates/remote/", "crates/testkit/"),
        ci=False,
    ),
    Part("fuzz", "fuzz the readers", 3, "fuzz/run", ("fuzz/", "attacks/", *CORE), (CXX,)),
    Part("kernel-lint", "gcc, sparse, checkpatch", 4, "make -C kernel lint", ("kernel/",), (APT,)),
    Part(
        "docs",
        "the site, with the documentation of the crates",
        6,
        "make docs",
        ("docs/", "scripts/site.py", *PACKAGE),
        ("make .venv/docs",),
    ),
    Part(
        "msrv",
        "compile with the oldest Rust that Cargo.toml names",
        4,
        "cargo +$MSRV check --workspace --all-targets --locked --target-dir target/msrv",
        CORE,
        ("rustup toolchain install --profile minimal $MSRV",),
    ),
    Part(
        "fuzz-planted",
        "each fuzz target finds an error that is planted in its reader",
        10,
        "fuzz/run --planted",
        ("fuzz/",),
        (CXX,),
    ),
    Part(
        "interference",
        "a second process acts between any two system calls, at 6,000 points of 200,000",
        20,
        "cargo test --quiet --locked -p dmafile-interference -- --sample ${POINTS:-6000} $ARGS",
        ("tests/interference/",),
        (ROOT_USER,),
        ci=False,
    ),
    Part(
        "dropin",
        "the test suite of safetensors, with its imports changed",
        3,
        "$(scripts/loaders torch)/bin/python python/tests/loaders/dropin.py $LOADERS --quiet $ARGS",
        ("python/", "crates/"),
        (TOOLS, "scripts/loaders torch"),
        ci=False,
    ),
    Part(
        "gpu",
        "GPU memory, with a test double of the driver (100,000 schedules), and with a real one",
        30,
        "scripts/gpu-test $ARGS",
        (
            "tests/double/",
            "scripts/gpu-test",
            "python/dmafile/cuda.py",
            "crates/gpu/",
            "crates/dmafile/src/sink/",
        ),
        (TOOLS, "scripts/loaders torch", APT),
        ci=False,
    ),
    Part(
        "consumers",
        "llama.cpp, OpenVINO and Vulkan use loaded memory",
        5,
        f"CI=true {PYTEST} python/tests/test_paths.py python/tests/test_consumers.py "
        "python/tests/test_takers.py $ARGS && "
        f"CONSUMERS=1 {MACHINES} tests/vm/test_vulkan.py $ARGS",
        ("python/tests/test_consumers.py", "tests/vm/test_vulkan.py", "docs/consumers.md"),
        (TOOLS, EXTENSION, "make .venv/consumers"),
        ci=False,
    ),
    Part(
        "loaders",
        "the real PyTorch, transformers, checkpoints and vLLM (1.3 GB to download, once)",
        20,
        "T=python/tests/loaders; "
        "KILLS=30 $(scripts/loaders torch)/bin/python -m pytest --quiet -rs "
        "python/tests/test_torch.py python/tests/test_stream.py python/tests/test_dropin_torch.py "
        "$T/test_transformers.py $T/test_checkpoint.py $T/test_ranks.py $T/test_docs.py $ARGS && "
        "$(scripts/loaders vllm)/bin/python -m pytest --quiet -rs $T/test_vllm.py $ARGS",
        ("python/", "crates/"),
        (
            TOOLS,
            "scripts/loaders torch vllm",
            "scripts/need iproute2 command -v ip",
            "scripts/need e2fsprogs command -v /sbin/debugfs",
        ),
        ci=False,
    ),
    Part(
        "stores",
        "loads and saves with servers of S3, Azure and Google, and the hub's client (1.4 GB, once)",
        6,
        "$(scripts/stores)/bin/python -m pytest --quiet -rs tests/stores python/tests/test_hub.py "
        "$ARGS",
        ("crates/remote/", "tests/stores/", "scripts/stores", "python/tests/test_hub.py"),
        (TOOLS, PIP, "scripts/stores"),
        ci=False,
    ),
    Part(
        "contract",
        "whether the newest vllm, sglang, transformers and torch still have what dmafile uses",
        2,
        "python3 python/tests/loaders/contract.py $ARGS",
        ("python/tests/loaders/",),
        (TOOLS, PIP),
        ci=False,
    ),
    Part(
        "deb",
        "the Debian packages, installed and used in clean roots of Debian 12 and 13",
        10,
        f"{PACKAGES} deb-test",
        ("packaging/",),
        (ROOT_USER, APT),
        ci=False,
    ),
    Part(
        "crates",
        "the crates as packaged for crates.io: documentation, and the command",
        6,
        f"{PACKAGES} crates",
        ("packaging/", "Cargo.toml"),
        (PIP,),
        ci=False,
    ),
    Part(
        "wheels",
        "the wheels and the sdist, installed and used in clean roots of Debian 12 and 13",
        15,
        f"{PACKAGES} wheels-test",
        ("packaging/", "pyproject.toml"),
        (ROOT_USER, APT, PIP, ARM),
        ci=False,
    ),
    Part(
        "arm64",
        "the command, the C library and the engine on Debian's arm64 kernels in QEMU",
        60,
        f"ARM64=1 {MACHINES} tests/vm/test_arm64.py $ARGS",
        ("vm/arm64.py", "tests/vm/test_arm64.py"),
        (TOOLS, ARM),
        ci=False,
    ),
    Part(
        "release",
        "build a release twice, in two folders, and compare",
        60,
        f"{PACKAGES} release-test",
        ("packaging/",),
        (ROOT_USER, APT, PIP, ARM),
        ci=False,
    ),
    Part(
        "matrix",
        "some 120 machines: loads, saves and crashes on all kernels and file systems",
        150,
        f"MATRIX=1 {MACHINES} vm tests/vm bench/instructions {LONG} $ARGS",
        ("vm/", "tests/vm/"),
        (TOOLS, EXTENSION),
        ci=False,
    ),
    Part(
        "kernel",
        "the module and the series on Debian's kernels and the project's own",
        300,
        "make -C kernel test",
        ("kernel/",),
        (TOOLS,),
        ci=False,
    ),
)


def git(*words: str) -> str | None:
    """What git prints, or nothing if it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return None if done.returncode else done.stdout.strip()


def changed(since: str | None) -> list[str] | None:
    """The files that changed since this commit; None if that is unknown.

    Without a commit: those of the last merge, and since.
    """
    if since is None:
        merge = git("rev-list", "--merges", "--max-count=1", "HEAD")
        since = f"{merge}^1" if merge else None
    names = git("diff", "--name-only", since, "--") if since else None
    return None if names is None else names.splitlines()


def concerns(part: Part, files: list[str] | None) -> bool:
    return files is None or any(name.startswith(tuple(part.paths)) for name in files)


class Record:
    """At which commit, and when, each part last passed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.passed: dict[str, tuple[str, float]] = json.loads(path.read_text())
        except (OSError, ValueError):
            self.passed = {}

    def commit(self, part: Part) -> str | None:
        return self.passed.get(part.name, (None,))[0]

    def when(self, part: Part) -> float:
        return self.passed.get(part.name, ("", 0.0))[1]

    def add(self, part: Part) -> None:
        commit = git("rev-parse", "HEAD")
        # What passed with other changes did not pass at that commit.
        if commit and not git("status", "--porcelain", "--untracked-files=no"):
            self.passed[part.name] = (commit, time.time())
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.passed, indent=1))


def in_turn(parts: Sequence[Part], record: Record) -> list[Part]:
    """Those whose files changed, then the others, the longest unchecked first."""
    others = sorted(parts, key=record.when)
    first = [part for part in parts if concerns(part, changed(record.commit(part)))]
    return first + [part for part in others if part not in first]


def environment() -> dict[str, str]:
    """For the commands of parts, without the variables of a surrounding make(1)."""
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))
    }
    manifest = (ROOT / "Cargo.toml").read_text()
    kept["MSRV"] = manifest.split('rust-version = "')[1].split('"')[0]
    kept["LOADERS"] = str(cache() / "loaders")
    return kept


def cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "dmafile"


def shell(command: str, end: float | None) -> int | None:
    """The exit status of a command; None if it was ended because the time is over."""
    process = subprocess.Popen(["sh", "-c", command], cwd=ROOT, env=environment(), process_group=0)
    try:
        return process.wait(None if end is None else max(0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        # Also after Ctrl-C, and what the command left running.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(part: Part, end: float | None) -> str:
    """Runs a part; the outcome in a word or two."""
    print(f"test-all: {part.name}: {part.what} ({part.minutes:g} minutes)", flush=True)
    began = time.monotonic()
    for need in part.needs:
        status = shell(need, end)
        if status is None:
            return "ended: the time is over"
        if status:
            return f"skipped: not possible here: {need}"
    status = shell(part.command, end)
    took = f"{(time.monotonic() - began) / 60:.1f} minutes"
    if status is None:
        return "ended: the time is over"
    return f"passed in {took}" if status == 0 else f"FAILED after {took}"


def report(outcomes: dict[str, str]) -> int:
    print("test-all:")
    for name, outcome in outcomes.items():
        print(f"  {name}: {outcome}")
    return int(any(outcome.startswith("FAILED") for outcome in outcomes.values()))


def run_all(parts: Sequence[Part], record: Record) -> int:
    print(f"test-all: {len(parts)} parts, {sum(part.minutes for part in parts):g} minutes in all")
    outcomes = {}
    for part in parts:
        outcomes[part.name] = run(part, None)
        if outcomes[part.name].startswith("passed"):
            record.add(part)
    return report(outcomes)


def run_in_time(parts: Sequence[Part], record: Record, used: float) -> int:
    """Runs the parts for which there is time, after so many seconds were USED."""
    began = time.monotonic() - used
    slower = max(1.0, used / USUAL)
    outcomes = {part.name: "left out: not for every change" for part in parts if not part.ci}
    for part in in_turn([part for part in parts if part.ci], record):
        if time.monotonic() - began + 60 * part.minutes * slower > HOUR:
            outcomes[part.name] = f"left out: no time for {part.minutes * slower:.0f} minutes"
            continue
        outcomes[part.name] = run(part, began + LIMIT)
        if outcomes[part.name].startswith("passed"):
            record.add(part)
        if outcomes[part.name].startswith("FAILED"):
            break
    return report(outcomes)


def main(words: list[str]) -> int:
    record = Record(cache() / "parts.json")
    if words == ["list"]:
        for part in PARTS:
            print(f"{part.name:13} {part.minutes:4g} minutes  {part.what}")
        return 0
    if words[:1] == ["--ci"]:
        return run_in_time(PARTS, record, float(words[1]))
    known = {part.name: part for part in PARTS}
    if unknown := [word for word in words if word not in known]:
        print(
            f"test-all: no part {shlex.join(unknown)}; there are: {' '.join(known)}",
            file=sys.stderr,
        )
        return 2
    return run_all([known[word] for word in words] or PARTS, record)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
