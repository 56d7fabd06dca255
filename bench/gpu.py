"""Measures loads into the memory of a GPU and into pinned memory, and other loaders for comparison.

    python bench/gpu.py [--dir DIR] [--gib 4] [--rounds 3] [--only TEXT]... [--json FILE]

`make gpu-kit` packs it with dmafile and tests, for a machine with a GPU (docs/gpu.md). Needs a GPU,
Python, and only dmafile. Other loaders are measured if they are installed (PyTorch for the GPU,
safetensors, fastsafetensors, runai-model-streamer, instanttensor), and the disk if fio is
installed. Each load runs in a separate process, which uses the GPU once before its clock starts:
the time for that is in the column `first use`. The first load of each kind also copies its bytes
back and compares their SHA-256. Nothing is downloaded. The file is created in DIR, on the disk to
be measured, and removed at the end. The benchmark ends within ten minutes: it lists the loads for
which there was no time. FILE has all samples so far, at any time. `--gib 32 --only pinned` compares
ways to fill 32 GiB of pinned memory, if that much is available.

Three columns are about the memory of the host. `peak` is that of the process (VmHWM), without what
a driver allocates. `pinned` (pages that the kernel has pinned for devices) and `taken` (the
decrease of available memory) are the largest values of the whole machine during the load, so
nothing else should run on it. A page that is pinned both for a GPU and for reads from the disk
counts twice.

It also runs with the double of the driver (docs/gpu.md), but then its times mean nothing.
"""

import argparse
import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias

NO_GPU = 3
"""The exit status if there is none."""
GIB = 1 << 30
EACH = 64 << 20
"""The size of a tensor."""
PACKAGES = ("torch", "safetensors", "fastsafetensors", "runai-model-streamer", "instanttensor")

Sample: TypeAlias = dict[str, Any]
State: TypeAlias = tuple[float, int, int | None]
"""A time, and the available and pinned memory."""
Job: TypeAlias = tuple[str, str, Callable[[Path, float], None], str]
"""Label, way, what prepares the page cache, and page size."""

# Each program loads the file `path`. When it calls end(), all bytes are on the device or pinned.
WAYS = {
    "disk: fio": """
import subprocess
fio = ["fio", "--name=read", "--readonly", "--rw=read", "--ioengine=io_uring", "--direct=1"]
fio += ["--thread", "--bs=1m", "--iodepth=32", f"--filename={path}", "--output-format=json"]
begin()
done = subprocess.run(fio, stdout=subprocess.PIPE, check=True)
end()
job = json.loads(done.stdout)["jobs"][0]
# fio's clock excludes its start.
said["seconds"] = size / job["read"]["bw_bytes"]
said["cpu"] = (job["usr_cpu"] + job["sys_cpu"]) / 100 * said["seconds"]
said["peak"] = None
""",
    "copy: from pinned memory": """
import ctypes, mmap
driver = ctypes.CDLL("libcuda.so.1")
def call(name, *args):
    code = getattr(driver, name)(*args)
    if code:
        sys.exit(f"{name} says {code}")
device, to = ctypes.c_int(), ctypes.c_uint64()
context, stream = ctypes.c_void_p(), ctypes.c_void_p()
said["bytes"] = count = min(size, 1 << 30)
def use():
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxPushCurrent_v2", context)
    call("cuStreamCreate", ctypes.byref(stream), 1)
    call("cuMemAlloc_v2", ctypes.byref(to), ctypes.c_size_t(count))
first(use)
memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_HUGEPAGE)
with open(path, "rb") as file:
    file.readinto(memory)
at = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
call("cuMemHostRegister_v2", at, ctypes.c_size_t(count), 0)
def copy():
    call("cuMemcpyHtoDAsync_v2", to, at, ctypes.c_size_t(count), stream)
    call("cuStreamSynchronize", stream)
copy()
begin()
copy()
end()
""",
    "dmafile.cuda": """
import dmafile.cuda
used = first(lambda: dmafile.cuda._dmafile.DeviceMemory(gpu, 1))
begin()
tensors = dmafile.cuda.load(path, gpu)
end()
check(lambda name: tensors[name]._memory.copy_back(tensors[name]._at, tensors[name].nbytes))
""",
    "dmafile.torch": """
import torch, dmafile.torch
used = first(lambda: torch.zeros(1, device="cuda:0"))
begin()
tensors = dmafile.torch.load_file(path, "cuda:0")
torch.cuda.synchronize()
end()
check(lambda name: bytes_of(tensors[name]))
""",
    "safetensors": """
import torch, safetensors.torch
used = first(lambda: torch.zeros(1, device="cuda:0"))
begin()
tensors = safetensors.torch.load_file(path, device="cuda:0")
torch.cuda.synchronize()
end()
check(lambda name: bytes_of(tensors[name]))
""",
    "fastsafetensors": """
import torch
from fastsafetensors import SafeTensorsFileLoader, SingleGroup
used = first(lambda: torch.zeros(1, device="cuda:0"))
begin()
loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cuda:0"))
loader.add_filenames({0: [path]})
buffers = loader.copy_files_to_device()
tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
torch.cuda.synchronize()
end()
check(lambda name: bytes_of(tensors[name]))
""",
    "runai_model_streamer": """
import torch
from runai_model_streamer import SafetensorsStreamer
used = first(lambda: torch.zeros(1, device="cuda:0"))
begin()
with SafetensorsStreamer() as streamer:
    streamer.stream_file(path)
    tensors = {name: tensor.to("cuda:0") for name, tensor in streamer.get_tensors()}
torch.cuda.synchronize()
end()
check(lambda name: bytes_of(tensors[name]))
""",
    "instanttensor": """
import torch
from instanttensor import safe_open
used = first(lambda: torch.zeros(1, device="cuda:0"))
begin()
with safe_open([path], framework="pt", device=0) as file:
    tensors = {name: tensor.clone() for name, tensor in file.tensors()}
torch.cuda.synchronize()
end()
check(lambda name: bytes_of(tensors[name]))
""",
    "pinned: dmafile": """
import dmafile.cuda
used = first(lambda: dmafile.cuda._dmafile.DeviceMemory(gpu, 1))
begin()
buffer = dmafile.load(path, to=gpu.replace(":", "-host:"), pages=pages)
end()
said["pages"] = buffer.report["pages"]
check(lambda name: memoryview(buffer)[places[name]])
""",
    "pinned: registered after": """
import dmafile.cuda
used = first(lambda: dmafile.cuda._dmafile.DeviceMemory(gpu, 1))
buffer = dmafile.load(path, pages=pages)
begin()
buffer.pin(gpu)
end()
said["pages"] = buffer.report["pages"]
check(lambda name: memoryview(buffer)[places[name]])
""",
    "pinned: torch.empty + readinto": """
import torch
used = first(lambda: torch.zeros(1, device="cuda:0"))
begin()
memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
view, at = memoryview((ctypes.c_ubyte * size).from_address(memory.data_ptr())), 0
with open(path, "rb", buffering=0) as file:
    while at < size:
        at += file.readinto(view[at : at + (1 << 30)])
end()
check(lambda name: view[places[name]])
""",
}

FRAME = """
import ctypes, json, os, resource, sys, time
path, pages, is_checked, gpu = sys.argv[1], sys.argv[2], sys.argv[3] == "True", sys.argv[4]
# After what is installed.
sys.path += sys.argv[5:]
size = os.path.getsize(path)
said = {"bytes": size, "pages": pages}
with open(path, "rb") as file:
    length = int.from_bytes(file.read(8), "little")
    places = {
        name: slice(*(8 + length + at for at in row["data_offsets"]))
        for name, row in json.loads(file.read(length)).items()
    }
def usage():
    mine = resource.getrusage(resource.RUSAGE_SELF)
    return mine.ru_utime + mine.ru_stime
def first(use):
    begun = time.perf_counter()
    kept = use()
    said["first"] = time.perf_counter() - begun
    return kept
def begin():
    said["begin"], said["cpu"] = time.monotonic(), usage()
    said["seconds"] = time.perf_counter()
def end():
    said["seconds"] = time.perf_counter() - said["seconds"]
    said["cpu"], said["end"] = usage() - said["cpu"], time.monotonic()
    status = open("/proc/self/status").read().splitlines()
    said["peak"] = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))
def bytes_of(tensor):
    here = tensor.cpu().contiguous()
    return ctypes.string_at(here.data_ptr(), here.numel() * here.element_size())
def check(read):
    import hashlib
    digest = hashlib.sha256()
    for name in places if is_checked else ():
        digest.update(read(name))
    said["sha256"] = digest.hexdigest() if is_checked else None
"""


def make(path: Path, nbytes: int, until: float) -> str:
    """Creates a safetensors file of equally large tensors; returns the SHA-256 of their bytes."""
    count = max(nbytes // EACH, 1)
    header = {
        f"tensor.{n}": {
            "dtype": "F16",
            "shape": [EACH // 2],
            "data_offsets": [n * EACH, (n + 1) * EACH],
        }
        for n in range(count)
    }
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 4096)
    digest, noise = hashlib.sha256(), random.Random(1).randbytes(EACH)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for n in range(count):
            if time.monotonic() > until:
                sys.exit(f"gpu: no time left to write {path}: use a smaller --gib")
            # Different in each tensor, and faster than new noise.
            turn = n * 4099 % EACH
            for part in (memoryview(noise)[turn:], memoryview(noise)[:turn]):
                digest.update(part)
                file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def evict(path: Path, until: float) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill_cache(path: Path, until: float) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(16 << 20) and time.monotonic() < until:
            pass


def memory() -> tuple[int, int | None]:
    """Available and pinned bytes; None for the latter if the kernel does not count them."""
    info = numbers("/proc/meminfo")
    free = info["MemAvailable:"] + info.get("HugePages_Free:", 0) * info.get("Hugepagesize:", 0)
    pins = numbers("/proc/vmstat")
    if "nr_foll_pin_acquired" not in pins:
        return free << 10, None
    held = pins["nr_foll_pin_acquired"] - pins["nr_foll_pin_released"]
    return free << 10, held * os.sysconf("SC_PAGE_SIZE")


def numbers(path: str) -> dict[str, int]:
    lines = Path(path).read_text().splitlines()
    return {words[0]: int(words[1]) for line in lines if len(words := line.split()) > 1}


@dataclass
class Ended:
    """A process that has ended, or was stopped."""

    code: int | None
    out: str
    errors: str
    states: list[State]


def forked(program: str, words: Sequence[str], out: Any, errors: Any) -> BaseProcess:
    """Runs a program in a child of this process, which has imported PyTorch already."""

    def run() -> None:
        os.setsid()
        os.dup2(out.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        sys.argv = ["-c", *words]
        exec(compile(program, "load", "exec"), {"__name__": "__main__"})

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    return child


def ended(
    command: Sequence[str],
    seconds: float,
    env: dict[str, str] | None = None,
    program: str | None = None,
) -> Ended:
    """Runs a process, and looks at the memory meanwhile; stops it when the time has passed. If
    there is a program, it is run in a fork of this process, and the command is its arguments."""
    until = time.monotonic() + seconds
    states = [(time.monotonic(), *memory())]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        pid: int | None
        poll: Callable[[], int | None]
        wait: Callable[[float], int | None]
        if program is None:
            child = subprocess.Popen(
                command, stdout=out, stderr=errors, start_new_session=True, env=env
            )
            pid, poll, wait = child.pid, child.poll, child.wait
        else:
            process = forked(program, command, out, errors)
            pid, poll, wait = process.pid, lambda: process.exitcode, process.join
        assert pid is not None
        try:
            while poll() is None and time.monotonic() < until:
                time.sleep(0.01)
                states.append((time.monotonic(), *memory()))
            code = poll()
        finally:
            if poll() is None:
                # With what it has started. A fork may not have its process group yet.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                # In a call of a driver that hangs, it cannot end.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    wait(10)
        out.seek(0)
        errors.seek(0)
        return Ended(code, out.read(), errors.read(), states)


def run(
    way: str,
    path: Path,
    pages: str,
    is_checked: bool,
    seconds: float,
    there: Sequence[str] = ("cuda:0",),
) -> Sample | str:
    """Runs one load in a new process; returns its measurements, or an error message. `there` is the
    GPU, and folders of loaders that are not installed."""
    program = FRAME + WAYS[way] + "\nprint(json.dumps(said))\n"
    how = [str(path), pages, str(is_checked), *there]
    done = ended(how, seconds, program=program)
    if done.code is None:
        return f"stopped after {seconds:.0f} seconds"
    lines, why = done.out.splitlines(), done.errors.strip().splitlines()
    if done.code or not lines:
        return why[-1] if why else f"it ended with {done.code} and without a message"
    said: Sample = json.loads(lines[-1])
    return said | used(done.states, said["begin"], said["end"])


TEST = """
import sys
sys.path += sys.argv[2:]
import pytest
options = ["--quiet", "-rs", "-p", "no:cacheprovider", "--config-file=/dev/null"]
options += ["-o", "markers=slow"]
sys.exit(pytest.main([*options, "--rootdir=" + sys.argv[1], sys.argv[1]]))
"""


def tested(folder: Path, others: Sequence[str], seconds: float) -> Sample:
    """Runs the tests that need no double of the driver."""
    print(f"tests: at most {seconds:.0f} seconds", flush=True)
    env = os.environ | {"DMAFILE_GPU": "real", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    # For the programs that tests start, too; loads are measured without it.
    path = [os.environ.get("PYTHONPATH", ""), str(folder.parent / "pytest")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    done = ended([sys.executable, "-c", TEST, str(folder), *others], seconds, env)
    print(done.out + done.errors, flush=True)
    lines = done.out.splitlines() or [""]
    result = f"stopped after {seconds:.0f} seconds" if done.code is None else lines[-1]
    return {"passed": done.code == 0, "result": result, "output": done.out + done.errors}


def used(states: Sequence[State], begin: float, end: float) -> dict[str, int | None]:
    """The most memory that was taken and pinned during a load, compared with the state before."""
    before = [one for one in states if one[0] <= begin][-1:] or states[:1]
    during = [one for one in states if begin < one[0] <= end + 0.05] or before
    (_, free, pinned), *_ = before
    pins = [one[2] for one in during if one[2] is not None]
    return {
        "taken": max(0, free - min(one[1] for one in during)),
        "pinned": max(0, max(pins) - pinned) if pins and pinned is not None else None,
    }


def missing(way: str, size: int, gpu: str = "cuda:0") -> str | None:
    """Why a way cannot be measured here."""
    if way.startswith("copy") and not gpu.startswith("cuda"):
        return "written for NVIDIA's driver only"
    if way == "disk: fio":
        return None if shutil.which("fio") else "fio is not installed"
    needs = {
        "dmafile.torch": ["torch"],
        "pinned: torch.empty + readinto": ["torch"],
        "safetensors": ["torch", "safetensors"],
    }
    plain = way.startswith(("copy", "dmafile.cuda", "pinned: dmafile", "pinned: reg"))
    modules = [] if plain else needs.get(way, ["torch", way])
    for name in modules:
        if not importlib.util.find_spec(name):
            return f"{name} is not installed"
    if way.startswith("pinned"):
        # PyTorch rounds up to a power of two.
        room = (1 << (size - 1).bit_length() if "torch" in way else size) + GIB
        if room > (free := memory()[0]):
            return f"needs {room / GIB:.0f} GiB of memory, and {free / GIB:.0f} GiB are available"
    return None


def machine() -> dict[str, Any]:
    """Describes this machine."""
    import dmafile

    doctor = ended([sys.executable, "-m", "dmafile", "doctor", "--json"], 60)
    if doctor.code is None or not doctor.out:
        sys.exit(f"gpu: dmafile doctor failed: {doctor.errors.strip() or 'it hangs'}")
    checks = json.loads(doctor.out)["checks"]
    checks = [one for one in checks if one["name"] in ("cuda", "hip")]
    try:
        is_double = hasattr(ctypes.CDLL("libcuda.so.1"), "double_reset")
    except OSError:
        is_double = False
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "dmafile": dmafile.__version__,
        "python": sys.version.split()[0],
        "packages": versions,
        "kernel": os.uname().release,
        "cpus": os.cpu_count(),
        "gpus": [one["found"] for one in checks if one["health"] != "not present"],
        "refused": [one["found"] for one in checks if one["health"] == "not present"],
        "double": is_double,
    }


def jobs_of(way: str) -> list[Job]:
    if way.startswith(("disk", "copy")):
        return [(way, way, evict, "auto")]
    if not way.startswith("pinned"):
        return [(f"{way}, cold", way, evict, "auto"), (f"{way}, cached", way, fill_cache, "auto")]
    if "torch" in way:
        return [(f"{way}, cold", way, evict, "auto")]
    return [(f"{way}, {pages}, cold", way, evict, pages) for pages in ("base", "thp", "huge")]


def table(results: dict[str, list[Sample]]) -> list[str]:
    """Lines of a table, and of what it costs to register memory."""
    heads = ["seconds", "GB/s", "CPU s/GB", "first use s", "peak MiB", "pinned MiB", "taken MiB"]
    rows = [["", *heads]]
    for label, runs in sorted(results.items()):
        seconds = sorted(one["seconds"] for one in runs)
        middle, gb = statistics.median(seconds), runs[0]["bytes"] / 1e9
        firsts = [one["first"] for one in runs if "first" in one]
        cells = [
            label,
            f"{middle:.3f} [{seconds[0]:.3f}-{seconds[-1]:.3f}]",
            f"{gb / middle:.2f}",
            f"{statistics.median(one['cpu'] for one in runs) / gb:.3f}",
            f"{statistics.median(firsts):.3f}" if firsts else "",
        ]
        for name in ("peak", "pinned", "taken"):
            values = [one[name] for one in runs if one[name] is not None]
            cells.append(f"{max(values) >> 20}" if values else "")
        rows.append(cells)
    lines = ["{:42}{:>24}{:>9}{:>9}{:>12}{:>9}{:>11}{:>10}".format(*row).rstrip() for row in rows]
    for label, runs in sorted(results.items()):
        if "registered after" in label:
            cost = statistics.median(one["seconds"] / one["bytes"] for one in runs) * GIB
            got = ", ".join(sorted({one["pages"] for one in runs}))
            lines.append(f"{label}: {cost:.4f} seconds per GiB on pages of kind {got}")
    return lines


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="a folder on the disk to be measured"
    )
    parser.add_argument("--gib", type=float, default=4, help="the size of the file")
    parser.add_argument("--rounds", type=int, default=3, help="0 to run only the tests")
    parser.add_argument(
        "--only", action="append", help="measure only what has this in its name; can be repeated"
    )
    parser.add_argument("--json", type=Path, help="where all figures go")
    parser.add_argument("--tests", type=Path, help="a folder of tests that run first")
    parser.add_argument("--others", type=Path, help="a folder of loaders that are not installed")
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"only say whether there is a GPU: exit status {NO_GPU}",
    )
    parser.add_argument("--minutes", type=float, default=9, help="stop after this time")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    args = arguments(words)
    until = time.monotonic() + args.minutes * 60
    results: dict[str, list[Sample]] = {}
    refused: dict[str, str] = {}
    # Those for this version of Python, and those for all.
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    others = [str(args.others.resolve() / name) for name in (tag, "any")] if args.others else []
    sys.path += others
    where = machine()
    if not where["gpus"]:
        why = "; ".join(where["refused"])
        print(f"gpu: there is no GPU that can be used here: {why}", file=sys.stderr)
        sys.exit(NO_GPU)
    if args.check:
        print("gpu: there is a GPU:", "; ".join(where["gpus"]))
        return
    gpu = str(where["gpus"][0]).split(",")[0]
    print(json.dumps(where, indent=1))
    if where["double"]:
        print("THE DRIVER IS A DOUBLE: these times mean nothing")
    # None of them must take the time of all others.
    each = args.minutes * 20
    tests = tested(args.tests.resolve(), others, each) if args.tests else None
    every: dict[str, Any] = {"machine": where, "tests": tests}
    every |= {"runs": results, "refused": refused}

    def write() -> None:
        if args.json:
            new = args.json.with_name(args.json.name + ".new")
            new.write_text(json.dumps(every, indent=1))
            new.replace(args.json)

    write()
    if args.rounds:
        every["bytes"] = measured(args, until, (gpu, *others), results, refused, write)
        write()
        print(f"\n{args.gib:g} GiB, median [least-most] of up to {args.rounds} shuffled rounds")
        print("\n".join(table(results)))
        print("not measured:" if refused else "all of it was measured")
        for label, why in sorted(refused.items()):
            print(f"  {label}: {why}")
    if tests:
        print(f"tests: {tests['result']}")
    if args.json:
        print(f"all figures: {args.json.resolve()}")
    is_wrong = "WRONG BYTES" in refused.values()
    if is_wrong or (tests and not tests["passed"]):
        sys.exit(1)


def measured(
    args: argparse.Namespace,
    until: float,
    there: Sequence[str],
    results: dict[str, list[Sample]],
    refused: dict[str, str],
    write: Callable[[], None],
) -> int:
    """Runs all loads, in shuffled rounds; returns the size of the file."""
    # Every load forks, and would otherwise import it. That does not use the GPU, which no child
    # could use afterwards.
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401
    nbytes = int(args.gib * GIB)
    if nbytes + GIB > (free := shutil.disk_usage(args.dir).free):
        sys.exit(
            f"gpu: {args.dir.resolve()} has room for {free / GIB:.1f} GiB, and the file needs "
            f"{nbytes / GIB:.1f} GiB and 1 GiB to spare: use another --dir, or a smaller --gib"
        )
    with tempfile.TemporaryDirectory(dir=args.dir, prefix=".gpu-") as folder:
        path = Path(folder) / "model.safetensors"
        expected = make(path, nbytes, until)
        size = path.stat().st_size

        def measure(
            label: str, way: str, prepare: Callable[[Path, float], None], pages: str
        ) -> None:
            if label in refused:
                return
            prepare(path, until)
            left = until - time.monotonic()
            if left <= 0:
                refused[label] = "no time left"
                return
            limit = min(left, args.minutes * 20)
            said = run(way, path, pages, label not in results, limit, there)
            if isinstance(said, str):
                refused[label] = said
            elif said.get("sha256") not in (None, expected):
                refused[label] = "WRONG BYTES"
            else:
                results.setdefault(label, []).append(said)

        jobs: list[Job] = []
        for way in WAYS:
            wanted = [
                job for job in jobs_of(way) if any(text in job[0] for text in args.only or [""])
            ]
            if wanted and (why := missing(way, size, there[0])):
                refused[way] = why
            else:
                jobs += wanted
        shuffled = random.Random(0)
        for _ in range(args.rounds):
            for job in shuffled.sample(jobs, len(jobs)):
                measure(*job)
                write()
    return size


if __name__ == "__main__":
    main()
