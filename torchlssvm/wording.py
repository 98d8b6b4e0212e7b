"""Words for numbers and lists in texts that people read."""

from __future__ import annotations

from collections.abc import Sequence

LISTED_NAMES = 5
"""Names listed in a line of text, so that it stays one."""


def counted(number: int, noun: str) -> str:
    """A number and its noun.

    >>> counted(1, "sample"), counted(3000, "sample")
    ('1 sample', '3,000 samples')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(names: Sequence[str]) -> str:
    """The first few of many names."""
    more = f" and {len(names) - LISTED_NAMES} more" if len(names) > LISTED_NAMES else ""
    return ", ".join(names[:LISTED_NAMES]) + more
