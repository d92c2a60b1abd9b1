"""A sign of life on stderr while something takes long. Given (no notebook builds it)."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE, EVERY = 2.0, 5.0  # seconds until the first line of a log, and between its lines


@contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """While the body runs, say `what` on stderr; call what it gives with how far it has come.

    In a terminal one line at once, with the seconds, which goes away at the end. Elsewhere
    nothing for two seconds, then a line every five: "importing PyTorch: 7 s". For a body that
    writes nothing to stderr itself.
    """
    line = _Line(what, sys.stderr.isatty())
    thread = threading.Thread(target=line.keep_telling, daemon=True)
    thread.start()
    try:
        yield line.come_to
    finally:
        line.done.set()
        thread.join()
        line.erase()


class _Line:
    """What is being done, how far it is, and since when."""

    def __init__(self, what: str, is_terminal: bool) -> None:
        self.what, self.is_terminal = what, is_terminal
        self.place, self.width = "", 0
        self.started = time.monotonic()
        self.done = threading.Event()
        if is_terminal:
            self.tell()  # here: an import may let no other thread run

    def come_to(self, place: str) -> None:
        """Say how far it is from the next line on: "3 of 14"."""
        self.place = place

    def keep_telling(self) -> None:
        """Tell until it is done."""
        pause = 1.0 if self.is_terminal else PATIENCE
        while not self.done.wait(pause):
            self.tell()
            pause = 1.0 if self.is_terminal else EVERY

    def tell(self) -> None:
        """Write the line; in a terminal over the one before it."""
        seconds = time.monotonic() - self.started
        parts = [self.place] * bool(self.place) + [f"{seconds:.0f} s"]
        text = f"{self.what}: {', '.join(parts)}"
        if not self.is_terminal:
            print(text, file=sys.stderr, flush=True)
            return
        print(f"\r{text:<{self.width}}", end="", file=sys.stderr, flush=True)
        self.width = len(text)

    def erase(self) -> None:
        """Leave nothing of the line in a terminal."""
        if self.is_terminal:
            print(f"\r{'':<{self.width}}\r", end="", file=sys.stderr, flush=True)
