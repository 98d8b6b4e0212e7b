"""Exit codes and output. Results go to standard output as text or JSON, and messages to standard error."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torchlssvm.progress_bar import progress_bar
from torchlssvm.wording import printable

OK, FAILED, USAGE, NOT_VERIFIED, BUSY, OUTPUT_LOST = range(6)
INTERRUPTED = 130  # 128 plus the number of the signal, 2
"""Exit codes."""

EXTRA_OF_PACKAGE = {
    "cryptography": "audit", "rfc3161_client": "audit", "jinja2": "report", "matplotlib": "report",
    "pyarrow": "parquet", "torchvision": "vision", "PIL": "vision", "lightning": "lightning", "torchmetrics": "lightning",
    "jsonargparse": "lightning", "sklearn": "sklearn",
}  # fmt: skip
"""Optional packages of commands, and the extra that installs each."""


class OutputError(Exception):
    """Standard output is closed or full."""


class ReaderLeftError(OutputError):
    """The program that read the output has ended, as in ``torchlssvm history STORE | head``."""


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line, shortened if a crafted file makes it long. An OSError names its file."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{error.filename}: {error.strerror}"
    text = printable(text) or type(error).__name__
    return text if len(text) <= 1500 else f"{text[:1000]} [...] {text[-400:]}"


def emit(options: argparse.Namespace, data: dict[str, Any], text: str | Sequence[str]) -> int:
    """Print the result of a command, as one JSON object or as text, and return OK.

    If printing fails, the OutputError says whether the change was made. If the reader of the output has ended and the command
    changes nothing, there is no error. Pass text that contains names from files as a list of lines, so that line breaks in the
    names are escaped too.
    """
    lines = text if isinstance(text, str) else "\n".join(map(printable, text))
    try:
        write(json.dumps(data, indent=2) if options.json else lines)
    except OutputError as error:
        if isinstance(error, ReaderLeftError) and not options.changes:
            return OK
        raise OutputError(
            f"{options.changes or 'nothing was changed'}, but the output could not be written: {error}"
        ) from None
    return OK


def write(text: str, end: str = "\n") -> None:
    """Write to standard output and flush it. Raises OutputError if it is closed or full.

    Control characters other than line breaks and tabs are escaped, so text from files cannot control the terminal.
    """
    text = printable(text, keep="\n\t")
    if sys.stdout is None:
        raise OutputError("standard output is closed")
    try:
        print(text, end=end, flush=True)
    except UnicodeEncodeError:  # a terminal without these letters
        print(text.encode("ascii", "backslashreplace").decode(), end=end, flush=True)
    except (OSError, ValueError) as error:  # ValueError: closed from within
        with contextlib.suppress(OSError, ValueError):  # drop the rest of the buffer
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        kind = ReaderLeftError if isinstance(error, BrokenPipeError) else OutputError
        raise kind(getattr(error, "strerror", None) or str(error)) from None


def warn(text: str) -> None:
    """Write a line to standard error, if it is open."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(printable(text, keep="\n\t"), file=sys.stderr, flush=True)


def table(rows: dict[str, Any]) -> list[str]:
    """Format names and values, one pair per line."""
    width = max(map(len, rows), default=0)
    return [f"{name:<{width}}  {value}" for name, value in rows.items()]


@contextlib.contextmanager
def progress(options: argparse.Namespace, doing: str, total: int | None = None) -> Iterator[Callable[[int], Any]]:
    """Show a progress bar unless --json is given. Yields a function that counts samples. ``total``: their number, if known."""
    if options.json:
        yield lambda _: None
        return
    with progress_bar(doing, total) as count:
        yield count
