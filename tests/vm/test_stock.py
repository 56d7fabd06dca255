"""Each stock kernel with a disk of every kind, in one boot: the kernel, doctor and loads."""

import os
import shlex
from collections.abc import Iterator

import pytest

from tests.vm.programs import TARGET, build
from vm import kernels
from vm.fixtures import FILE_SYSTEMS, vm

CHECKS = """
dmafile=$1
uname -r
for node in /dev/udmabuf /dev/dma_heap/system; do
    [ ! -e $node ] || echo "node $node"
done
$dmafile doctor >/tmp/doctor && grep -q . /tmp/doctor && echo "doctor"
head -c 5000 /dev/urandom >/tmp/small
for kind in udmabuf heap:system; do
    $dmafile load --quiet --to $kind /tmp/small -- true 2>/tmp/refused && echo "made $kind"
    ! grep -q "there is no /dev/.* (ENOENT); " /tmp/refused || echo "refused $kind"
done
[ $(grep -c "dmafile.ko makes dma-bufs" /tmp/doctor) -ne 2 ] || echo "module"
number=
for fs in $FILE_SYSTEMS; do
    file=/mnt$number/file
    io=direct
    # It keeps its files in memory, where nothing is direct and the cache is the file.
    [ $fs != tmpfs ] || io=auto
    head -c 5000123 /dev/urandom >$file
    sync $file
    dd if=$file iflag=nocache count=0 status=none
    $dmafile load --quiet --io $io $file -- sh -c \
        'head -c $DMAFILE_BYTES /proc/self/fd/$DMAFILE_FD | sha256sum' >/tmp/loaded
    cached=$(fincore --bytes --noheadings --output RES $file)
    if [ $fs = tmpfs ]; then
        dd if=$file of=/dev/null iflag=direct bs=777 count=1 2>/tmp/dd && echo "unaligned"
        ! $dmafile load --quiet --io direct $file -- true 2>/tmp/refused || exit
        echo "refused direct: $(cat /tmp/refused)"
        $dmafile explain $file >/tmp/plan || exit
        sed -nE 's/^ *(io|cache|bytes) +/explained \\1: /p' /tmp/plan
    fi
    sha256sum <$file | cmp - /tmp/loaded && echo "loaded $fs $(stat -f -c %T $file) $cached"
    number=$((${number:-1} + 1))
done
"""


NEWEST = pytest.param(
    kernels.NEWEST,
    marks=pytest.mark.skipif(not os.environ.get("MATRIX"), reason="make test-all PARTS=matrix"),
)


@pytest.fixture(scope="module", params=[*kernels.STOCK, NEWEST])
def stock(request: pytest.FixtureRequest, ready: None) -> Iterator[tuple[str, list[str]]]:
    """The output of CHECKS in one boot of each stock kernel, with a disk of every kind."""
    build()
    words = ["--kernel", request.param, *(f"--fs={fs}" for fs in FILE_SYSTEMS)]
    script = f"FILE_SYSTEMS={shlex.quote(' '.join(FILE_SYSTEMS))}\n{CHECKS}"
    result = vm(*words, "--", "sh", "-c", script, "sh", TARGET / "debug" / "dmafile")
    assert result.returncode == 0, result.stderr.decode()
    # With --quiet, a message would mean that something is wrong.
    assert result.stderr == b""
    yield request.param, result.stdout.decode().splitlines()


def test_the_requested_kernel_runs(stock: tuple[str, list[str]]) -> None:
    name, said = stock
    assert said[0] == kernels.find(name).image.name.removeprefix("vmlinuz-")


def test_only_newer_kernels_offer_dma_bufs_to_user_space(stock: tuple[str, list[str]]) -> None:
    name, said = stock
    nodes = {line.split()[1] for line in said if line.startswith("node ")}
    assert nodes == (set() if name == "6.1" else {"/dev/udmabuf", "/dev/dma_heap/system"})


def test_without_dma_bufs_doctor_names_dmafile_ko(
    stock: tuple[str, list[str]],
) -> None:
    name, said = stock
    found = "refused" if name == "6.1" else "made"
    assert {f"{found} udmabuf", f"{found} heap:system"} <= set(said), said
    assert ("module" in said) == (name == "6.1"), said


def test_doctor_runs(stock: tuple[str, list[str]]) -> None:
    assert "doctor" in stock[1]


@pytest.mark.parametrize("fs", FILE_SYSTEMS)
def test_a_load_has_the_bytes_of_the_file_and_leaves_no_page_cache(
    stock: tuple[str, list[str]], fs: str
) -> None:
    [line] = [line for line in stock[1] if line.startswith(f"loaded {fs} ")]
    _, _, kind, cached = line.split()
    # The names that `stat -f` prints for ext4 and overlayfs have changed over time.
    assert kind.startswith(fs[:3]) or (fs == "overlayfs" and kind.startswith("overlay")), kind
    assert fs == "tmpfs" or cached == "0"


def test_files_on_tmpfs_are_copied_from_memory(stock: tuple[str, list[str]]) -> None:
    name, said = stock
    # Since Linux 6.6, O_DIRECT opens files on tmpfs. It needs no alignment, because it copies too.
    assert ("unaligned" in said) == (name != "6.1"), said
    why = "tmpfs files are in memory, so there is no direct I/O"
    [refused] = [line for line in said if line.startswith("refused direct: ")]
    assert why in refused and "(EOPNOTSUPP)" in refused, refused
    plan = [line.removeprefix("explained ") for line in said if line.startswith("explained ")]
    # Nothing is read from a disk, and nothing is added to the page cache.
    assert [line.split()[:2] for line in plan] == [["io:", "buffered"], ["bytes:", "0"]], plan
    assert plan[0].endswith(why) and plan[1].startswith("bytes: 0 B from disk, 4.77 MiB"), plan
