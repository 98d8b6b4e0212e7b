"""DSSE envelopes: a payload of any type and signatures over both (Dead Simple Signing Envelope, version 1).

    signed bytes = "DSSEv1" SP len(type) SP type SP len(payload) SP payload        (lengths in decimal, SP one space)

A signature's ``keyid`` is only a hint: a verifier tries the keys that it trusts.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Any

from torchlssvm.canonical_json import canonical
from torchlssvm.errors import VerificationError

__all__ = ["Envelope", "Signature", "signed_bytes"]

PAYLOAD_TYPE = "application/vnd.in-toto+json"
"""The payload is an in-toto statement."""

MAX_SIGNATURES = 16
"""Signatures of one envelope: the holder's, and those of keys it was rotated to."""

SIGNATURE_BYTES = 64
"""Bytes of an Ed25519 signature."""

KEY_ID = re.compile(r"[\x20-\x7e]{0,256}")


def signed_bytes(payload: bytes, payload_type: str = PAYLOAD_TYPE) -> bytes:
    """The pre-authentication encoding of DSSE.

    >>> signed_bytes(b"hello world", "http://example.com/HelloWorld")
    b'DSSEv1 29 http://example.com/HelloWorld 11 hello world'
    """
    name = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(name), name, len(payload), payload)


@dataclass(frozen=True)
class Signature:
    """One signature of an envelope, and the hint which key made it."""

    keyid: str
    sig: bytes


@dataclass(frozen=True)
class Envelope:
    """An in-toto statement as bytes, and its signatures."""

    payload: bytes
    signatures: tuple[Signature, ...] = ()

    def to_json(self) -> str:
        """One line of canonical JSON."""
        signatures = [{"keyid": s.keyid, "sig": base64.b64encode(s.sig).decode()} for s in self.signatures]
        payload = base64.b64encode(self.payload).decode()
        return canonical({"payload": payload, "payloadType": PAYLOAD_TYPE, "signatures": signatures}).decode()

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Envelope:
        """Check the fields of an envelope; VerificationError names the first that is wrong."""
        if set(data) != {"payload", "payloadType", "signatures"}:
            raise VerificationError("not a certificate: an envelope has payload, payloadType and signatures")
        if data["payloadType"] != PAYLOAD_TYPE:
            raise VerificationError(
                f"not a certificate: the payload is {str(data['payloadType'])[:60]!r}, not {PAYLOAD_TYPE!r}"
            )
        given = data["signatures"]
        if not isinstance(given, list) or len(given) > MAX_SIGNATURES:
            raise VerificationError(f"not a certificate: signatures is not a list of at most {MAX_SIGNATURES}")
        return cls(from_base64(data["payload"], "the payload"), tuple(map(read_signature, given)))


def read_signature(given: Any) -> Signature:
    """Check one signature of an envelope."""
    if not isinstance(given, dict) or not {"sig"} <= set(given) <= {"keyid", "sig"}:
        raise VerificationError("not a certificate: a signature has sig and keyid")
    keyid = given.get("keyid", "")
    if not isinstance(keyid, str) or not KEY_ID.fullmatch(keyid):
        raise VerificationError("not a certificate: the keyid of a signature is no short ASCII text")
    sig = from_base64(given["sig"], "a signature")
    if len(sig) != SIGNATURE_BYTES:
        raise VerificationError(f"not a certificate: a signature has {len(sig)} bytes, not {SIGNATURE_BYTES}")
    return Signature(keyid, sig)


def from_base64(text: Any, what: str) -> bytes:
    """Decode standard base64 with padding, written in the one way it can be written."""
    try:
        if not isinstance(text, str):
            raise ValueError
        data = base64.b64decode(text.encode("ascii"), validate=True)
        if base64.b64encode(data).decode() != text:
            raise ValueError
    except (ValueError, binascii.Error):
        raise VerificationError(f"not a certificate: {what} is not base64") from None
    return data
