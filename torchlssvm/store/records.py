"""The records of a store's meta table: which fields each has, and of which types."""

from __future__ import annotations

from typing import Any

FIELDS: dict[str, dict[str, Any]] = {
    "state": {"position": int, "digest": str | None, "samples": int, "chain": str},
    "head": {"type": str},
    "rows": {"features": int, "targets": int, "grid": list | None, "target_grid": list | None},
    "key": {"key": str, "since": int},
}
TYPES: dict[str, Any] = {
    "compacted": int,
    "created": str,
    "fingerprint": str | None,
    "chosen": dict | None,
    "checkpoints": dict,
}
HEX = {"state": "chain", "key": "key"}
"""Fields that are bytes as hex."""


def check_record(name: str, value: Any) -> None:
    """ValueError when a record does not have the fields and types that are read; more fields are allowed."""
    wanted = dict if name in FIELDS else TYPES.get(name, object)
    if not isinstance(value, wanted):
        raise ValueError(f"it is a {type(value).__name__}")
    for field, types in FIELDS.get(name, {}).items():
        if field not in value:
            raise ValueError(f"{field} is missing")
        if not isinstance(value[field], types) or isinstance(value[field], bool):
            raise ValueError(f"{field} is a {type(value[field]).__name__}")
    if name in HEX:
        bytes.fromhex(value[HEX[name]])
