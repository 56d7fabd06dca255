"""Ranks that load a model together: reads lines of JSON, and answers each with one line per rank
and the number of ranks that have failed.

`ranks` are the ranks to start here, of `world`. `paths`, `options`, `users` and `late` have the
settings of a rank by its number; rank `killed` is killed when half of the bytes are loaded, or in
the step `killed_in`: when it begins to wait for these values of others, or to connect to them
("gloo"). If a load fails and `again` is a path, each rank loads that while it handles the
exception. All ranks load with the group of the ranks `members`. With `leave` a rank ends as soon as
it has loaded, and all but rank 0 look at the store rarely.
"""

import ctypes
import gc
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# For prctl(2), after a change of the user.
import dmafile._ranks
import dmafile._stripes
import dmafile.torch
import torch
import torch.distributed as dist

PR_SET_DUMPABLE = 4


def read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def memory() -> tuple[int, int]:
    """The share (Pss) of this process in mapped memfds, and the number of these mappings."""
    pss, count, here = 0, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line[0] in "0123456789abcdef" and "-" in line.split()[0]:
            here = "/memfd:" in line
            count += here
        elif here and line.startswith("Pss:"):
            pss += int(line.split()[1]) << 10
    return pss, count


def private() -> int:
    """The bytes of this process that belong to no file, such as copies."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def links() -> Iterator[str]:
    for one in Path("/proc/self/fd").iterdir():
        # The descriptor of this loop is closed by then.
        with suppress(FileNotFoundError):
            yield str(one.readlink())


def left() -> dict[str, Any]:
    """What a load could leak."""
    gc.collect()
    return {
        "fds": sorted(links()),
        "maps": memory()[1],
        "threads": [one.name for one in threading.enumerate() if "dmafile" in one.name],
        "tasks": sorted(
            name
            for task in Path("/proc/self/task").iterdir()
            if "dmafile" in (name := (task / "comm").read_text())
        ),
    }


def die_at(mark: Path) -> None:
    while not mark.exists():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def die_in(step: str | None, mark: Path) -> None:
    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    ranks: Any = dmafile._ranks.Ranks
    hear = ranks.hear

    def dying(self: Any, what: str, *rest: Any) -> Any:
        if what == step:
            die()
        return hear(self, what, *rest)

    if step is None:
        threading.Thread(target=die_at, args=(mark,), daemon=True).start()
    elif step == "gloo":
        dist.ProcessGroupGloo = die
    else:
        ranks.hear = dying


def digests(tensors: dict[str, Any]) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.view(torch.uint8).numpy()).hexdigest()
        for name, tensor in tensors.items()
    }


def rank(number: int, wanted: dict[str, Any]) -> None:
    me = str(number)
    dist.init_process_group(
        "gloo",
        init_method=wanted["store"],
        rank=number,
        world_size=wanted["world"],
        timeout=timedelta(seconds=wanted["timeout"]),
    )
    members = wanted["members"]
    group = dist.group.WORLD if members is None else dist.new_group(members)
    # After this, all connections are open.
    dist.barrier()
    if user := wanted["users"].get(me):
        os.setuid(user)
        # Otherwise its files in /proc belong to root.
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1)
    mark, killed = Path(wanted["mark"]), wanted["killed"]
    if number == killed:
        die_in(wanted["killed_in"], mark)
    # The others are still connecting then.
    dmafile._stripes._CONNECT = 10
    reports: list[dict[str, Any]] = []
    ranks: Any = dmafile._ranks.Ranks
    meet = ranks._meet

    def met(self: Any, *rest: Any) -> None:
        meet(self, *rest)
        mark.with_suffix(f".{number}").touch()

    ranks._meet = met

    def progress(done: int, total: int) -> None:
        if killed is not None and 2 * done >= total:
            # Only a rank that has met the others can name the one that had the store.
            for one in range(wanted["world"]):
                while not mark.with_suffix(f".{one}").exists():
                    time.sleep(0.001)
            mark.touch()
            # This rank may be the one that is killed.
            time.sleep(0.2)

    def load(path: Any) -> dict[str, Any]:
        tensors = getattr(dmafile.torch, wanted["call"])(
            path,
            group=group,
            progress=progress,
            report=reports.append,
            **wanted["options"].get(me, {}),
        )
        return dict(tensors)

    if wanted["leave"] and number:
        module: Any = dmafile._ranks
        module.time = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: time.sleep(0.3))
    before, read, own = left(), read_bytes(), private()
    time.sleep(wanted["late"].get(me, 0))
    said: dict[str, Any] = {"rank": number, "before": before}
    try:
        try:
            tensors = load(wanted["paths"].get(me, wanted["path"]))
        except Exception as error:
            if wanted["again"] is None:
                raise
            said["first"] = str(error)
            # The exception refers to all frames of the first load.
            tensors = load(wanted["again"])
    except Exception as error:
        said |= {"error": str(error), "errno": getattr(error, "errno", None)}
        del error
    else:
        said |= {"read": read_bytes() - read, "digests": digests(tensors), "reports": reports}
        if not wanted["leave"]:
            dist.barrier(group)
            said |= {"memory": memory()[0], "private": private() - own}
            dist.barrier(group)
            # Writes are private to a rank.
            tensors.pop(next(iter(tensors))).view(torch.uint8).zero_()
            dist.barrier(group)
            assert digests(tensors).items() <= said["digests"].items()
        del tensors
    said["after"] = left()
    os.write(1, json.dumps(said).encode() + b"\n")


def run(wanted: dict[str, Any]) -> int:
    """Runs the ranks; returns how many have failed."""
    os.environ |= wanted["environment"]
    started = []
    # Forked, because importing PyTorch takes longer than the test.
    for number in wanted["ranks"]:
        child = os.fork()
        if child == 0:
            try:
                rank(number, wanted)
            except BaseException as error:
                print(f"rank {number}: {error!r}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        started.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in started)


if __name__ == "__main__":
    for line in sys.stdin:
        os.write(1, b"%d\n" % run(json.loads(line)))
