"""Certificates of erasure: an in-toto statement in a DSSE envelope.

The subject of the statement is the hash of the store's journal. The predicate has the fields of :class:`Certificate`; its
schema is ``schemas/certificate.json``. So that equal statements have equal bytes, the payload is canonical JSON: sorted keys,
separators "," and ":", no other white space, ASCII only, no floating point numbers. Times are UTC in ISO 8601.

A certificate contains no plain digest of the statistics, because anyone with the digest and the remaining rows could confirm a
guess about a sample that is erased later. Instead, it contains a commitment: HMAC-SHA-256(key of the journal's position,
digest). The key stays in the store until the first compaction after the state has changed, so until then the certificate can
be compared with the state. An :class:`Opening` gives the key to a verifier who does not have the store.

The envelope (Dead Simple Signing Envelope, version 1) contains signatures over the type and the payload:

    signed bytes = "DSSEv1" SP len(type) SP type SP len(payload) SP payload        (lengths in decimal, SP one space)

The ``keyid`` of a signature is only a hint: a verifier tries all the keys that it trusts.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import unicodedata
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torchlssvm.audit.documents import check_document, read_document, write_private
from torchlssvm.canonical_json import canonical
from torchlssvm.errors import VerificationError
from torchlssvm.files import refuse_in_store
from torchlssvm.linear.data_choices import ChoiceState
from torchlssvm.wording import counted

__all__ = ["Certificate", "Opening", "Signature"]

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:torchlssvm:erasure:v1"
"""The format of the predicate. Any other value is refused by name."""

SUBJECT_NAME = "journal"

NONCE_BYTES = 32
"""Random bytes before the id in a commitment SHA-256(nonce || id). They make it impossible to test a guess."""

OPENING_FORMAT = "torchlssvm-opening-1"
OPENING_WARNING = (
    "anyone who has this file and the remaining samples can test guesses about samples that are erased later. Give it only to "
    "people who must check the head without the store, and ask them to delete it afterwards"
)


@dataclass(frozen=True)
class Signature:
    """One signature of an envelope, with a hint about the key."""

    keyid: str
    sig: bytes


@dataclass(frozen=True, repr=False)
class Certificate:
    """State which samples were erased from a store, and commit to the state of the head since then.

    Attributes:
        events: the erasures ("remove") and the requests they answer ("request"), each with its id, kind, position in the
            journal, time, number of samples (or names) and commitments.
        commitment: commitment to the digest of the head's statistics at ``position``; None for a machine without a digest.
        position: number of entries in the journal when the certificate was issued; ``chain`` is the hash of the journal there.
        grid: the resolution of the features, and ``normalize``, ``scale`` and ``targets`` if the head uses them.
        fingerprint: hash of the network that computes the features.
        shape: number of features and classes; ``samples``: number of remaining samples.
        compacted: True if the files of the store were rewritten after the erasure, so that the bytes are gone.
        scope: ``choices`` made from data, and whether they were made again; ``snapshots`` and ``checkpoints`` from before the
            erasure, which still contain the samples.
        library, time: the version of the library that issued the certificate, and the time.
        files: snapshots, checkpoints, exports and reports of the state at ``position``, each with a commitment to its bytes.
        requests: the requests that the events answer, each with ``id``, ``received``, ``due`` and ``reason``, without names.
        signatures: signatures of the envelope; empty for an unsigned certificate.
    """

    events: list[dict[str, Any]]
    commitment: str | None
    position: int
    chain: str
    grid: dict[str, Any] | None
    fingerprint: str | None
    shape: dict[str, int]
    samples: int
    compacted: bool
    scope: dict[str, Any]
    library: str
    time: str
    files: dict[str, str] = field(default_factory=dict)
    requests: list[dict[str, str]] = field(default_factory=list)
    signatures: tuple[Signature, ...] = ()

    def __repr__(self) -> str:
        erasures = sum(event["kind"] == "remove" for event in self.events)
        what = f"{counted(self.erased, 'sample')} erased in {counted(erasures, 'event')}, {self.samples:,} remaining"
        state = f"{'' if self.compacted else 'not '}compacted, {counted(len(self.signatures), 'signature')}"
        return f"Certificate({what}, {state}, issued {self.time[:19]} at position {self.position})"

    # -- writing -------------------------------------------------------------------------------------------------------

    def statement(self) -> dict[str, Any]:
        """Return the in-toto statement as primitives."""
        return {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": SUBJECT_NAME, "digest": {"sha256": self.chain}}],
            "predicateType": PREDICATE_TYPE,
            "predicate": {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("chain", "signatures")},
        }

    def payload(self) -> bytes:
        """Return the statement as bytes."""
        return canonical(self.statement())

    def message(self) -> bytes:
        """Return the bytes that are signed."""
        return signed_bytes(self.payload())

    def to_json(self) -> str:
        """Return the envelope as one line of canonical JSON."""
        signatures = [{"keyid": s.keyid, "sig": base64.b64encode(s.sig).decode()} for s in self.signatures]
        payload = base64.b64encode(self.payload()).decode()
        return canonical({"payload": payload, "payloadType": PAYLOAD_TYPE, "signatures": signatures}).decode()

    def signed(self, signature: bytes, keyid: str = "") -> Certificate:
        """Return a copy with one more signature, which replaces an existing signature with the same key id."""
        kept = [s for s in self.signatures if not keyid or s.keyid != keyid]
        return replace(self, signatures=(*kept, Signature(keyid, signature)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the certificate to a file. Raises ValueError if the path is inside a store."""
        refuse_in_store(path)
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    # -- asking --------------------------------------------------------------------------------------------------------

    @property
    def erased(self) -> int:
        """Number of erased samples."""
        return sum(event["samples"] for event in self.events if event["kind"] == "remove")

    def covers(self, sample_id: str, nonce: bytes | str) -> bool:
        """Return True if a sample is among the erased ones. Pass the nonce of the sample from the receipt.

        A nonce must have exactly 32 bytes, because a longer nonce could contain the beginning of another id.
        """
        secret = bytes.fromhex(nonce) if isinstance(nonce, str) else nonce
        if len(secret) != NONCE_BYTES:
            return False
        wanted = sample_commitment(unicodedata.normalize("NFC", sample_id), secret)  # as the store has it
        return any(wanted in event["commitments"] for event in self.events if event["kind"] == "remove")

    def opens(self, key: bytes, digest: str | None) -> bool:
        """Return True if the commitment is to this digest under this key, or if there is neither commitment nor digest."""
        if self.commitment is None or digest is None:
            return self.commitment is digest is None
        return hmac.compare_digest(hmac.digest(key, digest.encode(), "sha256").hex(), self.commitment)

    # -- reading -------------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Certificate:
        """Read a certificate from a regular file. Raises VerificationError if the file contains no certificate."""
        return cls.from_dict(read_document(path, "certificate"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Certificate:
        """Read an envelope. Raises VerificationError if it contains no certificate."""
        return cls.from_dict(read_document(text.encode() if isinstance(text, str) else text, "certificate"))

    @classmethod
    def from_dict(cls, data: Any) -> Certificate:
        """Create a certificate from an envelope, and check all fields. Raises VerificationError with the first wrong field."""
        envelope = check_document(data, "envelope")
        signatures = [Signature(s.get("keyid", ""), from_base64(s["sig"])) for s in envelope["signatures"]]
        payload = from_base64(envelope["payload"])
        statement = check_document(read_document(payload, "certificate"), "certificate")
        found = cls(
            **statement["predicate"],
            chain=statement["subject"][0]["digest"]["sha256"],
            signatures=tuple(signatures),
        )
        reason = found._contradiction()
        if found.payload() != payload:
            reason = "its payload is not canonical JSON"
        if reason is not None:
            raise VerificationError(f"not a certificate: {reason}")
        return found

    def checked(self) -> Certificate:
        """Return the certificate read again from its own JSON, so that every field is checked."""
        return self.from_json(self.to_json())

    def _contradiction(self) -> str | None:
        """Return a contradiction that the schema cannot express, or None."""
        if any(len(signature.sig) != 64 for signature in self.signatures):
            return "a signature does not have the 64 bytes of Ed25519"
        if len({event["position"] for event in self.events}) < len(self.events):
            return "two events have the same position"
        for event in self.events:
            if len(event["commitments"]) != event["samples"]:
                return f"an event of {event['samples']} samples has {len(event['commitments'])} commitments"
        return None


@dataclass(frozen=True, repr=False)
class Opening:
    """The key of the commitment to one state, and the hash of the journal at that state; see ``OPENING_WARNING``."""

    chain: str
    key: str
    format: str = OPENING_FORMAT

    def __repr__(self) -> str:  # without the key
        return f"Opening(chain={self.chain[:16]!r}...)"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the opening to a new file that only its owner can read."""
        write_private(path, canonical(asdict(self)) + b"\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Opening:
        """Read an opening from a regular file. Raises VerificationError if the file contains no opening."""
        return cls.from_dict(read_document(path, "opening"))

    @classmethod
    def from_dict(cls, data: Any) -> Opening:
        """Create an opening from its fields. Raises VerificationError with the first wrong field."""
        return cls(**check_document(data, "opening"))

    def secret(self) -> bytes:
        """Return the key as bytes."""
        return bytes.fromhex(self.key)


def signed_bytes(payload: bytes, payload_type: str = PAYLOAD_TYPE) -> bytes:
    """Return the pre-authentication encoding of DSSE.

    >>> signed_bytes(b"hello world", "http://example.com/HelloWorld")
    b'DSSEv1 29 http://example.com/HelloWorld 11 hello world'
    """
    name = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(name), name, len(payload), payload)


def from_base64(text: str) -> bytes:
    """Decode standard base64 with padding, and refuse any other spelling of the same bytes."""
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except ValueError:
        data = b""
    if base64.b64encode(data).decode() != text:
        raise VerificationError("not a certificate: payload and signatures are base64")
    return data


def public_choices(head: Any, key: bytes | None) -> dict[str, dict[str, str]]:
    """Choices that a linear head made from data: the method in plain text, the value of a rho or calibration as a commitment.

    Such a value reveals as much as a digest. If a key is given, the commitment is HMAC(key, "choice " || canonical JSON of its
    facts).
    """
    out = {}
    for name, choice in head.choices.items():
        secret = name in ("rho", "calibration") and bool(choice.value)
        state = choice.state.value
        if choice.state is ChoiceState.STALE:
            state = "void" if name == "calibration" else "kept"
        out[name] = {"state": state, "how": str(replace(choice, value="") if secret else choice)}
        if secret and key is not None:
            out[name]["commitment"] = hmac.digest(key, b"choice " + canonical(choice.facts()), "sha256").hex()
    return out


def sample_commitment(sample_id: str, nonce: bytes) -> str:
    """Return SHA-256(nonce || id) as hex: the commitment to a sample or to a name in a request."""
    return hashlib.sha256(nonce + sample_id.encode()).hexdigest()
