"""The one way in which this library writes JSON that is hashed or signed."""

from __future__ import annotations

import json
from typing import Any


def canonical(data: Any) -> bytes:
    """ASCII JSON with sorted keys, separators "," and ":", no other white space and no NaN."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()
