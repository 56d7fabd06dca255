"""Measures loads into the memory of a GPU and into pinned memory, and other loaders for comparison.

    python bench/gpu.py [--dir DIR] [--gib 4] [--rounds 3] [--json FILE]

Needs a GPU, and only dmafile. Other loaders are measured if they are installed (PyTorch with CUDA,
safetensors, fastsafetensors, runai-model-streamer, instanttensor). Each load runs in a separate
process. Nothing is downloaded. The file is created in DIR, on the disk to be measured, and removed
at the end. The benchmark ends within ten minutes: it lists the loads for which there was no time.

It also runs with the double of the driver (docs/gpu.md), but then its times mean nothing.
"""

import argparse
import ctypes
import hashlib
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_SECONDS = 540
GIB = 1 << 30

# Each program loads the file `path`. When it calls end(), all bytes are on the device or pinned.
WAYS = {
    "dmafile.cuda": """
import dmafile.cuda
begin()
tensors = dmafile.cuda.load(path, 0)
end()
first = next(iter(tensors.values()))
check(lambda at, nbytes: first._memory.copy_back(at, nbytes))
""",
    "dmafile.torch": """
import torch, dmafile.torch
torch.zeros(1, device="cuda:0")
begin()
tensors = dmafile.torch.load_file(path, "cuda:0")
torch.cuda.synchronize()
end()
""",
    "safetensors": """
import torch, safetensors.torch
torch.zeros(1, device="cuda:0")
begin()
tensors = safetensors.torch.load_file(path, device="cuda:0")
torch.cuda.synchronize()
end()
""",
    "fastsafetensors": """
import torch
from fastsafetensors import SafeTensorsFileLoader, SingleGroup
torch.zeros(1, device="cuda:0")
begin()
loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cuda:0"))
loader.add_filenames({0: [path]})
buffers = loader.copy_files_to_device()
tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
torch.cuda.synchronize()
end()
""",
    "runai_model_streamer": """
import torch
from runai_model_streamer import SafetensorsStreamer
torch.zeros(1, device="cuda:0")
begin()
with SafetensorsStreamer() as streamer:
    streamer.stream_file(path)
    tensors = {name: tensor.to("cuda:0") for name, tensor in streamer.get_tensors()}
torch.cuda.synchronize()
end()
""",
    "instanttensor": """
import torch
from instanttensor import safe_open
torch.zeros(1, device="cuda:0")
begin()
with safe_open([path], framework="pt", device=0) as file:
    tensors = {name: tensor.clone() for name, tensor in file.tensors()}
torch.cuda.synchronize()
end()
""",
    "pinned: dmafile": """
import dmafile
begin()
buffer = dmafile.load(path, to="cuda-host", pages=pages)
end()
""",
    "pinned: registered after": """
import dmafile
buffer = dmafile.load(path, pages=pages)
begin()
buffer.pin("cuda:0")
end()
""",
    "pinned: torch.empty + readinto": """
import torch
torch.zeros(1, device="cuda:0")
begin()
memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
with open(path, "rb", buffering=0) as file:
    view, at = memoryview(memory.numpy()), 0
    while at < size:
        at += file.readinto(view[at : at + (1 << 30)])
end()
""",
}

FRAME = """
import json, os, resource, sys, time
path, size, pages, expected = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
said = {}
def usage():
    mine = resource.getrusage(resource.RUSAGE_SELF)
    return mine.ru_utime + mine.ru_stime
def begin():
    said["cpu"], said["seconds"] = usage(), time.perf_counter()
def end():
    said["seconds"] = time.perf_counter() - said["seconds"]
    said["cpu"] = usage() - said["cpu"]
    status = open("/proc/self/status").read().splitlines()
    said["peak"] = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))
def check(read):
    import hashlib
    digest = hashlib.sha256()
    for at in range(0, size_of_data, 64 << 20):
        digest.update(read(at, min(64 << 20, size_of_data - at)))
    said["right"] = digest.hexdigest() == expected
with open(path, "rb") as file:
    size_of_data = size - 8 - int.from_bytes(file.read(8), "little")
"""


def make(path: Path, nbytes: int) -> str:
    """Creates a safetensors file of equally large tensors; returns the SHA-256 of their bytes."""
    each = 64 << 20
    count = max(nbytes // each, 1)
    header = {
        f"tensor.{n}": {
            "dtype": "F16",
            "shape": [each // 2],
            "data_offsets": [n * each, (n + 1) * each],
        }
        for n in range(count)
    }
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 4096)
    digest, noise = hashlib.sha256(), random.Random(1)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(count):
            block = noise.randbytes(each)
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def evict(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill_cache(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(16 << 20):
            pass


def run(way: str, path: Path, expected: str, pages: str = "auto") -> dict[str, Any] | str:
    """Runs one load in a new process; returns its measurements, or an error message."""
    program = FRAME + WAYS[way] + "\nprint(json.dumps(said))\n"
    command = [sys.executable, "-c", program, str(path), str(path.stat().st_size), pages, expected]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def is_installed(way: str) -> bool:
    needs = {
        "dmafile.torch": ["torch"],
        "pinned: torch.empty + readinto": ["torch"],
        "safetensors": ["torch", "safetensors"],
    }
    plain = way.startswith(("dmafile.cuda", "pinned: dmafile", "pinned: reg"))
    modules = [] if plain else needs.get(way, ["torch", way])
    return all(importlib.util.find_spec(name) for name in modules)


def machine() -> dict[str, Any]:
    """Describes this machine."""
    import dmafile

    doctor = subprocess.run(
        [sys.executable, "-m", "dmafile", "doctor", "--json"], capture_output=True, text=True
    )
    gpus = []
    if doctor.returncode == 0:
        checks = json.loads(doctor.stdout)
        checks = checks if isinstance(checks, list) else checks.get("checks", [])
        gpus = [one["found"] for one in checks if one["name"] in ("cuda", "hip")]
    try:
        is_double = hasattr(ctypes.CDLL("libcuda.so.1"), "double_reset")
    except OSError:
        is_double = False
    return {
        "dmafile": dmafile.__version__,
        "kernel": os.uname().release,
        "cpus": os.cpu_count(),
        "gpus": gpus,
        "double": is_double,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="a folder on the disk to be measured"
    )
    parser.add_argument("--gib", type=float, default=4, help="the size of the file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where all figures go")
    args = parser.parse_args()
    begun = time.monotonic()
    results: dict[str, list[dict[str, Any]]] = {}
    refused: dict[str, str] = {}
    where = machine()
    print(json.dumps(where, indent=1))
    if where["double"]:
        print("THE DRIVER IS A DOUBLE: these times mean nothing")

    with tempfile.TemporaryDirectory(dir=args.dir, prefix=".gpu-") as folder:
        path = Path(folder) / "model.safetensors"
        expected = make(path, int(args.gib * GIB))
        size = path.stat().st_size

        def measure(label: str, way: str, prepare: Callable[[Path], None], pages: str) -> None:
            if label in refused:
                return
            if time.monotonic() - begun > MOST_SECONDS:
                refused.setdefault(label, "no time left")
                return
            prepare(path)
            said = run(way, path, expected, pages)
            if isinstance(said, str):
                refused[label] = said
            elif said.get("right") is False:
                refused[label] = "WRONG BYTES"
            else:
                results.setdefault(label, []).append(said)

        jobs: list[tuple[str, str, Callable[[Path], None], str]] = []
        for way in WAYS:
            if not is_installed(way):
                refused[way] = "not installed"
            elif not way.startswith("pinned"):
                jobs += [
                    (f"{way}, cold", way, evict, "auto"),
                    (f"{way}, cached", way, fill_cache, "auto"),
                ]
            elif "torch" in way:
                jobs.append((f"{way}, cold", way, evict, "auto"))
            else:
                jobs += [
                    (f"{way}, {pages}, cold", way, evict, pages) for pages in ("4k", "thp", "huge")
                ]
        shuffled = random.Random(0)
        for _ in range(args.rounds):
            for job in shuffled.sample(jobs, len(jobs)):
                measure(*job)

    print(f"\n{size / GIB:.1f} GiB, median [least-most] of up to {args.rounds} shuffled rounds")
    print(f"{'':48} {'seconds':>24} {'GB/s':>7} {'CPU s/GB':>9} {'MiB':>7}")
    for label, runs in sorted(results.items()):
        seconds = sorted(one["seconds"] for one in runs)
        middle = statistics.median(seconds)
        cpu = statistics.median(one["cpu"] for one in runs) / (size / 1e9)
        peak = max(one["peak"] for one in runs) >> 20
        spread = f"{middle:.3f} [{seconds[0]:.3f}-{seconds[-1]:.3f}]"
        print(f"{label:48} {spread:>24} {size / 1e9 / middle:7.2f} {cpu:9.3f} {peak:7}")
    for label, why in sorted(refused.items()):
        print(f"{label}: {why}")
    if args.json:
        every = {"machine": where, "bytes": size, "runs": results, "refused": refused}
        args.json.write_text(json.dumps(every, indent=1))
    if any(why == "WRONG BYTES" for why in refused.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
