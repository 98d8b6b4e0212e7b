"""Choices that a head made from data, as a certificate lists them: the method in plain text, the value as a commitment.

A value that samples have shaped (a calibration, a chosen rho) reveals as much as a digest: together with the remaining rows, it
could confirm a guess about a sample that is erased later. Those who have the key of the state can still compare the value.
"""

from __future__ import annotations

import hmac
from dataclasses import replace

from torchlssvm.canonical_json import canonical
from torchlssvm.linear import LinearHead
from torchlssvm.linear.data_choices import ChoiceState


def public_choices(head: LinearHead, key: bytes | None) -> dict[str, dict[str, str]]:
    """Return the state and method of each choice and, with a key, HMAC(key, "choice " || canonical JSON of its facts).

    Chosen columns and scales are options of the head, and are in plain text.
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
