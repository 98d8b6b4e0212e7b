"""Exit codes, and output to the terminal: text or JSON on standard output, messages on standard error."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from torchlssvm.wording import printable

OK, FAILED, USAGE, NOT_VERIFIED, BUSY, OUTPUT_LOST = range(6)
INTERRUPTED = 130  # 128 plus the number of the signal, 2
"""Exit codes of the command."""

EXTRA_OF_PACKAGE = {
    "cryptography": "audit", "rfc3161_client": "audit", "jinja2": "report", "matplotlib": "report",
    "torchvision": "vision", "PIL": "vision", "lightning": "lightning", "torchmetrics": "lightning",
    "jsonargparse": "lightning", "sklearn": "sklearn",
}  # fmt: skip
"""Packages that a command may miss, and the extra that installs each."""


class OutputError(Exception):
    """Standard output is closed, full or broken."""


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line; for an OSError, the file and the reason."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return printable(f"{error.filename}: {error.strerror}")
    return printable(" ".join(str(error).split())) or type(error).__name__


def emit(options: argparse.Namespace, data: dict[str, Any], text: str | Sequence[str]) -> int:
    """Print a command's result as one JSON object or as text, and return OK.

    The OutputError says whether the change was made.
    Give text that contains names from files as a list of its lines: a line break in a name is then escaped too.
    """
    lines = text if isinstance(text, str) else "\n".join(map(printable, text))
    try:
        write(json.dumps(data, indent=2) if options.json else lines)
    except OutputError as error:
        raise OutputError(
            f"{options.changes or 'nothing was changed'}, but the output could not be written: {error}"
        ) from None
    return OK


def write(text: str, end: str = "\n") -> None:
    """Write to standard output and flush; OutputError when it is closed or full.

    Control characters are escaped, except for line breaks and tabs: text from files cannot steer the terminal.
    """
    text = printable(text, keep="\n\t")
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
    """Write a line to standard error, if it is open."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(printable(text, keep="\n\t"), file=sys.stderr, flush=True)


def table(rows: dict[str, Any]) -> list[str]:
    """Format names and values, one pair in a line."""
    width = max(map(len, rows), default=0)
    return [f"{name:<{width}}  {value}" for name, value in rows.items()]


@contextlib.contextmanager
def progress(options: argparse.Namespace, doing: str, total: int | None = None) -> Iterator[Callable[[int], Any]]:
    """Show a bar on stderr while the work goes on: on a terminal, without --json, and with tqdm installed.

    Yields a function that counts samples as done. ``total``: their number, if it is known.
    """
    shown = not options.json and sys.stderr is not None and sys.stderr.isatty() and find_spec("tqdm") is not None
    if not shown:
        yield lambda _: None
        return
    from tqdm import tqdm

    layout = "{desc} ... {elapsed}"
    if total is not None:
        layout = "{desc} {percentage:3.0f}% |{bar}| {n_fmt} of {total_fmt}, {remaining} left"
    width, height = shutil.get_terminal_size()  # tqdm shows nothing where a terminal does not tell its size
    size = {"ncols": width - 1, "nrows": height}
    with tqdm(desc=doing, total=total, leave=False, file=sys.stderr, bar_format=layout, **size) as bar:
        yield bar.update
