"""``torchlssvm keygen``: make a key to sign certificates, or the key of a suppression list."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from torchlssvm.cli.arguments import add_command
from torchlssvm.cli.console import OK, emit
from torchlssvm.cli.key_arguments import add_passphrase_file, ask, passphrase_from
from torchlssvm.cli.store_folder import refuse_inside_store

if TYPE_CHECKING:
    from torchlssvm.cli.arguments import Commands


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    keys = add_command(
        commands,
        "keygen",
        run_keygen,
        "Make an Ed25519 key to sign certificates with, or the key of a suppression list.",
        store=False,
        changes="the keys were written",
    )
    keys.add_argument("--passphrase", action="store_true", help="protect the private key, asking for a passphrase")
    add_passphrase_file(keys)
    keys.add_argument("out", type=Path, metavar="OUT", help="private key (PEM); the public one is written to OUT.pub")
    keys.add_argument(
        "--suppression", action="store_true", help="make the key of a suppression list, a secret without a pair"
    )


def run_keygen(options: argparse.Namespace) -> int:
    """Write a pair of keys."""
    from torchlssvm import audit

    refuse_inside_store(options.out)
    if options.suppression:
        return make_suppression_key(options)
    public = audit.new_key(options.out, new_passphrase(options))
    emit(
        options,
        {"private_key": str(options.out), "public_key": str(public), "key_id": audit.key_id(audit.public_key(public))},
        f"{options.out}: the private key, keep it to yourself\n{public}: the public key, for those who verify",
    )
    return OK


def new_passphrase(options: argparse.Namespace) -> str | bytes | None:
    """The passphrase to protect a new key with; None for none."""
    if options.passphrase_file is not None:
        return passphrase_from(options.passphrase_file)
    if not options.passphrase:
        return None
    first = ask("passphrase: ")
    if ask("the same again: ") != first:
        raise ValueError("the two passphrases are not the same: no key was made")
    return first


def make_suppression_key(options: argparse.Namespace) -> int:
    """Write the key of a suppression list."""
    from torchlssvm.store import new_suppression_key

    new_suppression_key(options.out)
    text = (
        f"{options.out}: the key of a suppression list. Keep it secret: with it, and only with it, anybody can test who was "
        "erased. Keep a copy in a safe place: without it nothing can be added to a store that uses the list."
    )
    emit(options, {"suppression_key": str(options.out)}, text)
    return OK
