"""Certificates of erasure: an in-toto statement in a DSSE envelope.

The statement's subject is the hash of the store's journal, its predicate the fields of :class:`Certificate`; the schema is
``docs/certificate.schema.json``. The payload is canonical JSON: keys sorted, separators "," and ":", no other white space,
ASCII only, no floating point numbers. Times are UTC in ISO 8601.

A certificate gives no digest of the statistics in clear: with the surviving rows that would confirm a guess about a sample
that leaves later. It gives a commitment, HMAC-SHA-256(key of the journal's position, digest); the key is in the store only,
until the first compaction after the state has changed.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchlssvm.audit import version_0_1
from torchlssvm.audit.envelope import Envelope, Signature, signed_bytes
from torchlssvm.canonical_json import canonical, loads
from torchlssvm.errors import VerificationError
from torchlssvm.untrusted import read_regular

__all__ = ["Certificate"]

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:torchlssvm:erasure:v1"
"""Names the fields of the predicate; other fields would have another name."""

SUBJECT_NAME = "journal"

MAX_CERTIFICATE_BYTES = 2**28
"""Bytes of a certificate: three million samples."""

MAX_COUNT = 2**63 - 1
"""The largest integer of SQLite, and so the largest position and number of samples."""

NONCE_BYTES = 32
"""Random bytes before an id in its commitment SHA-256(nonce || id): as many as the hash has, so no guess can be tested."""

EVENT_KINDS = ("add", "remove", "relabel", "replace", "request")
REQUEST_FIELDS = ("id", "received", "due", "reason")
HEX_64 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Certificate:
    """Samples that were erased from a store, and the state of its head since then.

    Attributes:
        events: for each event its id, kind, position in the journal, time, number of samples and their commitments.
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
        digest: in clear, in a certificate of version 0.1.0 only.
        format: the type of the predicate, or the format of version 0.1.0.
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
    digest: str | None = None
    format: str = PREDICATE_TYPE

    # -- writing -------------------------------------------------------------------------------------------------------

    def statement(self) -> dict[str, Any]:
        """The in-toto statement, as primitives."""
        return {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": SUBJECT_NAME, "digest": {"sha256": self.chain}}],
            "predicateType": PREDICATE_TYPE,
            "predicate": {name: getattr(self, name) for name in FIELD_TYPES if name != "chain"},
        }

    def payload(self) -> bytes:
        """The statement as bytes; for a certificate of version 0.1.0, its JSON without the signature."""
        return version_0_1.payload(self) if self.old else canonical(self.statement())

    def message(self) -> bytes:
        """The bytes that are signed."""
        return self.payload() if self.old else signed_bytes(self.payload())

    def to_json(self) -> str:
        """The envelope as one line of canonical JSON."""
        return version_0_1.to_json(self) if self.old else Envelope(self.payload(), self.signatures).to_json()

    def signed(self, signature: bytes, keyid: str = "") -> Certificate:
        """The same with one signature more, which takes the place of one under the same key id."""
        if self.old:
            raise ValueError(f"{version_0_1.MISSING_IN_0_1}: it is not signed again, issue a new one")
        kept = [s for s in self.signatures if not keyid or s.keyid != keyid]
        return replace(self, signatures=(*kept, Signature(keyid, signature)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    # -- asking --------------------------------------------------------------------------------------------------------

    @property
    def old(self) -> bool:
        """True for a certificate of version 0.1.0."""
        return self.format == version_0_1.CERTIFICATE_FORMAT_0_1

    @property
    def erased(self) -> int:
        """The number of samples its events removed."""
        return sum(event["samples"] for event in self.events if event["kind"] == "remove")

    def covers(self, sample_id: str, nonce: bytes | str) -> bool:
        """True if a sample is among those of its events; only the nonce from its receipt can tell.

        A nonce has exactly 32 bytes: a longer one could take the beginning of another id along.
        """
        secret = bytes.fromhex(nonce) if isinstance(nonce, str) else nonce
        if len(secret) != NONCE_BYTES:
            return False
        wanted = sample_commitment(unicodedata.normalize("NFC", sample_id), secret)  # as the store has it
        return any(wanted in event["commitments"] for event in self.events)

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
        """Read an envelope, or the JSON of version 0.1.0; VerificationError when it is no certificate."""
        return cls.from_dict(parse(text))

    @classmethod
    def from_dict(cls, data: Any) -> Certificate:
        """Check the fields and their types; VerificationError names the first that is wrong."""
        if not isinstance(data, Mapping):
            raise VerificationError(f"not a certificate: expected an object, got {type(data).__name__}")
        if "payloadType" not in data and "format" in data:
            body = version_0_1.read(dict(data))
            check_certificate_fields(body, version_0_1.FIELD_TYPES_0_1, version_0_1.FILLED_FIELDS_0_1)
            return cls(**body)
        envelope = Envelope.from_dict(dict(data))
        found = cls._from_statement(parse(envelope.payload))
        if found.payload() != envelope.payload:
            raise VerificationError("not a certificate: its payload is not canonical JSON")
        return replace(found, signatures=envelope.signatures)

    def checked(self) -> Certificate:
        """The same certificate, read from its own payload: every field is checked."""
        if self.old or self.signatures:
            return self.from_json(self.to_json())
        return self._from_statement(parse(self.payload()))

    @classmethod
    def _from_statement(cls, data: Any) -> Certificate:
        if not isinstance(data, dict) or set(data) != {"_type", "subject", "predicateType", "predicate"}:
            raise VerificationError("not a certificate: the payload is no in-toto statement with a predicate")
        if data["_type"] != STATEMENT_TYPE:
            raise VerificationError(
                f"not a certificate: the statement is {str(data['_type'])[:60]!r}, not {STATEMENT_TYPE!r}"
            )
        if data["predicateType"] != PREDICATE_TYPE:
            raise VerificationError(
                f"not a certificate: it states {str(data['predicateType'])[:60]!r}; this library reads {PREDICATE_TYPE!r}"
            )
        try:
            ((name, chain),) = [(s["name"], s["digest"]["sha256"]) for s in data["subject"]]
            if data["subject"] != [{"name": SUBJECT_NAME, "digest": {"sha256": chain}}] or name != SUBJECT_NAME:
                raise ValueError
        except (TypeError, KeyError, ValueError):
            raise VerificationError("not a certificate: its subject is not the hash of one journal") from None
        predicate = data["predicate"]
        if not isinstance(predicate, dict) or "chain" in predicate:
            raise VerificationError("not a certificate: its predicate is not that of an erasure")
        check_certificate_fields(predicate | {"chain": chain}, FIELD_TYPES)
        return cls(**predicate, chain=chain)


FIELD_TYPES: dict[str, Any] = {
    "events": list,
    "commitment": str | None,
    "position": int,
    "chain": str,
    "grid": dict | None,
    "fingerprint": str | None,
    "shape": dict,
    "samples": int,
    "compacted": bool,
    "scope": dict,
    "library": str,
    "time": str,
    "files": dict,
    "requests": list,
}
INNER_TYPES: dict[str, Any] = {"grid": str | int, "shape": int, "scope": dict | list, "files": str}
EVENT_TYPES: dict[str, type] = {
    "event_id": str,
    "kind": str,
    "position": int,
    "time": str,
    "samples": int,
    "commitments": list,
}


def sample_commitment(sample_id: str, nonce: bytes) -> str:
    """SHA-256(nonce || id), as hex: a sample, or a name of a request, as journal and certificate have it."""
    return hashlib.sha256(nonce + sample_id.encode()).hexdigest()


def parse(text: str | bytes) -> Any:
    """JSON within bounds; VerificationError when it is none."""
    try:
        return loads(text)
    except ValueError as error:
        raise VerificationError(f"not a certificate: no JSON ({str(error)[:200]})") from None


def check_certificate_fields(data: dict[str, Any], types: dict[str, Any], others: tuple[str, ...] = ()) -> None:
    """Check the fields and what is in them; VerificationError names the first that is wrong.

    ``types``: of the fields that must be there; ``others``: fields that were checked before.
    """
    for name, kinds in types.items():
        if name not in data:
            raise VerificationError(f"not a certificate: {name!r} is missing")
        value = data[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and name != "compacted"):
            raise VerificationError(f"not a certificate: {name!r} is a {type(value).__name__}")
    for name in data:
        if name not in types and name not in others:
            raise VerificationError(f"not a certificate: unknown field {str(name)[:40]!r}")
    if not 0 <= data["position"] <= MAX_COUNT or not 0 <= data["samples"] <= MAX_COUNT:
        raise VerificationError("not a certificate: its position or its number of samples is out of range")
    if data.get("commitment") is not None and not HEX_64.fullmatch(data["commitment"]):
        raise VerificationError("not a certificate: 'commitment' is not 64 digits of lower-case hex")
    check_events(data["events"])
    for name, kinds in INNER_TYPES.items():
        for key, value in (data.get(name) or {}).items():
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise VerificationError(f"not a certificate: {key[:40]!r} of {name!r} is a {type(value).__name__}")
    scope = data["scope"]
    if not isinstance(scope.get("choices", {}), dict) or not all(
        isinstance(v, str) for part in scope.values() for v in (part.values() if isinstance(part, dict) else part)
    ):
        raise VerificationError("not a certificate: 'scope' holds something else than texts")
    for request in data.get("requests", []):
        texts = isinstance(request, dict) and all(isinstance(v, str) for v in request.values())
        if not texts or set(request) != set(REQUEST_FIELDS):
            raise VerificationError(f"not a certificate: a request needs {', '.join(REQUEST_FIELDS)}, as texts")


def check_events(events: list[Any]) -> None:
    """Check the events of a certificate."""
    if not events:
        raise VerificationError("not a certificate: it names no event")
    seen: set[int] = set()
    for event in events:
        if not isinstance(event, dict) or set(event) != set(EVENT_TYPES):
            raise VerificationError(f"not a certificate: an event needs {', '.join(EVENT_TYPES)}")
        for name, kind in EVENT_TYPES.items():
            if not isinstance(event[name], kind) or isinstance(event[name], bool):
                raise VerificationError(f"not a certificate: {name!r} of an event is a {type(event[name]).__name__}")
        if event["kind"] not in EVENT_KINDS or not 0 < event["position"] <= MAX_COUNT or event["position"] in seen:
            raise VerificationError("not a certificate: an event has an unknown kind, or a position that cannot be")
        seen.add(event["position"])
        if len(event["commitments"]) != event["samples"]:
            raise VerificationError("not a certificate: an event has another number of commitments than of samples")
        if not all(isinstance(c, str) and HEX_64.fullmatch(c) for c in event["commitments"]):
            raise VerificationError("not a certificate: a commitment is not 64 digits of lower-case hex")
