"""Keys: ``keygen`` makes them; the options of commands that sign, and of those that trust a signer."""

from __future__ import annotations

import argparse
import getpass
import sys
from pathlib import Path
from typing import Any

from torchlssvm.cli.arguments import UsageError, command, option
from torchlssvm.cli.console import emit
from torchlssvm.cli.store_access import refuse_inside_store

MAX_PASSPHRASE_BYTES = 4096
"""Bytes of a file with a passphrase."""

PASSPHRASE_FILE = option(
    "--passphrase-file",
    type=Path,
    metavar="FILE",
    help="its first line is the passphrase of the key (default: asked for on the terminal)",
)
TRUSTED_KEYS = option(
    "--public-key",
    action="append",
    metavar="[NAME=]PUB",
    help="a key that you trust, from its holder; may be repeated, one of them must have signed. NAME: the holder's",
)


def SIGNING_KEY(parser: argparse.ArgumentParser, required: bool = False) -> None:
    """Add ``--key`` and ``--passphrase-file``."""
    parser.add_argument(
        "--key", type=Path, required=required, metavar="KEY.pem", help="sign the certificate (see keygen)"
    )
    PASSPHRASE_FILE(parser)


def signing_key(options: argparse.Namespace) -> Any:
    """The private key of ``--key``; None without it. Asks for the passphrase of a protected key if no file has it."""
    from torchlssvm import audit

    if options.key is None:
        if options.passphrase_file is not None:
            raise UsageError("--passphrase-file needs --key")
        return None
    if options.passphrase_file is not None:
        return audit.private_key(options.key, passphrase_from(options.passphrase_file))
    try:
        return audit.private_key(options.key)
    except audit.PassphraseError:
        return audit.private_key(options.key, ask(f"passphrase of {options.key}: "))


def passphrase_from(path: Path) -> bytes:
    """The first line of a file, without its end."""
    from torchlssvm.untrusted import read_regular

    line = read_regular(path, MAX_PASSPHRASE_BYTES).partition(b"\n")[0].removesuffix(b"\r")
    if not line:
        raise ValueError(f"{path}: the first line, which should be the passphrase, is empty")
    return line


def ask(prompt: str) -> str:
    """Ask for a passphrase on the terminal; ValueError when there is none."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise ValueError("a passphrase is asked for, and there is no terminal: give --passphrase-file")
    return getpass.getpass(prompt, stream=sys.stderr)


def trusted_keys(options: argparse.Namespace) -> Any:
    """The keys of ``--public-key`` by the names of their holders; None without any."""
    from torchlssvm import audit

    if not options.public_key:
        return None
    found: dict[str, list[Any]] = {}
    for text in options.public_key:
        name, mark, path = text.partition("=")
        if not mark or Path(text).exists():
            name, path = "", text
        found.setdefault(name, []).append(audit.public_key(Path(path)))
    return found


@command(
    "keygen",
    "Make a key to sign certificates (Ed25519), or that of a suppression list.",
    option("out", type=Path, metavar="OUT", help="private key (PEM); the public one is written to OUT.pub"),
    option("--passphrase", action="store_true", help="protect the private key, asking for a passphrase"),
    PASSPHRASE_FILE,
    option("--suppression", action="store_true", help="make the key of a suppression list, a secret without a pair"),
    store=False,
    changes="the keys were written",
)
def keygen(options: argparse.Namespace) -> int:
    """Write a pair of keys, or one that is shared with nobody."""
    refuse_inside_store(options.out)
    if options.suppression:
        from torchlssvm.store import new_suppression_key

        new_suppression_key(options.out)
        text = (
            f"{options.out}: the key of a suppression list. Keep it secret: with it, and only with it, anybody can test who "
            "was erased. Keep a copy in a safe place: without it nothing can be added to a store that uses the list."
        )
        return emit(options, {"suppression_key": str(options.out)}, text)
    from torchlssvm import audit

    public = audit.new_key(options.out, new_passphrase(options))
    said = {
        "private_key": str(options.out),
        "public_key": str(public),
        "key_id": audit.key_id(audit.public_key(public)),
    }
    text = f"{options.out}: the private key, keep it to yourself\n{public}: the public key, for those who verify"
    return emit(options, said, text)


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
