"""Certificates of erasure: an in-toto statement in a DSSE envelope.

The statement's subject is the hash of the store's journal, its predicate the fields of :class:`Certificate`; the schema is
``schemas/certificate.json``, beside this file. The payload is canonical JSON: keys sorted, separators "," and ":", no other
white space, ASCII only, no floating point numbers. Times are UTC in ISO 8601.

A certificate gives no digest of the statistics in clear: with the surviving rows that would confirm a guess about a sample
that leaves later. It gives a commitment, HMAC-SHA-256(key of the journal's position, digest); the key is in the store only,
until the first compaction after the state has changed.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torchlssvm import schema
from torchlssvm.audit.envelope import SCHEMAS, Envelope, Signature, signed_bytes
from torchlssvm.canonical_json import canonical, loads
from torchlssvm.errors import VerificationError
from torchlssvm.untrusted import read_regular

__all__ = ["Certificate"]

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:torchlssvm:erasure:v1"
"""Names the format of the predicate; another format has another number, and is refused by its name."""

SUBJECT_NAME = "journal"

MAX_CERTIFICATE_BYTES = 2**28
"""Bytes of a certificate: three million samples."""

NONCE_BYTES = 32
"""Random bytes before an id in its commitment SHA-256(nonce || id): as many as the hash has, so no guess can be tested."""


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
        return Envelope(self.payload(), self.signatures).to_json()

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
        try:
            text = read_regular(path, MAX_CERTIFICATE_BYTES)
        except ValueError as error:
            raise VerificationError(f"not a certificate: {error}") from None
        return cls.from_json(text)

    @classmethod
    def from_json(cls, text: str | bytes) -> Certificate:
        """Read an envelope; VerificationError when it does not hold a certificate."""
        return cls.from_dict(parse(text))

    @classmethod
    def from_dict(cls, data: Any) -> Certificate:
        """Check all fields of an envelope and its payload; VerificationError names the first that is wrong."""
        envelope = Envelope.from_dict(dict(data) if isinstance(data, Mapping) else data)
        found = cls._from_statement(parse(envelope.payload))
        if found.payload() != envelope.payload:
            raise VerificationError("not a certificate: its payload is not canonical JSON")
        return replace(found, signatures=envelope.signatures)

    def checked(self) -> Certificate:
        """The same certificate, read from its own JSON, so that every field is checked."""
        return self.from_json(self.to_json())

    @classmethod
    def _from_statement(cls, data: Any) -> Certificate:
        try:
            schema.check(data, schema.load(SCHEMAS / "certificate.json"))
            check_events(data["predicate"]["events"])
        except ValueError as error:
            raise VerificationError(f"not a certificate: {error}") from None
        return cls(**data["predicate"], chain=data["subject"][0]["digest"]["sha256"])


def sample_commitment(sample_id: str, nonce: bytes) -> str:
    """SHA-256(nonce || id), as hex: a sample, or a name of a request, as journal and certificate have it."""
    return hashlib.sha256(nonce + sample_id.encode()).hexdigest()


def parse(text: str | bytes) -> Any:
    """Parse JSON within bounds; VerificationError when it is not JSON."""
    try:
        return loads(text)
    except ValueError as error:
        raise VerificationError(f"not a certificate: not JSON ({str(error)[:200]})") from None


def check_events(events: list[dict[str, Any]]) -> None:
    """Check what the schema cannot say of the events of a certificate; ValueError names the first that is wrong."""
    if len({event["position"] for event in events}) < len(events):
        raise ValueError("two events have the same position")
    for event in events:
        if len(event["commitments"]) != event["samples"]:
            raise ValueError(f"an event of {event['samples']} samples has {len(event['commitments'])} commitments")
