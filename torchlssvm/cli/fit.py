"""``fit``, ``validate``, ``test`` and ``predict``: handed on to Lightning, which reads the rest of the line itself."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchlssvm.cli.console import FAILED, OK

if TYPE_CHECKING:
    from torchlssvm.cli.arguments import Commands

LIGHTNING_STAGES = {
    "fit": "train a head with Lightning: --config configs/base.yaml",
    "validate": "evaluate it on the validation data",
    "test": "evaluate it on the test data",
    "predict": "compute its scores",
}


def register(commands: Commands) -> None:
    """Name the commands in the help."""
    for name, text in LIGHTNING_STAGES.items():
        commands.add_parser(name, help=text, add_help=False)


def lightning_options(given: Sequence[str]) -> argparse.Namespace | None:
    """Return the options that run Lightning on this command line; None for any other command."""
    if not given or given[0] not in LIGHTNING_STAGES:
        return None

    def run(_: argparse.Namespace) -> int:
        from torchlssvm.lightning.cli import run as run_stage

        return OK if run_stage(given) else FAILED

    return argparse.Namespace(command=given[0], run=run, json=False, parser=None)
