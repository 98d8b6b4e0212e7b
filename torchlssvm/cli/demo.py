"""``torchlssvm demo``: learn, correct, erase and verify, on data that ships with scikit-learn."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from torchlssvm.cli.arguments import add_command

if TYPE_CHECKING:
    from torchlssvm.cli.arguments import Commands


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    text = "Learn digits with wrong labels, find and correct them, erase a user, and verify that nothing is left."
    demo = add_command(commands, "demo", run_demo, text, store=False)
    demo.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="folder of the picture (default: .)")
    demo.add_argument("--seed", type=parse_seed, default=0, metavar="N", help="seed of all random numbers (default: 0)")


def run_demo(options: argparse.Namespace) -> int:
    """Run the demo; the exit code is 1 if one of its checks fails."""
    from torchlssvm import demo

    return demo.run(options.out, options.seed, options.json)


def parse_seed(text: str) -> int:
    """Parse a seed that every random generator takes."""
    value = int(text)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 2^63 - 1")
    return value
