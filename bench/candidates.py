"""All candidates, each a line of ways.c, by the tables that show them.

The head of ways.c explains the keywords of a line; most are options of `dmafile load`. Seconds
(bench/seconds) and instructions (bench/instructions) are measured with the same lines and the same
program.
"""

from dataclasses import dataclass

KINDS = ("anon", "memfd", "udmabuf")
PAGES = ("4k", "thp", "huge")


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

QUICK = {
    "dmafile, memfd": "load to=memfd",
    "dmafile, anon": "load to=anon",
    "dmafile, dma-buf": "load to=dma-buf",
}
READ, READ_INTO_HEAP = "read() into a memfd", "read() into a heap's dma-buf"
READ_INTO_HUGE = "read() into private huge pages"
RIVALS = {
    READ: copy("memfd", "read", "buffered"),
    READ_INTO_HUGE: f"{copy('anon', 'read', 'buffered')} pages=thp",
    READ_INTO_HEAP: NORMAL,
}
"""The other rows of that table."""

LIMIT = {name: QUICK[name] for name in ("dmafile, memfd", "dmafile, anon")}
ALLOCATION = {
    f"allocation alone, {kind}, {pages}": make(kind, pages)
    for kind, pages in (
        ("anon", "4k"),
        ("anon", "thp"),
        ("anon", "huge"),
        ("memfd", "4k"),
        ("memfd", "huge"),
    )
}
FIO = {
    f"fio, {block.upper()} × {depth}, {'huge' if huge else '4 KiB'} pages": (block, depth, huge)
    for block, depth in (("1m", 32), ("4m", 8), ("4m", 32))
    for huge in (False, True)
}
"""Block size, queue depth, and whether fio's buffers are on huge pages."""

SCALE = LIMIT

NO_CHECKSUM = "no checksum"
CHECKSUMS = {
    NO_CHECKSUM: "load to=memfd",
    **{name: f"load to=memfd verify={name}" for name in ("crc32c", "xxh3", "blake3", "sha256")},
}


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

RW_TO_DISK = "save from=dmafile method=rw io=direct"
WRITE_FROM_ITS_MAPPING = "save from=dmafile method=write io=buffered"
FROM_MODULE = {
    "`RW`, direct": RW_TO_DISK,
    "`RW`, buffered": "save from=dmafile method=rw io=buffered",
    "`dmafile save`, direct": "store from=dmafile method=module io=direct",
    "`dmafile save`, bounce, direct": "store from=dmafile method=bounce io=direct",
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


# Instructions, on a stock kernel: docs/instructions.md, docs/kernel.md.

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

ALLOC_READ = copy("dmafile", "alloc-read", "direct")
"""dmafile.ko: a dma-buf is created and filled in one step."""
RW = copy("dmafile", "rw", "direct")
"""dmafile.ko: an existing dma-buf of the module is filled."""
READ_INTO_ITS_MAPPING = copy("dmafile", "read", "buffered")
ENGINE = "load to=dmafile method=module io=direct"
POOL_MADE = f"{load('udmabuf', 'huge', 'uring', 'direct')} pool=made"
"""A udmabuf on huge pages that were not reserved in the pool before."""

MODULE = {
    "the normal way: heap, `read()` into its mapping": NORMAL,
    "heap, bounce": heap("bounce", "direct"),
    "udmabuf, 4 KiB pages": load("udmabuf", "4k", "uring", "direct"),
    "udmabuf, THP": load("udmabuf", "thp", "uring", "direct"),
    "udmabuf, hugetlb, which were set aside": load("udmabuf", "huge", "uring", "direct"),
    "udmabuf, hugetlb, set aside for it and given back": POOL_MADE,
    "`ALLOC_READ`, direct": ALLOC_READ,
    "`dmafile load --to dmafile`, direct": ENGINE,
    "`ALLOC_READ`, buffered": copy("dmafile", "alloc-read", "buffered"),
    "`ALLOC` alone, nothing read": make("dmafile"),
    "`ALLOC`, then `RW`, direct": RW,
    "`ALLOC`, then `RW`, buffered": copy("dmafile", "rw", "buffered"),
    "`ALLOC`, then `read()` into its mapping": READ_INTO_ITS_MAPPING,
}
"""Methods of filling a dma-buf, for docs/kernel.md."""

LOADS = [load(*what, *way) for what in ((k, p) for k in KINDS for p in PAGES) for way in WAYS]
HEAP_LOADS = [heap(*way) for way in HEAP_WAYS]

BLOCKS = {
    (kind, pages, block): f"{load(kind, pages, 'uring', 'direct')} block={block << 10}"
    for kind, pages in (("memfd", "thp"), ("memfd", "4k"), ("udmabuf", "thp"), ("anon", "thp"))
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
        load("udmabuf", "4k", "uring", "direct"),
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
        load("memfd", "4k", "threads", "direct"),
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
    Gate("ALLOC_READ, to its memory alone", ALLOC_READ, make("dmafile"), 1.16),
    Gate("dmafile load, to ALLOC_READ", ENGINE, ALLOC_READ, 1.95),
]
"""Ratios with the module."""


def on_stock() -> list[str]:
    """All candidates for stock kernels, each once."""
    every = [NORMAL, *MEMORY, *MODULE.values(), *LOADS, *HEAP_LOADS, *BLOCKS.values()]
    every += (line for gate in GATES for line in (gate.candidate, gate.against))
    return list(dict.fromkeys(every))


# Instructions, on the kernel of the series, which supports every published row: docs/series.md.
# Published figures are from other machines and are compared as ratios only.


@dataclass(frozen=True)
class HeapRow:
    """A row of the proposal to read a file while a heap allocates a dma-buf (2024; a phone with
    12 GB, UFS 4.0, f2fs, Linux 6.1; AR-31), with nanoseconds by size."""

    name: str
    line: str
    nanoseconds: dict[int, int]


HEAP_SIZES = (512 << 10, 8 << 20, 1 << 30, 3 << 30)


def heap_row(name: str, line: str, *nanoseconds: int) -> HeapRow:
    return HeapRow(name, line, dict(zip(HEAP_SIZES, nanoseconds, strict=True)))


HEAP = (
    heap_row(
        "normal: heap, mmap, read()",
        "copy to=heap method=read io=buffered",
        *(2_790_861, 14_535_784, 1_520_790_492, 3_332_438_754),
    ),
    heap_row(
        "udmabuf, read(), buffered",
        "copy to=u+mfd method=read io=buffered",
        *(1_704_046, 11_313_476, 821_348_000, 2_108_419_923),
    ),
    heap_row(
        "sendfile, buffered",
        "copy to=heap method=sendfile io=buffered",
        *(3_261_261, 12_112_292, 1_565_939_938, 3_062_052_984),
    ),
    heap_row(
        "read while allocating, buffered",
        "copy to=heap method=heap-read io=buffered",
        *(2_064_538, 10_771_474, 986_338_800, 2_187_570_861),
    ),
    heap_row(
        "sendfile, direct",
        "copy to=heap method=sendfile io=direct",
        *(12_844_231, 37_883_938, 5_110_299_184, 9_777_661_077),
    ),
    heap_row(
        "allocated, then read, direct",
        "copy to=heap method=in-order io=direct",
        *(813_215, 6_962_092, 2_364_211_877, 5_648_897_554),
    ),
    heap_row(
        "udmabuf, read(), direct",
        "copy to=u+mfd method=read io=direct",
        *(1_289_554, 8_968_138, 921_480_784, 2_158_305_738),
    ),
    heap_row(
        "read while allocating, direct",
        "copy to=heap method=heap-read io=direct",
        *(1_957_661, 6_581_999, 520_003_538, 1_400_006_107),
    ),
)


HEAP_OURS = {
    "dmafile, memfd": "load to=memfd",
    "dmafile, memfd, allocated, then read": "load to=memfd allocation=before",
    "dmafile, udmabuf": "load to=udmabuf",
    "dmafile, heap": "load to=heap:system",
    "dmafile, dmafile.ko": "load to=dmafile",
}
"""Loads by dmafile for the same purpose."""


@dataclass(frozen=True)
class CopyRow:
    """A row of the proposal to copy into dma-bufs with copy_file_range (2025; 32 buffers of 32 MB,
    a CPU at 1 GHz; CF-13), with milliseconds. `percent` is relative to the first row's speed, as
    published; that of row 11 is computed from rounded MB/s."""

    name: str
    line: str
    create: int
    close: int
    fill: int
    percent: int


# Kind, mode, method; milliseconds of creation, close and I/O; I/O speed in % of the first row's.
FIGURES = """
dmabuf buffer R/W 52 5 1170 100
udmabuf buffer R/W 591 326 1281 91
memfd buffer R/W 1 323 2370 49
memfd direct R/W 1 321 1058 110
memfd buffer sendfile 1 329 1577 74
memfd direct sendfile 1 327 2672 43
memfd buffer splice 2 321 1729 67
memfd direct splice 2 324 1528 76
memfd buffer c_f_r 1 325 1586 73
memfd direct c_f_r 1 323 897 130
u+mfd buffer R/W 609 344 2207 52
u+mfd direct R/W 580 342 737 158
u+mfd buffer sendfile 582 343 1270 92
u+mfd direct sendfile 573 344 2254 51
u+mfd buffer splice 584 341 1202 97
u+mfd direct splice 564 340 851 137
u+mfd buffer c_f_r 585 344 1244 94
u+mfd direct c_f_r 578 341 581 201
udmabuf buffer c_f_r 585 328 1163 100
udmabuf direct c_f_r 579 328 464 252
dmabuf buffer c_f_r 48 5 1058 110
dmabuf direct c_f_r 48 5 316 370
dmabuf buffer R/W 48 5 1173 99
"""
TO = {"dmabuf": "heap", "udmabuf": "udmabuf", "memfd": "memfd", "u+mfd": "u+mfd"}
METHODS = {"R/W": "read", "sendfile": "sendfile", "splice": "splice", "c_f_r": "copy-file-range"}
MODES = {"buffer": "buffered", "direct": "direct"}


def copy_row(number: int, line: str) -> CopyRow:
    kind, mode, method, *figures = line.split()
    way = copy(TO[kind], METHODS[method], MODES[mode])
    return CopyRow(f"{number} {kind} {mode} {method}", way, *map(int, figures))


COPIES = [copy_row(number, line) for number, line in enumerate(FIGURES.strip().splitlines(), 1)]

SERIES_WAYS = {
    "the normal way: heap, `read()` into its mapping": NORMAL,
    "udmabuf, then `read()`, buffered": copy("u+mfd", "read", "buffered"),
    "patch 1: all allocated, then read, buffered": copy("heap", "in-order", "buffered"),
    "patches 1–5: read while allocating, buffered": copy("heap", "heap-read", "buffered"),
    "udmabuf, then `read()`, direct": copy("u+mfd", "read", "direct"),
    "patch 1: all allocated, then read, direct": copy("heap", "in-order", "direct"),
    "patches 1–5: read while allocating, direct": copy("heap", "heap-read", "direct"),
    "`sendfile` into the heap's dma-buf, buffered": copy("heap", "sendfile", "buffered"),
    "`sendfile` into the heap's dma-buf, direct": copy("heap", "sendfile", "direct"),
    "`dmafile load --to heap:system`": heap("heap-read", "direct"),
    "dmafile.ko, `ALLOC_READ`, direct": ALLOC_READ,
}
"""AR-31's rows, patch by patch, and the module."""

UDMABUFS = {
    "over pages of 4 KiB": make("udmabuf", "4k"),
    "over huge pages that tmpfs has made": make("udmabuf", "thp"),
    "over huge pages of hugetlb": make("udmabuf", "huge"),
}
"""Each on an existing memfd."""

BY_WRITE = "save from=heap method=write io=buffered"
SAVES = {
    "`write()` from its mapping, buffered": BY_WRITE,
    "`copy_file_range`, buffered": "save from=heap method=copy-file-range io=buffered",
    "`copy_file_range`, direct": "save from=heap method=copy-file-range io=direct",
}
"""From a heap's dma-buf to the disk."""

INTO_HEAP = copy("heap", "copy-file-range", "direct")
INTO_MEMFD = copy("memfd", "copy-file-range", "direct")
BY_SENDFILE = copy("memfd", "sendfile", "buffered")


@dataclass(frozen=True)
class Goal:
    """The share of another method's instructions that a copy may take."""

    name: str
    line: str
    against: str
    most: float | None
    """None if there is no limit, only a comparison."""
    step: str = "fill"
    """`all` if neither method creates memory before filling it."""


GOALS = (
    Goal("into a heap's dma-buf, direct, to `read()` into its mapping", INTO_HEAP, NORMAL, 1 / 16),
    Goal(
        "the same, to direct `read()` into the memfd under a udmabuf",
        INTO_HEAP,
        copy("u+mfd", "read", "direct"),
        0.8,
    ),
    Goal("into a memfd, direct, to buffered `sendfile`", INTO_MEMFD, BY_SENDFILE, 1 / 3, "all"),
    Goal(
        "`fallocate` of a memfd, without a file, to the same",
        f"{make('memfd', '4k')} method=fallocate",
        BY_SENDFILE,
        None,
        "all",
    ),
    Goal(
        "the same two copies, where tmpfs gives huge pages",
        f"{INTO_MEMFD} pages=thp",
        f"{BY_SENDFILE} pages=thp",
        1 / 3,
        "all",
    ),
    Goal(
        "a heap's dma-buf to the disk, direct, to `write()` from its mapping",
        SAVES["`copy_file_range`, direct"],
        BY_WRITE,
        1 / 8,
    ),
)


def on_series() -> list[str]:
    """All candidates that are measured at one size, each once."""
    every = [*SERIES_WAYS.values(), *(row.line for row in COPIES), *SAVES.values()]
    every += (line for goal in GOALS for line in (goal.line, goal.against))
    return list(dict.fromkeys(every))


def by_size() -> list[str]:
    """The candidates that are measured at each of AR-31's sizes."""
    return [*(row.line for row in HEAP), *HEAP_OURS.values()]
