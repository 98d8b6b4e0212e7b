"""What the commands share: exit codes, output, a progress bar, options, and opening a store."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from typing_extensions import Self

    from torchlssvm.store import SampleStore

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

OK, FAILED, USAGE, NOT_VERIFIED, BUSY, UNSAID, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130
EXTRAS = {
    "cryptography": "audit", "torchvision": "vision", "PIL": "vision", "lightning": "lightning", "torchmetrics": "lightning",
    "jsonargparse": "lightning", "sklearn": "sklearn",
}  # fmt: skip
"""Packages that a command may miss, and the extra that installs each."""


class UsageError(Exception):
    """A wrong command line; ``parser``: of the command, where it is known."""

    def __init__(self, message: str, parser: argparse.ArgumentParser | None = None):
        super().__init__(message)
        self.parser = parser


class OutputError(Exception):
    """What a command has to say cannot be written to standard output."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are UsageErrors, and that takes an option twice only if it means both."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        for action in (None, "store"):
            self.register("action", action, StoreOnce)

    def error(self, message: str) -> NoReturn:
        """Raise it."""
        raise UsageError(message, self)


class StoreOnce(argparse.Action):
    """Keep the value of an option; given twice it is an error, since one of the values would be lost without a word."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        """Keep it."""
        given = vars(namespace).setdefault("given", set())
        if option_string is not None and self.dest in given:
            raise argparse.ArgumentError(self, "given twice; it takes one value")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


def one_line(error: BaseException) -> str:
    """The message of an error on one line; for one of the system, the file and the reason."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


# -- options -----------------------------------------------------------------------------------------------------------


def command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
    store: bool = True,
    changes: str = "",
) -> argparse.ArgumentParser:
    """A new command with the options that all have. ``changes``: what it has done once it worked, if it changes anything."""
    short = text.partition(". ")[0].rstrip(".")
    parser = commands.add_parser(name, help=short[0].lower() + short[1:], description=text)
    if store:
        parser.add_argument("store", type=Path, metavar="STORE", help="folder of the store")
        parser.add_argument(
            "--timeout", type=seconds, default=30.0, metavar="S", help="wait so long for another writer (default: 30)"
        )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run, parser=parser, changes=changes)
    return parser


def add_whose(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """``--subject`` or ``--id``."""
    whose = parser.add_mutually_exclusive_group(required=required)
    whose.add_argument("--subject", action="append", metavar="S", help="all samples of this subject; may be repeated")
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


def refuse_inside_store(out: Path, store: Path | None = None) -> None:
    """ValueError when a file would be written into the folder of a store, this one or any other."""
    from torchlssvm.store.database import FILE

    place = out.resolve()
    for folder in (place, *place.parents):
        if (folder / FILE).exists() or (store is not None and folder == store.resolve()):
            raise ValueError(
                f"{out} is inside the store {folder}: files of others do not belong there, choose another place"
            )


# -- output ------------------------------------------------------------------------------------------------------------


def emit(options: argparse.Namespace, data: dict[str, Any], text: str) -> None:
    """Print what a command found: one JSON object, or text. OutputError says whether the change was made all the same."""
    try:
        write(json.dumps(data, indent=2) if options.json else text)
    except OutputError as error:
        raise OutputError(
            f"{options.changes or 'nothing was changed'}, but the output could not be written: {error}"
        ) from None


def write(text: str, end: str = "\n") -> None:
    """Write to standard output, now; OutputError when it is closed or full."""
    if sys.stdout is None:
        raise OutputError("standard output is closed")
    try:
        print(text, end=end, flush=True)
    except UnicodeEncodeError:  # a terminal that has no such letters
        print(text.encode("ascii", "backslashreplace").decode(), end=end, flush=True)
    except (OSError, ValueError) as error:  # ValueError: closed from within
        with contextlib.suppress(OSError, ValueError):  # what is still in the buffer goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OutputError(getattr(error, "strerror", None) or str(error)) from None


def warn(text: str) -> None:
    """Write a line to standard error; where that is closed, nobody can be told."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


def table(rows: dict[str, Any]) -> str:
    """Names and values, one pair in a line."""
    width = max(map(len, rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


class Progress:
    """A bar on stderr while a terminal is looking, ten times a second at most; elsewhere, and with --json, nothing.

    ``with Progress(options, "adding", total) as bar: bar.advance(64)``; total is None when it is not known. A thread draws it
    again twice a second, so that the clock goes on while one long step is under way.
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
        """Draw until it is over."""
        while not self.over.wait(0.5):
            self.draw()

    def advance(self, steps: int) -> None:
        """So many more are done."""
        self.done += steps
        if self.shown and time.monotonic() - self.drawn > 0.1:
            self.draw()

    def draw(self) -> None:
        """Write the line again."""
        self.drawn = time.monotonic()
        self.put("\r" + self.line(shutil.get_terminal_size().columns - 1) + "\x1b[K")

    def put(self, text: str) -> None:
        """Write to the terminal; one that is gone is no reason to stop."""
        with self.lock, contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()

    def line(self, width: int) -> str:
        """The bar as text: ``adding [########--------]  50%  5,000 of 10,000, 1,250/s``."""
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
