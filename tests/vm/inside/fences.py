"""Saves from a dma-buf to which a device still writes, which its fences show.

    fences.py DMAFILE HELPERS FOLDER    as root; HELPERS include those of the C library

The driver vgem lends memory whose fences a program attaches and signals. The bytes change just
before the fence is signalled, so a save that does not wait has other bytes.
"""

import fcntl
import mmap
import os
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.vm.inside.camera import reader
from tests.vm.inside.loads import BLOB, MIB
from tests.vm.inside.saves import call

SIZE = 4 * MIB
WAIT = 2
"""How long a save must at least wait, in seconds. vgem signals fences after 10 seconds."""

# drm/drm.h, drm/drm_mode.h, drm/vgem_drm.h
DRM_CREATE_DUMB, DUMB = 0xC02064B2, struct.Struct("=IIIIIIQ")
DRM_HANDLE_TO_FD, PRIME = 0xC00C642D, struct.Struct("=IIi")
VGEM_FENCE_ATTACH, ATTACH = 0xC0106441, struct.Struct("=IIII")
VGEM_FENCE_SIGNAL, SIGNAL = 0x40086442, struct.Struct("=II")
VGEM_FENCE_WRITE = 1


class Device:
    """A buffer of vgem, and its fences."""

    def __init__(self) -> None:
        call("modprobe", "vgem")
        (card,) = Path("/dev/dri").glob("card*")
        self.card = os.open(card, os.O_RDWR | os.O_CLOEXEC)
        dumb = fcntl.ioctl(self.card, DRM_CREATE_DUMB, DUMB.pack(SIZE >> 12, 1024, 32, 0, 0, 0, 0))
        self.handle, _, size = DUMB.unpack(dumb)[4:]
        assert size == SIZE, size
        prime = PRIME.pack(self.handle, os.O_RDWR | os.O_CLOEXEC, -1)
        self.fd = PRIME.unpack(fcntl.ioctl(self.card, DRM_HANDLE_TO_FD, prime))[2]
        self.memory = mmap.mmap(self.fd, SIZE)

    def begin(self) -> int:
        """A write that has not ended; returns its fence."""
        attach = ATTACH.pack(self.handle, VGEM_FENCE_WRITE, 0, 0)
        fence: int = ATTACH.unpack(fcntl.ioctl(self.card, VGEM_FENCE_ATTACH, attach))[2]
        return fence

    def end(self, fence: int, data: bytes) -> bool:
        """Writes and signals; false if the fence had timed out."""
        self.memory[:] = data
        try:
            fcntl.ioctl(self.card, VGEM_FENCE_SIGNAL, SIGNAL.pack(fence, 0))
        except TimeoutError:
            return False
        return True


def check(device: Device, command: Sequence[str], to: Path | None, says: str = "") -> None:
    """Runs a command during a write of the device. `to` has the bytes afterwards."""
    old, new = BLOB[:SIZE], BLOB[1 : SIZE + 1]
    device.memory[:] = old
    fence = device.begin()
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(device.fd,), text=True
    ) as process:
        assert process.stdin
        process.stdin.write(says)
        process.stdin.flush()
        time.sleep(WAIT)
        waits = process.poll() is None
        in_time = device.end(fence, new)
        process.communicate()
    assert process.returncode == 0, command
    if not in_time:
        # The machine was too busy.
        return check(device, command, to, says)
    assert waits, f"{command} does not wait"
    if to is not None:
        Path("/tmp/want").write_bytes(new)
        call("cmp", "/tmp/want", str(to))


def main() -> None:
    dmafile, helpers, folder = sys.argv[1:]
    device, to = Device(), Path(folder) / "to"
    save = [dmafile, "save", "--quiet"]
    for method in ("auto", "bounce", "threads"):
        check(device, [*save, f"fd:{device.fd}", f"--method={method}", str(to)], to)
    snapshot = Path(folder) / "snapshot"
    snapshot.mkdir()
    check(device, [*save, f"fd:{device.fd}=it", str(snapshot)], snapshot / "it.1.dmafile")
    recording = Path(folder) / "recording"
    recorder = [f"{helpers}/recorder", str(recording), str(device.fd), "auto", "auto", "0"]
    check(device, recorder, None, f"append 0 {SIZE}\nfinish\n")
    (record,) = reader()(str(recording))
    assert record[8] == BLOB[1 : SIZE + 1], "the record has the bytes from before"
    print("5 saves checked")


if __name__ == "__main__":
    main()
