"""A progress bar for terminals."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Callback = Callable[[int, int], object]
"""Called with the bytes in place and the total."""

_WIDTH = 32


class _Bar:
    """Draws the progress on stderr."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._drawn = False

    def __call__(self, done: int, total: int) -> None:
        share = done / total if total else 0.0
        seconds = time.monotonic() - self._begin
        rate = done / seconds / 1e9 if seconds > 0 else 0.0
        filled = round(share * _WIDTH)
        bar = "#" * filled + "." * (_WIDTH - filled)
        size = f"{done / 2**30:.2f}/{total / 2**30:.2f} GiB"
        sys.stderr.write(f"\r{bar} {share:4.0%} {size}, {rate:.2f} GB/s ")
        sys.stderr.flush()
        self._drawn = True

    def close(self) -> None:
        if self._drawn:
            sys.stderr.write("\n")
            sys.stderr.flush()


@contextmanager
def callback(progress: Callback | bool | None) -> Iterator[Callback | None]:
    """The function to call: `True` means a bar if stderr is a terminal."""
    if progress is None or progress is False:
        yield None
    elif progress is not True:
        yield progress
    elif sys.stderr is None or not sys.stderr.isatty():
        yield None
    else:
        bar = _Bar()
        try:
            yield bar
        finally:
            bar.close()
