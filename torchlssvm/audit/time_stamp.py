"""Time stamps of certificates (RFC 3161): the request to an authority, and the check of its response.

This module does not use the network: you send the request to the authority yourself, and save its response next to the
certificate. The stamp covers the bytes of the certificate file, so you can also check it with ``openssl ts -verify -data CERT
-in STAMP -CAfile CA``. Requests have no nonce, because an older response for the same bytes is just as valid.

The package ``rfc3161-client`` (extra ``audit``) checks the signature and the certificate path, and this module checks what the
package leaves out. Because the package accepts only strict DER, which not all authorities write, :func:`normalized` converts
their responses first.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from torchlssvm.audit.checks import Check, Outcome, checking
from torchlssvm.errors import TorchLSSVMError, VerificationError
from torchlssvm.untrusted import read_regular

__all__ = ["TimeStamp", "time_stamp_request"]

MAX_STAMP_BYTES = 2**20
"""Largest size of a response in bytes. A usual response, with the certificates of the authority, has 5,000 bytes."""

SHA256_OID = "2.16.840.1.101.3.4.2.1"
MESSAGE_DIGEST = bytes.fromhex("2a864886f70d010904")
SIGNING_CERTIFICATES = {
    bytes.fromhex("2a864886f70d010910020c"): "sha1",  # ESSCertID
    bytes.fromhex("2a864886f70d010910022f"): "sha256",  # ESSCertIDv2, unless it names another hash
}
HASHES = {
    bytes.fromhex("608648016503040201"): "sha256",
    bytes.fromhex("608648016503040202"): "sha384",
    bytes.fromhex("608648016503040203"): "sha512",
}
"""Object identifiers, each as the content of its DER."""

INTEGER, OCTET_STRING, OBJECT_IDENTIFIER, SEQUENCE, TAGGED_0 = 0x02, 0x04, 0x06, 0x30, 0xA0


def _library() -> Any:
    try:
        import rfc3161_client
    except ImportError:
        raise TorchLSSVMError("time stamps need the package rfc3161-client: pip install 'torchlssvm[audit]'") from None
    return rfc3161_client


def time_stamp_request(data: bytes) -> bytes:
    """Return the request (TimeStampReq, DER) for a stamp over the bytes of a certificate file."""
    library = _library()
    builder = library.TimestampRequestBuilder(data, library.HashAlgorithm.SHA256, nonce=False, cert_req=True)
    return bytes(builder.build().as_bytes())


@dataclass(frozen=True)
class TimeStamp:
    """The response of an authority. Do not rely on its fields before :meth:`check` has been called with a trusted authority.

    Attributes:
        time: the time that the authority states, UTC.
        digest: SHA-256 of the stamped bytes.
    """

    time: datetime
    digest: bytes
    _response: Any = field(repr=False)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TimeStamp:
        """Read the response of an authority from a file. Raises VerificationError if the file contains no response."""
        try:
            return cls.from_der(read_regular(path, MAX_STAMP_BYTES))
        except ValueError as error:
            raise VerificationError(f"not a time stamp: {error}") from None

    @classmethod
    def from_der(cls, data: bytes) -> TimeStamp:
        """Read a TimeStampResp. Raises VerificationError if it is malformed, or if the authority refused the request."""
        library = _library()
        try:
            response = library.decode_timestamp_response(normalized(data))
            if response.status != 0:  # 0: granted
                raise VerificationError(f"the authority did not grant the time stamp (status {response.status})")
            info = response.tst_info
            imprint = info.message_imprint
            if imprint.hash_algorithm.dotted_string != SHA256_OID:
                raise ValueError("the stamp uses another hash than SHA-256")
            if info.version != 1:
                raise ValueError(f"version {info.version} of RFC 3161, expected 1")
            return cls(info.gen_time, bytes(imprint.message), response)
        except ValueError as error:
            raise VerificationError(f"not a time stamp: {str(error)[:200]}") from None

    def check(self, data: bytes, authority: Any = None) -> Check:
        """Check that the stamp covers these bytes. Raises VerificationError if it does not.

        Pass the root certificates that you trust as ``authority`` (PEM, as bytes or a file). Without them, the signature of the
        authority is not checked, and the outcome says so.
        """
        with checking("time stamp"):
            if hashlib.sha256(data).digest() != self.digest:
                raise VerificationError("the time stamp covers other bytes than those of the certificate file")
            if authority is None:
                return Check("time stamp", Outcome.NOT_CHECKED, {"time": self.time})
            name = self._check_signature(data, read_roots(authority))
            return Check("time stamp", Outcome.HOLDS, {"time": self.time, "authority": name})

    def _check_signature(self, data: bytes, roots: list[Any]) -> str:
        """Check the signature and the certificates of the authority, and return its name."""
        from cryptography import x509

        try:
            # Rebuilt for each use: verifying takes the SignerInfos out of the library's object.
            _library().VerifierBuilder(roots=roots).build().verify_message(self._response, data)
            signed = _library().decode_timestamp_response(self._response.as_bytes()).signed_data
            (info,) = signed.signer_infos
            sent = [x509.load_der_x509_certificate(c) for c in signed.certificates]
            signer = next(c for c in sent if (c.issuer, c.serial_number) == (info.issuer, info.serial_number))
            check_attributes(signed_attributes(self._response.time_stamp_token()), certificate_bytes(signer))
        except VerificationError:
            raise
        except Exception as error:  # both libraries raise many kinds of errors for crafted tokens
            raise VerificationError(
                f"the time stamp was altered, or is not from an authority that you trust: {str(error)[:200]}"
            ) from None
        return str(signer.subject.rfc4514_string())


def read_roots(given: Any) -> list[Any]:
    """Read trusted certificates from PEM bytes or a file. Raises ValueError if it contains no certificate."""
    from cryptography import x509

    pem = given if isinstance(given, bytes) else read_regular(given, MAX_STAMP_BYTES)
    try:
        return list(x509.load_pem_x509_certificates(pem))
    except ValueError as error:
        raise ValueError(f"not a certificate of a time stamp authority: {error}") from None


def certificate_bytes(certificate: Any) -> bytes:
    """Return a certificate as DER."""
    from cryptography.hazmat.primitives.serialization import Encoding

    return bytes(certificate.public_bytes(Encoding.DER))


# -- DER ---------------------------------------------------------------------------------------------------------------


def elements(data: bytes) -> list[tuple[int, bytes]]:
    """Split bytes into DER elements, each with its tag and content. Raises ValueError or IndexError if they are truncated."""
    found, at = [], 0
    while at < len(data):
        tag, size = data[at], data[at + 1]
        at += 2
        if size & 0x80:
            width = size & 0x7F
            size, at = int.from_bytes(data[at : at + width], "big"), at + width
        found.append((tag, data[at : at + size]))
        at += size
    if at > len(data):
        raise ValueError("truncated DER")
    return found


def element(tag: int, content: bytes) -> bytes:
    """Return a DER element."""
    size = len(content)
    width = (size.bit_length() + 7) // 8
    head = bytes([tag, size]) if size < 0x80 else bytes([tag, 0x80 | width]) + size.to_bytes(width, "big")
    return head + content


def normalized(response: bytes) -> bytes:
    """Sort the certificates of a response as DER requires, and change the status "granted with modifications" to "granted".

    ``rfc3161-client`` refuses unsorted certificates and the other status. Neither of these is signed: the signature covers only
    the TSTInfo and the signed attributes, which do not change. Bytes that cannot be parsed are returned unchanged, and the
    package refuses them.
    """
    try:
        ((_, body),) = elements(response)
        (_, status), (_, token) = elements(body)  # ValueError without a token: refused
        (_, kind), (_, content) = elements(token)
        ((_, signed_data),) = elements(content)
        code = elements(status)[0][1]
        parts = [
            (tag, b"".join(sorted(element(*one) for one in elements(value))) if tag == TAGGED_0 else value)
            for tag, value in elements(signed_data)
        ]
    except (ValueError, IndexError):
        return response
    content = element(SEQUENCE, b"".join(element(*part) for part in parts))
    token = element(OBJECT_IDENTIFIER, kind) + element(TAGGED_0, content)
    status = element(INTEGER, bytes(1) if code == b"\x01" else code)
    return element(SEQUENCE, element(SEQUENCE, status) + element(SEQUENCE, token))


# -- signed attributes, which rfc3161-client does not check -----------------------------------------------------------


def signed_attributes(token: bytes) -> list[tuple[bytes, bytes]]:
    """Return the object identifier and the values of each signed attribute in the only SignerInfo of a token."""
    (_, content) = elements(elements(token)[0][1])  # ContentInfo: type, [0] content
    signed_data = elements(content[1])[0][1]
    (signer,) = elements(elements(signed_data)[-1][1])
    attributes = next(value for tag, value in elements(signer[1]) if tag == TAGGED_0)
    return [(kind, values) for (_, kind), (_, values) in (elements(a) for _, a in elements(attributes))]


def check_attributes(attributes: list[tuple[bytes, bytes]], signer: bytes) -> None:
    """Check that no attribute occurs twice, and that one of them names the signer's certificate (DER)."""
    kinds = [kind for kind, _ in attributes]
    if len(set(kinds)) < len(kinds) or MESSAGE_DIGEST not in kinds:
        raise VerificationError("not a time stamp: a signed attribute is missing or occurs twice")
    named = [(SIGNING_CERTIFICATES[kind], values) for kind, values in attributes if kind in SIGNING_CERTIFICATES]
    if not named:
        raise VerificationError("not a time stamp: no signed attribute names the signer's certificate")
    for function, values in named:
        first = elements(elements(elements(elements(values)[0][1])[0][1])[0][1])  # SigningCertificate, certs, ESSCertID
        if first[0][0] == SEQUENCE:
            function, first = HASHES[elements(first[0][1])[0][1]], first[1:]
        if first[0] != (OCTET_STRING, hashlib.new(function, signer).digest()):
            raise VerificationError("the time stamp names another certificate than the signer's")
