"""Choices that a head made from data, as a certificate names them: how they were made in clear, their values as commitments.

A value that samples have shaped (a calibration's numbers, a chosen rho) tells of them as a digest does: with the rows that are
left, a guess about a sample that leaves later could be tested. A holder of the key of the state compares it all the same.
"""

from __future__ import annotations

import hmac

from torchlssvm.linear import LinearHead


def public_choices(head: LinearHead, key: bytes | None) -> dict[str, str]:
    """The choices of a head, each value replaced by a commitment under the key of the state (by nothing without a key)."""
    return {name: public_choice(head, name, text, key) for name, text in head.choices.items()}


def public_choice(head: LinearHead, name: str, text: str, key: bytes | None) -> str:
    """One choice: its description without numbers, and HMAC(key, "choice " || name || " " || description with numbers)."""
    shown = text.removeprefix(f"{head.rho!r}, ") if name == "rho" else text
    if name == "calibration" and head.calibration is not None:
        shown = f"{head.calibration.method}, made for the samples held"
    if shown == text:
        return text
    if key is None:
        return f"{shown}; its value is not told"
    return f"{shown}; its value is committed to: {hmac.digest(key, f'choice {name} {text}'.encode(), 'sha256').hex()}"
