"""Tests that memory registered for RDMA, with a software device, is shown as a region of pins.

    rdma.py    in the machine, as root, with the device `siw0`

Ends with an assertion, or with a line that has the number of regions.
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


def line(address: int, size: int) -> str:
    return f"{address:x}-{address + size:x} w {PAGES} {size} "


def lines() -> str:
    return Path("/sys/kernel/debug/pin_owner/regions").read_text()


def vanishes(text: str) -> None:
    end = time.monotonic() + PATIENCE
    while text in lines():
        assert time.monotonic() < end, f"{text} is still there:\n{lines()}"
        time.sleep(0.1)


def main() -> None:
    size = PAGES * mmap.PAGESIZE
    memory = mmap.mmap(-1, size)
    memory.write(b"\1" * size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    card = Card()
    for _ in range(3):
        region = card.register(address, size)
        own = Path("/proc/self/pins").read_text()
        assert re.search(rf"(?m)^{line(address, size)}\d+ ib_umem_get$", own), own
        card.end(region)
        vanishes(line(address, size))
    # The registrations of a killed process are released.
    read, write = os.pipe()
    child = os.fork()
    if not child:
        Card().register(address, size)
        os.write(write, b"1")
        signal.pause()
    os.read(read, 1)
    assert line(address, size) in Path(f"/proc/{child}/pins").read_text()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    vanishes(line(address, size))
    assert Path("/sys/kernel/debug/pin_owner/check").read_text() == "consistent\n"
    print("4 regions checked")


main()
