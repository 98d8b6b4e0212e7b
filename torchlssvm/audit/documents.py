"""The files of an audit. They are read with a size limit, checked against JSON schemas, and written for their owner only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchlssvm import schema
from torchlssvm.canonical_json import loads
from torchlssvm.errors import VerificationError
from torchlssvm.files import refuse_in_store, replacement
from torchlssvm.untrusted import read_regular

SCHEMAS = Path(__file__).parent / "schemas"
"""Folder of the JSON schemas."""

MAX_BYTES = {"certificate": 2**28, "receipt": 2**31, "opening": 2**16}
"""Largest sizes of files in bytes. A certificate of this size covers three million samples, the limit of a receipt is above the
size of any erasure that SQLite can store, and an opening has about 1/300 of its limit."""

NAMES = {"certificate": "a certificate", "envelope": "a certificate", "receipt": "a receipt", "opening": "an opening"}


def read_document(source: str | bytes | os.PathLike[str], kind: str) -> Any:
    """Parse JSON from bytes or a regular file, with a size limit. Raises VerificationError if the content is not JSON."""
    try:
        return loads(source if isinstance(source, bytes) else read_regular(source, MAX_BYTES[kind]))
    except ValueError as error:
        raise VerificationError(f"not {NAMES[kind]}: {str(error)[:200]}") from None


def check_document(data: Any, kind: str) -> dict[str, Any]:
    """Check the fields against the schema of this kind. Raises VerificationError with the name of the first wrong field."""
    plain = dict(data) if isinstance(data, Mapping) else data
    try:
        schema.check(plain, schema.load(SCHEMAS / f"{kind}.json"))
    except ValueError as error:
        raise VerificationError(f"not {NAMES[kind]}: {error}") from None
    return dict(plain)


def write_private(path: str | os.PathLike[str], data: bytes, overwrite: bool = False) -> None:
    """Write a file that only its owner can read. When this function returns, the whole file is on the disk.

    Raises FileExistsError if the file exists, unless ``overwrite`` is True, and ValueError if the path is inside a store.
    """
    refuse_in_store(path)
    if overwrite:
        with replacement(path, private=True) as new:
            new.write_bytes(data)
        return
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        Path(path).unlink(missing_ok=True)  # no incomplete file stays
        raise
