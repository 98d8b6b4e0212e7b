"""Arguments of the command line: the parser, the options that all commands have, and the types of values."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


SENTENCE_END = re.compile(r"\. (?=[A-Z])")
"""End of a sentence of a description; not that of "e.g. "."""


class UsageError(Exception):
    """A wrong command line; ``parser`` is that of the command, where it is known."""

    def __init__(self, message: str, parser: argparse.ArgumentParser | None = None):
        super().__init__(message)
        self.parser = parser


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError and refuses an option given twice, unless its values are collected."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        for action in (None, "store"):
            self.register("action", action, StoreOnce)

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError that names this parser."""
        raise UsageError(message, self)


class StoreOnce(argparse.Action):
    """Store the value of an option; given twice it is an error, since one of the values would be lost."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        """Store the value, or raise ArgumentError when the option was given before."""
        given = vars(namespace).setdefault("given", set())
        if option_string is not None and self.dest in given:
            raise argparse.ArgumentError(self, "given twice; it takes one value")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
    store: bool = True,
    changes: str = "",
) -> argparse.ArgumentParser:
    """Add a command with the options that all have. ``changes``: the effect to report should its output be lost."""
    short = SENTENCE_END.split(text, 1)[0].rstrip(".")
    parser = commands.add_parser(name, help=short[0].lower() + short[1:], description=text)
    if store:
        parser.add_argument("store", type=Path, metavar="STORE", help="folder of the store")
        parser.add_argument(
            "--timeout",
            type=seconds,
            default=30.0,
            metavar="S",
            help="seconds to wait for another writer (default: 30)",
        )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run, parser=parser, changes=changes)
    return parser


def seconds(text: str) -> float:
    """A time that is not negative."""
    value = float(text)
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and a million seconds")
    return value


def regularization(text: str) -> float | str:
    """A number, or gcv."""
    return text if text == "gcv" else float(text)


def count(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value
