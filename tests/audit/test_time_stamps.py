"""Time stamps: honest tokens hold, the others do not, and ``openssl ts -verify`` is the judge of both."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

pytest.importorskip("rfc3161_client", reason="time stamps need torchlssvm[audit]")
from cryptography import x509

from tests.support.stamps import DAY, NOW, Party, authority, ca, token, usage
from torchlssvm import VerificationError, audit

DATA = b"the bytes of a certificate"
Case = Callable[[], tuple[bytes, bytes]]
"""A response, and the certificates that the verifier trusts (PEM)."""

ROOT = ca("Root")
TSA = authority(ROOT)
UNKNOWN = (x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4.5"), b"\x05\x00"), True)
NOT_OURS = (x509.NameConstraints(None, [x509.DirectoryName(TSA.certificate.subject)]), True)


def by(signer: Party, *between: Party, root: Party = ROOT, **changes: object) -> tuple[bytes, bytes]:
    """A token by an authority, with the certificates between it and the root."""
    return token(DATA, signer, [signer, *between], **changes), root.pem


def chain(middle: Party, **changes: object) -> tuple[bytes, bytes]:
    return by(authority(middle), middle, **changes)


def deep(length: int | None) -> tuple[bytes, bytes]:
    first = ca("First", ROOT, length)
    second = ca("Second", first)
    return by(authority(second), second, first)


HONEST: dict[str, Case] = {
    "issued by the root": lambda: by(TSA),
    "granted with modifications": lambda: by(TSA, status=1),
    "certificates in another order than that of DER": lambda: chain(ca("Middle", ROOT), reverse=True),
    "an intermediate": lambda: chain(ca("Middle", ROOT)),
    "two intermediates within the path length": lambda: deep(1),
    "certificates that expired since": lambda: by(
        authority(OLD_ROOT, start=NOW - 9 * DAY, end=NOW - DAY), root=OLD_ROOT, time=NOW - 2 * DAY
    ),
    "signature and nonrepudiation": lambda: by(authority(ROOT, usage=usage("digital_signature", "content_commitment"))),
    "other trusted certificates beside": lambda: (token(DATA, TSA, [TSA]), ca("Other").pem + ROOT.pem),
}
OLD_ROOT = ca("Old root", start=NOW - 10 * DAY)
SERVER = x509.ExtendedKeyUsageOID.SERVER_AUTH
STAMPING = x509.ExtendedKeyUsageOID.TIME_STAMPING
REFUSED: dict[str, Case] = {
    "path length": lambda: deep(0),
    "path length of the root": lambda: by_short_root(),
    "an issuer without keyCertSign": lambda: chain(ca("Middle", ROOT, usage=usage("digital_signature"))),
    "an issuer that is no authority": lambda: chain(ca("Middle", ROOT, ca=False)),
    "name constraints": lambda: chain(ca("Middle", ROOT, more=(NOT_OURS,))),
    "an unknown critical extension": lambda: by(authority(ROOT, more=(UNKNOWN,))),
    "an unknown critical extension of an issuer": lambda: chain(ca("Middle", ROOT, more=(UNKNOWN,))),
    "key usage for encipherment": lambda: by(authority(ROOT, usage=usage("key_encipherment"))),
    "key usage for more than signatures": lambda: by(
        authority(ROOT, usage=usage("digital_signature", "key_agreement"))
    ),
    "SignerInfo of another certificate": lambda: named_other(),
    "SignerInfo of an absent certificate": lambda: (token(DATA, TSA, [TSA], named=authority(ROOT)), ROOT.pem),
    "no ESSCertID": lambda: by(TSA, ess=None),
    "ESSCertID of another certificate": lambda: by(TSA, ess=authority(ROOT)),
    "messageDigest twice": lambda: by(TSA, twice=True),
    "TSTInfo version 3": lambda: by(TSA, version=3),
    "another root": lambda: (token(DATA, TSA, [TSA]), ca("Root").pem),
    "no certificates": lambda: (token(DATA, TSA, []), ROOT.pem),
    "use not critical": lambda: by(authority(ROOT, critical=False)),
    "for servers": lambda: by(authority(ROOT, purposes=[SERVER])),
    "for stamps and servers": lambda: by(authority(ROOT, purposes=[STAMPING, SERVER])),
    "expired when it stamped": lambda: by(authority(ROOT, start=NOW - DAY, end=NOW), time=NOW + DAY),
    "an issuer expired when it stamped": lambda: chain(ca("Middle", ROOT, end=NOW - DAY / 2)),
    "messageDigest of something else": lambda: by(TSA, digest=bytes(32)),
    "signed by another key": lambda: (token(DATA, authority(ROOT), [TSA], named=TSA, ess=TSA), ROOT.pem),
    "other bytes": lambda: (token(b"others", TSA, [TSA]), ROOT.pem),
    "rejected": lambda: by(TSA, status=2),
    "signed by itself": lambda: by(authority(None)),
    "by the trusted certificate itself": lambda: (token(DATA, TSA, [TSA]), TSA.pem),
}


ACCEPTED_BY_OPENSSL = ("messageDigest twice",)  # by version 3.0; RFC 5652 forbids it


def by_short_root() -> tuple[bytes, bytes]:
    root = ca("Short", length=0)
    middle = ca("Middle", root)
    return by(authority(middle), middle, root=root)


def named_other() -> tuple[bytes, bytes]:
    other = authority(ROOT)
    return token(DATA, TSA, [TSA, other], named=other), ROOT.pem


def judged(folder: Path, response: bytes, trusted: bytes, when: datetime) -> bool:
    """True if openssl accepts it, at the time of the stamp."""
    for name, content in {"data": DATA, "response": response, "trusted.pem": trusted}.items():
        (folder / name).write_bytes(content)
    command = ["openssl", "ts", "-verify", "-data", "data", "-in", "response", "-CAfile", "trusted.pem"]
    command += ["-attime", str(int(when.timestamp()))]
    return subprocess.run(command, cwd=folder, capture_output=True).returncode == 0


def holds(response: bytes, trusted: bytes) -> bool:
    try:
        return audit.TimeStamp.from_der(response).check(DATA, trusted).outcome is audit.Outcome.HOLDS
    except VerificationError:
        return False


@pytest.mark.parametrize("name", [*HONEST, *REFUSED])
def test_a_token_is_judged_as_openssl_judges_it(name: str, tmp_path: Path) -> None:
    response, trusted = (HONEST | REFUSED)[name]()
    assert holds(response, trusted) == (name in HONEST)
    if shutil.which("openssl") is not None and name not in ACCEPTED_BY_OPENSSL:
        when = {"certificates that expired since": NOW - 2 * DAY, "expired when it stamped": NOW + DAY}.get(name, NOW)
        assert judged(tmp_path, response, trusted, when) == (name in HONEST)
