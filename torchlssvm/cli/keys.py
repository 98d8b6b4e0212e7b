"""Keys: ``keygen``, and the options of commands that sign or check signatures."""

from __future__ import annotations

import argparse
import getpass
import sys
from pathlib import Path
from typing import Any

from torchlssvm.cli.arguments import UsageError, command, option
from torchlssvm.cli.console import emit

MAX_PASSPHRASE_BYTES = 4096
"""Largest size of a passphrase file."""

PASSPHRASE_FILE = option(
    "--passphrase-file",
    type=Path,
    metavar="FILE",
    help="file with the passphrase of the key on its first line (default: asked for on the terminal)",
)
TRUSTED_KEYS = option(
    "--public-key",
    action="append",
    metavar="[NAME=]PUB",
    help="public key that you trust and the name of its holder; may be repeated, one of the keys must have signed",
)


def SIGNING_KEY(parser: argparse.ArgumentParser, required: bool = False) -> None:
    """Add ``--key`` and ``--passphrase-file``."""
    parser.add_argument(
        "--key",
        type=Path,
        required=required,
        metavar="KEY.pem",
        help="private key that signs the certificate (see keygen)",
    )
    PASSPHRASE_FILE(parser)


def signing_key(options: argparse.Namespace) -> Any:
    """Load the private key of ``--key``, or return None. Asks for the passphrase if it is needed and not given in a file."""
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
    """Return the first line of a file."""
    from torchlssvm.untrusted import read_regular

    line = read_regular(path, MAX_PASSPHRASE_BYTES).partition(b"\n")[0].removesuffix(b"\r")
    if not line:
        raise ValueError(f"{path}: the first line is empty; it should be the passphrase")
    return line


def ask(prompt: str) -> str:
    """Ask for a passphrase on the terminal. Raises ValueError without a terminal."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise ValueError("the key needs a passphrase, and there is no terminal to ask for it: give --passphrase-file")
    return getpass.getpass(prompt, stream=sys.stderr)


def trusted_keys(options: argparse.Namespace) -> Any:
    """Load the keys of ``--public-key`` by the names of their holders, or return None without the option."""
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
    "Create a key pair that signs certificates (Ed25519), or the key of a suppression list.",
    option("out", type=Path, metavar="OUT", help="private key to write (PEM); the public key goes to OUT.pub"),
    option("--passphrase", action="store_true", help="ask for a passphrase that protects the private key"),
    PASSPHRASE_FILE,
    option("--suppression", action="store_true", help="create the secret key of a suppression list, not a key pair"),
    store=False,
    changes="the keys were written",
)
def keygen(options: argparse.Namespace) -> int:
    """Write a key pair, or one secret key."""
    from torchlssvm.files import refuse_in_store

    refuse_in_store(options.out)
    if options.suppression:
        from torchlssvm.store import new_suppression_key

        new_suppression_key(options.out)
        text = (
            f"{options.out}: key of a suppression list. Keep it secret: anyone who has it can test who was erased. Keep a copy "
            "in a safe place: without it, nothing can be added to a store that uses the list."
        )
        return emit(options, {"suppression_key": str(options.out)}, text)
    from torchlssvm import audit

    public = audit.new_key(options.out, new_passphrase(options))
    said = {
        "private_key": str(options.out),
        "public_key": str(public),
        "key_id": audit.key_id(audit.public_key(public)),
    }
    text = f"{options.out}: private key, keep it secret\n{public}: public key, give it to those who verify"
    return emit(options, said, text)


def new_passphrase(options: argparse.Namespace) -> str | bytes | None:
    """Return the passphrase of a new key, or None."""
    if options.passphrase_file is not None:
        return passphrase_from(options.passphrase_file)
    if not options.passphrase:
        return None
    first = ask("passphrase: ")
    if ask("repeat passphrase: ") != first:
        raise ValueError("the two passphrases differ; no key was created")
    return first
