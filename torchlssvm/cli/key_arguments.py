"""Keys from the command line: one that signs, with its passphrase, and those that a verifier trusts."""

from __future__ import annotations

import argparse
import getpass
import sys
from pathlib import Path
from typing import Any

from torchlssvm.cli.arguments import UsageError

MAX_PASSPHRASE_BYTES = 4096
"""Bytes of a file with a passphrase."""


def add_signing_key(parser: argparse.ArgumentParser, required: bool = False) -> None:
    """Add ``--key`` and ``--passphrase-file``."""
    parser.add_argument(
        "--key", type=Path, required=required, metavar="KEY.pem", help="sign the certificate (see keygen)"
    )
    add_passphrase_file(parser)


def add_passphrase_file(parser: argparse.ArgumentParser) -> None:
    """Add ``--passphrase-file``."""
    parser.add_argument(
        "--passphrase-file",
        type=Path,
        metavar="FILE",
        help="its first line is the passphrase of the key (default: asked for on the terminal)",
    )


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


def add_trusted_keys(parser: argparse.ArgumentParser) -> None:
    """Add ``--public-key``, which may be repeated."""
    parser.add_argument(
        "--public-key",
        action="append",
        metavar="[NAME=]PUB",
        help="a key that you trust, from its holder; may be repeated, one of them must have signed. NAME: the holder's",
    )


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
