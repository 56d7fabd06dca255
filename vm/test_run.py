"""Tests of vm/run. Most of them boot, so one boot checks several things."""

import itertools
import os
import re
import subprocess
from pathlib import Path

import pytest

from vm import debian, kernels, machine
from vm.debian import Package
from vm.fixtures import FILE_SYSTEMS, PATIENCE, vm
from vm.host import ROOT, Unavailable

thorough = pytest.mark.skipif(not os.environ.get("MATRIX"), reason="make test-all PARTS=matrix")

# Output and exit status


@pytest.mark.usefixtures("ready")
def test_outputs_are_complete_and_separate_and_a_signal_is_the_status(tmp_path: Path) -> None:
    blob = bytes(range(256)) * 4096
    (tmp_path / "blob").write_bytes(blob)
    word = 'it\'s "one" $word\n*'
    script = 'cat blob; pwd >&2; printf "%s" "$1" "$WORD" >&2; kill -KILL $$'
    command = [str(ROOT / "vm" / "run"), PATIENCE, "--", "sh", "-c", script, "sh", word]
    result = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "WORD": word}, capture_output=True
    )
    assert result.stdout == blob
    assert result.stderr.decode() == f"{tmp_path}\n{word}{word}"
    assert result.returncode == 128 + 9


@pytest.mark.usefixtures("ready")
def test_a_command_that_does_not_exist_ends_with_127() -> None:
    result = vm("--as-user", "--", "no-such-command")
    assert result.returncode == 127
    assert b"no-such-command" in result.stderr


@pytest.mark.usefixtures("ready")
def test_as_user_on_one_cpu_with_little_memory() -> None:
    facts = "id -u; nproc; grep MemTotal /proc/meminfo; grep -o 'vm[.]one.*two=2' /proc/cmdline"
    script = f"{facts}; touch /mnt/mine && ls /mnt/mine; touch /etc/not-mine; exit 3"
    options = ["--as-user", "--cpus=1", "--memory=1G", "--fs=ext4"]
    result = vm(*options, "--append=vm.one=1", "--append=vm.two=2", "--", "sh", "-c", script)
    user, cpus, memory, words, mine = result.stdout.decode().splitlines()
    assert (user, cpus, words, mine) == ("1000", "1", "vm.one=1 vm.two=2", "/mnt/mine")
    assert 800_000 < int(memory.split()[1]) < 1 << 20
    assert b"/etc/not-mine" in result.stderr
    assert result.returncode == 3


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize(
    ("mode", "kind"), [("intel", b"DMA-FQ\n"), pytest.param("amd", b"DMA\n", marks=thorough)]
)
def test_the_disk_is_behind_the_iommu(mode: str, kind: bytes) -> None:
    group = "/sys/block/nvme0n1/device/device/iommu_group"
    result = vm("--iommu", mode, "--fs=ext4", "--", "cat", f"{group}/type")
    assert result.stdout == kind, result.stderr
    assert result.returncode == 0


@pytest.mark.usefixtures("ready")
@thorough
def test_an_iommu_that_the_kernel_does_not_use_ends_the_run() -> None:
    result = vm("--iommu=intel", "--append=intel_iommu=off", "--", "echo", "run")
    assert (result.returncode, result.stdout) == (machine.NO_GUEST, b"")
    assert b"does not use the IOMMU (intel)" in result.stderr


# `says` prints the contents of sysfs files of a node's block device. `fills` writes a file to the
# node and `prints` reads its first 1 MiB, both by direct I/O.
BLOCKS = """
    set -e
    says() { (cd "/sys/block/${1#/dev/}" && shift && cat -- "$@" | xargs); }
    fills() { dd "if=$2" "of=$1" bs=64k oflag=direct status=none; }
    prints() { dd "if=$1" bs=64k count=16 iflag=direct status=none; }
"""


@pytest.mark.usefixtures("ready")
def test_raw_disks_and_one_with_a_file_system_polled_with_small_commands() -> None:
    queue = [f"queue/{name}" for name in ("logical_block_size", "io_poll", "max_hw_sectors_kb")]
    files = " ".join(["device/serial", *queue, "device/device/iommu_group/type"])
    script = f"""{BLOCKS}
        id -u
        awk '$2 ~ "^/mnt" {{ print $2, $3 }}' /proc/mounts
        cat /sys/module/nvme/parameters/poll_queues
        says "$RAW" {files}
        says "$RAW2" {files}
        env | grep -c ^RAW
        head -c 1M /dev/urandom > /tmp/blob
        cat /tmp/blob
        fills "$RAW2" /tmp/blob
        prints "$RAW"
        prints "$RAW2"
    """
    disks = ["--fs=raw", "--fs=ext4", "--fs=raw", "--poll-queues=1", "--mdts=4"]
    result = vm("--as-user", "--iommu=intel-strict", *disks, "--", "sh", "-c", script)
    assert result.returncode == 0, result.stderr
    *facts, read = result.stdout.split(b"\n", 6)
    said = "1000", "/mnt2 ext4", "1", "disk1 512 1 64 DMA", "disk3 512 1 64 DMA", "2"
    assert tuple(fact.decode() for fact in facts) == said
    size = 1 << 20
    blob = read[:size]
    assert blob.strip(b"\0") and read == blob + bytes(size) + blob


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize(
    "kernel", ["6.12", *(pytest.param(name, marks=thorough) for name in ("6.1", "newest"))]
)
def test_raw_disks_of_other_kinds(kernel: str, tmp_path: Path) -> None:
    blob = os.urandom(1 << 20)
    (tmp_path / "blob").write_bytes(blob)
    script = f"""{BLOCKS}
        says "$RAW" device/serial integrity/format device/device/iommu_group/type
        says "$RAW2" device/serial queue/zoned queue/nr_zones
        says "$RAW3" device/serial
        # Inside a zone, not at its start.
        dd if={tmp_path}/blob of="$RAW2" bs=4k seek=8193 count=1 oflag=direct 2>&1 | grep error
        head=${{RAW3#/dev/}}
        echo round-robin > "/sys/block/$head/device/iopolicy"
        for node in "$RAW" "$RAW2" "$RAW3"; do
            fills "$node" {tmp_path}/blob
            prints "$node"
        done
        # The number of reads by each path.
        awk '{{ print $1 }}' "/sys/block/${{head%n1}}"c*n1/stat
    """
    disks = ["--fs=raw-pi", "--fs=tmpfs", "--fs=raw-zoned", "--fs=raw-multipath"]
    options = [f"--kernel={kernel}", "--iommu=intel-pt", "--disk-size=64M"]
    result = vm(*options, *disks, "--", "sh", "-c", script)
    assert result.returncode == 0, result.stderr
    *facts, refusal, read = result.stdout.split(b"\n", 4)
    said = "disk1 T10-DIF-TYPE1-CRC identity", "disk3 host-managed 4", "disk4"
    assert tuple(fact.decode() for fact in facts) == said
    assert refusal.endswith(b"Input/output error")
    assert read[: 3 * len(blob)] == 3 * blob
    reads = [int(number) for number in read[3 * len(blob) :].split()]
    assert len(reads) == 2 and all(reads)


@pytest.mark.usefixtures("counting")
def test_instructions_are_counted_and_idle_time_is_not(tmp_path: Path) -> None:
    turns = 200_000_000
    source = f"""
        #include "mark.h"
        int main(void)
        {{
            mark(1);
            __asm__ volatile("mov ${turns}, %%rcx; 1: dec %%rcx; jnz 1b" : : : "rcx");
            mark(2);
        }}
    """
    compiler = ["cc", "-x", "c", f"-I{ROOT / 'vm'}", "-o", str(tmp_path / "loop"), "-"]
    subprocess.run(compiler, input=source.encode(), check=True)
    marks = tmp_path / "marks"
    result = vm("--marks", marks, "--", "sh", "-c", f"sleep 3; {tmp_path}/loop; exit 5")
    assert result.returncode == 5
    [line] = result.stderr.decode().splitlines()
    words = re.fullmatch(r"vm: ([\d,]+) instructions \(([\d,]+) user, ([\d,]+) kernel\)", line)
    assert words, line
    total, user, kernel = (int(word.replace(",", "")) for word in words.groups())
    assert total == user + kernel
    # Starting two programs, and 3 seconds of kernel work, count in addition.
    assert 2 * turns < user < 2.01 * turns
    assert kernel < 0.5 * turns
    at = [list(map(int, line.split())) for line in marks.read_text().splitlines()]
    assert [number for number, _, _ in at] == [254, 1, 2, 255]
    # The loop, its setup, one of the marks, and at most a few processes that woke up.
    assert 2 * turns + 2 <= at[2][1] - at[1][1] < 2.001 * turns
    assert at[2][2] - at[1][2] < 0.25 * turns


def test_qemu_without_plugins_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qemu = tmp_path / "qemu-system-x86_64"
    qemu.write_text("#!/bin/sh\necho 'plugin interface not enabled in this build' >&2\nexit 1\n")
    qemu.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(Unavailable, match=r"does not load the plugin.*\n.*not enabled"):
        machine.build_counter(tmp_path / "counter.so")


# What makes a run fail


@pytest.mark.usefixtures("ready")
def test_a_panic_fails_the_run() -> None:
    result = vm("--", "sh", "-c", "echo before; echo c > /proc/sysrq-trigger; echo after")
    assert result.returncode == machine.COMPLAINT
    assert result.stdout == b"before\n", result.stderr.decode()
    assert b"Kernel panic" in result.stderr


@pytest.mark.usefixtures("ready")
def test_a_warning_fails_the_run_even_if_the_command_succeeds(tmp_path: Path) -> None:
    # Debian's kernels have no warning on demand, so this writes the text of one to the log.
    warning = "<4>WARNING: CPU: 0 PID: 1 at mm/page_alloc.c:4242 rmqueue+0x1/0x2"
    log = tmp_path / "log"
    result = vm("--kernel-log", log, "--", "sh", "-c", f"echo '{warning}' > /dev/kmsg; echo done")
    assert result.stdout == b"done\n", result.stderr.decode()
    assert result.returncode == machine.COMPLAINT
    assert b"page_alloc.c:4242" in result.stderr
    assert b"page_alloc.c:4242" in log.read_bytes()


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize(
    ("parallel", "said", "deaths", "boots"),
    [
        (True, b"", 2, 3),
        (True, b"", 3, 3),
        (False, b"", 1, 1),
        (True, b"Kernel panic - not syncing", 1, 1),
    ],
)
def test_only_a_machine_that_ends_silently_is_started_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parallel: bool,
    said: bytes,
    deaths: int,
    boots: int,
) -> None:
    begun = []

    def watch(words: list[str], share: Path, log: Path, timeout: float) -> bool:
        begun.append(log.read_bytes())
        log.write_bytes(b"so far; " + said)
        if len(begun) > deaths:
            (share / "booted").touch()
        return True

    monkeypatch.setattr(machine, "watch", watch)
    log = tmp_path / "log"
    log.touch()
    assert machine.boot([], tmp_path, log, machine.Wanted(parallel=parallel))
    # Each boot begins with an empty log, and the last one's log stays.
    assert begun == [b""] * boots and log.read_bytes() == b"so far; " + said


@pytest.mark.slow
def test_a_hang_is_ended() -> None:
    # Booting counts, and takes from ten seconds to minutes. So the limit grows until it suffices.
    for seconds in (20 * 3**turn for turn in itertools.count()):
        result = vm(f"--timeout={seconds}", "--", "sh", "-c", "echo started; sleep infinity")
        assert result.returncode == machine.HANG
        assert f"timeout after {seconds} seconds" in result.stderr.decode()
        if result.stdout:
            break
    assert result.stdout == b"started\n"


@pytest.mark.parametrize(
    "line",
    [
        "BUG: KASAN: slab-out-of-bounds in f+0x1/0x2",
        "BUG: kernel NULL pointer dereference, address: 0000000000000000",
        "Oops: 0002 [#1] PREEMPT SMP",
        "WARNING: possible circular locking dependency detected",
        "WARNING: CPU: 1 PID: 2 at fs/inode.c:1 f+0x1/0x2",
        "WARNING: kernel/time/hrtimer.c:1098 at hrtimer_start+0x7b/0xc0, CPU#1: dmafile/12",
        "WARNING: CPU: 0 PID: 0 at kernel/time/hrtimer.c:1050 hrtimer_start+0x8b/0xb0",
        "INFO: task dmafile:12 blocked for more than 120 seconds.",
        "Kernel panic - not syncing: sysrq triggered crash",
    ],
)
def test_errors_of_a_kernel_are_found(line: str) -> None:
    assert machine.COMPLAINTS.search(f"[    1.0] {line}\n".encode())


@pytest.mark.parametrize(
    "line",
    [
        "nvme nvme0: missing or invalid SUBNQN field.",
        "clocksource: tsc unstable",
        "debug: fine",
        "WARNING: kernel/time/hrtimer.c:1098 at hrtimer_forward+0x7b/0xc0, CPU#1: swapper/0/1",
        "WARNING: CPU: 0 PID: 0 at kernel/time/hrtimer.c:1050 hrtimer_forward+0x8b/0xb0",
    ],
)
def test_harmless_messages_of_a_kernel_are_not_errors(line: str) -> None:
    assert not machine.COMPLAINTS.search(f"[    1.0] {line}\n".encode())


# Refused before anything boots


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--fs", "fat", "--", "true"], machine.USAGE, "invalid choice"),
        (["--cpus", "0", "--", "true"], machine.USAGE, "at least 1"),
        (["--poll-queues", "0", "--", "true"], machine.USAGE, "at least 1"),
        (["--poll-queues", "3", "--", "true"], machine.USAGE, "one for each CPU"),
        (["--mdts", "0", "--", "true"], machine.USAGE, "invalid choice"),
        (["--mdts", "12", "--", "true"], machine.USAGE, "invalid choice"),
        (["--count-instructions", "--cpus", "2", "--", "true"], machine.USAGE, "one CPU"),
        (["--marks", "marks", "--cpus", "2", "--", "true"], machine.USAGE, "one CPU"),
        (["--marks", "marks", "--parallel", "--", "true"], machine.USAGE, "--parallel"),
        (["--memory", "much", "--", "true"], machine.USAGE, "512M"),
        (["--"], machine.USAGE, "COMMAND"),
        (["true"], machine.USAGE, "unrecognized"),
    ],
)
def test_invalid_arguments_are_refused(words: list[str], status: int, said: str) -> None:
    result = vm(*words)
    assert result.returncode == status
    assert said in result.stderr.decode()


@pytest.mark.parametrize("name", ["6.12.1", "seriess", "no/such/image"])
def test_kernels_that_do_not_exist_are_refused(name: str) -> None:
    # The message of a failed build contains 6.12, too.
    with pytest.raises(Unavailable, match=rf"no kernel `{name}`: not one of 6\.12, 6\.1, newest, "):
        kernels.find(name)


# The kernel that a name stands for

SERVED = [
    Package(f"linux-image-{version.partition('-')[0]}-amd64", version, suite)
    for version, suite in (
        ("6.12.117-1", "stable"),
        ("7.2.9-1~bpo13+1", "stable-backports"),
        ("7.2.13-1", "unstable"),
        ("7.2.12-1~bpo13+1", "stable-backports"),
        ("7.3.4-1~bpo13+1", "stable-backports"),
        ("7.3~rc7-1~exp1", "experimental"),
        ("7.4~rc1-1~exp1", "experimental"),
        ("7.10~rc1-1~exp1", "experimental"),
    )
]


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("newest", "7.3.4-1~bpo13+1"),
        ("7.3", "7.3.4-1~bpo13+1"),
        ("7.2", "7.2.13-1"),
        ("6.12", "6.12.117-1"),
        # A release candidate, because there is nothing else.
        ("7.4", "7.4~rc1-1~exp1"),
        ("7.1", None),
    ],
)
def test_a_name_means_the_newest_version_in_debian(name: str, version: str | None) -> None:
    for images in (SERVED, SERVED[::-1]):
        chosen = kernels.choose(images, name)
        assert (chosen and chosen.version) == version


@pytest.mark.parametrize(
    ("mirrors", "said"),
    [
        ({"Debian": "m/", "Debian-Security": "s/"}, ["m/ sid", "s/ trixie-security"]),
        ({"Debian": "m/", "Other": "o/"}, ["m/ sid"]),
    ],
)
def test_packages_come_from_the_mirrors_of_the_system(
    mirrors: dict[str, str], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debian, "mirrors", lambda: mirrors)
    lines = debian.sources(["sid", "trixie-security"])
    assert [line.partition("] ")[2] for line in lines] == [f"{one} main" for one in said]


def test_without_a_mirror_of_debian_the_error_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debian, "mirrors", lambda: {"Other": "o/"})
    with pytest.raises(Unavailable, match="no mirror of Debian: add one"):
        debian.sources(["sid"])


def test_the_first_of_alternative_dependencies_is_used() -> None:
    depends = (
        "linux-base (>= 4.12~), linux-headers-6.12.95+deb12-common (= 6.12.95-1), "
        "linux-image-6.12.95+deb12-amd64 (= 6.12.95-1) | "
        "linux-image-6.12.95+deb12-amd64-unsigned (= 6.12.95-1), gcc-12"
    )
    assert debian.named(depends, ("linux-headers-", "linux-image-", "gcc")) == [
        "linux-headers-6.12.95+deb12-common=6.12.95-1",
        "linux-image-6.12.95+deb12-amd64=6.12.95-1",
        "gcc-12",
    ]
    assert debian.named("", ("",)) == []


def test_an_image_without_headers_in_debian_is_an_error(tmp_path: Path) -> None:
    place = tmp_path / "linux-image-6.16.12+deb13-amd64_6.16.12-1~bpo13+1"
    (place / "boot").mkdir(parents=True)
    (place / kernels.HEADERS).mkdir()
    image = place / "boot" / "vmlinuz-6.16.12+deb13-amd64"
    image.touch()
    with pytest.raises(Unavailable, match=r"6\.16\.12.*no longer has headers"):
        kernels.Kernel(image).build  # noqa: B018


@pytest.mark.usefixtures("ready")
@thorough
def test_the_newest_has_disks_and_dma_bufs() -> None:
    nodes = ("/dev/udmabuf", "/dev/dma_heap/system")
    script = 'uname -r; ls "$@"; for one in /mnt*; do stat -f -c %T $one; done'
    disks = [f"--fs={fs}" for fs in FILE_SYSTEMS]
    result = vm("--kernel=newest", *disks, "--", "sh", "-c", script, "sh", *nodes)
    assert result.returncode == 0, result.stderr
    release, *seen = result.stdout.decode().splitlines()
    assert release == kernels.find("newest").image.name.removeprefix("vmlinuz-")
    assert set(seen[: len(nodes)]) == set(nodes)
    assert len(set(seen[len(nodes) :])) == len(FILE_SYSTEMS)


def test_sizes_are_parsed() -> None:
    assert [machine.size(text) for text in ("512", "4K", "2G", "2GiB")] == [
        512,
        4096,
        2 << 30,
        2 << 30,
    ]
