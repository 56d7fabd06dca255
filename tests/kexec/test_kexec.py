"""Held memory outlives the kernel: systemd's descriptor store is carried through a kexec, and the
holder of the next kernel serves what the first one loaded.

A small machine boots systemd of Debian's unstable release from a disk, on a Linux with the options
that Debian leaves off (kernel/config/liveupdate.config). $MODEL_MIB is the size of its model (256).
"""

import hashlib
import json
import os
import random
import shutil
from pathlib import Path

import pytest

from tests.vm.programs import TARGET, build
from vm import debian, machine, small
from vm.fixtures import missing
from vm.host import ROOT, Unavailable, alone, cache, call, need, replacing

MIB = 1 << 20
MODEL_MIB = int(os.environ.get("MODEL_MIB", "256"))
PACKAGES = ("systemd", "systemd-sysv", "kexec-tools")
KERNEL = "base-7.3-liveupdate"
TIMEOUT = 3600
"""Seconds. The machine has no KVM, and the host may be slow."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="the disk is made by root"),
]

HOLDS = {
    "model": ("/model", "--verify xxh3"),
    "sparse": ("/sparse", "--verify sha256"),
    "huge": ("/small", "--verify xxh3 --pages huge"),
    "plain": ("/small", ""),
}
"""Names of holds, their files and options. The last two are loaded again."""
UNIT = """
[Unit]
After={after}
Wants={after}
[Service]
Type=oneshot
ExecStart=/check
StandardOutput=null
TimeoutStartSec=infinity
"""
CHECK = """#!/bin/sh
# A line of JSON for each hold, in each kernel.
exec >/dev/console 2>/dev/console
for name in {names}; do
	unit=dmafile-hold@$name
	pid=$(systemctl show --value -p MainPID $unit)
	stored=$(systemctl show --value -p NFileDescriptorStore $unit)
	read=$(sed -n 's/^read_bytes: //p' /proc/$pid/io)
	line=$(journalctl -q -b -u $unit -o cat --no-pager | grep '^{{')
	note=$(journalctl -q -b -u $unit -o cat --no-pager | grep 'note:')
	inside='head -c $DMAFILE_BYTES "$0" | sha256sum | cut -c1-64; stat -Lc %b "$0"'
	taken=$(dmafile take $name --quiet -- sh -c "$inside" {{}})
	set -- $taken
	echo "check: {{\\"name\\": \\"$name\\", \\"read\\": $read, \\"sha256\\": \\"$1\\"," \\
		"\\"blocks\\": $2, \\"stored\\": $stored, \\"note\\": \\"$note\\", \\"line\\": $line}}"
done
dmafile doctor | sed -n 's/.*kexec  */doctor: /p'
if [ ! -e /second ]; then
	touch /second
	sync
	kexec -s -l /boot/vmlinuz --append="$(cat /proc/cmdline)"
	systemctl kexec
else
	systemctl poweroff
fi
"""


@pytest.fixture(scope="module")
def root() -> Path:
    """Debian's unstable release with systemd, made once (150 MB)."""
    need("mmdebstrap", "command", "-v", "mmdebstrap")
    place = cache() / "kexec-root"
    with alone("kexec-root"):
        if not place.exists():
            with alone():
                source = debian.sources(debian.releases()[debian.UNSTABLE])[0]
            with replacing(place) as partial:
                words = ["mmdebstrap", "--quiet", "--variant=minbase", "--mode=root"]
                words += [f"--include={','.join(PACKAGES)}", debian.UNSTABLE, str(partial), source]
                call(words)
    return place


def disk(root: Path, image: Path, folder: Path) -> tuple[Path, dict[str, str]]:
    """A disk with that release, the holds and what checks them; and the digests of the files."""
    top = folder / "root"
    # It has device nodes.
    call(["cp", "--archive", str(root), str(top)])
    strip = ["strip", "-o", str(top / "usr/bin/dmafile"), str(TARGET / "debug" / "dmafile")]
    call(strip)
    shutil.copy(image, top / "boot" / "vmlinuz")
    units = top / "etc/systemd/system"
    unit = (ROOT / "crates/cli/systemd/dmafile-hold@.service.in").read_text()
    (units / "dmafile-hold@.service").write_text(unit.replace("@BINDIR@", "/usr/bin"))
    (units / "dmafile-hold@.service.d").mkdir()
    kept = "[Service]\nFileDescriptorStorePreserve=yes\n"
    (units / "dmafile-hold@.service.d" / "kexec.conf").write_text(kept)
    (top / "etc/dmafile").mkdir()
    for name, (file, options) in HOLDS.items():
        text = f"MODEL={file}\nOPTIONS={options}\n"
        (top / "etc/dmafile" / f"{name}.conf").write_text(text)
    after = " ".join(f"dmafile-hold@{name}.service" for name in HOLDS)
    (units / "check.service").write_text(UNIT.format(after=after))
    wants = units / "multi-user.target.wants"
    wants.mkdir(exist_ok=True)
    (wants / "check.service").symlink_to("../check.service")
    (top / "check").write_text(CHECK.format(names=" ".join(HOLDS)))
    (top / "check").chmod(0o755)
    choose = random.Random(11)
    with (top / "model").open("wb") as model:
        for _ in range(MODEL_MIB):
            model.write(choose.randbytes(MIB))
        model.write(b"odd")
    (top / "small").write_bytes(choose.randbytes(3 * MIB + 5))
    # Holes before and after its bytes.
    with (top / "sparse").open("wb") as sparse:
        sparse.seek(20 * MIB)
        sparse.write(choose.randbytes(5 * MIB))
        sparse.truncate(40 * MIB)
    digests = {}
    for name in ("model", "small", "sparse"):
        with (top / name).open("rb") as data:
            digests[f"/{name}"] = hashlib.file_digest(data, "sha256").hexdigest()
    made = folder / "disk"
    with made.open("wb") as empty:
        empty.truncate((1024 + 2 * MODEL_MIB) * MIB)
    call(["mke2fs", "-q", "-F", "-t", "ext4", "-d", str(top), str(made)])
    shutil.rmtree(top)
    return made, digests


def test_the_next_kernel_serves_what_was_held(root: Path, tmp_path: Path) -> None:
    need("qemu-system-x86", "command", "-v", "qemu-system-x86_64")
    need("e2fsprogs", "command", "-v", "mke2fs")
    build()
    try:
        image = small.find(KERNEL)
    except Unavailable as error:
        missing(error)
    made, digests = disk(root, image, tmp_path)
    words = ["qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2"]
    words += ["-m", f"{2048 + 2 * MODEL_MIB}M", "-nographic", "-no-reboot", "-nic", "none"]
    words += ["-drive", f"if=none,id=disk,file={made},format=raw,cache=unsafe"]
    words += ["-device", "nvme,serial=disk,drive=disk", "-kernel", str(image), "-append"]
    parameters = "root=/dev/nvme0n1 rw init=/usr/lib/systemd/systemd systemd.show_status=0"
    console = "console=ttyS0 loglevel=4 panic=-1 hugepages=8"
    words.append(f"{parameters} {console} kho=on liveupdate=on")
    text = machine.to_end(words, TIMEOUT)
    lines = [line.partition("check: ")[2] for line in text.splitlines() if "check: {" in line]
    assert len(lines) == 2 * len(HOLDS), machine.tail(text.encode())
    assert text.count("doctor: systemd") == 2, text
    all_checks = [json.loads(line) for line in lines]
    for kernel, checks in enumerate((all_checks[: len(HOLDS)], all_checks[len(HOLDS) :])):
        for check in checks:
            name, line = check["name"], check["line"]
            file = HOLDS[name][0]
            assert check["sha256"] == digests[file], (kernel, check)
            # The memory, and the table.
            assert check["stored"] == 2, (kernel, check)
            survives = name in ("model", "sparse")
            assert bool(check["note"]) != survives, (kernel, check)
            assert line["stored"] == (survives and kernel == 1), (kernel, check)
            print(f"kernel {kernel + 1}, {name}: read {check['read']}, blocks {check['blocks']}")
    first, second = (
        {check["name"]: check for check in checks}
        for checks in (all_checks[: len(HOLDS)], all_checks[len(HOLDS) :])
    )
    # Programs are read, too, by whichever holder starts first.
    assert first["model"]["read"] >= MODEL_MIB * MIB
    assert second["model"]["read"] < 64 * MIB
    # Holes become memory when they are handed over.
    blocks = [checks["sparse"]["blocks"] for checks in (first, second)]
    assert blocks[0] < 8 * MIB // 512 and blocks[1] == 40 * MIB // 512, blocks
