"""Tests of the patches in kernel/linux-VERSION: style, and building in many configurations."""

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from kernel.lint import OF_TRACEPOINTS
from kernel.test import KERNELS, kernel_of
from kernel.tests.vm.test_module import matrix
from vm import debian, kernels, ko, roots, series, small
from vm.compiled import static
from vm.fixtures import passed, vm
from vm.host import Unavailable, alone, cache, environment, need

versions = pytest.mark.parametrize("version", series.VERSIONS)
TOPICS = [(version, topic) for version in series.VERSIONS for topic in series.topics(version)]
CASES = [f"series-{version}" for version in series.VERSIONS]


@matrix
@pytest.mark.parametrize(("version", "topic"), TOPICS)
def test_a_topic_applies_with_no_more_than_what_it_needs(
    version: str, topic: str, tmp_path: Path
) -> None:
    patches = series.patches(version, series.with_needed([topic]))
    series.originals(debian.linux_source(version), tmp_path, patches)
    for patch in patches:
        series.apply(patch, tmp_path)


@matrix
@versions
def test_all_topics_apply_in_order(version: str, tmp_path: Path) -> None:
    patches = series.patches(version)
    series.originals(debian.linux_source(version), tmp_path, patches)
    for patch in patches:
        series.apply(patch, tmp_path)
    # The module and the patches have the same engine.
    for file in (ko.SOURCES / "core").iterdir():
        place = "fs/dmafile" if file.suffix == ".c" else "include/linux/dmafile"
        assert (tmp_path / place / file.name).read_bytes() == file.read_bytes(), file.name


@matrix
def test_a_patch_that_does_not_apply_is_named(tmp_path: Path) -> None:
    patches = series.patches("6.12", ["fixes", "heap-read"])
    series.originals(debian.linux_source("6.12"), tmp_path, patches)
    file = tmp_path / "drivers" / "dma-buf" / "dma-heap.c"
    file.write_text(file.read_text().replace("PAGE_ALIGN(", "PAGE_ALIGN_OTHER("))
    with pytest.raises(Unavailable, match=r"heap-read/0\S*\.patch does not apply"):
        for patch in patches:
            series.apply(patch, tmp_path)


def test_each_topic_has_a_cover_letter_of_a_page() -> None:
    for version, topic in TOPICS:
        cover = series.SERIES / f"linux-{version}" / topic / series.COVER
        words = cover.read_text().partition("\n\n")[2].split()
        assert 100 < len(words) < 400, f"{cover}: {len(words)} words"


def test_each_patch_names_its_reader_and_one_that_fixes_its_bug() -> None:
    for version in series.VERSIONS:
        for patch in series.patches(version):
            text = series.message(patch)
            assert re.search(r"(?m)^Cc: \S", text), patch
            tests = re.match(r"selftests|\S+/selftest: |Documentation", text)
            if patch.parent.name == "fixes" and not tests and not text.startswith(UNKNOWN):
                assert re.search(r"(?m)^(Fixes: [0-9a-f]{12} \(\"|\[ Upstream commit )", text), (
                    patch
                )


UNKNOWN = (
    "udmabuf: do not warn about sizes that user space chooses",
    "udmabuf: obey the maximum segment size of devices",
)
"""kernel/docs/sending.md says how to find the commits that they fix."""


@matrix
@versions
def test_checkpatch_is_clean(version: str, tmp_path: Path) -> None:
    need("perl", "command", "-v", "perl")
    checkpatch = debian.linux_source(version) / "scripts" / "checkpatch.pl"
    # The sender adds the Signed-off-by.
    words = ["--no-tree", "--strict", "--no-signoff", "--terse", "--no-summary", "--show-types"]
    words.append("--showfile")
    # There is no history with the quoted commits.
    words.append("--ignore=FILE_PATH_CHANGES,UNKNOWN_COMMIT_ID")
    # Outside of this repository: checkpatch takes files that git knows for C files.
    copies = [tmp_path / f"{patch.parent.name}-{patch.name}" for patch in series.patches(version)]
    for patch, copy in zip(series.patches(version), copies, strict=True):
        shutil.copy(patch, copy)
    command = [str(checkpatch), *words, *map(str, copies)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert OF_TRACEPOINTS.sub("", result.stdout) + result.stderr == ""


def objects(names: Iterable[str]) -> list[str]:
    """The object files of those names that are C files of the kernel."""
    ours = (name for name in names if not name.startswith(("tools/", "Documentation/")))
    return sorted(name.removesuffix(".c") + ".o" for name in set(ours) if name.endswith(".c"))


def compiled(kernel: str, build: Path, linux: Path, wanted: Sequence[str], *words: str) -> str:
    """What gcc with W=1 (and WORDS of make) prints of these objects. Their errors are ours."""
    for name in wanted:
        (build / name).unlink(missing_ok=True)
    command = [*small.parse(kernel).make(linux, build), "--silent", "W=1", *words, *wanted]
    result = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return result.stdout + result.stderr


@matrix
@pytest.mark.parametrize("kernel", CASES)
def test_gcc_and_sparse_are_clean(kernel: str) -> None:
    """New files; those of Linux have warnings of their own."""
    version = small.parse(kernel).version
    build = kernels.find(kernel).build
    new = objects(name for patch in series.patches(version) for name in series.added(patch))
    assert new
    with series.tree(version, debian.linux_source(version)) as linux:
        assert compiled(kernel, build, linux, new, "C=2", f"CHECK={roots.sparse()}") == ""


@matrix
@versions
def test_every_variant_can_be_configured(version: str, tmp_path: Path) -> None:
    names = [name for name in small.NAMES if small.parse(name).version == version]
    with series.tree(version, debian.linux_source(version)) as patched:
        for name in names:
            one, tree = small.parse(name), tmp_path / name
            tree.mkdir()
            linux = patched if one.patched else debian.linux_source(version)
            with (tree / "log").open("w+") as log:
                small.configure(one, linux, small.settings_of(name), tree, log.fileno())
            print(f"{name} can be configured", flush=True)


@matrix
@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("kernel", [f"{case}-{one}" for case in CASES for one in small.BUILT])
def test_other_configurations_link(kernel: str) -> None:
    built = kernels.find(kernel).image.parents[1]
    version = small.parse(kernel).version
    patches = series.patches(version)
    names = {name for patch in patches for name in series.files(patch)}
    said = [line for line in (built / "log").read_text().splitlines() if "warning:" in line]
    assert not [line for line in said if any(name in line for name in names)], said


@matrix
@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("kernel", CASES)
def test_linux_builds_and_boots_after_each_patch(kernel: str) -> None:
    """A kernel that was built from the same patches and settings before is only booted. STEPS=3-9
    tests only these patches, counted over all topics.

    The last patch is first, because most of its objects are those of the whole series.
    """
    version = small.parse(kernel).version
    linux, wanted = debian.linux_source(version), small.settings_of(kernel)
    patches = series.patches(version)
    place = cache() / f"{kernel}-steps"
    images = place / "images"
    images.mkdir(parents=True, exist_ok=True)
    kept = []
    first, last = map(int, os.environ.get("STEPS", f"1-{len(patches)}").split("-"))
    for step in range(last, first - 1, -1):
        applied = patches[:step]
        of = json.dumps([linux.parent.name, sorted(wanted.items()), series.digest(applied)])
        kept.append(images / hashlib.sha256(of.encode()).hexdigest()[:12])
        if not kept[-1].exists():
            built = build_step(kernel, linux, applied, wanted, place)
            shutil.copytree(built, place / "partial")
            (place / "partial").rename(kept[-1])
        [image] = kept[-1].iterdir()
        passed(vm(f"--kernel={image}", "--", "echo", "booted"), "booted")
        print(f"{applied[-1].parent.name}/{applied[-1].name} builds and boots", flush=True)
    if "STEPS" not in os.environ:
        for old in set(images.iterdir()) - set(kept):
            shutil.rmtree(old)


def build_step(
    kernel: str, linux: Path, applied: Sequence[Path], wanted: small.Settings, place: Path
) -> Path:
    """Builds Linux with these patches, the last of them without a new warning. Returns the folder
    with the image."""
    shutil.rmtree(place / "partial", ignore_errors=True)
    version = small.parse(kernel).version
    # Start with the objects of the whole series, most of which can be reused.
    if not (place / "build").exists():
        build = kernels.find(kernel).build
        # Prevents builds in this folder during the copy.
        with alone(f"series-source-{version}"):
            shutil.copytree(build, place / "partial", symlinks=True)
        (place / "partial").rename(place / "build")
    # An option cannot be set before the patch that adds it.
    texts = "".join(patch.read_text() for patch in applied)
    missing = series.options(version) - {
        f"CONFIG_{name}" for name in re.findall(r"(?m)^\+config (\w+)$", texts)
    }
    there = {name: value for name, value in wanted.items() if name not in missing}
    last, build = applied[-1], place / "build"
    changed = [name for name in objects(series.files(last)) if (build / name).exists()]
    old = [name for name in changed if name not in objects(series.added(last))]
    with series.tree(version, linux, applied[:-1]) as tree:
        before = counted(compiled(kernel, build, tree, old))
    with series.tree(version, linux, applied) as tree:
        small.build(kernel, tree, there, place)
        after = counted(compiled(kernel, build, tree, changed))
    log = (place / "log").read_text()
    assert "warning:" not in log, f"{last.name}: {log}"
    assert not after - before, f"{last.name}: {after - before}"
    return place / "boot"


def counted(said: str) -> set[str]:
    """The warnings without their places, which a patch may move."""
    return {line.partition("warning: ")[2] for line in said.splitlines() if "warning: " in line}


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
@versions
def test_the_copied_uapi_header_is_that_of_the_series(version: str, tmp_path: Path) -> None:
    headers = tmp_path / "uapi" / "linux"
    headers.mkdir(parents=True)
    with series.tree(version, debian.linux_source(version)) as tree:
        shutil.copy(tree / "include" / "uapi" / "linux" / "dma-heap.h", headers)
    (tmp_path / "same.c").write_text(SAME)
    static(tmp_path / "same.c", tmp_path, f"-I{headers.parent}", f"-I{ko.SOURCES / 'uapi'}")


def test_each_test_is_for_one_kernel(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        if item.path.is_relative_to(ko.SOURCES):
            assert kernel_of(item) in KERNELS, item.nodeid
