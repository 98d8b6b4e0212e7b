"""DSSE envelopes: a payload of any type and signatures over both (Dead Simple Signing Envelope, version 1).

    signed bytes = "DSSEv1" SP len(type) SP type SP len(payload) SP payload        (lengths in decimal, SP one space)

A signature's ``keyid`` is only a hint: a verifier tries the keys that it trusts.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchlssvm import schema
from torchlssvm.canonical_json import canonical
from torchlssvm.errors import VerificationError

__all__ = ["Envelope", "Signature", "signed_bytes"]

PAYLOAD_TYPE = "application/vnd.in-toto+json"
"""The payload is an in-toto statement."""

SIGNATURE_BYTES = 64
"""Bytes of an Ed25519 signature."""

SCHEMAS = Path(__file__).parent / "schemas"
"""Folder of the JSON schemas of certificates, envelopes, receipts and openings."""


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
    def from_dict(cls, data: Any) -> Envelope:
        """Check the fields of an envelope; VerificationError names the first that is wrong."""
        try:
            schema.check(data, schema.load(SCHEMAS / "envelope.json"))
            pairs = [(s.get("keyid", ""), from_base64(s["sig"], "a signature")) for s in data["signatures"]]
            if any(len(sig) != SIGNATURE_BYTES for _, sig in pairs):
                raise ValueError(f"a signature does not have {SIGNATURE_BYTES} bytes")
            return cls(from_base64(data["payload"], "the payload"), tuple(Signature(*pair) for pair in pairs))
        except ValueError as error:
            raise VerificationError(f"not a certificate: {error}") from None


def from_base64(text: str, what: str) -> bytes:
    """Decode standard base64 with padding, written in the one way it can be written; ValueError for anything else."""
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (ValueError, binascii.Error):
        raise ValueError(f"{what} is not base64") from None
    if base64.b64encode(data).decode() != text:
        raise ValueError(f"{what} is not base64")
    return data
