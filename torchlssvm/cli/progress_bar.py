"""A progress bar on standard error."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class ProgressBar:
    """A bar on stderr if that is a terminal, drawn ten times a second at most; elsewhere, and with --json, nothing.

    ``with ProgressBar(options, "adding", total) as bar: bar.advance(64)``; total is None when it is not known. A
    thread draws it again twice a second, so that the clock goes on while one long step is under way.
    """

    def __init__(self, options: argparse.Namespace, what: str, total: int | None = None):
        self.what, self.total = what, total
        self.done = 0
        self.start = time.monotonic()
        self.drawn = 0.0
        self.shown = not options.json and sys.stderr is not None and sys.stderr.isatty()
        self.lock, self.over = threading.Lock(), threading.Event()
        self.clock = threading.Thread(target=self.tick, daemon=True)

    def __enter__(self) -> Self:
        if self.shown:
            self.draw()
            self.clock.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.shown:
            self.over.set()
            self.clock.join()
            self.put("\r\x1b[K")

    def tick(self) -> None:
        """Draw twice a second until the work is done."""
        while not self.over.wait(0.5):
            self.draw()

    def advance(self, steps: int) -> None:
        """Count so many more steps as done."""
        self.done += steps
        if self.shown and time.monotonic() - self.drawn > 0.1:
            self.draw()

    def draw(self) -> None:
        """Draw the line in the place of the last one."""
        self.drawn = time.monotonic()
        self.put("\r" + self.line(shutil.get_terminal_size().columns - 1) + "\x1b[K")

    def put(self, text: str) -> None:
        """Write to the terminal; errors of a closed one are ignored, since the work goes on without the bar."""
        with self.lock, contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()

    def line(self, width: int) -> str:
        """Format the bar as text: ``adding [########--------]  50%  5,000 of 10,000, 1,250/s``."""
        elapsed = time.monotonic() - self.start
        if self.total is None and not self.done:
            return f"{self.what} ... {elapsed:.0f} s"[:width]
        rate = self.done / max(1e-9, elapsed)
        if not self.total:
            return f"{self.what} {self.done:,}, {rate:,.0f}/s, {elapsed:.0f} s"[:width]
        share = min(1.0, self.done / self.total)
        numbers = f"{share:>4.0%}  {self.done:,} of {self.total:,}, {rate:,.0f}/s"
        room = max(0, min(40, width - len(self.what) - len(numbers) - 4))
        full = round(share * room)
        return f"{self.what} [{'#' * full}{'-' * (room - full)}] {numbers}"[:width]
