"""Ed25519 keys and signatures of certificates. This needs the package ``cryptography`` (extra ``audit``)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlssvm.audit.certificate import Certificate
from torchlssvm.audit.documents import write_private
from torchlssvm.errors import TorchLSSVMError
from torchlssvm.untrusted import read_regular

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

__all__ = ["PassphraseError", "find_signer", "key_id", "new_key", "private_key", "public_key", "sign", "trusted_keys"]

MAX_KEY_FILE_BYTES = 2**16
"""Largest size of a key file; a PEM file has 120 bytes, an encrypted one 300."""


class PassphraseError(ValueError):
    """A private key needs a passphrase, and the passphrase is missing or wrong."""


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise TorchLSSVMError("signatures need the package cryptography: pip install 'torchlssvm[audit]'") from None
    return ed25519


def new_key(path: str | os.PathLike[str], passphrase: bytes | str | None = None) -> Path:
    """Write a new private key (PEM, readable by its owner only) and its public key; return the path of the public key.

    ``passphrase``: encrypts the private key.
    """
    key = _ed25519().Ed25519PrivateKey.generate()
    from cryptography.hazmat.primitives import serialization as s

    secret = _as_bytes(passphrase)
    if secret == b"":
        raise ValueError("the passphrase is empty")
    protection = s.NoEncryption() if secret is None else s.BestAvailableEncryption(secret)
    private = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, protection)
    public = key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)
    beside = Path(f"{os.fspath(path)}.pub")
    if os.path.lexists(beside):
        raise FileExistsError(f"{beside} exists: keys are never overwritten")
    write_private(path, private)
    beside.write_bytes(public)
    return beside


def _as_bytes(text: bytes | str | None) -> bytes | None:
    return text.encode() if isinstance(text, str) else text


def private_key(given: Any, passphrase: bytes | str | None = None) -> Ed25519PrivateKey:
    """Load a private key from an object of ``cryptography``, 32 raw bytes, PEM bytes or text, or a file.

    ``passphrase``: of an encrypted PEM; PassphraseError if it is missing or wrong.
    """
    return _key(given, True, _as_bytes(passphrase))  # type: ignore[no-any-return]


def public_key(given: Any) -> Ed25519PublicKey:
    """Load a public key; see :func:`private_key`."""
    return _key(given, False)  # type: ignore[no-any-return]


def key_id(key: Any) -> str:
    """Return the SHA-256 of a public key (DER), as for ``openssl pkey``. A private key gives the id of its public key."""
    from cryptography.hazmat.primitives import serialization as s

    public = key.public_key() if hasattr(key, "public_key") else key
    der = public.public_bytes(s.Encoding.DER, s.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def trusted_keys(given: Any) -> list[tuple[str, Ed25519PublicKey]]:
    """Return the keys that a verifier trusts, each with the name of its holder ("" if it has none).

    ``given``: one key, a list of keys, or a mapping from names of holders to keys or lists of keys.
    """
    if isinstance(given, Mapping):
        return [(str(name), key) for name, keys in given.items() for _, key in trusted_keys(keys)]
    if isinstance(given, list | tuple | set | frozenset):
        return [pair for one in given for pair in trusted_keys(one)]
    return [("", public_key(given))]


def find_signer(certificate: Certificate, given: Any) -> tuple[str, Ed25519PublicKey] | None:
    """Return the first trusted key that has signed, with the name of its holder, or None; see :func:`trusted_keys`.

    Every key is tried with every signature, because the key id in the envelope is only a hint.
    """
    _ed25519()
    from cryptography.exceptions import InvalidSignature

    message, trusted = certificate.message(), trusted_keys(given)
    for signature in certificate.signatures:
        for name, key in trusted:
            try:
                key.verify(signature.sig, message)
            except InvalidSignature:
                continue
            return name, key
    return None


def _key(given: Any, private: bool, passphrase: bytes | None = None) -> Any:
    ed25519 = _ed25519()
    wanted = ed25519.Ed25519PrivateKey if private else ed25519.Ed25519PublicKey
    what = f"{'private' if private else 'public'} Ed25519 key"
    if isinstance(given, wanted):
        return given
    if isinstance(given, ed25519.Ed25519PrivateKey) and not private:
        raise ValueError(f"expected a {what}, got a private key")
    data = given
    if isinstance(data, str) and "-----BEGIN" in data:
        data = data.encode()
    if isinstance(data, str | os.PathLike):
        data = read_regular(data, MAX_KEY_FILE_BYTES)
    if not isinstance(data, bytes | bytearray):
        raise ValueError(f"a {what} is 32 bytes, a PEM or a path; got {type(given).__name__}")
    from cryptography.hazmat.primitives import serialization as s

    try:
        if len(data) == 32:
            make = wanted.from_private_bytes if private else wanted.from_public_bytes
            return make(bytes(data))
        if private and b"ENCRYPTED" in data and passphrase is None:
            raise PassphraseError("the private key needs a passphrase")
        secret = passphrase if b"ENCRYPTED" in data else None  # an unprotected key needs none
        key: Any = s.load_pem_private_key(bytes(data), secret) if private else s.load_pem_public_key(bytes(data))
    except PassphraseError:
        raise
    except (ValueError, TypeError) as error:
        if private and b"ENCRYPTED" in data:
            raise PassphraseError("wrong passphrase for the private key") from None
        raise ValueError(f"not a {what}: {error}") from None
    except Exception as error:  # cryptography raises its own error for unknown kinds of keys
        raise ValueError(f"not a {what}: {type(error).__name__}") from None
    if not isinstance(key, wanted):
        raise ValueError(f"not a {what}: it is a {type(key).__name__}")
    return key


def sign(certificate: Certificate, key: Any, passphrase: bytes | str | None = None) -> Certificate:
    """Return the certificate with one more Ed25519 signature. Sign again with another key to replace the first one."""
    private = private_key(key, passphrase)
    return certificate.signed(private.sign(certificate.message()), key_id(private))
