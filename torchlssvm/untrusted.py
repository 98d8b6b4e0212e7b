"""Files and texts from elsewhere, read within bounds: regular files of a largest size, JSON with one meaning."""

from __future__ import annotations

import errno
import json
import os
import stat
import zipfile
from typing import Any

__all__ = ["check_regular", "check_unpacked", "loads", "read_regular"]

MAX_JSON_DEPTH = 32
"""Levels of nesting in JSON: a certificate has 4, a record of a store 3."""

FREE_JSON_VALUES, BYTES_PER_JSON_VALUE = 1_000_000, 16
"""Values that JSON may always hold, and bytes for each further one: a short value takes sixty bytes of memory."""


def check_regular(path: str | os.PathLike[str]) -> None:
    """ValueError when there is something at a path that is no regular file: a FIFO or a device could be read for ever."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ValueError(f"{os.fspath(path)} is a link that leads to itself") from None
    if not stat.S_ISREG(mode):
        raise ValueError(f"{os.fspath(path)} is not a regular file")


def read_regular(path: str | os.PathLike[str], most: int) -> bytes:
    """The content of a regular file of at most so many bytes; ValueError for anything else, OSError if it cannot be read."""
    check_regular(path)
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):  # put there since
            raise ValueError(f"{os.fspath(path)} is not a regular file")
        content = file.read(most + 1) if found.st_size <= most else None
    if content is None or len(content) > most:
        raise ValueError(f"{os.fspath(path)} is larger than {most:,} bytes")
    return content


def loads(text: str | bytes) -> Any:
    """JSON without NaN, infinities, a key twice, or deep nesting; ValueError says which."""
    comma: Any = b"," if isinstance(text, bytes) else ","
    if text.count(comma) > FREE_JSON_VALUES + len(text) // BYTES_PER_JSON_VALUE:
        raise ValueError("too many values for its length")
    try:
        value = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_JSON_DEPTH} levels") from None
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        inner = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list))
        level = [v for values in inner for v in values if isinstance(v, dict | list)]
    if level:
        raise ValueError(f"nested deeper than {MAX_JSON_DEPTH} levels")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:40]!r} stands there twice")
    return out


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def check_unpacked(file: Any) -> None:
    """ValueError when a file of torch's holds something packed, which may be a thousand times larger once it is read."""
    if not zipfile.is_zipfile(file):
        return
    with zipfile.ZipFile(file) as archive:
        packed = next((i.filename for i in archive.infolist() if i.compress_type != zipfile.ZIP_STORED), None)
    if packed is not None:
        raise ValueError(f"it is packed ({packed[:80]!r}); torch.save packs nothing")
