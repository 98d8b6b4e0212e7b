"""Numbers, lists and untrusted text in lines that people read."""

from __future__ import annotations

from collections.abc import Sequence

LISTED_NAMES = 5
"""Names that one line lists before it says how many more there are."""


def counted(number: int, noun: str, plural: str = "s") -> str:
    """A number and its noun; ``plural`` is the ending for more than one.

    >>> counted(1, "sample"), counted(3000, "sample"), counted(2, "class", "es")
    ('1 sample', '3,000 samples', '2 classes')
    """
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - LISTED_NAMES} more" if len(names) > LISTED_NAMES else ""
    return ", ".join(names[:LISTED_NAMES]) + more


def printable(text: str, keep: str = "") -> str:
    r"""Escape the characters that could control a terminal: escape sequences, line breaks, marks of writing direction.

    Characters in ``keep`` stay as they are.

    >>> printable("a\x1b[2Jb\nc é")
    'a\\x1b[2Jb\\nc é'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)
