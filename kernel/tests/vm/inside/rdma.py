"""Tests that memory registered for RDMA, with a software device, is shown as pinned by its process.

    rdma.py    in the machine, as root, with the device `siw0`

Ends with an assertion, or with a line that has the number of registrations.
"""

import ctypes
import mmap
import os
import re
import signal
import time
from pathlib import Path

PAGES = 64
LOCAL_WRITE = 1
PATIENCE = 60.0


class Card:
    """An RDMA device, through libibverbs."""

    def __init__(self) -> None:
        self.verbs = ctypes.CDLL("libibverbs.so.1", use_errno=True)
        for name in ("get_device_list", "open_device", "alloc_pd", "reg_mr"):
            getattr(self.verbs, f"ibv_{name}").restype = ctypes.c_void_p
        count = ctypes.c_int()
        devices = self.verbs.ibv_get_device_list(ctypes.byref(count))
        assert devices and count.value == 1, f"{count.value} cards"
        first = ctypes.cast(devices, ctypes.POINTER(ctypes.c_void_p))[0]
        context = self.verbs.ibv_open_device(ctypes.c_void_p(first))
        assert context, os.strerror(ctypes.get_errno())
        self.domain = self.verbs.ibv_alloc_pd(ctypes.c_void_p(context))
        assert self.domain, os.strerror(ctypes.get_errno())

    def register(self, address: int, size: int) -> int:
        where = ctypes.c_void_p(address), ctypes.c_size_t(size)
        region = self.verbs.ibv_reg_mr(ctypes.c_void_p(self.domain), *where, LOCAL_WRITE)
        assert region, os.strerror(ctypes.get_errno())
        return int(region)

    def end(self, region: int) -> None:
        assert self.verbs.ibv_dereg_mr(ctypes.c_void_p(region)) == 0


OWNERS = Path("/sys/kernel/debug/pin_owner/owners")


def own(pid: int | str) -> str:
    return Path(f"/proc/{pid}/pins").read_text()


def vanishes(pid: int) -> None:
    end = time.monotonic() + PATIENCE
    while re.search(rf"(?m)^{pid} ", text := OWNERS.read_text()):
        assert time.monotonic() < end, f"the pins of {pid} are still there:\n{text}"
        time.sleep(0.1)


def main() -> None:
    size = PAGES * mmap.PAGESIZE
    memory = mmap.mmap(-1, size)
    memory.write(b"\1" * size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    card = Card()
    for _ in range(3):
        region = card.register(address, size)
        assert re.search(rf"(?m)^{PAGES} {size} \d+ .* siw_reg_user_mr\b", own("self")), own("self")
        card.end(region)
        vanishes(os.getpid())
    # The registrations of a killed process are released.
    read, write = os.pipe()
    child = os.fork()
    if not child:
        Card().register(address, size)
        os.write(write, b"1")
        signal.pause()
    os.read(read, 1)
    assert f"{PAGES} {size} " in own(child), own(child)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    vanishes(child)
    assert OWNERS.with_name("check").read_text().count("\n") == 1
    print("4 registrations checked")


main()
