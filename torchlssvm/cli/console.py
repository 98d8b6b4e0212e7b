"""What the commands share: exit codes, output, a progress bar, options, and opening a store."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

    from torchlssvm.store import SampleStore

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

OK, FAILED, USAGE, NOT_VERIFIED, BUSY, INTERRUPTED = 0, 1, 2, 3, 4, 130
EXTRAS = {
    "cryptography": "audit", "torchvision": "vision", "PIL": "vision", "lightning": "lightning", "torchmetrics": "lightning",
    "jsonargparse": "lightning", "sklearn": "sklearn",
}  # fmt: skip
"""Packages that a command may miss, and the extra that installs each."""


class UsageError(Exception):
    """Options that do not go together."""


def one_line(error: BaseException) -> str:
    """The message of an error on one line; for one of the system, the file and the reason."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


# -- options -----------------------------------------------------------------------------------------------------------


def command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], text: str, store: bool = True
) -> argparse.ArgumentParser:
    """A new command with the options that all have."""
    short = text.partition(". ")[0].rstrip(".")
    parser = commands.add_parser(name, help=short[0].lower() + short[1:], description=text)
    if store:
        parser.add_argument("store", type=Path, metavar="STORE", help="folder of the store")
        parser.add_argument(
            "--timeout", type=seconds, default=30.0, metavar="S", help="wait so long for another writer (default: 30)"
        )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_whose(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """``--subject`` or ``--id``."""
    whose = parser.add_mutually_exclusive_group(required=required)
    whose.add_argument("--subject", metavar="S", help="all samples of this subject")
    whose.add_argument("--id", nargs="+", action="extend", metavar="I", help="samples by their ids")


def seconds(text: str) -> float:
    """A time that is not negative."""
    value = float(text)
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and a million seconds")
    return value


def count(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


# -- the store ---------------------------------------------------------------------------------------------------------


def open_store(options: argparse.Namespace, readonly: bool = False) -> SampleStore:
    """The store that a command works on."""
    from torchlssvm.errors import StoreError
    from torchlssvm.store import SampleStore
    from torchlssvm.store.database import FILE

    if not os.path.lexists(options.store / FILE):
        raise StoreError(f"there is no store at {options.store}: torchlssvm init makes one")
    return SampleStore(options.store, readonly=readonly, timeout=options.timeout)


# -- output ------------------------------------------------------------------------------------------------------------


def emit(options: argparse.Namespace, data: dict[str, Any], text: str) -> None:
    """Print what a command found: one JSON object, or text."""
    print(json.dumps(data, indent=2) if options.json else text)


def table(rows: dict[str, Any]) -> str:
    """Names and values, one pair in a line."""
    width = max(map(len, rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


class Progress:
    """A bar on stderr while a terminal is looking, ten times a second at most; elsewhere nothing.

    ``with Progress("adding", total) as bar: bar.advance(64)``; total is None when it is not known.
    """

    def __init__(self, what: str, total: int | None = None):
        self.what, self.total = what, total
        self.done = 0
        self.start = time.monotonic()
        self.drawn = 0.0
        self.shown = sys.stderr.isatty()

    def __enter__(self) -> Self:
        self.draw()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def advance(self, steps: int) -> None:
        """So many more are done."""
        self.done += steps
        if time.monotonic() - self.drawn > 0.1:
            self.draw()

    def draw(self) -> None:
        """Write the line again."""
        if not self.shown:
            return
        self.drawn = time.monotonic()
        sys.stderr.write("\r" + self.line(shutil.get_terminal_size().columns - 1) + "\x1b[K")
        sys.stderr.flush()

    def line(self, width: int) -> str:
        """The bar as text: ``adding [########--------]  50%  5,000 of 10,000, 1,250/s``."""
        if self.total is None and not self.done:
            return f"{self.what} ..."[:width]
        rate = self.done / max(1e-9, time.monotonic() - self.start)
        if not self.total:
            return f"{self.what} {self.done:,}, {rate:,.0f}/s"[:width]
        share = min(1.0, self.done / self.total)
        numbers = f"{share:>4.0%}  {self.done:,} of {self.total:,}, {rate:,.0f}/s"
        room = max(0, min(40, width - len(self.what) - len(numbers) - 4))
        full = round(share * room)
        return f"{self.what} [{'#' * full}{'-' * (room - full)}] {numbers}"[:width]
