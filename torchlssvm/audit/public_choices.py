"""Choices that a head made from data, as a certificate names them: how they were made in clear, their values as commitments.

A value that samples have shaped (a calibration's numbers, a chosen rho) tells of them as a digest does: with the rows that are
left, a guess about a sample that leaves later could be tested. A holder of the key of the state can still compare it.
"""

from __future__ import annotations

import hmac
from dataclasses import replace

from torchlssvm.canonical_json import canonical
from torchlssvm.linear import LinearHead
from torchlssvm.linear.data_choices import ChoiceState


def public_choices(head: LinearHead, key: bytes | None) -> dict[str, dict[str, str]]:
    """For each choice its state, how it was made and, with a key, HMAC(key, "choice " || canonical JSON of its facts).

    Names of columns and scales that were chosen are options of the head, and stand in clear.
    """
    out = {}
    for name, choice in head.choices.items():
        secret = name in ("rho", "calibration") and bool(choice.value)
        state = choice.state.value
        if choice.state is ChoiceState.STALE:
            state = "void" if name == "calibration" else "kept"
        out[name] = {"state": state, "how": str(replace(choice, value="") if secret else choice)}
        if secret and key is not None:
            out[name]["commitment"] = hmac.digest(key, b"choice " + canonical(choice.facts()), "sha256").hex()
    return out
