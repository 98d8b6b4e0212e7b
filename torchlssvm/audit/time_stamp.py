"""Time stamps of certificates (RFC 3161): the request to an authority, and the check of its response.

Nothing here talks to an authority: the request is a file to send, the response a file that stands beside the certificate. The
stamp is over the bytes of the certificate's file, so that ``openssl ts -verify -data CERT -in STAMP -CAfile CA`` judges it too.
A request has no nonce: an older response to the same bytes would be as true.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, TypeAlias

from torchlssvm.audit.checks import Check, Outcome
from torchlssvm.errors import VerificationError
from torchlssvm.untrusted import read_regular

__all__ = ["TimeStamp", "time_stamp_request"]

MAX_STAMP_BYTES = 2**20
"""Bytes of a response: it has about 5,000, with the certificates of the authority."""

MAX_CHAIN = 8
"""Certificates between the authority's own and a trusted one."""

MAX_PARTS = 4096
"""Elements of one DER value; a response has a dozen."""

DerElement: TypeAlias = tuple[int, bytes, bytes]
"""Tag, content, and both with the length between them."""

INTEGER, OCTET_STRING, OBJECT_ID, SEQUENCE, SET = 0x02, 0x04, 0x06, 0x30, 0x31
BOOLEAN_TRUE, NULL = b"\x01\x01\xff", b"\x05\x00"
SHA256 = bytes.fromhex("0609608648016503040201")
HASHES = {
    SHA256: "sha256",
    bytes.fromhex("0609608648016503040202"): "sha384",
    bytes.fromhex("0609608648016503040203"): "sha512",
}
SIGNED_DATA = bytes.fromhex("06092a864886f70d010702")
STAMP_INFO = bytes.fromhex("060b2a864886f70d0109100104")
CONTENT_TYPE, MESSAGE_DIGEST = bytes.fromhex("06092a864886f70d010903"), bytes.fromhex("06092a864886f70d010904")
"""Object identifiers, each as its DER."""


def encode(tag: int, *parts: bytes) -> bytes:
    r"""One DER element.

    >>> encode(SEQUENCE, encode(INTEGER, b"\x01")).hex()
    '3003020101'
    """
    body = b"".join(parts)
    if len(body) < 128:
        return bytes([tag, len(body)]) + body
    size = len(body).to_bytes((len(body).bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(size)]) + size + body


def elements(data: bytes) -> list[DerElement]:
    """The DER elements of some bytes, each as tag, content and whole; ValueError if they are none."""
    found: list[DerElement] = []
    at = 0
    while at < len(data):
        start, tag = at, data[at]
        length, at = data[at + 1 : at + 2], at + 2
        if not length or tag & 0x1F == 0x1F:
            raise ValueError("an element is cut short, or has a tag of several bytes")
        size = length[0]
        if size & 0x80:
            width = size & 0x7F
            if not 0 < width <= 4 or len(data) < at + width:
                raise ValueError("the length of an element cannot be read")
            size, at = int.from_bytes(data[at : at + width], "big"), at + width
        if len(data) < at + size or len(found) >= MAX_PARTS:
            raise ValueError("an element is longer than what holds it, or there are too many")
        found.append((tag, data[at : at + size], data[start : at + size]))
        at += size
    return found


def inner_elements(element: DerElement, tag: int) -> list[DerElement]:
    """Return the elements inside an element, which must have the given tag."""
    if element[0] != tag:
        raise ValueError(f"expected an element of tag {tag:#x}, got {element[0]:#x}")
    return elements(element[1])


def check_count(found: list[DerElement], least: int, most: int | None = None) -> list[DerElement]:
    """Return elements; ValueError unless there are from ``least`` to ``most`` of them."""
    if not least <= len(found) <= (most or least):
        raise ValueError(f"it has {len(found)} parts where RFC 3161 has {least}{'' if most is None else f' to {most}'}")
    return found


def imprint(data: bytes) -> bytes:
    """The MessageImprint of some bytes: SHA-256."""
    return encode(SEQUENCE, encode(SEQUENCE, SHA256, NULL), encode(OCTET_STRING, hashlib.sha256(data).digest()))


def time_stamp_request(data: bytes) -> bytes:
    """The request (TimeStampReq, DER) to stamp the bytes of a certificate's file; the authority's certificate is asked for."""
    return encode(SEQUENCE, encode(INTEGER, b"\x01"), imprint(data), BOOLEAN_TRUE)


@dataclass(frozen=True)
class TimeStamp:
    """The response of an authority. Its fields are claims until :meth:`check` has been asked with a trusted authority.

    Attributes:
        time: that the authority gives, UTC.
        digest: SHA-256 of the bytes that were stamped.
    """

    time: datetime
    digest: bytes
    _info: bytes
    _signer: tuple[bytes, bytes, str]  # signed attributes as a SET, signature, hash
    _certificates: tuple[bytes, ...]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TimeStamp:
        """Read the response of an authority from a file; VerificationError when it holds none."""
        try:
            return cls.from_der(read_regular(path, MAX_STAMP_BYTES))
        except ValueError as error:
            raise VerificationError(f"not a time stamp: {error}") from None

    @classmethod
    def from_der(cls, data: bytes) -> TimeStamp:
        """Read a TimeStampResp; VerificationError when it is none, or refuses."""
        try:
            (whole,) = check_count(elements(data), 1)
            status, *token = check_count(inner_elements(whole, SEQUENCE), 1, 2)
            code = check_count(inner_elements(status, SEQUENCE), 1, 3)[0]
            if code[0] != INTEGER or int.from_bytes(code[1], "big") > 1 or not token:
                raise VerificationError(
                    f"the authority has not granted the time stamp (status {int.from_bytes(code[1], 'big')})"
                )
            return cls._from_token(token[0])
        except ValueError as error:
            raise VerificationError(f"not a time stamp: {error}") from None

    @classmethod
    def _from_token(cls, token: DerElement) -> TimeStamp:
        kind, content = check_count(inner_elements(token, SEQUENCE), 2)
        if kind[2] != SIGNED_DATA:
            raise ValueError("the token is not signed data")
        (signed,) = check_count(inner_elements(content, 0xA0), 1)
        _, _, packed, *rest = check_count(inner_elements(signed, SEQUENCE), 4, 6)
        kind, content = check_count(inner_elements(packed, SEQUENCE), 2)
        if kind[2] != STAMP_INFO:
            raise ValueError("what is signed is no time stamp")
        ((tag, info, _),) = check_count(inner_elements(content, 0xA0), 1)
        if tag != OCTET_STRING:
            raise ValueError("what is signed is no text of bytes")
        ((_, fields, _),) = check_count(elements(info), 1)
        _, _, stamped, _, (_, moment, _), *_ = check_count(elements(fields), 5, 10)
        algorithm, digest = check_count(inner_elements(stamped, SEQUENCE), 2)
        if check_count(inner_elements(algorithm, SEQUENCE), 1, 2)[0][2] != SHA256:
            raise ValueError("the stamp is over another hash than SHA-256")
        certificates = next((elements(e[1]) for e in rest if e[0] == 0xA0), [])
        (signer,) = check_count(inner_elements(rest[-1], SET), 1)
        return cls(
            as_time(moment),
            digest[1],
            info,
            read_signer(inner_elements(signer, SEQUENCE)),
            tuple(c[2] for c in certificates),
        )

    def check(self, data: bytes, authority: Any = None) -> Check:
        """Check that the stamp is over some bytes; VerificationError if it is not.

        ``authority``: certificates (PEM, as bytes or a file) that the verifier trusts: the authority's own, or those that
        issued it. Without one its signature is not checked, and the answer says so.
        """
        if hashlib.sha256(data).digest() != self.digest:
            raise VerificationError("the time stamp is over other bytes than those of the certificate's file")
        if authority is None:
            return Check("time stamp", Outcome.NOT_CHECKED, {"time": self.time})
        from cryptography import x509

        pem = authority if isinstance(authority, bytes) else read_regular(authority, MAX_STAMP_BYTES)
        try:
            trusted = x509.load_pem_x509_certificates(pem)
        except ValueError as error:
            raise ValueError(f"no certificate of a time stamp authority: {error}") from None
        try:
            name = self._check_signature(trusted)
        except VerificationError:
            raise
        except Exception as error:  # cryptography has errors of many kinds for what a crafted certificate holds
            raise VerificationError(f"not a time stamp: {type(error).__name__}: {error}") from None
        return Check("time stamp", Outcome.HOLDS, {"time": self.time, "authority": name})

    def _check_signature(self, trusted: list[Any]) -> str:
        """Check the authority's signature and certificates; returns its name."""
        from cryptography import x509

        sent = [x509.load_der_x509_certificate(c) for c in self._certificates]
        attributes, signature, hash_name = self._signer
        found = dict(map(read_attribute, elements(elements(attributes)[0][1])))
        digest = encode(OCTET_STRING, hashlib.new(hash_name, self._info).digest())
        if found.get(CONTENT_TYPE) != STAMP_INFO or found.get(MESSAGE_DIGEST) != digest:
            raise VerificationError("the time stamp was altered: its signature is over another one")
        signers = [c for c in (*sent, *trusted) if is_signed_by(c, signature, attributes, hash_name)]
        if not signers:
            raise VerificationError("the time stamp was altered, or its authority's certificate is missing")
        for signer in signers:
            if is_for_time_stamps(signer) and self._is_trusted(signer, sent, trusted):
                return str(signer.subject.rfc4514_string())
        raise VerificationError("the time stamp is not by an authority that you trust")

    def _is_trusted(self, certificate: Any, sent: list[Any], trusted: list[Any]) -> bool:
        """True if a certificate, valid at the time of the stamp, is a trusted one, or was issued by one through those sent."""
        for _ in range(MAX_CHAIN):
            if not certificate.not_valid_before_utc <= self.time <= certificate.not_valid_after_utc:
                return False
            if certificate in trusted or any(was_issued_by(certificate, root, self.time) for root in trusted):
                return True
            above = [c for c in sent if c != certificate and was_issued_by(certificate, c, self.time)]
            if not above:
                return False
            certificate = above[0]
        return False


def as_time(text: bytes) -> datetime:
    """A GeneralizedTime: YYYYMMDDhhmmss, perhaps with a fraction, and Z."""
    whole, _, fraction = text.decode("ascii").removesuffix("Z").partition(".")
    if not text.endswith(b"Z") or len(whole) != 14 or not (whole + fraction).isdigit():
        raise ValueError("its time cannot be read")
    return datetime.strptime(whole, "%Y%m%d%H%M%S").replace(tzinfo=timezone.utc)


def read_signer(fields: list[DerElement]) -> tuple[bytes, bytes, str]:
    """The signed attributes as a SET, the signature, and the name of its hash, from a SignerInfo."""
    _, _, algorithm, attributes, _, signature, *_ = check_count(fields, 6, 7)
    name = HASHES.get(check_count(inner_elements(algorithm, SEQUENCE), 1, 2)[0][2])
    if name is None or attributes[0] != 0xA0 or signature[0] != OCTET_STRING:
        raise ValueError("its signature has another form than RFC 3161 asks for, or another hash than SHA-2")
    return encode(SET, attributes[1]), signature[1], name


def read_attribute(element: DerElement) -> tuple[bytes, bytes]:
    """The object identifier and the values of an attribute."""
    kind, values = check_count(inner_elements(element, SEQUENCE), 2)
    return kind[2], values[1]


def is_signed_by(certificate: Any, signature: bytes, data: bytes, hash_name: str) -> bool:
    """True if the key of a certificate made a signature (RSA, elliptic curves or Ed25519)."""
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa

    functions = {"sha256": hashes.SHA256(), "sha384": hashes.SHA384(), "sha512": hashes.SHA512()}
    function = functions[hash_name]
    try:
        key = certificate.public_key()
        if isinstance(key, rsa.RSAPublicKey):
            key.verify(signature, data, padding.PKCS1v15(), function)
        elif isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, data, ec.ECDSA(function))
        elif isinstance(key, ed25519.Ed25519PublicKey):
            key.verify(signature, data)
        else:
            return False
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        return False
    return True


def is_for_time_stamps(certificate: Any) -> bool:
    """True if a certificate is for time stamps, and for nothing else."""
    from cryptography import x509

    try:
        use = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage)
    except (x509.ExtensionNotFound, ValueError):
        return False
    return bool(use.critical) and list(use.value) == [x509.oid.ExtendedKeyUsageOID.TIME_STAMPING]


def was_issued_by(certificate: Any, by: Any, time: datetime) -> bool:
    """True if a certificate was issued by another one, which may issue and was valid at a time."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(by)
        allowed = by.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (InvalidSignature, ValueError, TypeError, x509.ExtensionNotFound):
        return False
    return bool(allowed) and by.not_valid_before_utc <= time <= by.not_valid_after_utc
