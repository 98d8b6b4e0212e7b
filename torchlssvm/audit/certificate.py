"""Certificates of erasure: an in-toto statement in a DSSE envelope.

The statement's subject is the hash of the store's journal, its predicate the fields of :class:`Certificate`; the schema is
``schemas/certificate.json``, beside this file. The payload is canonical JSON: keys sorted, separators "," and ":", no other
white space, ASCII only, no floating point numbers. Times are UTC in ISO 8601.

A certificate gives no digest of the statistics in clear: with the surviving rows that would confirm a guess about a sample
that leaves later. It gives a commitment, HMAC-SHA-256(key of the journal's position, digest); the key is in the store only,
until the first compaction after the state has changed. An :class:`Opening` hands it to a verifier without the store.

The envelope (Dead Simple Signing Envelope, version 1) has signatures over type and payload:

    signed bytes = "DSSEv1" SP len(type) SP type SP len(payload) SP payload        (lengths in decimal, SP one space)

A signature's ``keyid`` is only a hint: a verifier tries the keys that it trusts.
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

__all__ = ["Certificate", "Opening", "Signature"]

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:torchlssvm:erasure:v1"
"""Names the format of the predicate; another format has another number, and is refused by its name."""

SUBJECT_NAME = "journal"

NONCE_BYTES = 32
"""Random bytes before an id in its commitment SHA-256(nonce || id): as many as the hash has, so no guess can be tested."""

SIGNATURE_BYTES = 64
"""Bytes of an Ed25519 signature."""

OPENING_FORMAT = "torchlssvm-opening-1"
OPENING_WARNING = (
    "with this file and the samples that are left, guesses about samples that leave later can be tested: give it only to whom "
    "must check the head without the store, and have it deleted afterwards"
)


@dataclass(frozen=True)
class Signature:
    """One signature of an envelope, and the hint which key made it."""

    keyid: str
    sig: bytes


@dataclass(frozen=True)
class Certificate:
    """Samples that were erased from a store, and the state of its head since then.

    Attributes:
        events: erasures ("remove") and the requests they answer ("request"), each with its id, kind, position in the journal,
            time, number of samples (of names, for a request) and their commitments.
        commitment: to the digest of the head's statistics at ``position`` (None for a machine without one).
        position: of the journal when this was issued, and ``chain``, its hash there.
        grid: the resolution of the features, and ``normalize`` and ``scale`` where the head uses them; ``fingerprint``: the
            network they come from.
        shape: features and classes; ``samples``: how many the head holds.
        compacted: whether the bytes are gone from the files too, and not only from the tables.
        scope: ``choices`` made from data, and whether they were made again; ``snapshots`` and ``checkpoints`` that are older
            than the erasure and still hold the samples.
        library, time: what issued it, and when.
        files: snapshots, checkpoints, exports and reports of the state at ``position``, each with a commitment to its bytes.
        requests: that the events answer, each with ``id``, ``received``, ``due`` and ``reason``; no person is named.
        signatures: of the envelope; none when it is unsigned.
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

    # -- writing -------------------------------------------------------------------------------------------------------

    def statement(self) -> dict[str, Any]:
        """The in-toto statement, as primitives."""
        return {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": SUBJECT_NAME, "digest": {"sha256": self.chain}}],
            "predicateType": PREDICATE_TYPE,
            "predicate": {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("chain", "signatures")},
        }

    def payload(self) -> bytes:
        """The statement as bytes."""
        return canonical(self.statement())

    def message(self) -> bytes:
        """The bytes that are signed."""
        return signed_bytes(self.payload())

    def to_json(self) -> str:
        """The envelope as one line of canonical JSON."""
        signatures = [{"keyid": s.keyid, "sig": base64.b64encode(s.sig).decode()} for s in self.signatures]
        payload = base64.b64encode(self.payload()).decode()
        return canonical({"payload": payload, "payloadType": PAYLOAD_TYPE, "signatures": signatures}).decode()

    def signed(self, signature: bytes, keyid: str = "") -> Certificate:
        """The same with one more signature, which replaces one under the same key id."""
        kept = [s for s in self.signatures if not keyid or s.keyid != keyid]
        return replace(self, signatures=(*kept, Signature(keyid, signature)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    # -- asking --------------------------------------------------------------------------------------------------------

    @property
    def erased(self) -> int:
        """The number of samples its events removed."""
        return sum(event["samples"] for event in self.events if event["kind"] == "remove")

    def covers(self, sample_id: str, nonce: bytes | str) -> bool:
        """True if a sample is among those that its events erased; only the nonce from its receipt can tell.

        A nonce has exactly 32 bytes: a longer one could contain the beginning of another id.
        """
        secret = bytes.fromhex(nonce) if isinstance(nonce, str) else nonce
        if len(secret) != NONCE_BYTES:
            return False
        wanted = sample_commitment(unicodedata.normalize("NFC", sample_id), secret)  # as the store has it
        return any(wanted in event["commitments"] for event in self.events if event["kind"] == "remove")

    def opens(self, key: bytes, digest: str | None) -> bool:
        """True if the digest is the one that was committed to under a key; both None for a machine without a digest."""
        if self.commitment is None or digest is None:
            return self.commitment is digest is None
        return hmac.compare_digest(hmac.digest(key, digest.encode(), "sha256").hex(), self.commitment)

    # -- reading -------------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Certificate:
        """Read it from a regular file; VerificationError when it holds no certificate."""
        return cls.from_dict(read_document(path, "certificate"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Certificate:
        """Read an envelope; VerificationError when it does not hold a certificate."""
        return cls.from_dict(read_document(text.encode() if isinstance(text, str) else text, "certificate"))

    @classmethod
    def from_dict(cls, data: Any) -> Certificate:
        """Check all fields of an envelope and its payload; VerificationError names the first that is wrong."""
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
        """The same certificate, read from its own JSON, so that every field is checked."""
        return self.from_json(self.to_json())

    def _contradiction(self) -> str | None:
        """What is wrong beyond what the schema can say; None if nothing is."""
        if any(len(signature.sig) != SIGNATURE_BYTES for signature in self.signatures):
            return f"a signature does not have {SIGNATURE_BYTES} bytes"
        if len({event["position"] for event in self.events}) < len(self.events):
            return "two events have the same position"
        for event in self.events:
            if len(event["commitments"]) != event["samples"]:
                return f"an event of {event['samples']} samples has {len(event['commitments'])} commitments"
        return None


@dataclass(frozen=True)
class Opening:
    """The key of the commitment to the state at one position; the hash of the journal there says which.

    With it, a holder of the rows that are left can test guesses about samples that were in this state and leave later. Give it
    to those only who must check a head without its store, and let them delete it afterwards.
    """

    chain: str
    key: str
    format: str = OPENING_FORMAT

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a new file that only its owner can read."""
        write_private(path, canonical(asdict(self)) + b"\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Opening:
        """Read it from a regular file; VerificationError when it holds none."""
        return cls.from_dict(read_document(path, "opening"))

    @classmethod
    def from_dict(cls, data: Any) -> Opening:
        """Check the fields; VerificationError names the first that is wrong."""
        return cls(**check_document(data, "opening"))

    def secret(self) -> bytes:
        """The key as bytes."""
        return bytes.fromhex(self.key)


def signed_bytes(payload: bytes, payload_type: str = PAYLOAD_TYPE) -> bytes:
    """The pre-authentication encoding of DSSE.

    >>> signed_bytes(b"hello world", "http://example.com/HelloWorld")
    b'DSSEv1 29 http://example.com/HelloWorld 11 hello world'
    """
    name = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(name), name, len(payload), payload)


def from_base64(text: str) -> bytes:
    """Decode standard base64 with padding, written in the one way it can be written."""
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except ValueError:
        data = b""
    if base64.b64encode(data).decode() != text:
        raise VerificationError("not a certificate: payload and signatures are base64")
    return data


def sample_commitment(sample_id: str, nonce: bytes) -> str:
    """SHA-256(nonce || id), as hex: a sample, or a name of a request, as journal and certificate have it."""
    return hashlib.sha256(nonce + sample_id.encode()).hexdigest()
