"""The ``torchlssvm`` command.

Exit codes: 0 when it worked, 1 when it did not (one line on stderr says why, or a table shows which check failed),
2 when the command line is wrong. One function registers each sub-command, which imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchlssvm import __version__
from torchlssvm.errors import TorchLSSVMError

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a wrong command line leaves by SystemExit(2), as argparse does."""
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.run is None:
        parser.print_help()
        return 0
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except (TorchLSSVMError, ValueError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1


def build_parser() -> argparse.ArgumentParser:
    """The parser with every command of :data:`COMMANDS`."""
    parser = argparse.ArgumentParser(prog="torchlssvm", description="Classifier heads that learn and unlearn exactly.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for register in COMMANDS:
        register(commands)
    return parser


def add_demo(commands: Commands) -> None:
    """``torchlssvm demo``."""
    text = "Learn digits with wrong labels, find and correct them, erase a user, and verify that nothing is left."
    parser = commands.add_parser("demo", help="learn, correct, erase and verify, in seconds", description=text)
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="folder of the picture (default: .)")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of everything random (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.set_defaults(run=run_demo)


def run_demo(options: argparse.Namespace) -> int:
    """The demo; 1 if one of its checks fails."""
    from torchlssvm import demo

    return demo.run(options.out, options.seed, options.json)


def seed(text: str) -> int:
    """A seed that every random generator takes."""
    value = int(text)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 2^63 - 1")
    return value


COMMANDS: tuple[Callable[[Commands], None], ...] = (add_demo,)
