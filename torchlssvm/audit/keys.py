"""Ed25519 keys and signatures of certificates. This module needs the package ``cryptography`` (extra ``audit``)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlssvm.audit.certificate import Certificate
from torchlssvm.audit.documents import write_private
from torchlssvm.errors import TorchLSSVMError
from torchlssvm.untrusted import read_regular

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

__all__ = ["PassphraseError", "find_signer", "key_id", "new_key", "private_key", "public_key", "sign", "trusted_keys"]


class PassphraseError(ValueError):
    """A private key needs a passphrase, and the passphrase is missing or wrong."""


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise TorchLSSVMError("signatures need the package cryptography: pip install 'torchlssvm[audit]'") from None
    return ed25519


def new_key(path: str | os.PathLike[str], passphrase: bytes | str | None = None) -> Path:
    """Write a new private key (PEM, readable by its owner only) and its public key, and return the path of the public key.

    Pass a ``passphrase`` to encrypt the private key.
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

    Pass the ``passphrase`` of an encrypted PEM. Raises PassphraseError if the passphrase is missing or wrong.
    """
    kind = _ed25519().Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    def read(pem: bytes) -> Any:
        if b"ENCRYPTED" not in pem:
            return load_pem_private_key(pem, None)
        if passphrase is None:
            raise PassphraseError("the private key needs a passphrase")
        try:
            return load_pem_private_key(pem, _as_bytes(passphrase))
        except ValueError:
            raise PassphraseError("wrong passphrase for the private key") from None

    return _key(given, kind, kind.from_private_bytes, read)  # type: ignore[no-any-return]


def public_key(given: Any) -> Ed25519PublicKey:
    """Load a public key from any of the forms that :func:`private_key` accepts."""
    kind = _ed25519().Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    return _key(given, kind, kind.from_public_bytes, load_pem_public_key)  # type: ignore[no-any-return]


def _key(given: Any, kind: type, from_raw: Callable[[bytes], Any], from_pem: Callable[[bytes], Any]) -> Any:
    data = given.encode() if isinstance(given, str) and "-----BEGIN" in given else given
    if isinstance(data, str | os.PathLike):
        data = read_regular(data, 2**16)  # a PEM file has 120 bytes, an encrypted one 300
    if isinstance(data, bytes | bytearray):
        try:
            data = from_raw(bytes(data)) if len(data) == 32 else from_pem(bytes(data))
        except PassphraseError:
            raise
        except Exception as error:  # cryptography raises its own error for unknown kinds of keys
            raise ValueError(f"not an {kind.__name__}: {error}") from None
    if not isinstance(data, kind):
        raise ValueError(f"an {kind.__name__} is 32 bytes, a PEM or a path; got {type(data).__name__}")
    return data


def key_id(key: Any) -> str:
    """Return the SHA-256 of a public key in DER, as ``openssl pkey`` writes it. A private key has the id of its public key."""
    from cryptography.hazmat.primitives import serialization as s

    public = key.public_key() if hasattr(key, "public_key") else key
    der = public.public_bytes(s.Encoding.DER, s.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def trusted_keys(given: Any) -> dict[str, list[Ed25519PublicKey]]:
    """Return the keys that a verifier trusts, each with the name of its holder ("" for a holder without a name).

    ``given`` is one key, a list of keys, or a mapping from names of holders to keys or lists of keys.
    """
    holders = given if isinstance(given, Mapping) else {"": given}
    return {
        str(name): [public_key(key) for key in (keys if isinstance(keys, list | tuple | set | frozenset) else [keys])]
        for name, keys in holders.items()
    }


def find_signer(certificate: Certificate, given: Any) -> tuple[str, Ed25519PublicKey] | None:
    """Find the first of the :func:`trusted_keys` that signed the certificate. Returns the key and its holder, or None.

    Every key is tried with every signature, because the key id in the envelope is only a hint.
    """
    _ed25519()
    from cryptography.exceptions import InvalidSignature

    message = certificate.message()
    trusted = [(name, key) for name, keys in trusted_keys(given).items() for key in keys]
    for signature in certificate.signatures:
        for name, key in trusted:
            try:
                key.verify(signature.sig, message)
            except InvalidSignature:
                continue
            return name, key
    return None


def sign(certificate: Certificate, key: Any, passphrase: bytes | str | None = None) -> Certificate:
    """Return the certificate with one more Ed25519 signature. To change keys, sign with the new key as well."""
    private = private_key(key, passphrase)
    return certificate.signed(private.sign(certificate.message()), key_id(private))
