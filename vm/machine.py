"""Runs a command in a virtual machine, and checks the kernel's log for errors."""

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from vm import kernels, ko
from vm.compiled import static
from vm.host import HERE, Unavailable, call, need
from vm.kernels import Kernel

# This program's own exit statuses; any other is COMMAND's.
USAGE, NO_GUEST, COMPLAINT, HANG = 2, 122, 123, 124

# 8 MiB, the most that Linux transfers by one command (NVME_MAX_KB_SZ).
LARGEST_MDTS = 11

INSIDE = "/run/dmafile"
"""Where the guest mounts the folder that it shares with this program."""

# The group that may open /dev/dmafile; on the host the udev rule of the module sets it.
MEMBERS = "2000"

# The plugin that counts instructions, in this run's folder; the file that it writes the marks of
# vm/mark.h to, in the shared folder; and the variable that gives COMMAND the file's path.
COUNTER, MARKS, MARKS_VARIABLE = "counter.so", "marks", "DMAFILE_MARKS"
MARK_BEGIN, MARK_END = 254, 255

# A warning of the scheduler's deadline server, caused by a busy host that gives a CPU no time. Seen
# on 6.12 and, with other words, on 7.3, before the first process ran.
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
"""Messages by which a kernel reports an error."""

# For each --fs: the Debian package, and the command that makes the file system. tmpfs needs none.
MAKERS: Mapping[str, tuple[str, Sequence[str]]] = {
    "ext4": ("e2fsprogs", ["mkfs.ext4", "-q", "-F"]),
    "xfs": ("xfsprogs", ["mkfs.xfs", "-q", "-f"]),
    "btrfs": ("btrfs-progs", ["mkfs.btrfs", "-q", "-f"]),
    "f2fs": ("f2fs-tools", ["mkfs.f2fs", "-q", "-f"]),
    "overlayfs": ("e2fsprogs", ["mkfs.ext4", "-q", "-F"]),
    "tmpfs": ("util-linux", []),
}

# The options that all disk controllers share.
NVME = "nvme,serial={disk},mdts={mdts}"

RAW: Mapping[str, Sequence[str]] = {
    "raw": [f"{NVME},drive={{disk}}"],
    # Eight additional bytes for each block, with its checksum and number (T10 DIF, type 1).
    "raw-pi": [f"{NVME},id={{disk}}-a", "nvme-ns,bus={disk}-a,drive={disk},ms=8,pi=1"],
    "raw-zoned": [
        f"{NVME},id={{disk}}-a",
        "nvme-ns,bus={disk}-a,drive={disk},zoned=on,zoned.zone_size=16M",
    ],
    # Two paths to one disk.
    "raw-multipath": [
        "nvme-subsys,id={disk}-s,nqn={disk}",
        f"{NVME},id={{disk}}-a,subsys={{disk}}-s",
        f"{NVME},id={{disk}}-b,subsys={{disk}}-s",
        "nvme-ns,bus={disk}-a,drive={disk},shared=on",
    ],
}
"""QEMU's devices for each --fs without a file system. Disks with one use those of `raw`."""

SHARED: Mapping[str, Sequence[str]] = {
    "9p": [
        "-fsdev",
        "local,id={disk},path={folder},security_model=none",
        "-device",
        "virtio-9p-pci,fsdev={disk},mount_tag={disk}",
    ],
    "virtiofs": [
        "-chardev",
        "socket,id={disk},path={folder}.socket",
        "-device",
        "vhost-user-fs-pci,chardev={disk},tag={disk}",
    ],
}
"""QEMU's options for each --fs that shares an empty folder of the host."""

VIRTIOFSD = ("/usr/libexec/virtiofsd", "/usr/lib/qemu/virtiofsd")
"""Debian 13 has its own package of the first one; on Debian 12, QEMU's contains the second one."""

INTEL, AMD = ["-device", "intel-iommu"], ["-device", "amd-iommu"]
IOMMUS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "off": ([], []),
    "intel": (INTEL, ["intel_iommu=on"]),
    "intel-strict": (INTEL, ["intel_iommu=on", "iommu.strict=1"]),
    "intel-pt": (INTEL, ["intel_iommu=on", "iommu=pt"]),
    # Always strict: Linux detects that QEMU emulates it.
    "amd": (AMD, []),
    # No IOMMU; devices use bounce buffers only.
    "swiotlb": ([], ["swiotlb=force"]),
}
"""For each --iommu: QEMU's options and the kernel's."""


@dataclass(frozen=True)
class Wanted:
    """The machine that the command line asks for."""

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
    # As with other commands, `vm/run ... | head` ends without a message.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    # So that SIGTERM also ends the machine and deletes its disks.
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
        description="Run COMMAND on a chosen kernel in QEMU; output and exit status are COMMAND's.",
        epilog=f"Exit status: {NO_GUEST} if the machine could not be started or set up, "
        f"{COMPLAINT} if the kernel reported an error, {HANG} after the timeout, {USAGE} on bad "
        "usage.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    standard = Wanted()
    add(
        "--kernel",
        default=standard.kernel,
        help=f"{', '.join((*kernels.STOCK, kernels.NEWEST))}, the first two numbers of any other "
        f"version that Debian has, or the path of an image [{standard.kernel}]",
    )
    add("--module", action="store_true", help="build dmafile.ko and load it")
    add(
        "--module-options",
        default="",
        metavar="WORDS",
        help='--module with parameters, for example "gather_mb=1 depth=1"',
    )
    add(
        "--fs",
        action="append",
        default=[],
        choices=(*MAKERS, *RAW, *SHARED),
        help="add a disk: the first is mounted at /mnt, the next at /mnt2. raw... disks are not "
        "mounted; $RAW, $RAW2 and so on are their nodes. 9p and virtiofs share a folder "
        "of the host",
    )
    add(
        "--disk-size",
        type=size,
        default=standard.disk_size,
        metavar="SIZE",
        help="size of each disk, sparse [2G]",
    )
    add(
        "--disk-speed",
        type=size,
        metavar="SIZE",
        help="maximum bytes per second of each disk [unlimited]",
    )
    add(
        "--mdts",
        type=int,
        choices=range(1, LARGEST_MDTS + 1),
        default=standard.mdts,
        metavar="N",
        help="maximum transfer of one disk command: 2^N pages of 4 KiB, "
        f"N from 1 to {LARGEST_MDTS} [{standard.mdts}]",
    )
    add(
        "--poll-queues",
        type=count,
        default=standard.poll_queues,
        metavar="N",
        help="queues of each disk for polled reads and writes, in addition to those with "
        "interrupts; at most as many as CPUs [none]",
    )
    add("--iommu", choices=IOMMUS, default=standard.iommu, help=f"IOMMU mode [{standard.iommu}]")
    add(
        "--append",
        action="append",
        default=[],
        metavar="WORDS",
        help='add to the kernel\'s command line, for example "preempt=full quiet"; can be repeated',
    )
    add("--cpus", type=count, metavar="N", help=f"number of CPUs [{standard.cpus}]")
    add(
        "--nodes",
        type=count,
        default=standard.nodes,
        metavar="N",
        help="NUMA nodes, each with an equal part of the memory and the CPUs [1]",
    )
    add(
        "--parallel",
        action="store_true",
        help="run the CPUs concurrently instead of in turns; this may (rarely) cause a kernel oops",
    )
    add(
        "--memory",
        type=size,
        default=standard.memory,
        metavar="SIZE",
        help="memory of the machine [2G]",
    )
    add("--as-user", action="store_true", help="run COMMAND as user 1000, not as root")
    add(
        "--as-member",
        action="store_true",
        help="--as-user, in the group that may open /dev/dmafile",
    )
    add(
        "--count-instructions",
        action="store_true",
        help="count the instructions that the whole guest executes while COMMAND runs",
    )
    add(
        "--marks",
        type=Path,
        metavar="PATH",
        help="--count-instructions, and write the counts at each mark (vm/mark.h) to PATH",
    )
    add(
        "--timeout",
        type=float,
        default=standard.timeout,
        metavar="SECONDS",
        help="time limit, including booting [600]",
    )
    add(
        "--kernel-log",
        type=Path,
        metavar="PATH",
        help="write the kernel's messages, from warnings up, to PATH",
    )
    # Split here and not by argparse, because COMMAND may contain another `--`.
    end = words.index("--") if "--" in words else len(words)
    options, command = vars(parser.parse_args(words[:end])), list(words[end + 1 :])
    if not command:
        parser.error("no command: end the line with `-- COMMAND...`")
    options["append"] = " ".join(options["append"])
    options["module"] |= bool(options["module_options"])
    options["as_user"] |= options["as_member"]
    options["count_instructions"] |= options["marks"] is not None
    if options["count_instructions"] and options["cpus"] not in (None, 1):
        parser.error("--count-instructions supports only one CPU")
    if options["count_instructions"] and options["parallel"]:
        parser.error("--count-instructions uses one CPU and cannot be combined with --parallel")
    options["cpus"] = options["cpus"] or (1 if options["count_instructions"] else standard.cpus)
    if options["cpus"] % options["nodes"]:
        parser.error("--cpus must be a multiple of --nodes")
    # The driver refuses to load with more.
    if options["poll_queues"] > options["cpus"]:
        parser.error("--poll-queues: at most one for each CPU")
    return Wanted(**options), command


def size(text: str) -> int:
    """Parses a size such as 512M, 2G or 2GiB into bytes."""
    match = re.fullmatch(r"(\d+)([KMGT]?)(iB)?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text} is not a size; use, for example, 512M or 2G")
    return int(match[1]) << 10 * " KMGT".index(match[2] or " ")


def count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def say(text: str) -> None:
    print(f"vm: {text}", file=sys.stderr)


def prepare(fs: Sequence[str] = ()) -> None:
    """Installs what booting needs, except for the kernel."""
    need("qemu-system-x86", "command", "-v", "qemu-system-x86_64")
    # virtme-ng packs the modules that mount the root, and busybox to load them; it reads the
    # version of an image with `file`.
    need("kmod", "command", "-v", "modprobe")
    need("busybox-static", "sh", "-c", "! ldd $(command -v busybox)")
    need("file", "command", "-v", "file")
    for name in fs:
        package, maker = MAKERS.get(name, ("", []))
        if maker:
            need(package, "command", "-v", maker[0])
    if "virtiofs" in fs:
        need("virtiofsd", "sh", "-c", " || ".join(f"[ -x {path} ]" for path in VIRTIOFSD))


def run(wanted: Wanted, command: Sequence[str]) -> int:
    """Boots a machine and runs the command; returns the exit status."""
    prepare(wanted.fs)
    kernel = kernels.find(wanted.kernel)
    built = ko.find(kernel) if wanted.module else None
    launcher = kernels.virtme_run()
    if wanted.marks:
        # So that a path that cannot be written fails before the machine runs.
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
        # The kernel's command line is too short for these.
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
    """A shell script that runs COMMAND in this program's folder and with its environment."""
    environment = dict(os.environ)
    environment["PATH"] = f"/run/vm:{environment['PATH']}"
    # The guest cannot write to that folder.
    environment.pop("TMPDIR", None)
    if wanted.count_instructions:
        environment[MARKS_VARIABLE] = f"{INSIDE}/{MARKS}"
    if wanted.as_user:
        environment |= {"HOME": "/tmp", "USER": "user", "LOGNAME": "user"}
    words = ["exec", "env", "-i", *(f"{name}={value}" for name, value in environment.items())]
    # Only the guest knows the nodes of its disks.
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
    """The variables with the raw disks' nodes: RAW, RAW2 and so on."""
    number = sum(one in RAW for one in fs)
    return [f"RAW{turn if turn > 1 else ''}" for turn in range(1, number + 1)]


def disk(folder: Path, number: int, fs: str, wanted: Wanted) -> list[str]:
    """QEMU's options for an NVMe disk, with a file system or raw, or for a shared folder."""
    if fs == "tmpfs":
        return []
    name = f"disk{number}"
    image = folder / name
    if fs in SHARED:
        image.mkdir()
        values = {"disk": name, "folder": image}
        return [word.format(**values) for word in SHARED[fs]]
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


@contextlib.contextmanager
def serving(folder: Path, fs: Sequence[str]) -> Iterator[None]:
    """Runs the servers of virtiofs; each ends with QEMU, if that connects to it."""
    with contextlib.ExitStack() as stack:
        for number, name in enumerate(fs, 1):
            if name == "virtiofs":
                stack.enter_context(virtiofsd(folder / f"disk{number}"))
        yield


@contextlib.contextmanager
def virtiofsd(shared: Path) -> Iterator[None]:
    [program, *_] = [path for path in VIRTIOFSD if os.access(path, os.X_OK)]
    # The first one is written in Rust, the second one in C.
    words = [f"--shared-dir={shared}", "--sandbox=chroot"]
    if program != VIRTIOFSD[0]:
        words = ["-o", f"source={shared},sandbox=chroot"]
    socket = shared.with_suffix(".socket")
    socket.unlink(missing_ok=True)
    with tempfile.TemporaryFile() as log:
        command = [program, f"--socket-path={socket}", *words]
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while not socket.exists():
                if server.poll() is not None:
                    log.seek(0)
                    said = log.read().decode(errors="replace").strip()
                    raise Unavailable(f"{program} ended: {said}")
                time.sleep(0.05)
            yield
        finally:
            server.kill()
            server.wait()


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
    # In this order: the first gets the tag virtme.initmount0. The guest paths after the names are
    # only for virtme-ng's init, which is not used.
    words += [f"--rwdir=share={share}", "--rodir=root=/"]
    # The kernel's messages, from warnings up, go to standard error.
    words += ["--show-boot-console", "--script-sh", "true", "--qemu-opts", *devices]
    # The last -append takes effect. It replaces virtme-ng's first process, which takes longer to
    # start than the kernel. An oops ends the machine, because results after it mean nothing.
    arguments = ["console=ttyS0", "earlyprintk=serial,ttyS0,115200", "loglevel=5", "panic=-1"]
    # For kernels that mount the root themselves.
    arguments += ["rootfstype=9p", "rootflags=version=9p2000.L,trans=virtio,access=any", "ro"]
    # The default, 256 legacy PTYs, takes a kernel with KASAN twelve seconds.
    arguments.append("pty.legacy_count=0")
    # On a busy host a CPU gets little time; the kernel must not take that for a hang.
    arguments += ["watchdog_thresh=60", "rcupdate.rcu_cpu_stall_timeout=120"]
    # Nor for a broken timer: the kernel waits only briefly for ticks, and then panics.
    arguments.append("no_timer_check")
    if wanted.poll_queues:
        arguments.append(f"nvme.poll_queues={wanted.poll_queues}")
    arguments += ["oops=panic", *settings, *shlex.split(wanted.append)]
    arguments += ["init=/bin/sh", "--", str(share / "guest.sh")]
    words += ["-append", shlex.join(arguments)]
    # By default CPUs take turns. With a thread for each, one could translate code while another
    # patches it, and run the old code: a jump label's breakpoint, which causes an oops.
    words += ["-accel", f"tcg,thread={'multi' if wanted.parallel else 'single'}"]
    # No five-level page tables: early in each boot the kernel does not know yet whether they are
    # on, and KASAN reports a wild access if an interrupt arrives then. No CMPXCHG16B: QEMU before
    # version 8 may compute wrong flags after it (the helper uses a `cc_op` that has not been
    # written back), and an interrupt then causes a double fault. Kernels work without it, except
    # for the driver of AMD's IOMMU.
    words += ["-cpu", "max,-la57" if devices == AMD else "max,-la57,-cx16"]
    if wanted.nodes > 1:
        # A socket must not span two nodes.
        words += ["-smp", f"sockets={wanted.nodes}"]
    if wanted.count_instructions:
        words += ["-plugin", f"{share.parent / COUNTER},out={share / MARKS}"]
        # Guest time advances with instructions, and with real time while the guest is idle, so a
        # busy host causes as many timer interrupts as an idle one. Fast string instructions are
        # off: the kernel would move single bytes with them, each of which counts.
        words += ["-icount", "shift=0,sleep=on", "-cpu", "max,-erms,-fsrm"]
    if "virtiofs" in wanted.fs:
        # The server accesses the guest's memory.
        memory = f"memory-backend-memfd,id=memory,size={wanted.memory},share=on"
        words += ["-object", memory, "-machine", "memory-backend=memory"]
    for one in disks:
        words += one
    return words


def boot(words: Sequence[str], share: Path, log: Path, wanted: Wanted) -> bool:
    """Boots the machine; returns whether it ended in time.

    With --parallel, a machine that ends silently before its first process ran is started again: one
    of QEMU's CPUs may have run code that another one had just changed.
    """
    for chances in range(BOOTS, 0, -1):
        with serving(share.parent, wanted.fs):
            in_time = watch(words, share, log, wanted.timeout)
        died = (
            in_time and not (share / "booted").exists() and not COMPLAINTS.search(log.read_bytes())
        )
        if not (died and wanted.parallel and chances > 1):
            break
        say("the machine ended while booting; starting it again")
        log.write_bytes(b"")
    return in_time


def to_end(words: Sequence[str], timeout: float) -> str:
    """Runs QEMU with a console on its standard output until the machine is off; returns what was
    printed. Raises AssertionError if the kernel complained, or if time is over.
    """
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout)
    except subprocess.TimeoutExpired as late:
        raise AssertionError(f"no end after {timeout:g} s:\n{tail(late.stdout or b'')}") from None
    complaint = COMPLAINTS.search(done.stdout)
    assert not complaint, excerpt(done.stdout, complaint.start())
    return (done.stdout + done.stderr).decode(errors="replace")


BOOTS = 3
"""How often a machine with --parallel is started at most."""


def watch(words: Sequence[str], share: Path, log: Path, timeout: float) -> bool:
    """Relays COMMAND's output as it is printed; returns whether the machine ended in time."""
    end = time.monotonic() + timeout
    with (
        log.open("ab") as said,
        (share / "stdout").open("rb") as stdout,
        (share / "stderr").open("rb") as stderr,
    ):
        # The log begins with errors of virtme-ng and QEMU; the rest is the kernel's.
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
        say(f"the kernel reported an error:\n{excerpt(log, first.start())}")
        return COMPLAINT
    if not in_time:
        say(f"timeout after {wanted.timeout:g} seconds; end of the kernel's log:\n{tail(log)}")
        return HANG
    broken, status = share / "broken", share / "status"
    if broken.exists():
        say(f"the guest could not be set up: {broken.read_text().strip()}\n{tail(log)}")
        return NO_GUEST
    if not status.exists():
        say(f"the machine ended before COMMAND; end of the kernel's log:\n{tail(log)}")
        return NO_GUEST
    if wanted.count_instructions:
        user, kernel = counted(share / MARKS)
        say(f"{user + kernel:,} instructions ({user:,} user, {kernel:,} kernel)")
    return int(status.read_text())


def build_counter(plugin: Path) -> None:
    """Builds the QEMU plugin that counts, and checks that QEMU loads it."""
    flags = ["-O2", "-shared", "-fPIC", "-fvisibility=hidden"]
    call(["cc", *flags, "-o", str(plugin), str(HERE / "counter.c")])
    command = ["qemu-system-x86_64", "-machine", "none", "-nodefaults", "-display", "none"]
    command += ["-monitor", "stdio", "-plugin", f"{plugin},out={os.devnull}"]
    result = subprocess.run(command, input="quit\n", capture_output=True, text=True)
    if result.returncode:
        raise Unavailable(
            "this QEMU does not load the plugin that counts instructions (it needs QEMU 4.2 to 8.2 "
            f"with plugins enabled, as in Debian 12):\n{result.stderr.strip()}"
        )


def counted(marks: Path) -> tuple[int, int]:
    """Instructions in user space and in the kernel between the marks of count.c."""
    at = {}
    for line in marks.read_text().splitlines():
        number, user, kernel = map(int, line.split())
        at[number] = (user, kernel)
    begin, end = at[MARK_BEGIN], at[MARK_END]
    return end[0] - begin[0], end[1] - begin[1]


def excerpt(log: bytes, position: int) -> str:
    """The line at POSITION, with 5 lines before it and 99 after it."""
    before = log[:position].decode(errors="replace").splitlines(keepends=True)
    after = log[position:].decode(errors="replace").splitlines(keepends=True)
    return "".join([*before[-6:], *after[:100]])


def tail(log: bytes) -> str:
    return "\n".join(log.decode(errors="replace").splitlines()[-20:])
