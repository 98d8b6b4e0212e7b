"""Ed25519 keys and signatures of certificates. They need the package ``cryptography`` (extra ``audit``)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlssvm.audit.certificate import Certificate
from torchlssvm.errors import TorchLSSVMError
from torchlssvm.untrusted import read_regular

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

__all__ = ["new_key", "private_key", "public_key", "sign"]

MAX_KEY_FILE_BYTES = 2**16
"""Bytes of a file with a key: a PEM has 120."""


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise TorchLSSVMError("signatures need the package cryptography: pip install 'torchlssvm[audit]'") from None
    return ed25519


def new_key(path: str | os.PathLike[str]) -> Path:
    """Write a new private key (PEM, readable by its owner only) and its public key beside it; returns the latter's path."""
    key = _ed25519().Ed25519PrivateKey.generate()
    from cryptography.hazmat.primitives import serialization as s

    private = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    public = key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # never over a key that is there
    with os.fdopen(handle, "wb") as file:
        file.write(private)
    beside = Path(f"{os.fspath(path)}.pub")
    beside.write_bytes(public)
    return beside


def private_key(given: Any) -> Ed25519PrivateKey:
    """A private key from an object of ``cryptography``, 32 raw bytes, PEM bytes or text, or a file with one of them."""
    return _key(given, private=True)  # type: ignore[no-any-return]


def public_key(given: Any) -> Ed25519PublicKey:
    """A public key; see :func:`private_key`."""
    return _key(given, private=False)  # type: ignore[no-any-return]


def _key(given: Any, private: bool) -> Any:
    ed25519 = _ed25519()
    wanted = ed25519.Ed25519PrivateKey if private else ed25519.Ed25519PublicKey
    what = f"{'private' if private else 'public'} Ed25519 key"
    if isinstance(given, wanted):
        return given
    if isinstance(given, ed25519.Ed25519PrivateKey) and not private:
        raise ValueError(f"this is a private key; a {what} is needed")
    data = given
    if isinstance(data, str) and "-----BEGIN" in data:
        data = data.encode()
    if isinstance(data, str | os.PathLike):
        data = read_regular(data, MAX_KEY_FILE_BYTES)
    if not isinstance(data, bytes | bytearray):
        raise ValueError(f"a {what} is 32 bytes, a PEM or a path to one; got {type(given).__name__}")
    from cryptography.hazmat.primitives import serialization as s

    try:
        if len(data) == 32:
            make = wanted.from_private_bytes if private else wanted.from_public_bytes
            return make(bytes(data))
        key: Any = s.load_pem_private_key(bytes(data), None) if private else s.load_pem_public_key(bytes(data))
    except (ValueError, TypeError) as error:
        raise ValueError(f"no {what}: {error}") from None
    except Exception as error:  # cryptography has an error of its own for a key of an unknown kind
        raise ValueError(f"no {what}: {type(error).__name__}") from None
    if not isinstance(key, wanted):
        raise ValueError(f"no {what}: it is a {type(key).__name__}")
    return key


def sign(certificate: Certificate, key: Any) -> Certificate:
    """The certificate with an Ed25519 signature over its payload."""
    return certificate.signed(private_key(key).sign(certificate.payload()))
