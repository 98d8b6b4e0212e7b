"""JSON in one canonical form for hashes and signatures, and a reader with limits for untrusted JSON."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["canonical", "loads"]

MAX_JSON_DEPTH = 32
"""Levels of nesting in JSON: a certificate has 4, a record of a store 3."""

FREE_JSON_VALUES, BYTES_PER_JSON_VALUE = 1_000_000, 16
"""Values that JSON may always hold, and bytes for each further one: a short value takes sixty bytes of memory."""


def canonical(data: Any) -> bytes:
    """ASCII JSON with sorted keys, separators "," and ":", no other white space and no NaN."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def loads(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError for NaN, infinities, a duplicate key or deep nesting."""
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
