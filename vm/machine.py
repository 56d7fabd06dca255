"""Runs a command in a virtual machine, and judges what its kernel had to say."""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from vm import kernels, ko
from vm.compiled import static
from vm.host import HERE, Unavailable, call, need
from vm.kernels import Kernel

# What this program itself ends with; everything else is COMMAND's.
USAGE, NO_GUEST, COMPLAINT, HANG = 2, 122, 123, 124

# 8 MiB, which is all that Linux moves by a command (NVME_MAX_KB_SZ).
LARGEST_MDTS = 11

INSIDE = "/run/dmafile"
"""Where the guest has the folder that it shares with this program."""

# The group that has /dev/dmafile, as the udev rule of `make kernel-install` would arrange it.
MEMBERS = "2000"

# What counts instructions, in this run's folder, and where it writes the marks of vm/mark.h to, in
# the folder that COMMAND sees, too: there it is told of it by the variable.
COUNTER, MARKS, MARKS_VARIABLE = "counter.so", "marks", "DMAFILE_MARKS"
MARK_BEGIN, MARK_END = 254, 255

# The timer of the scheduler's deadline server, where a busy host gave a CPU no time: seen on 6.12,
# and on 7.3, which words it differently, before the first process ran.
LATE = rb"(?:\ CPU:\ \d+\ PID:\ \d+\ at)?\ kernel/time/hrtimer\.c:\d+(?:\ at)?\ hrtimer_forward\+"

COMPLAINTS = re.compile(
    rb"""
    Kernel\ panic | Oops | BUG: | WARNING:(?!%s) | KASAN: | KFENCE: | UBSAN: | kernel\ BUG\ at
    | general\ protection\ fault | unable\ to\ handle | bad\ page\ state
    | INFO:\ (task\ .*\ blocked|possible\ recursive|suspicious|trying\ to\ register|inconsistent)
    | detected\ stalls | kmemleak:.*new\ suspected
    """
    % LATE,
    re.VERBOSE,
)
"""How a kernel says that something is wrong with it."""

# Per --fs: the Debian package and the command that makes one. The machine knows tmpfs by itself.
MAKERS: Mapping[str, tuple[str, Sequence[str]]] = {
    "ext4": ("e2fsprogs", ["mkfs.ext4", "-q", "-F"]),
    "xfs": ("xfsprogs", ["mkfs.xfs", "-q", "-f"]),
    "btrfs": ("btrfs-progs", ["mkfs.btrfs", "-q", "-f"]),
    "f2fs": ("f2fs-tools", ["mkfs.f2fs", "-q", "-f"]),
    "overlayfs": ("e2fsprogs", ["mkfs.ext4", "-q", "-F"]),
    "tmpfs": ("util-linux", []),
}

# What all controllers of disks have in common.
NVME = "nvme,serial={disk},mdts={mdts}"

RAW: Mapping[str, Sequence[str]] = {
    "raw": [f"{NVME},drive={{disk}}"],
    # Eight more bytes for each block, with its checksum and number (T10 DIF, type 1).
    "raw-pi": [f"{NVME},id={{disk}}-a", "nvme-ns,bus={disk}-a,drive={disk},ms=8,pi=1"],
    "raw-zoned": [
        f"{NVME},id={{disk}}-a",
        "nvme-ns,bus={disk}-a,drive={disk},zoned=on,zoned.zone_size=16M",
    ],
    # Two ways to one disk.
    "raw-multipath": [
        "nvme-subsys,id={disk}-s,nqn={disk}",
        f"{NVME},id={{disk}}-a,subsys={{disk}}-s",
        f"{NVME},id={{disk}}-b,subsys={{disk}}-s",
        "nvme-ns,bus={disk}-a,drive={disk},shared=on",
    ],
}
"""Per --fs that makes no file system: QEMU's devices. A disk with one has those of `raw`."""

INTEL, AMD = ["-device", "intel-iommu"], ["-device", "amd-iommu"]
IOMMUS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "off": ([], []),
    "intel": (INTEL, ["intel_iommu=on"]),
    "intel-strict": (INTEL, ["intel_iommu=on", "iommu.strict=1"]),
    "intel-pt": (INTEL, ["intel_iommu=on", "iommu=pt"]),
    # Strict by itself: Linux sees that it is QEMU's.
    "amd": (AMD, []),
    # None, and devices reach nothing but bounce buffers.
    "swiotlb": ([], ["swiotlb=force"]),
}
"""Per --iommu: QEMU's words and the kernel's."""


@dataclass(frozen=True)
class Wanted:
    """What kind of machine, as the command line says."""

    kernel: str = "6.12"
    fs: Sequence[str] = ()
    disk_size: int = 2 << 30
    disk_speed: int | None = None
    mdts: int = 7
    poll_queues: int = 0
    iommu: str = "off"
    append: str = ""
    cpus: int = 2
    nodes: int = 1
    parallel: bool = False
    memory: int = 2 << 30
    as_user: bool = False
    as_member: bool = False
    module: bool = False
    module_options: str = ""
    count_instructions: bool = False
    marks: Path | None = None
    timeout: float = 600
    kernel_log: Path | None = None


def main() -> NoReturn:
    options, command = parse(sys.argv[1:])
    # `vm/run ... | head` ends like any command does.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    # So that ending this program ends the machine and takes its disks along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(run(options, command))
    except Unavailable as error:
        say(str(error))
        sys.exit(NO_GUEST)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def parse(words: Sequence[str]) -> tuple[Wanted, list[str]]:
    parser = argparse.ArgumentParser(
        prog="vm/run",
        usage="vm/run [options] -- COMMAND...",
        description="Runs COMMAND on a chosen kernel in QEMU; output and exit status are its.",
        epilog=f"Ends with {NO_GUEST} when there is no machine to run on, {COMPLAINT} when the "
        f"kernel complained, {HANG} when the time is over, {USAGE} on bad usage.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    standard = Wanted()
    add(
        "--kernel",
        default=standard.kernel,
        help=f"{', '.join((*kernels.STOCK, kernels.NEWEST))}, the two first numbers of any other "
        f"version that Debian has, or the path of an image [{standard.kernel}]",
    )
    add("--module", action="store_true", help="build dmafile.ko and load it")
    add(
        "--module-options",
        default="",
        metavar="WORDS",
        help='--module with parameters, as in "gather_mb=1 depth=1"',
    )
    add(
        "--fs",
        action="append",
        default=[],
        choices=(*MAKERS, *RAW),
        help="a disk at /mnt, the next at /mnt2; one of raw... is mounted nowhere, and COMMAND has "
        "its node as $RAW, the next one's as $RAW2",
    )
    add(
        "--disk-size",
        type=size,
        default=standard.disk_size,
        metavar="SIZE",
        help="of each, sparse [2G]",
    )
    add(
        "--disk-speed",
        type=size,
        metavar="SIZE",
        help="of each, bytes a second at most",
    )
    add(
        "--mdts",
        type=int,
        choices=range(1, LARGEST_MDTS + 1),
        default=standard.mdts,
        metavar="N",
        help="at most 2^N pages of 4 KiB in a command to a disk, "
        f"N up to {LARGEST_MDTS} [{standard.mdts}]",
    )
    add(
        "--poll-queues",
        type=count,
        default=standard.poll_queues,
        metavar="N",
        help="of each disk, for polled reads and writes, beside those with interrupts; as many as "
        "CPUs at most [none]",
    )
    add("--iommu", choices=IOMMUS, default=standard.iommu, help=f"[{standard.iommu}]")
    add(
        "--append",
        action="append",
        default=[],
        metavar="WORDS",
        help='for the kernel\'s command line, as in "preempt=full quiet"; several add up',
    )
    add("--cpus", type=count, metavar="N", help=f"[{standard.cpus}]")
    add(
        "--nodes",
        type=count,
        default=standard.nodes,
        metavar="N",
        help="NUMA nodes, with equal parts of the memory and the CPUs [1]",
    )
    add(
        "--parallel",
        action="store_true",
        help="let CPUs run at the same time, not by turns; the kernel may, rarely, fail of it",
    )
    add("--memory", type=size, default=standard.memory, metavar="SIZE", help="[2G]")
    add("--as-user", action="store_true", help="run COMMAND as user 1000, not as root")
    add(
        "--as-member",
        action="store_true",
        help="--as-user, in the group that may open /dev/dmafile",
    )
    add(
        "--count-instructions",
        action="store_true",
        help="count what the whole guest executes meanwhile",
    )
    add(
        "--marks",
        type=Path,
        metavar="PATH",
        help="--count-instructions, and keep what was counted at each mark (vm/mark.h)",
    )
    add(
        "--timeout",
        type=float,
        default=standard.timeout,
        metavar="SECONDS",
        help="with booting [600]",
    )
    add(
        "--kernel-log",
        type=Path,
        metavar="PATH",
        help="keep what the kernel printed, from warnings up",
    )
    # By hand, as COMMAND may have a `--` of its own.
    end = words.index("--") if "--" in words else len(words)
    options, command = vars(parser.parse_args(words[:end])), list(words[end + 1 :])
    if not command:
        parser.error("what is to be run? `-- COMMAND...` comes last")
    options["append"] = " ".join(options["append"])
    options["module"] |= bool(options["module_options"])
    options["as_user"] |= options["as_member"]
    options["count_instructions"] |= options["marks"] is not None
    if options["count_instructions"] and options["cpus"] not in (None, 1):
        parser.error("--count-instructions: one CPU is all that can be counted on")
    if options["count_instructions"] and options["parallel"]:
        parser.error("--count-instructions: one CPU has none to run in parallel with")
    options["cpus"] = options["cpus"] or (1 if options["count_instructions"] else standard.cpus)
    if options["cpus"] % options["nodes"]:
        parser.error("--nodes: each has as many CPUs as another")
    # The driver refuses to load with more.
    if options["poll_queues"] > options["cpus"]:
        parser.error("--poll-queues: at most one for each CPU")
    return Wanted(**options), command


def size(text: str) -> int:
    """Bytes, of 512M, 2G or 2GiB."""
    match = re.fullmatch(r"(\d+)([KMGT]?)(iB)?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text} is no size; try 512M or 2G")
    return int(match[1]) << 10 * " KMGT".index(match[2] or " ")


def count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def say(text: str) -> None:
    print(f"vm: {text}", file=sys.stderr)


def prepare(fs: Sequence[str] = ()) -> None:
    """Makes sure of all that booting takes, except for the kernel."""
    need("qemu-system-x86", "command", "-v", "qemu-system-x86_64")
    # virtme-ng packs the modules that mount the root, and busybox to load them; `file` tells it
    # the version of an image.
    need("kmod", "command", "-v", "modprobe")
    need("busybox-static", "sh", "-c", "! ldd $(command -v busybox)")
    need("file", "command", "-v", "file")
    for name in fs:
        package, maker = MAKERS.get(name, ("", []))
        if maker:
            need(package, "command", "-v", maker[0])


def run(wanted: Wanted, command: Sequence[str]) -> int:
    """Boots, runs, judges; what comes back is for exit()."""
    prepare(wanted.fs)
    kernel = kernels.find(wanted.kernel)
    built = ko.find(kernel) if wanted.module else None
    launcher = kernels.virtme_run()
    if wanted.marks:
        # Said before the machine has run, not after.
        wanted.marks.touch()
    with tempfile.TemporaryDirectory(prefix="dmafile-vm-") as name:
        folder = Path(name)
        share, log = folder / "share", folder / "log"
        share.mkdir()
        for output in ("stdout", "stderr"):
            (share / output).touch()
        (share / "command").write_bytes(os.fsencode(script(wanted, command)))
        if wanted.count_instructions:
            static(HERE / "count.c", share)
            build_counter(folder / COUNTER)
        # The kernel's command line has no room for arguments.
        arguments = shlex.join(["set", "--", str(kernel.modules), *wanted.fs])
        variables = {
            "share": INSIDE,
            "iommu": wanted.iommu if IOMMUS[wanted.iommu][0] else "",
            "module": str(built or ""),
            "parameters": wanted.module_options,
            "group": MEMBERS,
        }
        lines = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        guest = (HERE / "guest.sh").read_text()
        (share / "guest.sh").write_text("\n".join([*lines, arguments, guest]))
        disks = [disk(folder, number, fs, wanted) for number, fs in enumerate(wanted.fs, 1)]
        words = launch(launcher, kernel, wanted, share, disks)
        in_time = boot(words, share, log, wanted)
        if wanted.marks:
            shutil.copyfile(share / MARKS, wanted.marks)
        text = log.read_bytes()
        if wanted.kernel_log:
            wanted.kernel_log.write_bytes(text)
        return judge(wanted, share, text, in_time)


def script(wanted: Wanted, command: Sequence[str]) -> str:
    """A shell script of COMMAND with this program's folder and environment."""
    environment = dict(os.environ)
    environment["PATH"] = f"/run/vm:{environment['PATH']}"
    # It would be a place that can't be written to.
    environment.pop("TMPDIR", None)
    if wanted.count_instructions:
        environment[MARKS_VARIABLE] = f"{INSIDE}/{MARKS}"
    if wanted.as_user:
        environment |= {"HOME": "/tmp", "USER": "user", "LOGNAME": "user"}
    words = ["exec", "env", "-i", *(f"{name}={value}" for name, value in environment.items())]
    # Which nodes its disks have is for the guest to say.
    nodes = [f'{name}="${name}"' for name in raw_names(wanted.fs)]
    callers = []
    if wanted.as_user:
        groups = f"--groups={MEMBERS}" if wanted.as_member else "--clear-groups"
        callers += ["setpriv", "--reuid=1000", "--regid=1000", groups, "--"]
    if wanted.count_instructions:
        callers.append(f"{INSIDE}/count")
    line = " ".join([shlex.join(words), *nodes, shlex.join([*callers, *command])])
    return f"cd {shlex.quote(str(Path.cwd()))}\n{line}\n"


def raw_names(fs: Sequence[str]) -> list[str]:
    """The variables that name the raw disks' nodes: RAW, RAW2 and so on."""
    number = sum(one in RAW for one in fs)
    return [f"RAW{turn if turn > 1 else ''}" for turn in range(1, number + 1)]


def disk(folder: Path, number: int, fs: str, wanted: Wanted) -> list[str]:
    """QEMU's words for an NVMe disk, with a file system or raw."""
    if fs == "tmpfs":
        return []
    name = f"disk{number}"
    image = folder / name
    with image.open("wb") as file:
        file.truncate(wanted.disk_size)
    if fs in MAKERS:
        call([*MAKERS[fs][1], str(image)])
    drive = f"if=none,id={name},file={image},format=raw,cache=unsafe,discard=unmap"
    if wanted.disk_speed:
        drive += f",throttling.bps-total={wanted.disk_speed}"
    words = ["-drive", drive]
    for device in RAW.get(fs, RAW["raw"]):
        words += ["-device", device.format(disk=name, mdts=wanted.mdts)]
    return words


def launch(
    launcher: Sequence[str],
    kernel: Kernel,
    wanted: Wanted,
    share: Path,
    disks: Sequence[list[str]],
) -> list[str]:
    """The command line of virtme-ng."""
    devices, settings = IOMMUS[wanted.iommu]
    words = [*launcher, "--kimg", str(kernel.image), "--mods", "auto"]
    words += ["--force-9p", "--disable-kvm"]
    words += [f"--cpus={wanted.cpus}", f"--memory={wanted.memory >> 20}M"]
    if wanted.nodes > 1:
        each, cpus = (wanted.memory >> 20) // wanted.nodes, wanted.cpus // wanted.nodes
        for first in range(0, wanted.cpus, cpus):
            words.append(f"--numa={each}M,cpus={first}-{first + cpus - 1}")
    # In this order: the first has the tag virtme.initmount0. What they say of the guest's folders
    # is for an init that isn't used.
    words += [f"--rwdir=share={share}", "--rodir=root=/"]
    # What the kernel says, from warnings up, goes to standard error.
    words += ["--show-boot-console", "--script-sh", "true", "--qemu-opts", *devices]
    # The last -append is the one that counts. Ours has another first process: virtme-ng's takes
    # longer than the kernel to start. An oops ends the machine: what comes after is worth nothing.
    arguments = ["console=ttyS0", "earlyprintk=serial,ttyS0,115200", "loglevel=5", "panic=-1"]
    # For kernels that mount their root themselves.
    arguments += ["rootfstype=9p", "rootflags=version=9p2000.L,trans=virtio,access=any", "ro"]
    # 256 of the old kind, which take a kernel with KASAN twelve seconds.
    arguments.append("pty.legacy_count=0")
    # A CPU that has to share a busy host's must not look like one that hangs.
    arguments += ["watchdog_thresh=60", "rcupdate.rcu_cpu_stall_timeout=120"]
    # Nor its timer like a broken one: the kernel gives ticks a moment to come, and panics.
    arguments.append("no_timer_check")
    if wanted.poll_queues:
        arguments.append(f"nvme.poll_queues={wanted.poll_queues}")
    arguments += ["oops=panic", *settings, *shlex.split(wanted.append)]
    arguments += ["init=/bin/sh", "--", str(share / "guest.sh")]
    words += ["-append", shlex.join(arguments)]
    # CPUs take turns. Were each a thread, one could translate code while another one patches it,
    # and run what was there before: a jump label's breakpoint, which is an oops.
    words += ["-accel", f"tcg,thread={'multi' if wanted.parallel else 'single'}"]
    # Not page tables of five levels: whether there are is unknown for a moment of every boot, and
    # an interrupt just then is a wild access to KASAN. Nor CMPXCHG16B: before its version 8 QEMU
    # may take any bits for the flags after it (the helper computes them of a `cc_op` that has not
    # been written back), and an interrupt just then is a double fault; kernels do without.
    # Not the driver of AMD's IOMMU.
    words += ["-cpu", "max,-la57" if devices == AMD else "max,-la57,-cx16"]
    if wanted.nodes > 1:
        # No processor has a part in two of them.
        words += ["-smp", f"sockets={wanted.nodes}"]
    if wanted.count_instructions:
        words += ["-plugin", f"{share.parent / COUNTER},out={share / MARKS}"]
        # Time passes by instructions, and while there are none as it does outside: timer interrupts
        # then come as often on a busy host as on an idle one. The fast string instructions would
        # count each byte, where kernels for processors without them move words.
        words += ["-icount", "shift=0,sleep=on", "-cpu", "max,-erms,-fsrm"]
    for one in disks:
        words += one
    return words


def boot(words: Sequence[str], share: Path, log: Path, wanted: Wanted) -> bool:
    """Whether the machine ended in time. It gets another chance where it died before its first
    process ran, without a word: one of QEMU's processors may have run code that another one had
    just changed.
    """
    for chances in range(BOOTS, 0, -1):
        in_time = watch(words, share, log, wanted.timeout)
        died = (
            in_time and not (share / "booted").exists() and not COMPLAINTS.search(log.read_bytes())
        )
        if not (died and wanted.parallel and chances > 1):
            break
        say("the machine died while it booted, and is started again")
        log.write_bytes(b"")
    return in_time


BOOTS = 3
"""As often as a machine with processors that run at the same time is started."""


def watch(words: Sequence[str], share: Path, log: Path, timeout: float) -> bool:
    """Passes on what COMMAND prints while it prints it; says whether the machine ended in time."""
    end = time.monotonic() + timeout
    with (
        log.open("ab") as said,
        (share / "stdout").open("rb") as stdout,
        (share / "stderr").open("rb") as stderr,
    ):
        # The log begins with what virtme-ng and QEMU complain of; then it is the kernel's alone.
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        )
        try:
            while (running := process.poll() is None) and time.monotonic() < end:
                relay(stdout, sys.stdout.buffer)
                relay(stderr, sys.stderr.buffer)
                time.sleep(0.05)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        relay(stdout, sys.stdout.buffer)
        relay(stderr, sys.stderr.buffer)
    return not running


def relay(source: BinaryIO, target: BinaryIO) -> None:
    while piece := source.read(1 << 20):
        target.write(piece)
        target.flush()


def judge(wanted: Wanted, share: Path, log: bytes, in_time: bool) -> int:
    first = COMPLAINTS.search(log)
    if first:
        say(f"the kernel complained:\n{around(log, first.start())}")
        return COMPLAINT
    if not in_time:
        say(f"no end after {wanted.timeout:g} seconds; the last that the kernel said:\n{last(log)}")
        return HANG
    broken, status = share / "broken", share / "status"
    if broken.exists():
        say(f"the guest could not be made: {broken.read_text().strip()}\n{last(log)}")
        return NO_GUEST
    if not status.exists():
        say(f"the machine ended before COMMAND did; the last that was said:\n{last(log)}")
        return NO_GUEST
    if wanted.count_instructions:
        user, kernel = counted(share / MARKS)
        say(f"{user + kernel:,} instructions ({user:,} user, {kernel:,} kernel)")
    return int(status.read_text())


def build_counter(plugin: Path) -> None:
    """Makes the plugin for QEMU that counts, and sees whether QEMU takes it."""
    flags = ["-O2", "-shared", "-fPIC", "-fvisibility=hidden"]
    call(["cc", *flags, "-o", str(plugin), str(HERE / "counter.c")])
    command = ["qemu-system-x86_64", "-machine", "none", "-nodefaults", "-display", "none"]
    command += ["-monitor", "stdio", "-plugin", f"{plugin},out={os.devnull}"]
    result = subprocess.run(command, input="quit\n", capture_output=True, text=True)
    if result.returncode:
        raise Unavailable(
            "this QEMU loads no plugins, one of which counts the instructions (it takes QEMU 4.2 "
            f"to 8.2, built with them, as Debian 12 has it):\n{result.stderr.strip()}"
        )


def counted(marks: Path) -> tuple[int, int]:
    """Instructions of user and kernel between the marks of count.c."""
    at = {}
    for line in marks.read_text().splitlines():
        number, user, kernel = map(int, line.split())
        at[number] = (user, kernel)
    begin, end = at[MARK_BEGIN], at[MARK_END]
    return end[0] - begin[0], end[1] - begin[1]


def around(log: bytes, position: int) -> str:
    """The line there and the 99 that follow, after five that came before."""
    before = log[:position].decode(errors="replace").splitlines(keepends=True)
    after = log[position:].decode(errors="replace").splitlines(keepends=True)
    return "".join([*before[-6:], *after[:100]])


def last(log: bytes) -> str:
    return "\n".join(log.decode(errors="replace").splitlines()[-20:])
