"""Certificates of version 0.1.0: JSON of the library's own, with the digest in clear. They are read, not written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchlssvm.audit.envelope import SIGNATURE_BYTES, Signature
from torchlssvm.canonical_json import canonical
from torchlssvm.errors import VerificationError

if TYPE_CHECKING:
    from torchlssvm.audit.certificate import Certificate

CERTIFICATE_FORMAT_0_1 = "torchlssvm-certificate-1"
"""Value of the field ``format`` in certificates of version 0.1.0."""

MISSING_IN_0_1 = (
    "this certificate is of version 0.1.0: it has the digest of the statistics in clear, which with the rows of today confirms "
    "guesses about samples that have left since, and it is no DSSE envelope"
)
"""Differences from a present certificate, as ``verify`` reports them."""

FIELD_TYPES_0_1: dict[str, Any] = {
    "events": list,
    "digest": str | None,
    "position": int,
    "chain": str,
    "grid": dict | None,
    "fingerprint": str | None,
    "shape": dict,
    "samples": int,
    "compacted": bool,
    "scope": dict,
    "library": str,
    "time": str,
    "format": str,
}
"""Fields of the format of version 0.1.0, which stays as it is whatever the present one becomes."""

FILLED_FIELDS_0_1 = ("commitment", "signatures")
"""Fields of the present certificate that :func:`read` fills in."""


def read(data: dict[str, Any]) -> dict[str, Any]:
    """The fields of a :class:`Certificate`, from the JSON of version 0.1.0; all but the signature are still unchecked."""
    if data.get("format") != CERTIFICATE_FORMAT_0_1:
        raise VerificationError(
            f"not a certificate: its format is {str(data.get('format'))[:40]!r}, not a DSSE envelope or "
            f"{CERTIFICATE_FORMAT_0_1!r}"
        )
    if any(name in data for name in FILLED_FIELDS_0_1):
        raise VerificationError("not a certificate: unknown field in the format of version 0.1.0")
    text = data.pop("signature", None)
    if not isinstance(text, str):
        raise VerificationError("not a certificate: 'signature' is missing, or no text")
    try:
        signature = bytes.fromhex(text)
    except ValueError:
        signature = b"?"
    if signature.hex() != text or len(signature) not in (0, SIGNATURE_BYTES):  # one way to write it
        raise VerificationError("not a certificate: the signature is not 128 digits of lower-case hex")
    return data | {"commitment": None, "signatures": (Signature("", signature),) if signature else ()}


def payload(certificate: Certificate) -> bytes:
    """The bytes that version 0.1.0 signed: the JSON of all fields but the signature."""
    return canonical({name: getattr(certificate, name) for name in FIELD_TYPES_0_1})


def to_json(certificate: Certificate) -> str:
    """The certificate as version 0.1.0 wrote it."""
    signature = certificate.signatures[0].sig.hex() if certificate.signatures else ""
    return canonical({name: getattr(certificate, name) for name in FIELD_TYPES_0_1} | {"signature": signature}).decode()
