"""Choices that a head made from data, as a certificate names them: how they were made in clear, their values as commitments.

A value that samples have shaped (a calibration's numbers, a chosen rho) tells of them as a digest does: with the rows that are
left, a guess about a sample that leaves later could be tested. A holder of the key of the state compares it all the same.
"""

from __future__ import annotations

import hmac
from dataclasses import replace

from torchlssvm.canonical_json import canonical
from torchlssvm.linear import LinearHead
from torchlssvm.linear.data_choices import Choice, ChoiceState


def public_choices(head: LinearHead, key: bytes | None) -> dict[str, str]:
    """The choices of a head, each value replaced by a commitment under the key of the state (by nothing without a key)."""
    return {name: public_choice(choice, key) for name, choice in head.choices.items()}


def public_choice(choice: Choice, key: bytes | None) -> str:
    """One choice: how it was made, and HMAC(key, "choice " || canonical JSON of its facts, the value among them).

    Names of columns and scales that were chosen are options of the head, and stand in clear.
    """
    if choice.name not in ("rho", "calibration") or not choice.value:
        return str(choice)
    shown = str(replace(choice, value=""))
    if key is None:
        return f"{shown}; its value is not told"
    commitment = hmac.digest(key, b"choice " + canonical(choice.facts()), "sha256").hex()
    return f"{shown}; its value is committed to: {commitment}"


VOID_CALIBRATION = str(Choice("calibration", ChoiceState.STALE, ""))
"""A calibration in a certificate that was made before samples changed: it has no value to compare."""
