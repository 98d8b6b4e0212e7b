"""The parser, the ``@command`` decorator, and the options and types that several commands share.

A command is a function of the parsed options that returns its exit code::

    @command("compact", "Destroy the bytes of erased samples.", changes="the store was compacted")
    def compact(options): ...
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

Run: TypeAlias = Callable[[argparse.Namespace], int]
Option: TypeAlias = Callable[[Any], object]
"""Adds an option, or several, to a parser or a group of a parser."""


class UsageError(Exception):
    """A wrong command line. ``parser`` is the parser of the command, if it is known."""

    def __init__(self, message: str, parser: argparse.ArgumentParser | None = None):
        super().__init__(message)
        self.parser = parser


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError. Unless an option collects values, giving it twice is an error."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        for action in (None, "store"):
            self.register("action", action, StoreOnce)

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError that names this parser."""
        raise UsageError(message, self)


class StoreOnce(argparse.Action):
    """Store the value of an option. A second value is an error, because one of the two values would be lost."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        """Store the value, or raise ArgumentError when the option was given before."""
        given = vars(namespace).setdefault("given", set())
        if option_string is not None and self.dest in given:
            raise argparse.ArgumentError(self, "given twice, but it takes one value")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


# -- commands ----------------------------------------------------------------------------------------------------------


COMMANDS: list[tuple[str, Run, str, tuple[Option, ...], bool, str]] = []
"""All declared commands: name, function, help, options, whether the first argument is a store, and the effect."""

NOUNS = ("store", "samples", "requests", "erasure", "suppression", "certificate", "keys", "export", "report")
"""Modules that declare commands, in the order of the help."""

GROUPS = {
    "request": "Manage requests for erasure: open, list, show, close",
    "suppression": "Manage the suppression list, which keeps erased people out: use, show, apply",
    "certificate": "Manage certificates of erasure: issue, sign, opening, stamp, show",
}
"""Commands that consist of other commands."""


def command(name: str, text: str, *options: Option, store: bool = True, changes: str = "") -> Callable[[Run], Run]:
    """Declare a command.

    Args:
        name: one or two words, such as "remove" or "request open".
        text: the help. Its first sentence is the summary in the list of commands.
        options: functions that add options to the parser.
        store: whether the first argument is a store.
        changes: what the command has changed, for the error message if its output cannot be written.
    """

    def declare(run: Run) -> Run:
        COMMANDS.append((name, run, text, options, store, changes))
        return run

    return declare


def add_commands(parser: argparse.ArgumentParser, others: dict[str, str]) -> None:
    """Add all declared commands and list them in the help. ``others`` are commands that are only listed, with a summary."""
    commands = parser.add_subparsers(prog=parser.prog, metavar="COMMAND", dest="command", help=argparse.SUPPRESS)
    texts: dict[str, str] = {}
    groups: dict[str, Any] = {}
    by_noun = sorted(COMMANDS, key=lambda row: NOUNS.index(row[1].__module__.rpartition(".")[2]))
    for name, run, text, options, store, changes in by_noun:
        group, _, verb = name.rpartition(" ")
        if group and group not in groups:
            made = commands.add_parser(group, description=GROUPS[group])
            groups[group] = made.add_subparsers(title="verbs", metavar="VERB", dest="verb", required=True)
        first = text.partition(". ")[0].rstrip(".")
        texts[group or verb] = GROUPS.get(group, first)
        added = (groups[group] if group else commands).add_parser(verb, help=first, description=text)
        if store:
            added.add_argument("store", type=Path, metavar="STORE", help="folder of the store")
        for add_option in options:
            add_option(added)
        if store:
            TIMEOUT(added)
        added.add_argument("--json", action="store_true", help="print one JSON object")
        added.set_defaults(run=run, parser=added, changes=changes)
    parser.description = f"{parser.description}\n\n" + "\n".join(f"  {n:<12} {t}" for n, t in (texts | others).items())


def option(*names: str, **settings: Any) -> Option:
    """Declare an option, with the arguments of ``add_argument``."""
    return lambda parser: parser.add_argument(*names, **settings)


def one_of(*options: Option, required: bool = False) -> Option:
    """Declare options that exclude each other."""

    def add(parser: Any) -> None:
        group = parser.add_mutually_exclusive_group(required=required)
        for add_option in options:
            add_option(group)

    return add


# -- types -------------------------------------------------------------------------------------------------------------


def number(kind: type[int] | type[float], least: int, most: int) -> Callable[[str], Any]:
    """Return a parser of numbers in a range."""

    def parse(text: str) -> float:
        value = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not between {least} and {most}")
        return value

    parse.__name__ = kind.__name__  # argparse: "invalid int value"
    return parse


count = number(int, 1, 2**63 - 1)


def rho(text: str) -> float | str:
    """Parse a number, or the name of a method that chooses it."""
    return text if text in ("gcv", "kfold", "loo") else float(text)


def grid(text: str) -> str:
    """Check that the text is auto, none or LIMIT[:BITS]. ``as_grid`` converts it later."""
    if text not in ("auto", "none"):
        limit, *bits = text.split(":")
        _ = float(limit), [int(b) for b in bits]  # argparse reports a ValueError
    return text


def class_weight(text: str) -> str | list[float]:
    """Parse the name of a rule, or one number for each class."""
    return text if text in ("balanced", "complement") else [float(part) for part in text.split(",")]


def class_names(text: str) -> int | list[str]:
    """Parse a number of classes, their names, or @FILE with one name on each line."""
    if text.strip().isdecimal():
        return int(text)
    if text.startswith("@"):
        try:
            names = Path(text[1:]).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise argparse.ArgumentTypeError(f"cannot read the names of the classes: {error}") from None
    else:
        names = text.split(",")
    names = [name.strip() for name in names]
    if len(names) < 2 or not all(names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r}: give a number, or two or more different names, separated by commas or one per line in @FILE"
        )
    return names


def more_classes(text: str) -> int | list[str]:
    """A number of classes, or the names of one or more."""
    return count(text) if text.strip().isdecimal() else [name.strip() for name in text.split(",")]


# -- options of several commands ---------------------------------------------------------------------------------------

TIMEOUT = option(
    "--timeout",
    type=number(float, 0, 1_000_000),
    default=30.0,
    metavar="S",
    help="seconds to wait for another writer (default: 30)",
)
SUBJECT = option("--subject", action="append", metavar="S", help="all samples of this subject; may be repeated")
ID = option("--id", nargs="+", action="extend", metavar="I", help="samples with these ids")
EVENT = option("--event", metavar="E", help="id of the event; an id is applied only once (default: a random id)")
REQUEST = option(
    "--request", metavar="R", help="id of the request to answer; without --subject and --id, all samples that it names"
)
SUPPRESSION_KEY = option(
    "--suppression-key",
    type=Path,
    metavar="FILE",
    help="key of the suppression list (default: the file named by TORCHLSSVM_SUPPRESSION_KEY)",
)
BY_POSITION = option("--by-position", action="store_true", help="match files without ids to the samples by position")
FORCE = option("--force", action="store_true", help="overwrite an existing file")
CLASS_WEIGHT = option(
    "--class-weight", type=class_weight, metavar="W", help="balanced, complement, or one number per class: 1,2.5"
)
