"""Time stamp tokens as an authority, or somebody with bad intentions, would write them."""

from __future__ import annotations

import datetime
import hashlib
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

NOW = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
DAY = datetime.timedelta(days=1)


def der(tag: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    size = b"" if len(body) < 128 else len(body).to_bytes((len(body).bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(size) if size else len(body)]) + size + body


def oid(text: str) -> bytes:
    first, second, *rest = map(int, text.split("."))
    out = bytearray([40 * first + second])
    for value in rest:
        digits = [value & 0x7F]
        while value := value >> 7:
            digits.append(0x80 | (value & 0x7F))
        out += bytes(reversed(digits))
    return der(6, bytes(out))


def number(value: int) -> bytes:
    return der(2, value.to_bytes(value.bit_length() // 8 + 1, "big"))


def usage(*names: str) -> x509.KeyUsage:
    every = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
             "key_cert_sign", "crl_sign", "encipher_only", "decipher_only")  # fmt: skip
    return x509.KeyUsage(**{name: name in names for name in every})


class Party:
    """A certificate and its key; ``issue`` makes the next one of a chain."""

    def __init__(
        self, name: str, issuer: Party | None = None, start: Any = None, end: Any = None, extensions: Any = ()
    ):
        self.key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        builder = x509.CertificateBuilder().subject_name(subject).public_key(self.key.public_key())
        builder = builder.issuer_name(subject if issuer is None else issuer.certificate.subject)
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(start or NOW - DAY).not_valid_after(end or NOW + 30 * DAY)
        signing = self.key if issuer is None else issuer.key
        subject_key = x509.SubjectKeyIdentifier.from_public_key(self.key.public_key())
        issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key())
        for value, critical in (*extensions, (subject_key, False), (issuer_key, False)):
            builder = builder.add_extension(value, critical)
        self.certificate = builder.sign(signing, hashes.SHA256())

    @property
    def der(self) -> bytes:
        return self.certificate.public_bytes(Encoding.DER)

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)


def ca(name: str, issuer: Party | None = None, length: int | None = None, more: Any = (), **changes: Any) -> Party:
    sign = changes.pop("usage", usage("key_cert_sign", "crl_sign"))
    constraints = x509.BasicConstraints(changes.pop("ca", True), length)
    return Party(name, issuer, extensions=((constraints, True), (sign, True), *more), **changes)


def authority(issuer: Party | None, more: Any = (), **changes: Any) -> Party:
    sign = changes.pop("usage", usage("digital_signature"))
    purposes = changes.pop("purposes", [x509.ExtendedKeyUsageOID.TIME_STAMPING])
    use = (x509.ExtendedKeyUsage(purposes), changes.pop("critical", True))
    plain = (x509.BasicConstraints(False, None), True)
    return Party("Stamps", issuer, extensions=(plain, (sign, True), use, *more), **changes)


def token(
    data: bytes, signer: Party, sent: list[Party], *, named: Party | None = None, ess: Party | None = ..., twice: bool = False,
    version: int = 1, time: datetime.datetime = NOW, digest: bytes | None = None, status: int = 0, reverse: bool = False,
) -> bytes:  # fmt: skip
    """A response. named: by the SignerInfo; ess: by the signing-certificate attribute, None for none; reverse: the order of DER."""
    sha256 = der(0x30, oid("2.16.840.1.101.3.4.2.1"), der(5))
    imprint = der(0x30, sha256, der(4, hashlib.sha256(data).digest()))
    stamp = der(0x18, time.strftime("%Y%m%d%H%M%SZ").encode())
    info = der(0x30, number(version), oid("1.2.3.4"), imprint, number(7), stamp)
    content = oid("1.2.840.113549.1.9.16.1.4")
    hashed = der(0x31, der(4, digest or hashlib.sha256(info).digest()))
    attributes = [der(0x30, oid("1.2.840.113549.1.9.3"), der(0x31, content))]
    attributes += [der(0x30, oid("1.2.840.113549.1.9.4"), hashed)] * (2 if twice else 1)
    if ess is not None:
        known = (signer if ess is ... else ess).der
        ids = der(0x30, der(0x30, der(4, hashlib.sha256(known).digest())))
        attributes.append(der(0x30, oid("1.2.840.113549.1.9.16.2.47"), der(0x31, der(0x30, ids))))
    body = b"".join(sorted(attributes))
    signature = signer.key.sign(der(0x31, body), ec.ECDSA(hashes.SHA256()))
    who = (named or signer).certificate
    sid = der(0x30, who.issuer.public_bytes(), number(who.serial_number))
    ecdsa = der(0x30, oid("1.2.840.10045.4.3.2"))
    signed = der(0x30, number(1), sid, sha256, der(0xA0, body), ecdsa, der(4, signature))
    packed = der(0x30, content, der(0xA0, der(4, info)))
    certificates = der(0xA0, *sorted((party.der for party in sent), reverse=reverse)) if sent else b""
    whole = der(0x30, number(3), der(0x31, sha256), packed, certificates, der(0x31, signed))
    return der(0x30, der(0x30, number(status)), der(0x30, oid("1.2.840.113549.1.7.2"), der(0xA0, whole)))
