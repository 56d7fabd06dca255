"""Tests of the series in kernel/linux-6.12: its files, and in virtual machines its functions."""

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from kernel.lint import OF_TRACEPOINTS
from kernel.tests.vm.test_surroundings import WIDE, need_32_bits
from tests.vm.programs import Programs
from vm import kernels, ko, series, small
from vm.compiled import static
from vm.debian import linux_source
from vm.fixtures import FILE_SYSTEMS, MOUNTS, passed, vm
from vm.host import ROOT, Unavailable, alone, cache, environment, need

matrix = pytest.mark.skipif(not os.environ.get("MATRIX"), reason="make kernel-test")

HERE = Path(__file__).parent
SELFTESTS = Path("tools/testing/selftests")
WRITERS = ("ext4", "xfs", "tmpfs")
DISKS = tuple(fs for fs in FILE_SYSTEMS if fs != "tmpfs")
EVERYWHERE = ("slow_disk", "broken_disk", "changing_file", "limits", "many", "anything")
PARTS = {
    "series": (*EVERYWHERE, "in_pieces"),
    # A debug kernel needs too much memory itself.
    "series-debug": (*EVERYWHERE, "failures"),
}
"""Parts of kernel/tests/vm/inside/heap_flag.py, by kernel."""
PARTS_OF_COPIES = {
    "series": ("slow_disk", "broken_disk", "kept", "cut_short", "sealed", "loop"),
    "series-debug": ("slow_disk", "broken_disk", "kept", "cut_short", "sealed", "loop", "failures"),
}
"""Parts of kernel/tests/vm/inside/copy_faults.py, by kernel."""
DISKS_OF_COPIES = {"series": DISKS, "series-debug": ("ext4",)}
"""A debug kernel takes most of an hour for one file system."""


def test_every_new_file_is_added_by_one_patch() -> None:
    named = [name for patch in series.patches() for name in patch.new]
    new = series.SERIES / series.NEW
    there = [str(path.relative_to(new)) for path in new.rglob("*") if path.is_file()]
    assert sorted(named) == sorted(there)


def test_a_hook_has_a_line_of_context_at_most() -> None:
    for patch in series.patches():
        for hunk in re.split(r"(?m)^@@.*\n|^--- a/.*\n\+\+\+ b/.*\n", patch.hooks):
            for context in re.split(r"(?m)(?:^[-+].*\n)+", hunk):
                # Between two changes there may be one line for each.
                assert len(context.splitlines()) <= 2, f"{patch.name}:\n{context}"
            assert not hunk or re.match(r"(?: .*\n)?[-+]", hunk), f"{patch.name}:\n{hunk}"


@matrix
def test_a_hook_that_does_not_apply_is_named(tmp_path: Path) -> None:
    linux = linux_source()
    series.originals(linux, tmp_path)
    file = tmp_path / "drivers" / "dma-buf" / "dma-heap.c"
    file.write_text(file.read_text().replace("PAGE_ALIGN(", "PAGE_ALIGN_OTHER("))
    with pytest.raises(Unavailable, match=r"-dma-heap-read-file\.patch does not apply"):
        for patch in series.patches():
            series.apply(patch, tmp_path)


@matrix
def test_checkpatch_is_clean(tmp_path: Path) -> None:
    checkpatch = linux_source() / "scripts" / "checkpatch.pl"
    mails = series.mails(linux_source(), tmp_path)
    assert len(mails) == len(series.patches())
    # The sender adds the Signed-off-by.
    words = ["--no-tree", "--strict", "--no-signoff", "--terse", "--no-summary", "--show-types"]
    words.append("--showfile")
    # There is no history with the quoted commits, and MAINTAINERS is not changed.
    words.append("--ignore=FILE_PATH_CHANGES,UNKNOWN_COMMIT_ID")
    command = [str(checkpatch), *words, *map(str, mails)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert OF_TRACEPOINTS.sub("", result.stdout) + result.stderr == ""


@matrix
def test_gcc_and_sparse_are_clean() -> None:
    need("sparse", "command", "-v", "sparse")
    build = kernels.find("series").build
    new = [Path(name) for patch in series.patches() for name in patch.new]
    objects = [str(path.with_suffix(".o")) for path in new if path.suffix == ".c"]
    objects = [name for name in objects if not name.startswith("tools/")]
    assert len(objects) == 16
    command = ["make", "--silent", f"O={build}", "W=1", "C=2", *objects]
    with series.tree(linux_source()) as linux:
        result = subprocess.run(
            command, capture_output=True, text=True, cwd=linux, env=environment()
        )
    assert result.stdout + result.stderr == "" and result.returncode == 0


@matrix
@pytest.mark.usefixtures("ready")
def test_linux_builds_and_boots_after_each_patch() -> None:
    """Also after the last patch without the series' options. A kernel that was built from the same
    patches and settings before is only booted. STEPS=33-41 tests only these patches.

    The last patch is first, because most of its objects are those of the whole series.
    """
    linux, wanted, patches = linux_source(), small.settings_of("series"), series.patches()
    own = small.settings(OWN.read_text())
    without = {name: value for name, value in wanted.items() if name not in own}
    assert without != wanted
    place = cache() / "series-steps"
    images = place / "images"
    images.mkdir(parents=True, exist_ok=True)
    kept = []
    first, last = map(int, os.environ.get("STEPS", f"1-{len(patches)}").split("-"))
    steps = [(step, wanted) for step in range(last, first - 1, -1)]
    if "STEPS" not in os.environ:
        steps.append((len(patches), without))
    for step, settings in steps:
        of = json.dumps([linux.parent.name, sorted(settings.items()), series.digest(step)])
        kept.append(images / hashlib.sha256(of.encode()).hexdigest()[:12])
        if not kept[-1].exists():
            built = build_step(step, patches[step - 1], settings, place)
            shutil.copytree(built, place / "partial")
            (place / "partial").rename(kept[-1])
        [image] = kept[-1].iterdir()
        passed(vm(f"--kernel={image}", "--", "echo", "booted"), "booted")
        print(f"{patches[step - 1].name} builds and boots", flush=True)
    if "STEPS" not in os.environ:
        for old in set(images.iterdir()) - set(kept):
            shutil.rmtree(old)


def build_step(step: int, patch: series.Patch, wanted: small.Settings, place: Path) -> Path:
    """Builds Linux with all patches up to this one. Returns the folder."""
    shutil.rmtree(place / "partial", ignore_errors=True)
    # Start with the objects of the whole series, most of which can be reused.
    if not (place / "build").exists():
        build = kernels.find("series").build
        # Prevents builds in this folder during the copy.
        with alone("series-source"):
            shutil.copytree(build, place / "partial", symlinks=True)
        (place / "partial").rename(place / "build")
    with series.tree(linux_source(), step) as tree:
        # An option cannot be set before the patch that adds it.
        missing = set(small.settings(OWN.read_text())) - options(tree)
        there = {name: value for name, value in wanted.items() if name not in missing}
        small.build("series", tree, there, place)
    log = (place / "log").read_text()
    assert "warning:" not in log, f"{patch.name}: {log}"
    return place / "boot"


OWN = small.CONFIG / "series.config"
"""The options that only the series has."""


def options(tree: Path) -> set[str]:
    """The options in the Kconfig files that the series changes."""
    files = {name for patch in series.patches() for name in patch.changed if "Kconfig" in name}
    texts = [(tree / name).read_text() for name in files]
    return {f"CONFIG_{name}" for name in re.findall(r"(?m)^config (\w+)$", "\n".join(texts))}


@pytest.fixture(scope="module")
def selftests(ready: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the series' selftests, linked statically for machines without libraries."""
    return its_selftests("*.c", tmp_path_factory.mktemp("selftests"))


def its_selftests(pattern: str, folder: Path, *flags: str) -> Path:
    with series.tree(linux_source()) as tree:
        headers = its_headers(tree, folder)
        for source in (series.SERIES / series.NEW / SELFTESTS).rglob(pattern):
            # The kselftest header is only in the tree of Linux.
            path = tree / source.relative_to(series.SERIES / series.NEW)
            # The kselftest header does not compile with -Wextra.
            static(path, folder, headers, *flags)
    return folder


def its_headers(tree: Path, folder: Path) -> str:
    """Returns the compiler option for the uapi headers of the series."""
    headers = folder / "uapi" / "linux"
    headers.mkdir(parents=True)
    shutil.copy(tree / "include" / "uapi" / "linux" / "dma-heap.h", headers)
    return f"-I{headers.parent}"


SAME = """
#include <linux/dma-heap.h>
#include <stddef.h>
enum { KERNEL = DMA_HEAP_ALLOC_AND_READ_FILE };
#undef DMA_HEAP_ALLOC_AND_READ_FILE
#include <dma-heap-read-file.h>
#define SAME(field) _Static_assert(offsetof(struct dma_heap_allocation_data, field) == \\
	offsetof(struct dma_heap_read_file, field), #field)
SAME(file_fd);
SAME(file_reserved);
SAME(fd);
SAME(fd_flags);
SAME(heap_flags);
_Static_assert(sizeof(struct dma_heap_allocation_data) == sizeof(struct dma_heap_read_file), "");
_Static_assert(KERNEL == DMA_HEAP_ALLOC_AND_READ_FILE, "");
int main(void) { return 0; }
"""


@matrix
def test_the_copied_uapi_header_is_that_of_the_series(tmp_path: Path) -> None:
    ours = series.SERIES.parent / "uapi"
    with series.tree(linux_source()) as tree:
        theirs = its_headers(tree, tmp_path)
    (tmp_path / "same.c").write_text(SAME)
    static(tmp_path / "same.c", tmp_path, theirs, f"-I{ours}")


RUN = """
program=$1; shift
cp "$program" /tmp/program
for folder; do
    # Print all output, to see where a machine hangs.
    cd "$folder" && /tmp/program | tee /tmp/said
    # A skipped test would count as passed.
    grep -q "^# Totals: pass:[1-9].* fail:0 .*skip:0 error:0$" /tmp/said || exit 1
done
echo selftests passed
"""


@matrix
@pytest.mark.parametrize("kernel", ["base", "series", "series-debug"])
def test_a_write_may_come_from_any_source(selftests: Path, kernel: str) -> None:
    disks = [f"--fs={fs}" for fs in WRITERS]
    command = ("sh", "-c", RUN, "sh", str(selftests / "write_source"), *MOUNTS[: len(WRITERS)])
    result = vm(f"--kernel={kernel}", "--parallel", *disks, "--", *command)
    passed(result, "selftests passed")


@matrix
@pytest.mark.usefixtures("ready")
def test_a_source_that_is_not_mapped_yet_is_copied_in_large_folios() -> None:
    python = ("python3", "-E", "-S", "-m", "kernel.tests.vm.inside.cold_writes")
    options = ("--kernel=series", "--fs=xfs", "--memory=3G")
    passed(vm(*options, "--", *python, MOUNTS[0]), "writes checked")


@matrix
@pytest.mark.parametrize("kernel", ["series", "series-debug"])
def test_a_udmabuf_of_untouched_memory_is_zero(selftests: Path, kernel: str) -> None:
    command = ("sh", "-c", RUN, "sh", str(selftests / "udmabuf_fallocate"), "/tmp")
    passed(vm(f"--kernel={kernel}", "--", *command), "selftests passed")


@matrix
@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize(("kernel", "touches"), [("base", 2), ("series", 1)])
def test_a_write_touches_its_source_once_with_the_series(
    kernel: str, touches: int, tmp_path: Path
) -> None:
    program = static(ROOT / "bench" / "writes.c", tmp_path, "-Wextra", "-DWRITES=100")
    disks = [f"--fs={fs}" for fs in WRITERS]
    inside = 'cp "$1" /tmp/writes; shift; exec /tmp/writes 0 "$@"'
    command = ("sh", "-c", inside, "sh", str(program), *MOUNTS[: len(WRITERS)])
    result = vm(f"--kernel={kernel}", *disks, "--", *command)
    passed(result, "touched")
    lines = [line.split() for line in result.stdout.decode().splitlines()]
    assert [word for word, *_ in lines] == ["touched"] * 2 * len(WRITERS), lines
    for _, folder, size, faulted, copied in lines:
        assert (int(faulted), int(copied)) == (100 * (touches - 1), 100), (folder, size)


@matrix
@pytest.mark.parametrize("kernel", ["series", "series-debug"])
def test_a_heap_reads_files_into_its_buffers(selftests: Path, kernel: str) -> None:
    disks = [f"--fs={fs}" for fs in FILE_SYSTEMS]
    command = ("sh", "-c", RUN, "sh", str(selftests / "read_file"), *MOUNTS)
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
@pytest.mark.parametrize("kernel", sorted(DISKS_OF_COPIES))
def test_copy_file_range_between_disk_and_memory(selftests: Path, kernel: str) -> None:
    copies(COPY, selftests, kernel, DISKS_OF_COPIES[kernel])


@matrix
def test_copy_file_range_with_huge_pages_of_tmpfs(selftests: Path) -> None:
    copies(HUGE, selftests, "series", DISKS[:1])


def copies(script: str, selftests: Path, kernel: str, disks: Sequence[str]) -> None:
    command = ("sh", "-c", script, "sh", str(selftests / "copy_memory"), *MOUNTS[: len(disks)])
    options = (f"--kernel={kernel}", "--memory=3G")
    result = vm(*options, *(f"--fs={fs}" for fs in disks), "--", *command)
    passed(result, "selftests passed")


@matrix
@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("kernel", sorted(DISKS_OF_COPIES))
def test_dmafile_loads_by_copy_file_range(programs: Programs, kernel: str) -> None:
    disks = DISKS_OF_COPIES[kernel]
    options = (f"--kernel={kernel}", *(f"--fs={fs}" for fs in disks))
    passed(programs.run("copy_range", *MOUNTS[: len(disks)], options=options), "loads checked")


def calls(program: str, kernel: str, parts: Sequence[str], *more: str) -> None:
    """Runs parts of a program in kernel/tests/vm/inside."""
    python = ("python3", "-E", "-S", "-m", f"kernel.tests.vm.inside.{program}")
    options = (f"--kernel={kernel}", "--fs=ext4", *more)
    passed(vm(*options, "--", *python, MOUNTS[0], *parts), "calls checked")


@matrix
@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("kernel", sorted(PARTS_OF_COPIES))
def test_faults_during_copy_file_range(kernel: str) -> None:
    calls("copy_faults", kernel, PARTS_OF_COPIES[kernel])


@matrix
@pytest.mark.usefixtures("ready")
def test_copy_file_range_into_all_free_memory() -> None:
    calls("copy_faults", "series", ["large"], "--memory=5G")


@matrix
@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("kernel", ["series", "series-debug"])
def test_dmafile_loads_by_heap_read(programs: Programs, kernel: str) -> None:
    options = (f"--kernel={kernel}", *(f"--fs={fs}" for fs in FILE_SYSTEMS))
    passed(programs.run("heap_read", *MOUNTS, options=options), "loads checked")


MAPPING = {
    ("6.12", "off"): "not",
    ("6.12", "intel"): "not",
    ("series", "off"): "maps",
    ("series", "intel"): "translates",
    ("series", "swiotlb"): "bounces",
    ("series-debug", "intel"): "translates",
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
    options = ("--kernel=series", f"--iommu={iommu}", *(f"--fs={fs}" for fs in disks))
    passed(programs.run("saves", "series", *MOUNTS[:3], options=options), "saves checked")


@matrix
@pytest.mark.usefixtures("ready")
def test_dmafile_loads_from_disks_that_refuse_pre_mapping(programs: Programs) -> None:
    kinds = ("raw-pi", "raw-zoned", "raw-multipath")
    options = ("--kernel=series", "--disk-size=64M", *(f"--fs={kind}" for kind in kinds))
    passed(programs.run("premap", "maps", *kinds, options=options), "loads checked")


@matrix
@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("kernel", sorted(PARTS))
def test_faults_while_a_heap_reads_a_file(kernel: str) -> None:
    calls("heap_flag", kernel, PARTS[kernel])


@matrix
@pytest.mark.usefixtures("ready")
def test_importers_see_what_the_kernel_read(programs: Programs) -> None:
    options = ("--kernel=series", "--fs=ext4")
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
    selftests: Path,
    kernel: str,
    skipped: int,
    *options: str,
    mode: str = "",
    module: Path | str = "",
) -> None:
    """Runs the selftest of pre-mapped buffers on a raw disk, or without one on a file."""
    path = "" if any(word.startswith("--fs=raw") for word in options) else MOUNTS[0]
    command = ("sh", "-c", PREMAP, "sh", selftests / "premap", module, path, mode)
    result = vm(f"--kernel={kernel}", *options, "--", *command)
    said = result.stdout.decode()
    assert result.returncode == 0, said + result.stderr.decode()
    totals = rf"(?m)^# Totals: pass:[1-9]\d* fail:0 xfail:0 xpass:0 skip:{skipped} error:0$"
    assert re.search(totals, said), said


@matrix
@pytest.mark.parametrize("iommu", ["off", "intel", "intel-strict", "intel-pt", "amd"])
def test_pre_mapped_buffers(selftests: Path, iommu: str) -> None:
    premap(selftests, "series", OF_DISKS, *DISK, f"--iommu={iommu}")


@matrix
@pytest.mark.parametrize(("fs", "iommu"), [("ext4", "off"), ("xfs", "off"), ("xfs", "intel")])
def test_pre_mapped_buffers_and_files(selftests: Path, fs: str, iommu: str) -> None:
    premap(selftests, "series", FILES[fs], f"--fs={fs}", *DISK[1:], f"--iommu={iommu}")


@matrix
@pytest.mark.parametrize("kernel", ["series", "series-debug"])
@pytest.mark.parametrize("iommu", ["off", "intel-strict"])
def test_pre_mapped_buffers_while_the_disk_is_reset_or_removed(
    selftests: Path, kernel: str, iommu: str
) -> None:
    premap(selftests, kernel, 0, *DISK, f"--iommu={iommu}", mode="life")


@matrix
@pytest.mark.parametrize("kernel", ["series", "series-debug"])
@pytest.mark.parametrize("iommu", ["off", "intel-strict"])
def test_pre_mapped_buffers_while_the_disk_is_suspended(
    selftests: Path, kernel: str, iommu: str, tmp_path: Path
) -> None:
    module = ko.other(HERE / "awake", kernels.find(kernel).build, tmp_path)
    # So slow that requests are in flight during the suspend.
    options = (*DISK, "--disk-speed=4M", f"--iommu={iommu}")
    premap(selftests, kernel, 0, *options, mode="suspend", module=module)


@matrix
@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("iommu", ["off", "intel"])
def test_pre_mapped_buffers_of_32_bit_programs(tmp_path: Path, iommu: str) -> None:
    need_32_bits()
    its_selftests("premap.c", tmp_path, *WIDE)
    premap(tmp_path, "series", OF_DISKS, *DISK, f"--iommu={iommu}")
    premap(tmp_path, "series", FILES["ext4"], "--fs=ext4", *DISK[1:], f"--iommu={iommu}")


@matrix
def test_pre_mapped_bounce_buffers(selftests: Path) -> None:
    premap(selftests, "series", 91, *DISK, "--iommu=swiotlb", mode="bounce")


@matrix
@pytest.mark.parametrize(("mdts", "iommu"), [("10", "off"), ("11", "intel")])
def test_pre_mapped_buffers_in_the_largest_commands(
    selftests: Path, mdts: str, iommu: str
) -> None:
    premap(selftests, "series", OF_DISKS, *DISK, f"--mdts={mdts}", f"--iommu={iommu}")


WAITS = """
insmod "$1" || exit
exec "$2" "$RAW"
"""


@matrix
@pytest.mark.parametrize("kernel", ["series", "series-debug"])
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
def test_disks_that_refuse_pre_mapping(selftests: Path, disk: str) -> None:
    premap(selftests, "series", 0, f"--fs={disk}", *DISK[1:], mode="refused")


@matrix
@pytest.mark.parametrize("how", ["--iommu=swiotlb", "--append=nvme.premap=0"])
def test_machines_that_refuse_pre_mapping(selftests: Path, how: str) -> None:
    premap(selftests, "series", 0, *DISK, how, mode="refused")


@matrix
def test_pre_mapped_buffers_on_the_debug_kernel(selftests: Path) -> None:
    premap(selftests, "series-debug", OF_DISKS, *DISK)
    premap(selftests, "series-debug", FILES["ext4"], "--fs=ext4", *DISK[1:])


@matrix
def test_pre_mapped_buffers_when_memory_or_requests_fail(selftests: Path) -> None:
    # DMA API debugging disables itself if its allocations fail, so run no other tests.
    premap(selftests, "series-debug", 4, *DISK, mode="failures")
    premap(selftests, "series-debug", 12, "--fs=ext4", *DISK[1:], mode="failures")


@matrix
@pytest.mark.parametrize("kernel", ["series", "series-debug"])
def test_selftest_pin_owner(selftests: Path, kernel: str) -> None:
    command = ("sh", "-c", RUN, "sh", str(selftests / "pin_owner"), "/tmp")
    result = vm(f"--kernel={kernel}", "--append=pin_owner=on", "--", *command)
    passed(result, "selftests passed")
