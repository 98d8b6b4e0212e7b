"""Ed25519 keys and signatures of certificates. They need the package ``cryptography`` (extra ``audit``)."""

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
"""Bytes of a file with a key: a PEM has 120, an encrypted one 300."""


class PassphraseError(ValueError):
    """A private key is protected by a passphrase, and none or a wrong one was given."""


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise TorchLSSVMError("signatures need the package cryptography: pip install 'torchlssvm[audit]'") from None
    return ed25519


def new_key(path: str | os.PathLike[str], passphrase: bytes | str | None = None) -> Path:
    """Write a new private key (PEM, readable by its owner only) and its public key beside it; returns the latter's path.

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
        raise FileExistsError(f"{beside} is there already: a key is not written over")
    write_private(path, private)
    beside.write_bytes(public)
    return beside


def _as_bytes(text: bytes | str | None) -> bytes | None:
    return text.encode() if isinstance(text, str) else text


def private_key(given: Any, passphrase: bytes | str | None = None) -> Ed25519PrivateKey:
    """A private key from an object of ``cryptography``, 32 raw bytes, PEM bytes or text, or a file with one of them.

    ``passphrase``: of a PEM that is encrypted; PassphraseError when it is missing or wrong.
    """
    return _key(given, True, _as_bytes(passphrase))  # type: ignore[no-any-return]


def public_key(given: Any) -> Ed25519PublicKey:
    """A public key; see :func:`private_key`."""
    return _key(given, False)  # type: ignore[no-any-return]


def key_id(key: Any) -> str:
    """SHA-256 of a public key, or of that of a private one (of its DER form), as ``openssl pkey`` gives it too."""
    from cryptography.hazmat.primitives import serialization as s

    public = key.public_key() if hasattr(key, "public_key") else key
    der = public.public_bytes(s.Encoding.DER, s.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def trusted_keys(given: Any) -> list[tuple[str, Ed25519PublicKey]]:
    """The keys that a verifier trusts, each with the name of its holder ("" when none is given).

    ``given``: one key, a list of keys, or a mapping from names of holders to keys or lists of keys.
    """
    if isinstance(given, Mapping):
        return [(str(name), key) for name, keys in given.items() for _, key in trusted_keys(keys)]
    if isinstance(given, list | tuple | set | frozenset):
        return [pair for one in given for pair in trusted_keys(one)]
    return [("", public_key(given))]


def find_signer(certificate: Certificate, given: Any) -> tuple[str, Ed25519PublicKey] | None:
    """The first trusted key that has signed, with its holder's name; see :func:`trusted_keys`. None if none of them has.

    Every key is tried with every signature: the key id in the envelope is a hint, and may be anything.
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
        if private and b"ENCRYPTED" in data and passphrase is None:
            raise PassphraseError("the private key is protected by a passphrase: give it")
        secret = passphrase if b"ENCRYPTED" in data else None  # none is needed for a key that is not protected
        key: Any = s.load_pem_private_key(bytes(data), secret) if private else s.load_pem_public_key(bytes(data))
    except PassphraseError:
        raise
    except (ValueError, TypeError) as error:
        if private and b"ENCRYPTED" in data:
            raise PassphraseError("the passphrase does not fit the private key") from None
        raise ValueError(f"no {what}: {error}") from None
    except Exception as error:  # cryptography has an error of its own for a key of an unknown kind
        raise ValueError(f"no {what}: {type(error).__name__}") from None
    if not isinstance(key, wanted):
        raise ValueError(f"no {what}: it is a {type(key).__name__}")
    return key


def sign(certificate: Certificate, key: Any, passphrase: bytes | str | None = None) -> Certificate:
    """The certificate with one Ed25519 signature more; sign again with another key to hand over from the one to the other."""
    private = private_key(key, passphrase)
    return certificate.signed(private.sign(certificate.message()), key_id(private))
