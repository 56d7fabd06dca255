"""Candidates on the kernel of the series, which supports every published row.

Published figures are from other machines and are compared as ratios only.
"""

from dataclasses import dataclass

from bench.candidates import ALLOC_READ, NORMAL, copy, heap, make


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
    "dmafile, dmafile.ko": "load to=module",
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
    "over pages of 4 KiB": make("udmabuf", "base"),
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
        f"{make('memfd', 'base')} method=fallocate",
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
