"""Output with a line that says what is going on, and moves."""

import sys
import threading
import time
from typing import Self

INTERVAL = 1.5
"""Seconds."""


class Progress:
    """Prints what is being done, and the seconds so far: again and again on the same line of a
    terminal, otherwise on lines of their own, on standard error."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.doing = ""
        self.ended = threading.Event()
        self.lock = threading.Lock()
        self.moving = sys.stderr.isatty()
        self.thread = threading.Thread(target=self.tick, daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()
        self.clear()

    def tick(self) -> None:
        while not self.ended.wait(INTERVAL):
            with self.lock:
                line = f"  {time.monotonic() - self.began:.0f} s: {self.doing}"
                end = "" if self.moving else "\n"
                self.clear()
                print(line, end=end, file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.moving:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def now(self, what: str) -> None:
        """Names what begins now."""
        self.doing = what

    def say(self, text: str) -> None:
        """Prints to standard output."""
        with self.lock:
            self.clear()
            print(text, flush=True)
