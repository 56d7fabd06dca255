"""Measures how long a thaw takes to fill the memory of a process from its images.

A process with 2,700 memfds is frozen by `dmafile freeze`, and dumped by criu. `dmafile thaw` is
timed from its start to that of criu, which then has all memory as descriptors. It is compared with
the disk (the best of fio's direct jobs on the same files, and the time to touch as much shared
memory), with a thaw by criu alone, and with preadv(2) into memory, one object after the other, as
criu before 4.2 does it. As root, with criu (4.3 for its direct I/O) and fio installed:

    python -m bench.thaw
"""

import ctypes
import functools
import json
import mmap
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import documents
from bench.arguments import add_keep, add_place, folders, parser_of, program
from bench.runs import Rows, Run
from bench.seconds import facts
from bench.seconds.files import MIB, cached, evict, noise
from bench.seconds.memory import meminfo
from bench.words import compared, spread

KINDS = ((2400, 4 << 10, MIB), (250, MIB, 64 * MIB), (50, 64 * MIB, 2048 * MIB))
"""How many objects there are between two sizes; the last ones are scaled to the memory."""
OURS = "`dmafile thaw`"
DIRECT, BUFFERED = "criu alone, direct", "criu alone, buffered"
EACH = "`preadv()`, one object after the other"
TOUCH = "touching as much memory"
JOBS = [(block, depth) for block in ("1m", "4m") for depth in (8, 32)]
STAMP = """#!/bin/sh
# In place of criu: writes down when it is to restore the process, and refuses.
case $1 in
restore) date +%s.%N >"$STAMP"; exit 1 ;;
*) exec "$CRIU" "$@" ;;
esac
"""


def sizes(total: int, draw: random.Random) -> list[int]:
    """Sizes of objects, of TOTAL bytes together, as far as the large ones can be scaled."""
    found = [
        [int(least * (most / least) ** draw.random()) for _ in range(count)]
        for count, least, most in KINDS
    ]
    large = found.pop()
    scale = (total - sum(map(sum, found))) / sum(large)
    large = [max(MIB, int(size * min(1, scale))) for size in large]
    return [size for kind in (*found, large) for size in kind]


def keep(wanted: str) -> None:
    """Makes the objects, and waits."""
    allow_files()
    piece = next(noise(32 * MIB))
    for number, size in enumerate(json.loads(wanted)):
        fd = os.memfd_create(f"object-{number}")
        for at in range(0, size, len(piece)):
            os.write(fd, piece[: size - at])
        assert os.fstat(fd).st_size == size
    print("ready", flush=True)
    while True:
        time.sleep(1000)


def allow_files() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def run(*words: object, ends: int = 0, env: dict[str, str] | None = None) -> str:
    """What a command prints. If it does not end as it should, so does this program."""
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, env=env)
    if done.returncode != ends:
        sys.exit(f"{' '.join(map(str, words))}: {done.stderr or done.stdout}")
    return done.stdout


class Images:
    """The images of dmafile and of criu of the same process."""

    def __init__(self, place: Path, command: Sequence[str], sizes: Sequence[int]) -> None:
        self.command, self.sizes = command, sizes
        self.ours, self.theirs = place / "thaw-ours", place / "thaw-theirs"
        self.remove()
        self.theirs.mkdir()
        said = place / "thaw-said"
        words = [sys.executable, "-m", "bench.thaw", "keep", json.dumps(sizes)]
        with said.open("wb") as output:
            none = subprocess.DEVNULL
            process = subprocess.Popen(
                words, stdin=none, stdout=output, stderr=output, start_new_session=True
            )
        while "ready" not in said.read_text():
            if process.poll() is not None:
                sys.exit(said.read_text())
            time.sleep(0.1)
        print("freezing it", file=sys.stderr)
        tree = ["--leave-running", "--tree", process.pid]
        try:
            run("criu", "dump", "--images-dir", self.theirs, *tree)
            run(*command, "freeze", process.pid, self.ours)
        finally:
            # It has half of the machine's memory.
            process.kill()
            process.wait()

    def remove(self) -> None:
        for folder in (self.ours, self.theirs):
            shutil.rmtree(folder, ignore_errors=True)

    @staticmethod
    def files(folder: Path) -> list[Path]:
        return [path for path in folder.rglob("*") if path.is_file()]

    def thaw(self, scratch: Path) -> float:
        """The seconds until criu has all memory."""
        criu, stamp = scratch / "criu", scratch / "stamp"
        criu.write_text(STAMP)
        criu.chmod(0o755)
        stamp.unlink(missing_ok=True)
        path = f"{scratch}:{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "STAMP": str(stamp), "CRIU": str(shutil.which("criu"))}
        began = time.time()
        run(*self.command, "thaw", self.ours, ends=1, env=env)
        return float(stamp.read_text()) - began

    def alone(self, mode: str, scratch: Path) -> float:
        """The seconds until criu has restored the process."""
        stamp = scratch / "stamp"
        stamp.unlink(missing_ok=True)
        restore = f"criu restore --images-dir {self.theirs} --image-io-mode {mode}"
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        began = time.time()
        run(*unshare, "sh", "-c", f"{restore} --restore-detached && date +%s.%N >{stamp}")
        return float(stamp.read_text()) - began

    def each(self) -> float:
        """The seconds to read one object after the other."""
        began = time.monotonic()
        kept = []
        for file in self.files(self.ours):
            size = file.stat().st_size
            memory = os.memfd_create(file.name)
            os.ftruncate(memory, size)
            view = mmap.mmap(memory, size)
            kept.append((memory, view))
            with file.open("rb", buffering=0) as opened:
                at = 0
                while at < size:
                    at += os.preadv(opened.fileno(), [memoryview(view)[at:]], at)
        seconds = time.monotonic() - began
        for memory, view in kept:
            view.close()
            os.close(memory)
        return seconds

    def read(self, block: str, depth: int) -> float:
        """The seconds that fio takes to read as many bytes as there are.

        It reads whole blocks only, so that small files are left out.
        """
        fio = ["fio", "--name=read", "--readonly", "--rw=read", "--ioengine=io_uring", "--direct=1"]
        fio += ["--thread", f"--bs={block}", f"--iodepth={depth}", f"--opendir={self.ours}"]
        said = run(*fio, "--file_service_type=sequential", "--output-format=json")
        # Before it, fio says how many files it has found.
        done = json.loads(said[said.index("{") :])["jobs"][0]["read"]
        # fio's clock excludes its start.
        speed: float = done["io_bytes"] / done["runtime"] * 1000
        return sum(self.sizes) / speed

    def touch(self) -> float:
        """The seconds to make as much shared memory present, each CPU a part of it."""
        populate_write = 23
        count = len(os.sched_getaffinity(0))
        size = -(-sum(self.sizes) // count // mmap.PAGESIZE) * mmap.PAGESIZE
        views = [mmap.mmap(-1, size) for _ in range(count)]
        places = [(ctypes.c_char * size).from_buffer(view) for view in views]
        libc = ctypes.CDLL(None, use_errno=True)

        def populate(place: Any) -> int:
            failed = libc.madvise(ctypes.byref(place), ctypes.c_size_t(size), populate_write)
            return ctypes.get_errno() if failed else 0

        with ThreadPoolExecutor(count) as pool:
            began = time.monotonic()
            failed = list(pool.map(populate, places))
            seconds = time.monotonic() - began
        assert not any(failed), os.strerror(max(failed))
        return seconds


def measure(images: Images, rounds: int, draw: random.Random) -> list[dict[str, Any]]:
    samples = []
    with tempfile.TemporaryDirectory() as made:
        scratch = Path(made)
        ways: dict[str, Callable[[], float]] = {
            OURS: lambda: images.thaw(scratch),
            DIRECT: lambda: images.alone("direct", scratch),
            BUFFERED: lambda: images.alone("writeback", scratch),
            EACH: images.each,
            TOUCH: images.touch,
            **{fio(*job): functools.partial(images.read, *job) for job in JOBS},
        }
        for number in range(1, rounds + 1):
            order = list(ways)
            draw.shuffle(order)
            for way in order:
                files = images.files(images.theirs if way.startswith("criu") else images.ours)
                for file in files:
                    evict(file)
                seconds = ways[way]()
                left = sum(map(cached, files))
                samples.append(
                    {"way": way, "round": number, "seconds": seconds, "cached_after": left}
                )
                print(f"round {number} of {rounds}: {way}: {seconds:.2f} s", file=sys.stderr)
    return samples


def fio(block: str, depth: int) -> str:
    return f"fio, {block.upper()} × {depth}"


def tables(kept: Run) -> dict[str, Rows]:
    size = kept.machine["machine"]["bytes"]
    found: dict[str, list[float]] = {}
    for one in kept.samples:
        found.setdefault(one["way"], []).append(one["seconds"])
    # The fastest job, chosen afterwards.
    best = min((fio(*job) for job in JOBS), key=lambda name: statistics.median(found[name]))
    both = f"{best}, and then {TOUCH}"
    found[both] = [sum(one) for one in zip(found[best], found[TOUCH], strict=False)]
    rows = []
    for name in (OURS, both, best, TOUCH, DIRECT, BUFFERED, EACH):
        speed = spread([size / one / 1e9 for one in found[name]])
        rows.append([name, spread(found[name]), speed, compared(found[name], found[OURS])])
    return {"thaw": (["", "s", "GB/s", "time / dmafile's"], rows)}


def main() -> None:
    if sys.argv[1:2] == ["keep"]:
        return keep(sys.argv[2])
    parser = parser_of("bench.thaw", __doc__)
    parser.add_argument("--mib", type=int, help="size of all objects [half of the memory]")
    add_place(parser)
    add_keep(parser)
    args = parser.parse_args()
    allow_files()
    total = args.mib * MIB if args.mib else meminfo("MemTotal") // 2
    draw = random.Random(args.seed)
    with folders(args.dir) as (place, scratch):
        command = program(args.program)
        found = sizes(total, draw)
        own = {
            "bytes": sum(found),
            "objects": len(found),
            "criu": run("criu", "--version").split()[-1],
        }
        about = {**facts.described(command, place, scratch), **own}
        images = Images(place, command, found)
        try:
            samples = measure(images, args.rounds, draw)
        finally:
            images.remove()
    kept = Run({"bench": "thaw", "machine": about, "seed": args.seed}, samples)
    documents.finish(kept, "thaw", tables(kept), kept=args.keep)


if __name__ == "__main__":
    main()
