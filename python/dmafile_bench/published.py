"""What others measured, on other machines: to be compared by ratios, never by seconds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HeapRow:
    """A way of the proposal to read a file while a dma-buf of a heap is allocated (2024; a phone,
    12 GB, UFS 4.0, f2fs, Linux 6.1), in nanoseconds by size, and as way.py says it."""

    name: str
    words: str
    nanoseconds: dict[int, int]


HEAP_SIZES = (512 << 10, 8 << 20, 1 << 30, 3 << 30)


def heap_row(name: str, words: str, *nanoseconds: int) -> HeapRow:
    return HeapRow(name, words, dict(zip(HEAP_SIZES, nanoseconds, strict=True)))


HEAP = (
    heap_row(
        "normal: heap, mmap, read()",
        "to=heap method=read io=buffered",
        *(2_790_861, 14_535_784, 1_520_790_492, 3_332_438_754),
    ),
    heap_row(
        "udmabuf, read(), buffered",
        "to=u+mfd method=read io=buffered",
        *(1_704_046, 11_313_476, 821_348_000, 2_108_419_923),
    ),
    heap_row(
        "sendfile, buffered",
        "to=heap method=sendfile io=buffered",
        *(3_261_261, 12_112_292, 1_565_939_938, 3_062_052_984),
    ),
    heap_row(
        "read while allocating, buffered",
        "to=heap method=heap-read io=buffered",
        *(2_064_538, 10_771_474, 986_338_800, 2_187_570_861),
    ),
    heap_row(
        "sendfile, direct",
        "to=heap method=sendfile io=direct",
        *(12_844_231, 37_883_938, 5_110_299_184, 9_777_661_077),
    ),
    heap_row(
        "allocated, then read, direct",
        "to=heap method=in-order io=direct",
        *(813_215, 6_962_092, 2_364_211_877, 5_648_897_554),
    ),
    heap_row(
        "udmabuf, read(), direct",
        "to=u+mfd method=read io=direct",
        *(1_289_554, 8_968_138, 921_480_784, 2_158_305_738),
    ),
    heap_row(
        "read while allocating, direct",
        "to=heap method=heap-read io=direct",
        *(1_957_661, 6_581_999, 520_003_538, 1_400_006_107),
    ),
)


@dataclass(frozen=True)
class CopyRow:
    """A way of the proposal to copy into dma-bufs with copy_file_range (2025; 32 buffers of 32 MB,
    a CPU at 1 GHz), in milliseconds, and as way.py says it. `percent` is of the first row's speed,
    as published: row 11's is of its rounded MB/s."""

    name: str
    words: str
    create: int
    close: int
    fill: int
    percent: int

    @property
    def whole(self) -> int:
        return self.create + self.close + self.fill


# Kind, mode, method; milliseconds to create, to close, and of I/O; I/O in % of the first row's.
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
KINDS = {"dmabuf": "heap", "udmabuf": "udmabuf", "memfd": "memfd", "u+mfd": "u+mfd"}
METHODS = {"R/W": "read", "sendfile": "sendfile", "splice": "splice", "c_f_r": "copy-file-range"}
MODES = {"buffer": "buffered", "direct": "direct"}


def copy_row(number: int, line: str) -> CopyRow:
    kind, mode, method, *figures = line.split()
    words = f"to={KINDS[kind]} method={METHODS[method]} io={MODES[mode]}"
    return CopyRow(f"{number} {kind} {mode} {method}", words, *map(int, figures))


COPIES = [copy_row(number, line) for number, line in enumerate(FIGURES.strip().splitlines(), 1)]
