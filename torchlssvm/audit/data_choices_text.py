"""Choices that a head made from data, as a certificate names them: how they were made in clear, their values as commitments.

A value that samples have shaped (a calibration's numbers, a chosen rho) tells of them as a digest does: with the rows that are
left, a guess about a sample that leaves later could be tested. A holder of the key of the state can still compare it.
"""

from __future__ import annotations

import hmac

from torchlssvm.linear import LinearHead


def public_choices(head: LinearHead, key: bytes | None) -> dict[str, dict[str, str]]:
    """The choices of a head: state, how it was made and, with a key, HMAC(key, "choice " || name || " " || value)."""
    out = {}
    for name, (version, rule) in head.data_choices.made.items():
        if name == "rho" and head.data_choices.rho_not_chosen:
            out[name] = {"state": "open", "how": rule}
        elif name == "calibration" and head.calibration is None:
            out[name] = {"state": "void", "how": "made before samples changed"}
        else:
            calibration = head.calibration if name == "calibration" else None
            value, how = (repr(head.rho), rule) if calibration is None else (rule, str(calibration.method))
            out[name] = {"state": "current" if version == head.version else "kept", "how": how}
            if key is not None:
                out[name]["commitment"] = hmac.digest(key, f"choice {name} {value}".encode(), "sha256").hex()
    return out
