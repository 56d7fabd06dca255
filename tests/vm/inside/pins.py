"""`dmafile pins` with a program that pins memory in every way that the kernel offers.

    pins.py DMAFILE HELPERS            in the machine, as root
    pins.py DMAFILE HELPERS tracked    on a kernel of the series, with its tracker on or off
    pins.py DMAFILE HELPERS ROUNDS [SEED]
                                       what `--record` records, in as many random rounds

The program is pinner.c, whose makers report what they have pinned. Base pages are counted one by
one, huge pages by the count of the folio.
"""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAGE, HUGE = 4096, 2 << 20
PATIENCE = 300
"""A timeout in seconds that is long enough for a machine on a busy host."""
TRACING = Path("/sys/kernel/tracing")
OLD = os.uname().release.startswith("6.1.")

GROUP = Path("/sys/fs/cgroup/pinned")
ENTER = f'echo $$ >{GROUP}/cgroup.procs && exec "$0" "$@"'
"""A prefix that moves a command into this cgroup."""

NO_KCORE = "/proc/kcore: this kernel does not have it (ENOENT)"

Facts = dict[str, Any]


def settles(what: str, done: Any) -> None:
    """Waits for something that the kernel does later."""
    end = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < end, what
        time.sleep(0.1)


class Pinner:
    """The program that pins, and the reports of its makers."""

    def __init__(self, path: str, *makers: str) -> None:
        self.process = subprocess.Popen(
            ["sh", "-c", ENTER, path, *makers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.facts: dict[str, Facts] = {}
        self.pid = self.process.pid
        while makers and (line := self.hear()) != "ready":
            fact = json.loads(line)
            self.facts[fact["maker"]] = fact

    def hear(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, "the program that pins has ended"
        return line.strip()

    def say(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def release(self, count: int) -> None:
        for _ in range(count):
            self.say()
            assert self.hear() == "released"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Pins:
    """Runs the command, and counts the comparisons."""

    def __init__(self, dmafile: str, helpers: str) -> None:
        self.dmafile = shutil.copy(dmafile, "/tmp/dmafile")
        self.pinner = shutil.copy(Path(helpers) / "pinner", "/tmp/pinner")
        self.count = 0

    def run(self, *words: str) -> Any:
        command = [self.dmafile, "pins", *words, "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done
        return json.loads(done.stdout)

    def text(self, *words: str) -> str:
        done = subprocess.run([self.dmafile, "pins", *words], capture_output=True, text=True)
        assert done.returncode == 0, done
        return done.stdout

    def refused(self, *words: str) -> str:
        """The one line of a command that fails."""
        done = subprocess.run([self.dmafile, "pins", *words], capture_output=True, text=True)
        lines = done.stderr.splitlines()
        assert done.returncode == 1 and len(lines) == 1 and not done.stdout, done
        return lines[0]

    def less(self, *rights: str, words: Sequence[str]) -> tuple[int, int, str]:
        """The status, the lines and the error of a command with fewer rights (setpriv)."""
        command = ["setpriv", *rights, self.dmafile, "pins", *words]
        done = subprocess.run(command, capture_output=True, text=True)
        assert not done.stdout, done
        return done.returncode, done.stderr.count("\n"), done.stderr

    def same(self, what: str, found: object, wanted: object) -> None:
        self.count += 1
        assert found == wanted, f"{what}: {found}, not {wanted}"

    def has(self, what: str, text: str, part: str) -> None:
        self.count += 1
        assert part in text, f"{what}: no `{part}` in {text}"


def prepare() -> list[str]:
    """Makes devices to pin for; returns the makers that this machine supports."""
    makers = ["small", "hugetlb", "thp", "twice", "shared", "mapped", "xdp"]
    script = """
        ip link set lo up
        ip link add pins0 type dummy && ip link set pins0 up
        modprobe -q -a rdma_rxe ib_uverbs && rdma link add rxe0 type rxe netdev pins0
        modprobe -q dm_mod
        dmsetup create suspended --table '0 2048 zero'
        dmsetup suspend --noflush suspended
        echo 8 >/proc/sys/vm/nr_hugepages
        echo madvise >/sys/kernel/mm/transparent_hugepage/enabled
    """
    subprocess.run(["sh", "-c", script], check=True, capture_output=True)
    if Path("/dev/infiniband/uverbs0").exists():
        makers.append("rdma")
    if Path("/dev/udmabuf").exists():
        makers += ["udmabuf", "udmabuf-hugetlb", "udmabuf-gone"]
    # Without udev, there is no node with this name.
    number = Path("/sys/block").glob("dm-*")
    return [*makers, f"direct:/dev/{next(number).name}"]


def joined(pins: Pins, pinner: Pinner) -> None:
    """Compares every source of a kernel without the tracker with what was pinned."""
    facts = pinner.facts
    shown = pins.run(str(pinner.pid))
    held: dict[str, list[Facts]] = {}
    for holder in shown["holders"]:
        assert holder["pid"] == pinner.pid and holder["name"] == "pinner", holder
        held.setdefault(holder["by"], []).append(holder)
    buffers = [facts[one] for one in ("small", "hugetlb", "thp", "shared")]
    total = sum(one["bytes"] for one in buffers) + 2 * PAGE
    [ring] = held["io-uring"]
    pins.same("registered buffers", (ring["bytes"], ring["count"]), (total, 6))
    # Memory that is pinned twice is charged twice. RDMA is charged here too. Newer kernels charge
    # nothing to rings that were made with CAP_IPC_LOCK.
    charged = total if os.uname().release.startswith("6.") else 0
    charged += facts["rdma"]["bytes"] if "rdma" in facts else 0
    status = Path(f"/proc/{pinner.pid}/status").read_text()
    [pinned] = held["pinned"]
    pins.same("VmPin", f"VmPin:\t{pinned['bytes'] // 1024:8} kB" in status, True)
    pins.same("VmPin", pinned["bytes"], charged)
    if "rdma" in facts:
        [rdma] = held["rdma"]
        pins.same("RDMA", (rdma["bytes"], rdma["count"]), (facts["rdma"]["bytes"], 1))
        pins.same("RDMA device", rdma["device"], "rxe0")
    else:
        [why] = [one["why"] for one in shown["absent"] if one["by"] == "rdma"]
        pins.has("RDMA", why, "/sys/class/infiniband")
    if OLD:
        [why] = [one["why"] for one in shown["absent"] if one["by"] == "af-xdp"]
        pins.has("AF_XDP", why, "CONFIG_XDP_SOCKETS_DIAG")
    else:
        [xdp] = held["af-xdp"]
        umem = facts["xdp"]
        pins.same("AF_XDP", (xdp["bytes"], xdp["inode"]), (umem["bytes"], umem["inode"]))
    made = [facts[one] for one in facts if one.startswith("udmabuf")]
    found = sorted((one["inode"], one["bytes"]) for one in held.get("udmabuf", []))
    pins.same("udmabufs", found, sorted((one["inode"], one["bytes"]) for one in made))
    text = pins.text(str(pinner.pid))
    for by in held:
        name = {"io-uring": "io_uring buffer", "pinned": "VmPin", "rdma": "RDMA"}
        pins.has("text", text, name.get(by, by.replace("-", "_").replace("af_xdp", "AF_XDP")))


def shared(pins: Pins, pinner: Pinner) -> None:
    """A dma-buf that another process holds too, with only a mapping or a descriptor."""
    made = pinner.facts["udmabuf"]
    receiver = subprocess.Popen(
        [
            sys.executable,
            "-E",
            "-S",
            "-c",
            "import time; print('up', flush=True); time.sleep(9999)",
        ],
        stdout=subprocess.PIPE,
        pass_fds=[(fd := take(pinner.pid, made["fd"]))],
    )
    os.close(fd)
    assert receiver.stdout
    receiver.stdout.readline()
    everyone = pins.run()
    [one] = [
        holder
        for holder in everyone["holders"]
        if holder["by"] == "udmabuf" and holder["inode"] == made["inode"]
    ]
    pins.same(
        "who holds it", sorted([one["pid"], *one["also"]]), sorted([pinner.pid, receiver.pid])
    )
    [one] = [one for one in pins.run(str(receiver.pid))["holders"] if one["by"] == "udmabuf"]
    pins.same("who else", (one["pid"], one["also"]), (receiver.pid, [pinner.pid]))
    receiver.kill()
    receiver.wait()


def take(pid: int, fd: int) -> int:
    """A copy of a descriptor of another process (pidfd_getfd)."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    copy = libc.syscall(438, os.pidfd_open(pid), fd, 0)
    assert copy >= 0, os.strerror(ctypes.get_errno())
    return int(copy)


def file(pins: Pins, pinner: Pinner) -> None:
    """The pins of the memory of a memfd."""
    made = pinner.facts["shared"]
    shown = pins.run(f"/proc/{pinner.pid}/fd/{made['memfd_fd']}")
    pins.same("inode", shown["inode"], made["memfd"])
    pins.same(
        "mapped", [(one["pid"], one["bytes"]) for one in shown["mapped"]], [(pinner.pid, 6 * PAGE)]
    )
    found = [(one["pid"], one["by"], one["bytes"]) for one in shown["holders"]]
    pins.same("buffers in it", found, [(pinner.pid, "io-uring", made["bytes"])])
    if "udmabuf" not in pinner.facts:
        return
    made = pinner.facts["udmabuf"]
    shown = pins.run(f"/proc/{pinner.pid}/fd/{made['memfd_fd']}")
    pins.same("no buffers in it", shown["holders"], [])
    inodes = [one["inode"] for one in shown["possible"] if one["by"] == "udmabuf"]
    pins.same("udmabufs that may be over it", made["inode"] in inodes, True)


def pages(pins: Pins, pinner: Pinner, tracked: bool = False) -> None:
    """The pinned pages and their counts are exactly those of the program."""
    facts = pinner.facts
    # Newer kernels keep one pin for a huge page in a buffer, older ones one for each 4 KiB.
    huge = 512 if OLD else 1
    wanted: dict[int, int] = {}

    def adds(maker: str, pins: int = 1) -> None:
        if maker in facts:
            start, size = facts[maker]["address"], facts[maker]["bytes"]
            wanted.update(dict.fromkeys(range(start, start + size, PAGE), pins))

    for maker in ("small", "shared", "rdma", "xdp"):
        adds(maker)
    for maker in ("hugetlb", "thp"):
        adds(maker, huge)
    adds("twice", 2)
    direct = next(one for one in facts if one.startswith("direct"))
    if not OLD:
        # Linux 6.1 takes references for direct I/O, which do not count as pins.
        adds(direct)
    for maker in ("udmabuf", "udmabuf-hugetlb"):
        adds(maker)
    shown = pins.run("--pages", str(pinner.pid))
    found = {
        at: one["pins"]
        for one in shown["ranges"]
        for at in range(one["address"], one["address"] + one["bytes"], PAGE)
    }
    pins.same(
        "pages",
        {hex(at): count for at, count in found.items()},
        {hex(at): count for at, count in wanted.items()},
    )
    total = sum(group["bytes"] for group in shown["groups"])
    pins.same("bytes", (shown["bytes"], total), (len(wanted) * PAGE, len(wanted) * PAGE))
    for group in shown["groups"]:
        pins.same("who maps them", [one["pid"] for one in group["mapped"]], [pinner.pid])
        exact = tracked or group["folios"] * PAGE != group["bytes"]
        pins.same("exact", group["exact"], exact)
        pins.same("cgroup", group["cgroup"], None if group["sort"] == "hugetlb" else "/pinned")
    # All pinned pages, including those without a mapping.
    everyone = pins.run("--pages")
    if "udmabuf-gone" in facts:
        gone = facts["udmabuf-gone"]
        # The inode is gone too: only shmem pages that are charged to a cgroup remain.
        [group] = [one for one in everyone["groups"] if not one["mapped"]]
        seen = [group[word] for word in ("bytes", "pins", "sort", "cgroup", "inode")]
        wanted_here = [gone["bytes"], 4, "shmem", "/pinned", None]
        pins.same("of a memfd that is gone", seen, wanted_here)
    for maker in ("shared", "udmabuf", "udmabuf-hugetlb", "mapped"):
        if maker in facts and (fd := facts[maker].get("memfd_fd")):
            words = ("--pages", f"/proc/{pinner.pid}/fd/{fd}")
            if tracked:
                pins.has(f"of {maker}", pins.refused(*words), NO_KCORE)
                files = [one for one in everyone["groups"] if one["inode"] == facts[maker]["memfd"]]
                shown = sum(one["bytes"] for one in files)
            else:
                shown = pins.run(*words)["bytes"]
            pins.same(f"of {maker}", shown, facts[maker]["bytes"])
    text = pins.text("--pages")
    pins.has("text", text, f"{pinner.pid} pinner")
    pins.same("marked as exact", "~" in text, not tracked)


def refusals(pins: Pins) -> None:
    """Other users, missing processes and files, and invalid requests are refused with one line."""
    for words in (["--pages"], ["--watch=1"]):
        status, lines, error = pins.less("--reuid=1000", "--clear-groups", words=words)
        pins.same("for a user", (status, lines), (1, 1))
        pins.has("for a user", error, "(EACCES); run as root")
        pins.has("no process", pins.refused(*words, "4194305"), "(ESRCH)")
    pins.has("no tracker", pins.refused("--blocked"), "this kernel does not track pins (ENOENT)")
    pins.has("no file", pins.refused("/nowhere"), "(ENOENT)")
    pins.has("a folder", pins.refused("/tmp"), "(EINVAL)")


class Watching:
    """`dmafile pins --watch`, until it is stopped."""

    def __init__(self, pins: Pins, *words: str) -> None:
        command = [pins.dmafile, "pins", "--watch", *words, "--json"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr
        line = self.process.stderr.readline()
        assert line.startswith("watching"), line

    def stop(self) -> Any:
        self.process.send_signal(signal.SIGINT)
        out, err = self.process.communicate()
        assert self.process.returncode == 0 and not err, (out, err)
        return json.loads(out)


def traces() -> tuple[Sequence[str], str]:
    """The existing instances and probes."""
    instances = [one.name for one in (TRACING / "instances").iterdir()]
    return instances, (TRACING / "kprobe_events").read_text()


def watched(pins: Pins, makers: Sequence[str]) -> None:
    """Compares counts of the kernel with what the program did during the watch."""
    mine = [one for one in makers if one in ("small", "hugetlb", "thp", "twice", "xdp", "rdma")]
    mine += [one for one in makers if one.startswith("udmabuf")]
    # An instance of another program must stay.
    (TRACING / "instances/other").mkdir()
    # O_TRUNC would remove all probes, and the file cannot be seeked in.
    events = os.open(TRACING / "kprobe_events", os.O_WRONLY | os.O_APPEND)
    os.write(events, b"p:other/pins unpin_user_page\n")
    os.close(events)
    before = traces()
    watching = Watching(pins)
    pinner = Pinner(pins.pinner, *mine)
    seen: Any = None
    pinner.release(len(mine))
    # Kernel workers release some pins later.
    settles("still pinned", lambda: unpinned_all(pinner.pid))
    seen = watching.stop()
    pinner.end()
    pins.same("what is left", traces(), before)
    pins.same("nothing was missed", (seen["missed"], seen["dropped"]), (0, 0))
    pins.same("what was asked for", seen["requested"], OLD)
    counted = {row["by"]: row["pinned"] for row in seen["rows"] if row["pid"] == pinner.pid}
    wanted = {"io_uring buffer": 37 + 2 * 512 + 512 + 2, "AF_XDP": 8}
    if "rdma" in makers:
        wanted["RDMA"] = 5
    if "udmabuf" in makers:
        # Two of these pins are of huge pages, which are one folio each.
        wanted["udmabuf"] = 16 + 2 + 4
    pins.same("pinned", {by: count for by, count in counted.items() if count}, wanted)
    for by, count in wanted.items():
        undone = sum(row["unpinned"] for row in seen["rows"] if row["by"] == by)
        pins.same(f"unpinned by {by}", undone, count)


def unpinned_all(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    return "VmPin:\t       0 kB" in status


def killed(pins: Pins) -> None:
    """The next watch removes the instance of a killed one, but not that of a running one."""
    before = traces()
    dead, live = Watching(pins), Watching(pins)
    dead.process.kill()
    dead.process.wait()
    pins.same("left over", len(traces()[0]), len(before[0]) + 2)
    # The files of the killed process are closed some time later.
    settles("not removed", lambda: pins.run("--watch=1") and len(traces()[0]) == len(before[0]) + 1)
    pins.same("probes of the dead one", f"_{dead.process.pid}_" in traces()[1], False)
    pins.same("probes of the live one", f"_{live.process.pid}_" in traces()[1], True)
    pinner = Pinner(pins.pinner, "small")
    pinner.end()
    rows = live.stop()["rows"]
    seen = [row["pinned"] for row in rows if row["pid"] == pinner.pid and row["pinned"]]
    pins.same("the live one goes on", seen, [37])
    pins.same("what is left", traces(), before)


def short(pins: Pins) -> None:
    """Direct reads are only counted on request. Linux 6.1 takes references instead of pins."""
    for words, wanted in (((), []), (("--all",), [] if OLD else [64])):
        watching = Watching(pins, *words)
        # Reads 16 blocks of 16 KiB from the disk.
        command = ["dd", "if=/mnt/file", "of=/dev/null", "iflag=direct", "bs=16K", "count=16"]
        reader = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        assert reader.wait() == 0
        rows = watching.stop()["rows"]
        own = [row for row in rows if row["name"] == "dd" and row["by"] == "direct I/O"]
        pins.same("direct reads", [row["pinned"] for row in own if row["pinned"]], wanted)


def boot_time() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def owners(pins: Pins, pinner: Pinner, began: float) -> None:
    """The tracker reports the process, purpose, size and age of all long-term pins."""
    buffers = {"small", "hugetlb", "thp", "twice", "shared", "large", "reused", "updated", "cloned"}
    wanted: dict[str, int] = {}
    for maker, fact in pinner.facts.items():
        if maker in buffers:
            by = "io_uring buffer"
        elif maker == "xdp":
            by = "AF_XDP"
        elif maker in ("rdma", "vfio"):
            by = maker.upper()
        elif maker.startswith("udmabuf"):
            by = "udmabuf"
        else:
            continue
        wanted[by] = wanted.get(by, 0) + fact["bytes"]

    def read() -> tuple[list[Facts], dict[str, int]]:
        shown: list[Facts] = pins.run(str(pinner.pid))["owners"]
        found: dict[str, int] = {}
        for one in shown:
            found[one["by"]] = found.get(one["by"], 0) + one["bytes"]
        return shown, found

    shown, found = read()
    if "updated" in pinner.facts and found != wanted:
        # Older kernels unpin some time later what was replaced.
        settles(f"after an update: {found}, not {wanted}", lambda: read()[1] == wanted)
        shown, found = read()
    for one in shown:
        who = (one["pid"], one["name"], one["uid"], one["gone"])
        pins.same("whose", who, (pinner.pid, "pinner", 0, False))
        # /proc/uptime has a resolution of 10 ms.
        pins.same("since when", 0 <= one["age"] <= boot_time() - began + 0.01, True)
    pins.same("by whom", found, wanted)


RECORDING = Path("/sys/fs/bpf/dmafile-pins")


def recorded(pins: Pins, rounds: int, seed: int) -> None:
    """Programs in a stock kernel record the owner of every long-term pin that begins after them."""
    subprocess.run(["mount", "-t", "bpf", "bpf", RECORDING.parent], check=True)
    # By default anybody may write there.
    RECORDING.mkdir()
    os.chown(RECORDING, 1000, 1000)
    pins.has("open to others", pins.refused("--record"), "chmod 700 /sys/fs/bpf")
    pins.same("not read", pins.run()["recording"], None)
    RECORDING.rmdir()
    RECORDING.parent.chmod(0o700)
    makers = prepare()
    resume = ["dmsetup", "resume", "suspended"]
    before = Pinner(pins.pinner, "small", makers.pop())
    if OLD:
        # There a udmabuf takes references, and pins nothing.
        makers = [one for one in makers if not one.startswith("udmabuf")]
    else:
        makers += ["udmabuf-undone", "cloned"]
    makers += ["updated", f"vfio:{passed_through()}"]
    Path("/mnt/file").write_bytes(bytes(1 << 20))
    os.sync()
    makers.append("reused:/mnt/file")
    pins.same("nothing yet", pins.run()["recording"], None)
    pins.has("how to stop", pins.text("--record"), "dmafile pins --record --stop")
    shown = pins.run()
    pins.same("none", (shown["owners"], shown["recording"]["folios"]), ([], 0))
    starts(pins)
    # On newer kernels, direct I/O pins, too.
    older = [(one["recorded"], one["folios"]) for one in pins.run("--pages")["groups"]]
    pins.same("older pins", older, [(None, 37 if OLD else 40)])
    pins.has("older pins", pins.text("--pages"), "before recording")
    chance = random.Random(seed)
    for round in range(rounds):
        chosen = makers if round == 0 else chance.sample(makers, chance.randint(1, len(makers)))
        began = boot_time()
        pinner = Pinner(pins.pinner, *chosen)
        owners(pins, pinner, began)
        if round == 0:
            described(pins, pinner)
        if chance.random() < 0.5:
            pinner.release(len(chosen))
            settles("still recorded after its release", lambda: not pins.run()["owners"])
        pinner.end()
        settles("still recorded", lambda: not pins.run()["owners"])
        if round % 50 == 49:
            print(f"{round + 1} rounds", flush=True)
    subprocess.run(resume, check=True, stdout=subprocess.DEVNULL)
    before.end()
    if not OLD:
        outlived(pins)
    shown = pins.run()["recording"]
    counts = [shown[word] for word in ("lost", "beyond", "missed", "disturbed", "folios", "paused")]
    pins.same("all recorded", counts, [0, 0, 0, 0, 0, False])
    paused(pins)
    pins.text("--record", "--stop")
    pins.same("what is left", list(RECORDING.parent.iterdir()), [])
    full(pins)
    interrupted(pins, chance)
    denied(pins)


def passed_through() -> str:
    """Gives the second disk to VFIO; returns its IOMMU group."""
    device = Path("/sys/block", Path(os.environ["RAW"]).name, "device/device").resolve()
    group = (device / "iommu_group").resolve().name
    subprocess.run(["modprobe", "-a", "vfio-pci", "vfio_iommu_type1"], check=True)
    (device / "driver_override").write_text("vfio-pci")
    (device / "driver/unbind").write_text(device.name)
    Path("/sys/bus/pci/drivers_probe").write_text(device.name)
    return group


def paused(pins: Pins) -> None:
    """The kernel can be told to run no programs at its functions."""
    switch = Path("/proc/sys/kernel/ftrace_enabled")
    advice = "sysctl kernel.ftrace_enabled=1"
    try:
        switch.write_text("0")
    except OSError as error:
        # Newer kernels always refuse it.
        pins.same("not paused", error.errno, errno.EOPNOTSUPP)
        return
    pins.has("paused", pins.text(), "paused: kernel.ftrace_enabled is 0")
    pins.same("paused", pins.run()["recording"]["paused"], True)
    pins.has("paused", pins.refused("--record", "--stop"), advice)
    switch.write_text("1")
    pinner = Pinner(pins.pinner, "small")
    owners(pins, pinner, boot_time() - 60)
    pinner.end()
    settles("still recorded", lambda: not pins.run()["owners"])


def described(pins: Pins, pinner: Pinner) -> None:
    """The other properties of an owner."""
    for one in pins.run()["owners"]:
        pins.same("cgroup", one["cgroup"], "/pinned")
        place = {"io_uring buffer": "io_", "udmabuf": "udmabuf_", "AF_XDP": "xdp_", "RDMA": "ib_"}
        place["VFIO"] = "vfio_"
        named = [name for name in one["functions"] if name.startswith(place[one["by"]])]
        pins.same("functions", (bool(named), one["functions"][0].startswith("bpf")), (True, False))
    groups = pins.run("--pages", str(pinner.pid))["groups"]
    who = {"pid": pinner.pid, "name": "pinner", "gone": False}
    others = [one for one in groups if one["recorded"] not in (None, who)]
    pins.same("who pinned the pages", others, [])
    owned = sum(one["bytes"] for one in pins.run()["owners"])
    found = sum(one["bytes"] for one in groups if one["recorded"])
    gone = pinner.facts.get("udmabuf-gone", {"bytes": 0})["bytes"]
    pins.same("bytes of the pages", found, owned - gone)


def outlived(pins: Pins) -> None:
    """Memory that another process holds when the one that pinned it has ended."""
    pinner = Pinner(pins.pinner, "udmabuf")
    fd = take(pinner.pid, pinner.facts["udmabuf"]["fd"])
    pinner.end()
    [one] = pins.run()["owners"]
    seen = [one[word] for word in ("pid", "name", "gone", "by", "bytes")]
    pins.same("gone", seen, [pinner.pid, "pinner", True, "udmabuf", 16 * PAGE])
    pins.has("gone", pins.text(), "pinner (gone)")
    os.close(fd)
    settles("still recorded", lambda: not pins.run()["owners"])


def starts(pins: Pins) -> None:
    """Only one recording at a time, and only by root."""
    pins.has("again", pins.refused("--record"), "they are recorded already (EEXIST)")
    for words in (["--record"], ["--record", "--stop"]):
        pins.same(
            "for a user", pins.less("--reuid=1000", "--clear-groups", words=words)[:2], (1, 1)
        )
    pins.same("goes on", pins.run()["recording"] is not None, True)


def denied(pins: Pins) -> None:
    """Kernels that do not have or do not allow what it takes; the last one cannot be undone."""
    tables = Path("/sys/kernel/btf")
    subprocess.run(["mount", "-t", "tmpfs", "none", tables], check=True)
    pins.has("no BTF", pins.refused("--record"), "/sys/kernel/btf/vmlinux: ")
    subprocess.run(["umount", tables], check=True)
    gone = "-bpf,-perfmon,-sys_admin"
    status, lines, error = pins.less(f"--bounding-set={gone}", words=["--record"])
    pins.same("without CAP_BPF", (status, lines), (1, 1))
    why = "(with CAP_BPF, CAP_PERFMON and CAP_SYS_ADMIN), on a kernel that is not locked down"
    # Where securityfs is not mounted, it is not known whether it is locked down.
    pins.has("without CAP_BPF", error, why)
    switch = Path("/sys/kernel/security/lockdown")
    subprocess.run(["mount", "-t", "securityfs", "none", switch.parent], check=True)
    switch.write_text("confidentiality")
    pins.has("locked down", pins.refused("--record"), "is locked down (confidentiality)")
    pins.same("nothing left", list(RECORDING.parent.iterdir()), [])


def full(pins: Pins) -> None:
    """What does not fit is counted, and what fits is right."""
    pins.text("--record", "--memory=64K")
    pinner = Pinner(pins.pinner, "large")
    shown = pins.run()
    kept, lost = shown["recording"]["folios"], shown["recording"]["lost"]
    pins.same("lost and kept", (kept > 0, lost > 0, kept + lost), (True, True, 16384))
    pins.same("kept", sum(one["bytes"] for one in shown["owners"]), kept * PAGE)
    pins.has("lost", pins.text(), f"not recorded: {lost} pins, because that memory was full")
    pinner.end()
    settles("still recorded", lambda: not pins.run()["owners"])
    pinner = Pinner(pins.pinner, "small")
    owners(pins, pinner, boot_time() - 60)
    pinner.end()
    pins.text("--record", "--stop")


def interrupted(pins: Pins, chance: random.Random) -> None:
    """Whatever stops the command, the next one finds nothing in its way."""
    command = [pins.dmafile, "pins", "--record"]

    def stopped() -> bool:
        return not subprocess.run([*command, "--stop"], capture_output=True).returncode

    for _ in range(8):
        killed = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        time.sleep(chance.random() * 2.5)
        killed.kill()
        killed.wait()
        # The kernel ends what the killed process was doing some time later.
        settles("removed", stopped)
        pins.same("after a kill", list(RECORDING.parent.iterdir()), [])
    # What a stop or a start leaves that is killed half-way.
    pins.text("--record")
    RECORDING.rename(RECORDING.with_name("dmafile-pins-new"))
    pins.text("--record")
    pins.same("a leftover", list(RECORDING.parent.iterdir()), [RECORDING])
    pins.text("--record", "--stop")
    both = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    errors = [one.communicate()[1] for one in both]
    pins.same("two at once", sorted(one.returncode for one in both), [0, 1])
    [error] = [one for one in errors if one]
    pins.same("two at once", "(EEXIST)" in error or "(EAGAIN)" in error, True)
    pins.text("--record", "--stop")
    pins.has("none", pins.text("--record", "--stop"), "no pins were recorded")
    other = subprocess.Popen(
        [*command, "--for=1s"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert other.stderr and other.stderr.readline()
    pins.text("--record", "--stop")
    pins.text("--record")
    other.wait()
    pins.same("of another user", RECORDING.exists(), True)
    pins.text("--record", "--stop")
    during = subprocess.Popen(
        [*command, "--for=1h", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert during.stderr
    pins.has("begins", during.stderr.readline(), "recording pins; press Ctrl-C")
    pinner = Pinner(pins.pinner, "small")
    during.send_signal(signal.SIGINT)
    shown = json.loads(during.communicate()[0])
    pins.same("at Ctrl-C", [one["pid"] for one in shown["owners"]], [pinner.pid])
    pins.same("after Ctrl-C", (during.returncode, list(RECORDING.parent.iterdir())), (0, []))
    pinner.end()
    subprocess.run(["umount", RECORDING.parent], check=True)
    pins.has("no bpffs", pins.refused("--record"), "mount -t bpf -o mode=700")
    subprocess.run(["mount", "-t", "bpf", "-o", "mode=700", "bpf", RECORDING.parent], check=True)


def untracked(pins: Pins, pinner: Pinner) -> None:
    """With the tracker off, nothing is reported that could be wrong."""
    pins.same("no owners", pins.run(str(pinner.pid))["owners"], None)
    for words in ((), (str(pinner.pid),)):
        pins.has("no pages", pins.refused("--pages", *words), NO_KCORE)
    pins.has("off", pins.refused("--blocked"), "pin tracker is off (ENOENT); boot with pin")


def of_the_series(pins: Pins) -> None:
    """The counts of the kernel itself, which need no /proc/kcore."""
    try:
        on = bool(Path("/proc/self/pins").read_text())
    except OSError:
        on = False
    makers = prepare()
    before = pins.run("--pages") if on else None
    began = boot_time()
    pinner = Pinner(pins.pinner, *makers)
    if on:
        owners(pins, pinner, began)
        pages(pins, pinner, tracked=True)
    else:
        untracked(pins, pinner)
    # dmsetup prints a warning about missing semaphores.
    subprocess.run(["dmsetup", "resume", "suspended"], check=True, capture_output=True)
    pinner.end()
    if on:
        settles("still pinned", lambda: pins.run("--pages") == before)
    print(f"{pins.count} facts checked, the tracker is {'on' if on else 'off'}")


def main(dmafile: str, helpers: str, tracked: str = "", seed: str = "1") -> None:
    pins = Pins(dmafile, helpers)
    (GROUP.parent / "cgroup.subtree_control").write_text("+memory")
    GROUP.mkdir()
    if tracked.isdecimal():
        recorded(pins, int(tracked), int(seed))
        print(f"{pins.count} facts checked")
        return
    if tracked:
        of_the_series(pins)
        return
    makers = prepare()
    pinner = Pinner(pins.pinner, *makers)
    joined(pins, pinner)
    file(pins, pinner)
    if "udmabuf" in pinner.facts:
        shared(pins, pinner)
    pages(pins, pinner)
    refusals(pins)
    Path("/mnt/file").write_bytes(bytes(1 << 20))
    os.sync()
    # The pinner can only end after its direct read.
    subprocess.run(["dmsetup", "resume", "suspended"], check=True, stdout=subprocess.DEVNULL)
    pinner.end()
    watched(pins, makers)
    killed(pins)
    short(pins)
    print(f"{pins.count} facts checked")


if __name__ == "__main__":
    main(*sys.argv[1:])
