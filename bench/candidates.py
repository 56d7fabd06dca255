"""All candidates, each a line of ways.c, by the tables that show them.

The head of ways.c explains the keywords of a line; most are options of `dmafile load`. Seconds
(bench/seconds) and instructions (bench/instructions) are measured with the same lines and the same
program.
"""

from dataclasses import dataclass

KINDS = ("anon", "memfd", "udmabuf")
PAGES = ("base", "thp", "huge")


def load(kind: str, pages: str, method: str, io: str) -> str:
    """A load by dmafile."""
    return f"load to={kind} pages={pages} method={method} io={io}"


def heap(method: str, io: str) -> str:
    """A load by dmafile into a dma-buf of the system heap."""
    return f"load to=heap:system method={method} io={io}"


def copy(kind: str, method: str, io: str) -> str:
    """A copy without dmafile."""
    return f"copy to={kind} method={method} io={io}"


def make(kind: str, pages: str = "") -> str:
    """Allocation only, without reads."""
    return f"make to={kind}" + (f" pages={pages}" if pages else "")


NORMAL = copy("heap", "read", "buffered")
"""The baseline of most tables: one read() into the mapping of a dma-buf of the system heap."""


# Seconds: the candidates of each table of bench/seconds, by the names in the table.

LIMIT = {"dmafile, memfd": "load to=memfd", "dmafile, anon": "load to=anon"}
ALLOCATION = {
    f"allocation alone, {kind}, {pages}": make(kind, pages)
    for kind, pages in (
        ("anon", "base"),
        ("anon", "thp"),
        ("anon", "huge"),
        ("memfd", "base"),
        ("memfd", "huge"),
    )
}
FIO = {
    f"fio, {block.upper()} × {depth}, {'huge' if huge else '4 KiB'} pages": (block, depth, huge)
    for block, depth in (("1m", 32), ("4m", 8), ("4m", 32))
    for huge in (False, True)
}
"""Block size, queue depth, and whether fio's buffers are on huge pages."""


# Seconds of saves: docs/saving.md.

IN_MEMORY = "from=memfd pages=huge pool=made"
SAVED = "dmafile save"
BY_PAGE_CACHE = "`write()`, `fsync()`"
TO_DISK = {
    SAVED: f"store {IN_MEMORY}",
    BY_PAGE_CACHE: f"save {IN_MEMORY} method=write io=buffered",
    "`O_DIRECT`, one `write()` of 8 MiB after the other, `fsync()`": (
        f"save {IN_MEMORY} method=write io=direct block={8 << 20}"
    ),
}
FIO_TO_DISK = {
    f"fio, {engine}, {block.upper()} × {depth}": (engine, block, depth)
    for engine, block, depth in (
        ("io_uring", "1m", 32),
        ("io_uring", "4m", 8),
        ("io_uring", "4m", 32),
        # The usual block size and queue depth of DeepNVMe.
        ("libaio", "1m", 128),
    )
}
"""Engine, block size, and queue depth."""
IN_FLIGHT = 2
RECORDS = {
    f"{IN_FLIGHT} buffers of {mib} MiB{note}": (
        f"record {IN_MEMORY} block={mib << 20} queue-depth={IN_FLIGHT}{words}"
    )
    for mib in (2, 8, 32)
    for note, words in (("", ""), (", no checksum", " verify=none"))
}
"""Writes by a recorder."""


# Instructions of saves, on a stock kernel with the module: docs/saving.md. The last candidate of
# each table is the baseline.

RW_TO_DISK = "save from=module method=rw io=direct"
WRITE_FROM_ITS_MAPPING = "save from=module method=write io=buffered"
FROM_MODULE = {
    "`RW`, direct": RW_TO_DISK,
    "`RW`, buffered": "save from=module method=rw io=buffered",
    "`dmafile save`, direct": "store from=module method=module io=direct",
    "`dmafile save`, bounce, direct": "store from=module method=bounce io=direct",
    "`write()` from its mapping, `fsync()`": WRITE_FROM_ITS_MAPPING,
}
"""A dma-buf of dmafile.ko."""
FROM_MEMORY = {
    "`dmafile save`, direct": "store from=memfd pages=huge method=uring io=direct",
    "one direct `write()` from its mapping": "save from=memfd pages=huge method=write io=direct",
    "`write()` from its mapping, `fsync()`": "save from=memfd pages=huge method=write io=buffered",
}
"""A memfd on huge pages."""
TO_DISK_GOAL = (RW_TO_DISK, WRITE_FROM_ITS_MAPPING, 1 / 16)
"""The first may take at most this share of the second."""


# Instructions, on a stock kernel: docs/instructions.md, kernel/docs/module.md.

WAYS = (
    ("uring", "direct"),
    ("threads", "direct"),
    ("uring", "buffered"),
    ("threads", "buffered"),
)
HEAP_WAYS = (("bounce", "direct"), *WAYS)

MEMORY = [
    *(make(kind, pages) for kind in ("anon", "memfd") for pages in PAGES),
    *(make("udmabuf", pages) for pages in PAGES),
    make("heap"),
    make("nothing"),
]

ALLOC_READ = copy("module", "alloc-read", "direct")
"""dmafile.ko: a dma-buf is created and filled in one step."""
RW = copy("module", "rw", "direct")
"""dmafile.ko: an existing dma-buf of the module is filled."""
READ_INTO_ITS_MAPPING = copy("module", "read", "buffered")
ENGINE = "load to=module method=module io=direct"
POOL_MADE = f"{load('udmabuf', 'huge', 'uring', 'direct')} pool=made"
"""A udmabuf on huge pages that were not reserved in the pool before."""

MODULE = {
    "the normal way: heap, `read()` into its mapping": NORMAL,
    "heap, bounce": heap("bounce", "direct"),
    "udmabuf, 4 KiB pages": load("udmabuf", "base", "uring", "direct"),
    "udmabuf, THP": load("udmabuf", "thp", "uring", "direct"),
    "udmabuf, hugetlb, which were set aside": load("udmabuf", "huge", "uring", "direct"),
    "udmabuf, hugetlb, set aside for it and given back": POOL_MADE,
    "`ALLOC_READ`, direct": ALLOC_READ,
    "`dmafile load --to module`, direct": ENGINE,
    "`ALLOC_READ`, buffered": copy("module", "alloc-read", "buffered"),
    "`ALLOC` alone, nothing read": make("module"),
    "`ALLOC`, then `RW`, direct": RW,
    "`ALLOC`, then `RW`, buffered": copy("module", "rw", "buffered"),
    "`ALLOC`, then `read()` into its mapping": READ_INTO_ITS_MAPPING,
}
"""Methods of filling a dma-buf, for kernel/docs/module.md."""

LOADS = [load(*what, *way) for what in ((k, p) for k in KINDS for p in PAGES) for way in WAYS]
HEAP_LOADS = [heap(*way) for way in HEAP_WAYS]

BLOCKS = {
    (kind, pages, block): f"{load(kind, pages, 'uring', 'direct')} block={block << 10}"
    for kind, pages in (("memfd", "thp"), ("memfd", "base"), ("udmabuf", "thp"), ("anon", "thp"))
    for block in (512, 1024, 4096)
}
"""By memory kind, page size, and block size in KiB."""


@dataclass(frozen=True)
class Gate:
    """The largest ratio that a test allows."""

    name: str
    candidate: str
    against: str
    limit: float
    newest: float | None = None
    """The limit on the newest kernel, if it differs, because its page cache is cheaper."""


GATES = [
    Gate("memfd, THP", load("memfd", "thp", "uring", "direct"), NORMAL, 0.32),
    Gate("memfd, hugetlb", load("memfd", "huge", "uring", "direct"), NORMAL, 0.135),
    Gate("anon, THP", load("anon", "thp", "uring", "direct"), NORMAL, 0.25),
    Gate("udmabuf, THP", load("udmabuf", "thp", "uring", "direct"), NORMAL, 0.33),
    Gate(
        "udmabuf, 4 KiB, to one made first",
        load("udmabuf", "base", "uring", "direct"),
        copy("u+mfd", "read", "direct"),
        1.0,
    ),
    Gate("heap, bounce", heap("bounce", "direct"), NORMAL, 0.42),
    Gate("heap, bounce, to the heap alone", heap("bounce", "direct"), make("heap"), 1.5),
    Gate(
        "memfd, THP, to its memory alone",
        load("memfd", "thp", "uring", "direct"),
        make("memfd", "thp"),
        1.22,
    ),
    Gate(
        "memfd, THP, threads to uring",
        load("memfd", "thp", "threads", "direct"),
        load("memfd", "thp", "uring", "direct"),
        1.1,
    ),
    Gate(
        "memfd, 4 KiB, to a bare direct read()",
        load("memfd", "base", "threads", "direct"),
        copy("memfd", "read", "direct"),
        1.035,
    ),
    Gate(
        "memfd, THP, buffered",
        load("memfd", "thp", "threads", "buffered"),
        NORMAL,
        1.035,
    ),
]

MODULE_GATES = [
    Gate("ALLOC_READ, to normal", ALLOC_READ, NORMAL, 1 / 7, newest=0.3),
    Gate(
        "ALLOC_READ, to a udmabuf, THP", ALLOC_READ, load("udmabuf", "thp", "uring", "direct"), 0.44
    ),
    # The baseline for kernels without heaps, such as Debian's 6.1.
    Gate(
        "ALLOC_READ, to read() into its mapping",
        ALLOC_READ,
        READ_INTO_ITS_MAPPING,
        1 / 7,
        newest=0.3,
    ),
    Gate("ALLOC_READ, to its memory alone", ALLOC_READ, make("module"), 1.16),
    Gate("dmafile load, to ALLOC_READ", ENGINE, ALLOC_READ, 1.95),
]
"""Ratios with the module."""


def on_stock() -> list[str]:
    """All candidates for stock kernels, each once."""
    every = [NORMAL, *MEMORY, *MODULE.values(), *LOADS, *HEAP_LOADS, *BLOCKS.values()]
    every += (line for gate in GATES for line in (gate.candidate, gate.against))
    return list(dict.fromkeys(every))
