"""Debian's arm64 kernels in QEMU, with pages of 4 and 16 KiB: a disk, an initramfs, one script.

vm/run shows the guest the host's programs, which another architecture cannot run. Here the
initramfs has all that the script needs: busybox, the C library, modules, and the caller's files.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vm import debian, machine, small
from vm.debian import Apt
from vm.host import alone, cache, call, need, replacing

IMAGES = {"4k": "linux-image-6.12-arm64", "16k": "linux-image-6.12-arm64-16k"}
"""By the size of their base pages. Debian has none with 64 KiB."""
PROGRAMS = ("busybox-static", "libc6", "libgcc-s1", "libsmartcols1", "util-linux-extra")
MODULES = ("nvme", "ext4", "crc32c")
DISK = 2 << 30
STATUS = re.compile(r"^script ended with (\d+)\r?$", re.MULTILINE)

INIT = """#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox --install -s /bin
mount -t sysfs sys /sys
mount -t debugfs debug /sys/kernel/debug 2>/dev/null
mount -t devtmpfs dev /dev
mount -t tmpfs -o mode=1777 tmp /tmp
mkdir /dev/shm
mount -t tmpfs -o mode=1777 shm /dev/shm
ln -s /proc/self/fd /dev/fd
ip link set lo up
for module in /modules/*; do
	[ ! -e "$module" ] || insmod $module
done
until [ -b /dev/nvme0n1 ] && [ -b /dev/nvme1n1 ]; do sleep 1; done
mount -t ext4 /dev/nvme0n1 /mnt
(cd /mnt && exec sh /script)
echo "script ended with $?"
umount /mnt
poweroff -f
"""


@dataclass(frozen=True)
class Kernel:
    """An unpacked kernel, and the root of the programs that run on it."""

    image: Path
    modules: Path | None
    root: Path


def find(pages: str) -> Kernel:
    """The newest kernel in the cache with pages of this size, fetched if there is none."""
    place = cache() / "arm64" / pages
    with alone("arm64"):
        if not place.exists():
            fetch_kernel(place, IMAGES[pages])
    [image] = (place / "boot").glob("vmlinuz-*")
    [modules] = (place / "lib/modules").iterdir()
    return Kernel(image, modules, root())


def built(name: str) -> Kernel:
    """A small kernel of this name (vm/small.py), which has its drivers built in."""
    return Kernel(small.find(name), None, root())


def root() -> Path:
    """The programs, fetched if the cache has none."""
    place = cache() / "arm64" / "-".join(("root", *PROGRAMS))
    with alone("arm64-root"):
        if not place.exists():
            with alone(), replacing(place) as partial:
                packages().unpack(PROGRAMS, partial)
    return place


def packages() -> Apt:
    """The arm64 packages of Debian 12."""
    sources = debian.sources(debian.releases()["bookworm"])
    arm = [line.replace("[", "[arch=arm64 ", 1) for line in sources]
    return Apt("apt-arm64", arm, architecture="arm64")


def fetch_kernel(place: Path, name: str) -> None:
    print(f"vm: fetching {name} (100 MB, once)", file=sys.stderr)
    with alone():
        apt = packages()
        version, package = apt.newest(name)
        with replacing(place) as partial:
            apt.unpack([f"{package}={version}"], partial)
            [modules] = (partial / "lib/modules").iterdir()
            call(["depmod", "-b", str(partial), modules.name])


def initramfs(kernel: Kernel, files: Iterable[Path], script: str, folder: Path) -> Path:
    """Packs the root, the modules in the order of their loading, FILES for /bin, and SCRIPT."""
    root = folder / "root"
    shutil.copytree(kernel.root, root, symlinks=True)
    for name in ("dev", "etc", "mnt", "modules", "proc", "sys", "tmp"):
        (root / name).mkdir(exist_ok=True)
    shutil.rmtree(root / "usr/share")
    for number, module in enumerate(needed(kernel)):
        with (root / "modules" / f"{number:03}.ko").open("wb") as plain:
            subprocess.run(["xz", "-dc", str(module)], stdout=plain, check=True)
    for file in files:
        shutil.copy(file, root / "bin")
    (root / "init").write_text(INIT)
    (root / "init").chmod(0o755)
    (root / "script").write_text(script)
    image = folder / "initramfs"
    names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
    with image.open("wb") as output:
        command = ["cpio", "--quiet", "--create", "--format=newc", "--owner=0:0"]
        subprocess.run(command, cwd=root, input=names.encode(), stdout=output, check=True)
    return image


def needed(kernel: Kernel) -> list[Path]:
    """The modules, each after those that it depends on; what is built in needs none."""
    if kernel.modules is None:
        return []
    base = kernel.modules.parents[2]
    found: dict[Path, None] = {}
    for name in MODULES:
        words = ["modprobe", "-d", str(base), "-S", kernel.modules.name, "--show-depends", name]
        for line in call(words).splitlines():
            kind, _, path = line.strip().partition(" ")
            if kind == "insmod":
                found[Path(path.split()[0])] = None
    return list(found)


def run(
    kernel: Kernel,
    files: Iterable[Path],
    script: str,
    folder: Path,
    *,
    append: str = "",
    timeout: float = 1800,
) -> str:
    """Runs a shell script of a guest in /mnt, on ext4, and returns what it printed. There is
    another, empty disk, /dev/nvme1n1.

    Raises AssertionError if it failed, if the kernel complained, or if time is over.
    """
    need("qemu-system-arm", "command", "-v", "qemu-system-aarch64")
    need("cpio", "command", "-v", "cpio")
    need("e2fsprogs", "command", "-v", "mkfs.ext4")
    disks = [folder / "disk", folder / "raw"]
    for disk in disks:
        with disk.open("wb") as file:
            file.truncate(DISK)
    call(["mkfs.ext4", "-q", "-F", str(disks[0])])
    packed = initramfs(kernel, files, script, folder)
    words = ["qemu-system-aarch64", "-M", "virt", "-cpu", "max", "-accel", "tcg,thread=single"]
    words += ["-smp", "2", "-m", "3G", "-nographic", "-no-reboot", "-nic", "none"]
    words += ["-kernel", str(kernel.image), "-initrd", str(packed)]
    words += ["-append", f"console=ttyAMA0 loglevel=5 panic=-1 oops=panic {append}"]
    for disk in disks:
        drive = f"if=none,id={disk.name},file={disk},format=raw,cache=unsafe,discard=unmap"
        words += ["-drive", drive, "-device", f"nvme,serial={disk.name},drive={disk.name}"]
    text = machine.to_end(words, timeout)
    status = STATUS.search(text)
    assert status and status[1] == "0", machine.tail(text.encode())
    return text
