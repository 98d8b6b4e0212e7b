"""A validator for the part of JSON Schema (draft 2020-12) that this package's own schemas use. It needs no other package."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["check", "load"]

TYPES: dict[str, type] = {
    "object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "null": type(None),
}  # fmt: skip


@cache
def load(path: Path) -> dict[str, Any]:
    """Read a schema that ships with the package."""
    schema: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return schema


def check(value: Any, schema: dict[str, Any]) -> None:
    """Check a value as :func:`torchlssvm.canonical_json.loads` returns it; ValueError names the first part that is wrong.

    >>> rule = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer", "minimum": 0}}}
    >>> check({"n": 3}, rule)
    >>> check({"n": -1}, rule)
    Traceback (most recent call last):
    ...
    ValueError: n is -1, less than 0
    """
    _check(value, schema, schema, "")


def _check(value: Any, schema: dict[str, Any], root: dict[str, Any], at: str) -> None:
    schema = _resolve(schema, root)
    if "anyOf" in schema:
        _check_any(value, schema["anyOf"], root, at)
    if "type" in schema and not _has_type(value, schema["type"]):
        raise ValueError(f"{at or 'it'} is {_shown(value)}, not of type {schema['type']}")
    for allowed in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
        if allowed is not None and not any(type(value) is type(one) and value == one for one in allowed):
            expected = " or ".join(map(repr, allowed))
            raise ValueError(f"{at or 'it'} is {_shown(value)}, expected {expected}")
    if isinstance(value, str):
        _check_string(value, schema, at)
    elif isinstance(value, int) and not isinstance(value, bool):
        if value < schema.get("minimum", value):
            raise ValueError(f"{at or 'it'} is {_shown(value)}, less than {schema['minimum']}")
        if value > schema.get("maximum", value):
            raise ValueError(f"{at or 'it'} is {_shown(value)}, more than {schema['maximum']}")
    elif isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            raise ValueError(f"{at or 'it'} has {len(value)} items")
        if "items" in schema:
            inner = _resolve(schema["items"], root)
            for i, item in enumerate(value):
                _check(item, inner, root, f"{at}[{i}]")
    elif isinstance(value, dict):
        _check_object(value, schema, root, at)


def _check_string(value: str, schema: dict[str, Any], at: str) -> None:
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        raise ValueError(f"{at or 'it'} is {_shown(value)}: {len(value)} characters")
    pattern = schema.get(
        "pattern"
    )  # ours all start with ^ and end with $; Python's $ would allow a line break at the end
    if pattern is not None and not re.fullmatch(pattern[1:-1], value, re.ASCII):
        raise ValueError(f"{at or 'it'} is {_shown(value)}, which does not match {pattern}")


def _check_object(value: dict[str, Any], schema: dict[str, Any], root: dict[str, Any], at: str) -> None:
    for name in schema.get("required", ()):
        if name not in value:
            raise ValueError(f"{at or 'it'} has no {name!r}")
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name, part in value.items():
        where = f"{at}.{name[:40]}" if at else name[:40]
        if "propertyNames" in schema:
            _check(name, schema["propertyNames"], root, f"a name in {at or 'it'}")
        if name in known:
            _check(part, known[name], root, where)
        elif others is False:
            raise ValueError(f"{at or 'it'} has an unknown field {_shown(name)}")
        elif others is not True:
            _check(part, others, root, where)


def _check_any(value: Any, options: list[dict[str, Any]], root: dict[str, Any], at: str) -> None:
    for option in options[:-1]:
        try:
            return _check(value, option, root, at)
        except ValueError:
            continue
    return _check(value, options[-1], root, at)


def _resolve(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """Follow ``{"$ref": "#/$defs/name"}``; such a schema has no rule of its own."""
    while "$ref" in schema:
        schema = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    return schema


def _has_type(value: Any, wanted: str | list[str]) -> bool:
    """True if a value has one of the types; a boolean does not count as an integer."""
    names = [wanted] if isinstance(wanted, str) else wanted
    return any(isinstance(value, TYPES[n]) and (n == "boolean" or not isinstance(value, bool)) for n in names)


def _shown(value: Any) -> str:
    """The beginning of a value, in ASCII on one line."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**30:
        return "a huge number"  # Python refuses to print one of 5,000 digits
    if isinstance(value, str):
        return ascii(value) if len(value) <= 60 else ascii(value[:60]) + "..."
    return repr(value) if isinstance(value, int | float | None) else f"a {type(value).__name__}"
