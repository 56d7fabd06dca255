"""Tests of what the patches in kernel/linux-VERSION do, in virtual machines."""

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kernel.tests.vm.test_module import matrix
from kernel.tests.vm.test_surroundings import WIDE, need_32_bits
from tests.vm.programs import Programs
from vm import arm64, debian, kernels, ko, series, small
from vm.compiled import static
from vm.fixtures import FILE_SYSTEMS, MOUNTS, passed, vm
from vm.host import ROOT

HERE = Path(__file__).parent
WRITERS = ("ext4", "xfs", "tmpfs")
DISKS = tuple(fs for fs in FILE_SYSTEMS if fs != "tmpfs")
EVERYWHERE = ("slow_disk", "broken_disk", "changing_file", "limits", "many", "anything")
PARTS = {
    "": (*EVERYWHERE, "in_pieces"),
    # A debug kernel needs too much memory itself.
    "debug": (*EVERYWHERE, "failures"),
}
"""Parts of kernel/tests/vm/inside/heap_flag.py, by variant of the kernel."""
PARTS_OF_COPIES = {
    "": ("slow_disk", "broken_disk", "kept", "cut_short", "sealed", "loop"),
    "debug": ("slow_disk", "broken_disk", "kept", "cut_short", "sealed", "loop", "failures"),
}
"""Parts of kernel/tests/vm/inside/copy_faults.py, by variant."""
DISKS_OF_COPIES = {"": DISKS, "debug": ("ext4",)}
"""A debug kernel takes most of an hour for one file system."""

Selftest = Callable[..., Path]


def with_topic(topic: str, *variants: str, kind: str = "series") -> list[str]:
    """The names of the small kernels, in these variants, of the versions that have a topic."""
    return [
        "-".join(filter(None, (kind, version, variant)))
        for version in series.VERSIONS
        if topic in series.topics(version)
        for variant in variants or ("",)
    ]


def each(topic: str, *variants: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kernel", with_topic(topic, *variants))


def variant(kernel: str) -> str:
    return small.parse(kernel).variant


@pytest.fixture(scope="module")
def selftest(ready: None, tmp_path_factory: pytest.TempPathFactory) -> Selftest:
    """Compiles one of the series' selftests, for machines without libraries."""
    built: dict[tuple[str, ...], Path] = {}

    def compiled(kernel: str, name: str, *flags: str) -> Path:
        one = small.parse(kernel)
        key = (one.version, one.arch, name, *flags)
        if key not in built:
            built[key] = compile_selftest(one, name, tmp_path_factory.mktemp(name), *flags)
        return built[key]

    return compiled


def compile_selftest(kernel: small.Small, name: str, folder: Path, *flags: str) -> Path:
    sources = [
        path
        for patch in series.patches(kernel.version)
        for path in series.added(patch)
        if path.startswith("tools/testing/selftests/") and Path(path).name == f"{name}.c"
    ]
    with series.tree(kernel.version, debian.linux_source(kernel.version)) as tree:
        headers = folder / "uapi" / "linux"
        headers.mkdir(parents=True)
        shutil.copy(tree / "include" / "uapi" / "linux" / "dma-heap.h", headers)
        words = [f"-I{headers.parent}", f"-I{tree / 'tools' / 'testing' / 'selftests'}", *flags]
        # The kselftest header does not compile with -Wextra.
        return static(tree / sources[0], folder, *words, compiler=kernel.compiler)


RUN = """
program=$1; shift
cp "$program" /tmp/program
for folder; do
    # Print all output, to see where a machine hangs.
    cd "$folder" && /tmp/program | tee /tmp/said
    # A skipped test would count as passed.
    grep -q "^# Totals: pass:[1-9].* fail:0 .*skip:${SKIPPED:-0} error:0$" /tmp/said || exit 1
done
echo selftests passed
"""


@matrix
@pytest.mark.parametrize(
    "kernel",
    ["base-6.12", *with_topic("buffered-write", "", "debug")],
)
def test_a_write_may_come_from_any_source(selftest: Selftest, kernel: str) -> None:
    disks = [f"--fs={fs}" for fs in WRITERS]
    program = selftest(kernel, "write_source")
    command = ("sh", "-c", RUN, "sh", str(program), *MOUNTS[: len(WRITERS)])
    result = vm(f"--kernel={kernel}", "--parallel", *disks, "--", *command)
    passed(result, "selftests passed")


@matrix
@pytest.mark.parametrize("fs", ["ext4", "tmpfs"])
@pytest.mark.parametrize("kernel", ["base-7.3"])
def test_a_failed_write_extends_a_file_without_the_series(
    selftest: Selftest, kernel: str, fs: str
) -> None:
    """The bug that the topic `fixes` mends for 7.3; 6.12 does not have it."""
    program = selftest(kernel, "write_source")
    command = ("sh", "-c", RUN, "sh", str(program), MOUNTS[0])
    result = vm(f"--kernel={kernel}", "--parallel", f"--fs={fs}", "--", *command)
    failed = [line for line in result.stdout.decode().splitlines() if line.startswith("not ok")]
    assert failed == ["not ok 2 write_source.unreadable_at_the_end"], result


@matrix
@pytest.mark.usefixtures("ready")
@each("buffered-write")
def test_a_source_that_is_not_mapped_yet_is_copied_in_large_folios(kernel: str) -> None:
    python = ("python3", "-E", "-S", "-m", "kernel.tests.vm.inside.cold_writes")
    options = (f"--kernel={kernel}", "--fs=xfs", "--memory=3G")
    passed(vm(*options, "--", *python, MOUNTS[0]), "writes checked")


@matrix
@each("fixes", "", "debug")
def test_a_udmabuf_of_untouched_memory_is_zero(selftest: Selftest, kernel: str) -> None:
    command = ("sh", "-c", RUN, "sh", str(selftest(kernel, "udmabuf_fallocate")), "/tmp")
    passed(vm(f"--kernel={kernel}", "--", *command), "selftests passed")


@matrix
@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize(
    ("kernel", "twice"),
    [
        ("base-6.12", WRITERS),
        # The others touch it once since Linux 6.15.
        ("base-7.3", ("xfs",)),
        *((kernel, ()) for kernel in with_topic("buffered-write")),
    ],
)
def test_a_write_touches_its_source_once_with_the_series(
    kernel: str, twice: Sequence[str], tmp_path: Path
) -> None:
    program = static(ROOT / "kernel" / "bench" / "writes.c", tmp_path, "-Wextra", "-DWRITES=100")
    disks = [f"--fs={fs}" for fs in WRITERS]
    inside = 'cp "$1" /tmp/writes; shift; exec /tmp/writes 0 "$@"'
    command = ("sh", "-c", inside, "sh", str(program), *MOUNTS[: len(WRITERS)])
    result = vm(f"--kernel={kernel}", *disks, "--", *command)
    passed(result, "touched")
    lines = [line.split() for line in result.stdout.decode().splitlines()]
    assert [word for word, *_ in lines] == ["touched"] * 2 * len(WRITERS), lines
    names = dict(zip(MOUNTS, WRITERS, strict=False))
    for _, folder, size, faulted, copied in lines:
        before = 100 if names[folder] in twice else 0
        assert (int(faulted), int(copied)) == (before, 100), (folder, size)


@matrix
@each("heap-read", "", "debug")
def test_a_heap_reads_files_into_its_buffers(selftest: Selftest, kernel: str) -> None:
    disks = [f"--fs={fs}" for fs in FILE_SYSTEMS]
    command = ("sh", "-c", RUN, "sh", str(selftest(kernel, "read_file")), *MOUNTS)
    result = vm(f"--kernel={kernel}", *disks, "--", *command)
    passed(result, "selftests passed")


# DMA API debugging reports pages that are mapped for two devices. A udmabuf keeps its pages mapped
# for its own device after the first CPU access. So direct I/O on the memfd is reported, on any
# Linux 6.12.
FILTER = "/sys/kernel/debug/dma-api/driver_filter"
NO_OVERLAPS = f"[ ! -e {FILTER} ] || echo none >{FILTER}\n"
COPY = f"{NO_OVERLAPS}echo 24 >/proc/sys/vm/nr_hugepages\n{RUN}"
HUGE = "echo always >/sys/kernel/mm/transparent_hugepage/shmem_enabled\n" + COPY


@matrix
@each("memory-copy", *DISKS_OF_COPIES)
def test_copy_file_range_between_disk_and_memory(selftest: Selftest, kernel: str) -> None:
    copies(COPY, selftest, kernel, DISKS_OF_COPIES[variant(kernel)])


@matrix
@each("memory-copy")
def test_copy_file_range_with_huge_pages_of_tmpfs(selftest: Selftest, kernel: str) -> None:
    copies(HUGE, selftest, kernel, DISKS[:1])


def copies(script: str, selftest: Selftest, kernel: str, disks: Sequence[str]) -> None:
    program = selftest(kernel, "copy_memory")
    command = ("sh", "-c", script, "sh", str(program), *MOUNTS[: len(disks)])
    options = (f"--kernel={kernel}", "--memory=3G")
    result = vm(*options, *(f"--fs={fs}" for fs in disks), "--", *command)
    passed(result, "selftests passed")


@matrix
@pytest.mark.usefixtures("ready")
@each("memory-copy", *DISKS_OF_COPIES)
def test_dmafile_loads_by_copy_file_range(programs: Programs, kernel: str) -> None:
    disks = DISKS_OF_COPIES[variant(kernel)]
    options = (f"--kernel={kernel}", *(f"--fs={fs}" for fs in disks))
    passed(programs.run("copy_range", *MOUNTS[: len(disks)], options=options), "loads checked")


def calls(program: str, kernel: str, parts: Sequence[str], *more: str) -> None:
    """Runs parts of a program in kernel/tests/vm/inside."""
    python = ("python3", "-E", "-S", "-m", f"kernel.tests.vm.inside.{program}")
    options = (f"--kernel={kernel}", "--fs=ext4", *more)
    passed(vm(*options, "--", *python, MOUNTS[0], *parts), "calls checked")


@matrix
@pytest.mark.usefixtures("ready")
@each("memory-copy", *PARTS_OF_COPIES)
def test_faults_during_copy_file_range(kernel: str) -> None:
    calls("copy_faults", kernel, PARTS_OF_COPIES[variant(kernel)])


@matrix
@pytest.mark.usefixtures("ready")
@each("memory-copy")
def test_copy_file_range_into_all_free_memory(kernel: str) -> None:
    calls("copy_faults", kernel, ["large"], "--memory=5G")


@matrix
@pytest.mark.usefixtures("ready")
@each("heap-read", "", "debug")
def test_dmafile_loads_by_heap_read(programs: Programs, kernel: str) -> None:
    options = (f"--kernel={kernel}", *(f"--fs={fs}" for fs in FILE_SYSTEMS))
    passed(programs.run("heap_read", *MOUNTS, options=options), "loads checked")


MAPPING = {
    ("6.12", "off"): "not",
    ("6.12", "intel"): "not",
    ("series-6.12", "off"): "maps",
    ("series-6.12", "intel"): "translates",
    ("series-6.12", "swiotlb"): "bounces",
    ("series-6.12-debug", "intel"): "translates",
}
"""What tests/vm/inside/premap.py must expect, by kernel and IOMMU."""


@matrix
@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize(("kernel", "iommu"), MAPPING)
def test_dmafile_loads_into_pre_mapped_buffers(programs: Programs, kernel: str, iommu: str) -> None:
    machine = (f"--kernel={kernel}", f"--iommu={iommu}")
    how = MAPPING[kernel, iommu]
    raw = (*machine, "--fs=raw", "--disk-size=16M")
    passed(programs.run("premap", how, "raw", options=raw), "loads checked")
    disks = DISKS[:3]
    files = (*machine, *(f"--fs={fs}" for fs in disks))
    passed(programs.run("premap", how, *MOUNTS[: len(disks)], options=files), "loads checked")


@matrix
@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("iommu", ["off", "intel"])
def test_dmafile_saves_dma_bufs_without_a_copy(programs: Programs, iommu: str) -> None:
    disks = DISKS[:3]
    options = ("--kernel=series-6.12", f"--iommu={iommu}", *(f"--fs={fs}" for fs in disks))
    passed(programs.run("saves", "series", *MOUNTS[:3], options=options), "saves checked")


@matrix
@pytest.mark.usefixtures("ready")
def test_dmafile_loads_from_disks_that_refuse_pre_mapping(programs: Programs) -> None:
    kinds = ("raw-pi", "raw-zoned", "raw-multipath")
    options = ("--kernel=series-6.12", "--disk-size=64M", *(f"--fs={kind}" for kind in kinds))
    passed(programs.run("premap", "maps", *kinds, options=options), "loads checked")


@matrix
@pytest.mark.usefixtures("ready")
@each("heap-read", *PARTS)
def test_faults_while_a_heap_reads_a_file(kernel: str) -> None:
    calls("heap_flag", kernel, PARTS[variant(kernel)])
    calls("heap_flag", kernel, ["limits"], "--append=dma_heap.mem_accounting=1")


@matrix
@pytest.mark.usefixtures("ready")
@each("memory-copy")
def test_importers_see_what_the_kernel_read(programs: Programs, kernel: str) -> None:
    options = (f"--kernel={kernel}", "--fs=ext4")
    kinds = ["heap:system", "heap:system,copy-file-range", "udmabuf", "udmabuf,copy-file-range"]
    result = programs.run("importers", "/mnt", *kinds, options=options)
    passed(result, "imports checked")
    # For both kinds of huge pages, vmap() maps more than the first 4096 bytes.
    assert result.stdout.decode().count("vmap of huge pages: right") == 2


PREMAP = """
cp "$1" /tmp/program
[ ! "$2" ] || insmod "$2" || exit
exec /tmp/program "${3:-$RAW}" $4
"""
DISK = ("--fs=raw", "--disk-size=512M", "--poll-queues=1")
FILES = {"ext4": 89, "xfs": 81}
"""The number of skipped tests by file system: tests of disks, and of other kinds of buffers."""
OF_DISKS = 125
"""The number of skipped tests on a disk."""


def premap(
    selftest: Selftest,
    kernel: str,
    skipped: int,
    *options: str,
    mode: str = "",
    module: Path | str = "",
    flags: Sequence[str] = (),
) -> None:
    """Runs the selftest of pre-mapped buffers on a raw disk, or without one on a file."""
    path = "" if any(word.startswith("--fs=raw") for word in options) else MOUNTS[0]
    program = selftest(kernel, "premap", *flags)
    command = ("sh", "-c", PREMAP, "sh", program, module, path, mode)
    result = vm(f"--kernel={kernel}", *options, "--", *command)
    said = result.stdout.decode()
    assert result.returncode == 0, said + result.stderr.decode()
    totals = rf"(?m)^# Totals: pass:[1-9]\d* fail:0 xfail:0 xpass:0 skip:{skipped} error:0$"
    assert re.search(totals, said), said


@matrix
@pytest.mark.parametrize("iommu", ["off", "intel", "intel-strict", "intel-pt", "amd"])
def test_pre_mapped_buffers(selftest: Selftest, iommu: str) -> None:
    premap(selftest, "series-6.12", OF_DISKS, *DISK, f"--iommu={iommu}")


@matrix
@pytest.mark.parametrize(("fs", "iommu"), [("ext4", "off"), ("xfs", "off"), ("xfs", "intel")])
def test_pre_mapped_buffers_and_files(selftest: Selftest, fs: str, iommu: str) -> None:
    premap(selftest, "series-6.12", FILES[fs], f"--fs={fs}", *DISK[1:], f"--iommu={iommu}")


@matrix
@pytest.mark.parametrize("kernel", ["series-6.12", "series-6.12-debug"])
@pytest.mark.parametrize("iommu", ["off", "intel-strict"])
def test_pre_mapped_buffers_while_the_disk_is_reset_or_removed(
    selftest: Selftest, kernel: str, iommu: str
) -> None:
    premap(selftest, kernel, 0, *DISK, f"--iommu={iommu}", mode="life")


@matrix
@pytest.mark.parametrize("kernel", ["series-6.12", "series-6.12-debug"])
@pytest.mark.parametrize("iommu", ["off", "intel-strict"])
def test_pre_mapped_buffers_while_the_disk_is_suspended(
    selftest: Selftest, kernel: str, iommu: str, tmp_path: Path
) -> None:
    module = ko.other(HERE / "awake", kernels.find(kernel).build, tmp_path)
    # So slow that requests are in flight during the suspend.
    options = (*DISK, "--disk-speed=4M", f"--iommu={iommu}")
    premap(selftest, kernel, 0, *options, mode="suspend", module=module)


@matrix
@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("iommu", ["off", "intel"])
def test_pre_mapped_buffers_of_32_bit_programs(selftest: Selftest, iommu: str) -> None:
    need_32_bits()
    on = f"--iommu={iommu}"
    premap(selftest, "series-6.12", OF_DISKS, *DISK, on, flags=WIDE)
    premap(selftest, "series-6.12", FILES["ext4"], "--fs=ext4", *DISK[1:], on, flags=WIDE)


@matrix
def test_pre_mapped_bounce_buffers(selftest: Selftest) -> None:
    premap(selftest, "series-6.12", 91, *DISK, "--iommu=swiotlb", mode="bounce")


@matrix
@pytest.mark.parametrize(("mdts", "iommu"), [("10", "off"), ("11", "intel")])
def test_pre_mapped_buffers_in_the_largest_commands(
    selftest: Selftest, mdts: str, iommu: str
) -> None:
    premap(selftest, "series-6.12", OF_DISKS, *DISK, f"--mdts={mdts}", f"--iommu={iommu}")


WAITS = """
insmod "$1" || exit
exec "$2" "$RAW"
"""


@matrix
@pytest.mark.parametrize("kernel", ["series-6.12", "series-6.12-debug"])
@pytest.mark.parametrize("iommu", ["off", "intel-strict"])
def test_nobody_waits_for_a_slow_exporter(kernel: str, iommu: str, tmp_path: Path) -> None:
    module = ko.other(HERE / "exporter", kernels.find(kernel).build, tmp_path)
    program = static(HERE.parent / "premap_waits.c", tmp_path, f"-I{ROOT / 'kernel' / 'uapi'}")
    command = ("sh", "-c", WAITS, "sh", module, program)
    result = vm(f"--kernel={kernel}", *DISK, f"--iommu={iommu}", "--", *command)
    said = result.stdout.decode()
    assert result.returncode == 0, said + result.stderr.decode()
    assert re.findall(r"(?m)^ok (\d+)", said) == [str(n) for n in range(1, 10)], said


@matrix
@pytest.mark.parametrize("disk", ["raw-pi", "raw-zoned", "raw-multipath"])
def test_disks_that_refuse_pre_mapping(selftest: Selftest, disk: str) -> None:
    premap(selftest, "series-6.12", 0, f"--fs={disk}", *DISK[1:], mode="refused")


@matrix
@pytest.mark.parametrize("how", ["--iommu=swiotlb", "--append=nvme.premap=0"])
def test_machines_that_refuse_pre_mapping(selftest: Selftest, how: str) -> None:
    premap(selftest, "series-6.12", 0, *DISK, how, mode="refused")


@matrix
def test_pre_mapped_buffers_on_the_debug_kernel(selftest: Selftest) -> None:
    premap(selftest, "series-6.12-debug", OF_DISKS, *DISK)
    premap(selftest, "series-6.12-debug", FILES["ext4"], "--fs=ext4", *DISK[1:])


@matrix
def test_pre_mapped_buffers_when_memory_or_requests_fail(selftest: Selftest) -> None:
    # DMA API debugging disables itself if its allocations fail, so run no other tests.
    premap(selftest, "series-6.12-debug", 4, *DISK, mode="failures")
    premap(selftest, "series-6.12-debug", 12, "--fs=ext4", *DISK[1:], mode="failures")


@matrix
@each("pins", "", "debug", "rt")
def test_selftest_pin_owner(selftest: Selftest, kernel: str) -> None:
    # With PREEMPT_RT there are no transparent huge pages; what is skipped is said on stderr.
    run = f"SKIPPED=1; exec 2>&1{RUN}" if variant(kernel) == "rt" else RUN
    command = ("sh", "-c", run, "sh", str(selftest(kernel, "pin_owner")), "/tmp")
    result = vm(f"--kernel={kernel}", "--append=pin_owner=on", "--", *command)
    passed(result, "selftests passed")


ON_ARM64 = {
    "udmabuf_fallocate": "/tmp",
    "write_source": "/mnt /tmp",
    "read_file": "/mnt /tmp",
    "copy_memory": "/mnt",
    "premap": "/dev/nvme1n1",
    "pin_owner": "/tmp",
}
"""The selftests, and where they run: on ext4, tmpfs, or a disk that is not mounted."""


@matrix
@pytest.mark.usefixtures("ready")
@each("fixes", "arm64")
def test_selftests_on_arm64(selftest: Selftest, kernel: str, tmp_path: Path) -> None:
    version = small.parse(kernel).version
    added = [Path(name).stem for patch in series.patches(version) for name in series.added(patch)]
    programs = [selftest(kernel, name) for name in ON_ARM64 if name in added]
    lines = [f"{one.name} {place}" for one in programs for place in ON_ARM64[one.name].split()]
    script = "set -e\n" + "".join(f"echo; echo selftest {line}; {line}\n" for line in lines)
    said = arm64.run(arm64.built(kernel), programs, script, tmp_path, append="pin_owner=on")
    totals = re.findall(r"# Totals: pass:(\d+) fail:0 .*error:0", said)
    assert len(totals) == len(lines) and all(int(passed) for passed in totals), said
