"""``torchlssvm keygen``: make a key to sign certificates."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from torchlssvm.cli.arguments import add_command
from torchlssvm.cli.console import OK, emit
from torchlssvm.cli.store_folder import refuse_inside_store

if TYPE_CHECKING:
    from torchlssvm.cli.arguments import Commands


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    keys = add_command(
        commands,
        "keygen",
        run_keygen,
        "Make an Ed25519 key to sign certificates with.",
        store=False,
        changes="the keys were written",
    )
    keys.add_argument("out", type=Path, metavar="OUT", help="private key (PEM); the public one is written to OUT.pub")


def run_keygen(options: argparse.Namespace) -> int:
    """Write a pair of keys."""
    from torchlssvm import audit

    refuse_inside_store(options.out)
    public = audit.new_key(options.out)
    emit(
        options,
        {"private_key": str(options.out), "public_key": str(public)},
        f"{options.out}: the private key, keep it to yourself\n{public}: the public key, for those who verify",
    )
    return OK
