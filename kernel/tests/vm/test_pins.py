"""Tests of the series' pin tracker, in virtual machines: pins are counted exactly, with their
owners and the operations that they blocked, and pins and unpins that do not balance are reported.

The checks are in the programs of kernel/tests (pin*.c). vm/pinner is a driver that pins memory for
them.
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.vm.programs import Programs
from vm import kernels, ko, machine, series
from vm.compiled import static
from vm.fixtures import Result, passed, vm
from vm.host import ROOT, need

pytestmark = [
    pytest.mark.skipif(not os.environ.get("MATRIX"), reason="make kernel-test"),
    pytest.mark.usefixtures("ready"),
]

HERE = Path(__file__).parent
CASES = [f"series-{version}" for version in series.VERSIONS]
KERNELS = [f"{case}{variant}" for case in CASES for variant in ("", "-debug")]
versions = pytest.mark.parametrize("version", series.VERSIONS)
ON = "--append=pin_owner=on"
"""The default in the debug kernels."""

Run = Callable[..., Result]

BEGIN = """
set -e
insmod "$1"
cp -r "$2" /tmp/pins
shift 2
"""
HUGE = "echo 16 >/proc/sys/vm/nr_hugepages\n"
PLAIN = f'{HUGE}exec /tmp/pins/"$@"\n'
SWAP = f"""
chmod 600 $RAW
mkswap $RAW >/dev/null
swapon $RAW
{PLAIN}"""


@pytest.fixture(scope="module")
def run(ready: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a program in a machine with the driver, with a shell script."""
    programs = tmp_path_factory.mktemp("pins")
    for source in sorted(HERE.parent.glob("pin*.c")):
        static(source, programs, "-Wextra", f"-I{ROOT / 'kernel' / 'uapi'}")
    drivers: dict[str, Path] = {}

    def run_in(kernel: str, script: str, *words: str, options: Sequence[str] = (ON,)) -> Result:
        if kernel not in drivers:
            folder = tmp_path_factory.mktemp(kernel)
            drivers[kernel] = ko.other(HERE / "pinner", kernels.find(kernel).build, folder)
        files = (drivers[kernel], programs)
        command = ("sh", "-c", BEGIN + script, "sh", *map(str, files), *words)
        return vm(f"--kernel={kernel}", *options, "--", *command)

    return run_in


def ran(result: Result) -> None:
    passed(result, "requests")


# Counted


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_pins_of_every_page_of_the_machine_are_counted(run: Run, kernel: str) -> None:
    # A debug kernel needs long to read all pages.
    steps = 100 if kernel.endswith("-debug") else 400
    ran(run(kernel, PLAIN, "pins", f"-n{steps}"))


@pytest.mark.parametrize("kernel", CASES)
def test_a_page_takes_as_many_pins_as_its_count_has_room_for(
    run: Run, kernel: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    result = run(kernel, PLAIN, "pin_most", options=(ON, f"--kernel-log={log}"))
    said = result.stdout.decode() + result.stderr.decode()
    # Linux warns about the pin that fails, in both functions that could have made it.
    assert result.returncode == machine.COMPLAINT, said
    assert "\nok 1 most" in said, said
    complaints = machine.COMPLAINTS.findall(log.read_bytes())
    assert 1 <= len(complaints) <= 2, log.read_text()
    # From Linux 6.19 on, the line begins with the file.
    warned = re.findall(rb"WARNING: (?:CPU: .* at )?mm/gup\.c:\d+ ", log.read_bytes())
    assert len(warned) == len(complaints), log.read_text()


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_is_tracked_without_the_option(run: Run, kernel: str) -> None:
    off = ("--append=pin_owner=off",) if kernel.endswith("-debug") else ()
    ran(run(kernel, SWAP, "pin_moves", "off", options=(*off, "--fs=raw", "--disk-size=256M")))


@pytest.mark.parametrize("kernel", KERNELS)
def test_plain_references_are_not_counted_as_pins(run: Run, kernel: str) -> None:
    options = (ON, "--fs=raw", "--disk-size=256M")
    ran(run(kernel, SWAP, "pin_moves", "reclaimed", options=options))


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_call_stack_of_long_term_pins_is_shown(run: Run, kernel: str) -> None:
    ran(run(kernel, PLAIN, "pin_moves", "stacks"))


# Owners


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kind_of_program_that_pins_is_named(run: Run, kernel: str) -> None:
    ran(run(kernel, PLAIN, "pin_makers"))


# Btrfs uses the page cache for files with checksums.
DIRECT = """
echo 0 $(blockdev --getsz $RAW) linear $RAW 0 | dmsetup create stopped 2>/dev/null
dmsetup mknodes 2>/dev/null
disk=/dev/mapper/stopped
mkdir /tmp/mounted
for fs; do
    options=rw
    case $fs in
    ext4) mkfs.ext4 -q -F $disk ;;
    vfat) mkfs.vfat $disk >/dev/null ;;
    btrfs) mkfs.btrfs -q -f $disk && options=nodatasum ;;
    *) "mkfs.$fs" -q -f $disk >/dev/null ;;
    esac
    mount -t $fs -o $options $disk /tmp/mounted
    echo "# $fs"
    /tmp/pins/pin_makers -d /tmp/mounted/file stopped
    umount /tmp/mounted
done
"""
DISKS = ("ext4", "xfs", "btrfs", "f2fs", "vfat")


@pytest.mark.parametrize("kernel", KERNELS)
def test_direct_io_in_flight_is_named(run: Run, kernel: str) -> None:
    packages = ("dmsetup", "xfsprogs", "btrfs-progs", "f2fs-tools", "dosfstools")
    commands = ("dmsetup", "mkfs.xfs", "mkfs.btrfs", "mkfs.f2fs", "mkfs.vfat")
    for package, command in zip(packages, commands, strict=True):
        need(package, "command", "-v", command)
    ran(run(kernel, DIRECT, *DISKS, options=(ON, "--fs=raw", "--disk-size=1G")))


VFIO = """
device=$(basename "$(readlink -f "/sys/block/${RAW#/dev/}/device/device")")
cd "/sys/bus/pci/devices/$device"
echo vfio-pci >driver_override
echo "$device" >driver/unbind
echo "$device" >/sys/bus/pci/drivers_probe
exec /tmp/pins/pin_makers -v "$device"
"""


@pytest.mark.parametrize("kernel", KERNELS)
def test_memory_given_to_a_device_is_named(run: Run, kernel: str) -> None:
    ran(run(kernel, VFIO, options=(ON, "--fs=raw", "--disk-size=16M", "--iommu=intel")))


RDMA = """
ip link set lo up
rdma link add siw0 type siw netdev lo
exec python3 -E -S -m kernel.tests.vm.inside.rdma
"""


@versions
def test_memory_registered_for_rdma_is_named(version: str) -> None:
    for package, file in (("libibverbs1", "libibverbs.so.1"), ("ibverbs-providers", "libibverbs/")):
        need(package, "sh", "-c", f"ls /usr/lib/*/{file}* >/dev/null")
    need("iproute2", "command", "-v", "rdma")
    result = vm(f"--kernel=series-{version}-debug", "--", "sh", "-e", "-c", RDMA)
    passed(result, "registrations checked")


# Blocked operations

MACHINES = {
    "seal": (),
    "nodes": ("--nodes=2",),
    "cma": ("--append=cma=512M",),
    "offline": ("--append=kernelcore=1G",),
    "unmovable": (),
    "ksm": (),
    "huge": (),
    "collapse": (),
    "khugepaged": (),
    "unmounted": ("--fs=raw", "--disk-size=64M"),
}
"""By test of pin_moves.c, the options of the machine."""


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("what", MACHINES)
def test_the_holder_that_blocked_an_operation_is_named(run: Run, kernel: str, what: str) -> None:
    ran(run(kernel, PLAIN, "pin_moves", what, options=(ON, *MACHINES[what])))


SENTENCES = """
/tmp/pins/pin_moves seal >/tmp/said || { cat /tmp/said; exit 1; }
exec "$1" pins --blocked
"""
SEALED = (
    r".+ ago: 4\.00 KiB of a file, page 0x[0-9a-f]+, kept a memfd from being sealed against "
    "writing: "
)
HELD = (
    r"1 pin, the last long-term one by \d+, pin_once, .+ before",
    "1 pin",
    "1 reference that no pin, mapping or cache explains",
)
"""What `dmafile pins --blocked` prints for each way in which pin_moves.c holds a page."""


@pytest.mark.parametrize("kernel", CASES)
def test_dmafile_pins_says_who_blocked_an_operation(
    run: Run, programs: Programs, kernel: str
) -> None:
    result = run(kernel, SENTENCES, str(programs.dmafile))
    said = result.stdout.decode() + result.stderr.decode()
    assert result.returncode == 0, said
    sentences = result.stdout.decode().splitlines()
    assert len(sentences) == len(HELD), said
    for sentence, held in zip(sentences, HELD, strict=True):
        assert re.fullmatch(SEALED + held, sentence), said


@versions
def test_failing_memory_is_offlined_unless_it_is_pinned(run: Run, version: str) -> None:
    ran(run(f"series-{version}-debug", PLAIN, "pin_moves", "soft_offline"))


# Pins and unpins that do not balance

NOT_PINNED = (
    r"pfn 0x[0-9a-f]+ unpinned 1 time while not pinned: unpinned twice, or put_page\(\) was "
    "intended$"
)
LOGGED = ("got", "twice", "too_many")
LISTED = ("put", "freed", "leaked")
"""The errors that pin_wrong.c makes: the kernel logs some of them, and lists others on request."""


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", LOGGED)
def test_an_unpin_without_a_pin_is_reported_once(
    run: Run, kernel: str, kind: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    result = run(kernel, PLAIN, "pin_wrong", kind, options=(ON, f"--kernel-log={log}"))
    said = result.stdout.decode() + result.stderr.decode()
    # The kernel reports it, and continues.
    assert result.returncode == machine.COMPLAINT, said
    assert "\nok 1 one" in said, said
    text = log.read_bytes()
    [bug] = re.finditer(rb"BUG: pin_owner: ", text)
    rest = re.sub(rb"(?m)\r$", b"", text[bug.end() :]).decode()
    assert re.match(rf"(?m){NOT_PINNED}", rest), rest[:1000]
    assert "Call Trace:" in rest and "[pinner]" in rest, rest[:3000]
    others = text[: bug.start()] + text[bug.end() :]
    assert not machine.COMPLAINTS.search(others), others.decode()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", LISTED)
def test_counts_that_cannot_be_true_are_listed(run: Run, kernel: str, kind: str) -> None:
    result = run(kernel, PLAIN, "pin_wrong", kind)
    said = result.stdout.decode() + result.stderr.decode()
    assert result.returncode == 0 and "\nok 1 one" in said, said


# Races and faults

# On a busy host, a task may wait long for a contended lock.
RACES = f"""
echo 3600 >/proc/sys/kernel/hung_task_timeout_secs
chmod 600 $RAW2
mkswap $RAW2 >/dev/null
swapon $RAW2
{HUGE}exec /tmp/pins/pin_races "$1" $RAW
"""


@pytest.mark.parametrize("kernel", KERNELS)
def test_races(run: Run, kernel: str) -> None:
    disks = ("--fs=raw", "--fs=raw", "--disk-size=256M")
    memory = ("--nodes=2", "--append=kernelcore=1G")
    ran(run(kernel, RACES, "90", options=(ON, "--cpus=4", "--parallel", *memory, *disks)))


@versions
def test_allocations_of_the_tracker_may_fail(run: Run, version: str) -> None:
    ran(run(f"series-{version}-debug", PLAIN, "pin_faults"))
