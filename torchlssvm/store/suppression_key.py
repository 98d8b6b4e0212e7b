"""The key of a suppression list: 32 random bytes that the controller keeps outside every store."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path
from typing import Any

from torchlssvm.store.database import DATABASE_FILE
from torchlssvm.untrusted import read_regular

KEY_VARIABLE = "TORCHLSSVM_SUPPRESSION_KEY"
"""The environment variable with the key, as 64 hex digits or as the path of its file."""

KEY_FORMAT = "torchlssvm-suppression-key-1"
SUPPRESSION_KEY_BYTES = 32
"""Bytes of a key: as many as SHA-256 has, so that the key cannot be guessed."""

KEY_DIGITS = re.compile(f"[0-9a-fA-F]{{{2 * SUPPRESSION_KEY_BYTES}}}")
MAX_SUPPRESSION_KEY_FILE_BYTES = 2**12
"""Bytes of a file with a key; it has 94."""


def new_suppression_key(path: str | os.PathLike[str]) -> Path:
    """Write a new key to a file that only its owner can read; FileExistsError if there is one, ValueError inside a store."""
    refuse_in_store(Path(path))
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # never over a key that is there
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(f"{KEY_FORMAT} {secrets.token_hex(SUPPRESSION_KEY_BYTES)}\n")
        file.flush()
        os.fsync(file.fileno())
    return Path(path)


def suppression_key(given: Any = None) -> bytes | None:
    """A key from 32 bytes, 64 hex digits or a file; without one, from the environment variable; None if that is not set."""
    if given is None:
        given = os.environ.get(KEY_VARIABLE) or None
        if given is None:
            return None
    if isinstance(given, bytes) and len(given) == SUPPRESSION_KEY_BYTES:
        return given
    if isinstance(given, str) and KEY_DIGITS.fullmatch(given):
        return bytes.fromhex(given)
    if not isinstance(given, str | os.PathLike):
        raise ValueError(
            f"a suppression key is {SUPPRESSION_KEY_BYTES} bytes, {2 * SUPPRESSION_KEY_BYTES} hex digits or a file with them"
        )
    refuse_in_store(Path(given))
    try:
        name, _, digits = read_regular(given, MAX_SUPPRESSION_KEY_FILE_BYTES).decode("ascii").strip().partition(" ")
    except UnicodeDecodeError:
        name = digits = ""
    if name != KEY_FORMAT or not KEY_DIGITS.fullmatch(digits):
        raise ValueError(f"{os.fspath(given)} holds no suppression key: torchlssvm keygen --suppression FILE makes one")
    return bytes.fromhex(digits)


def refuse_in_store(path: Path) -> None:
    """ValueError when a key, a list or a receipt would be inside the folder of a store: a copy of it would have them too."""
    place = path.resolve()
    for folder in place.parents:
        if os.path.lexists(folder / DATABASE_FILE):
            raise ValueError(
                f"{path} is inside the store {folder}: keys, suppression lists and receipts are kept elsewhere"
            )
