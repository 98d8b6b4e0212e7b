"""The opening of a certificate's commitment, for verifiers who have a head but not the store.

With it, a holder of the rows that are left can test guesses about samples that were in this state and leave later. Give it to
those only who must check a head without its store, and let them delete it afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torchlssvm import schema
from torchlssvm.audit.envelope import SCHEMAS
from torchlssvm.canonical_json import canonical, loads
from torchlssvm.errors import VerificationError
from torchlssvm.untrusted import read_regular

__all__ = ["Opening"]

OPENING_FORMAT = "torchlssvm-opening-1"
MAX_OPENING_BYTES = 2**16
"""Bytes of a file with an opening: it has 200."""

OPENING_WARNING = (
    "with this file and the samples that are left, guesses about samples that leave later can be tested: give it only to whom "
    "must check the head without the store, and have it deleted afterwards"
)


@dataclass(frozen=True)
class Opening:
    """The key of the commitment to the state at one position; the hash of the journal there says which."""

    chain: str
    key: str
    format: str = OPENING_FORMAT

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a new file that only its owner reads."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(canonical(asdict(self)) + b"\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Opening:
        """Read it from a regular file; VerificationError when it holds none."""
        try:
            return cls.from_dict(loads(read_regular(path, MAX_OPENING_BYTES)))
        except ValueError as error:
            raise VerificationError(f"not an opening: {str(error)[:200]}") from None

    @classmethod
    def from_dict(cls, data: Any) -> Opening:
        """Check the fields; VerificationError names the first that is wrong."""
        try:
            schema.check(dict(data) if isinstance(data, Mapping) else data, schema.load(SCHEMAS / "opening.json"))
        except ValueError as error:
            raise VerificationError(f"not an opening: {error}") from None
        return cls(**data)

    def secret(self) -> bytes:
        """The key as bytes."""
        return bytes.fromhex(self.key)
