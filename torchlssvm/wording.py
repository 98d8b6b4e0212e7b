"""Words for numbers and lists, and text from elsewhere, in lines that people read."""

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


def printable(text: str, keep: str = "") -> str:
    r"""Text with every character escaped that a terminal would not show as itself: escape sequences, line breaks, bidi marks.

    Characters in ``keep`` stay.

    >>> printable("a\x1b[2Jb\nc é")
    'a\\x1b[2Jb\\nc é'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)
