"""Certificates of erasure: plain data, written as canonical JSON.

The bytes that are signed are the UTF-8 JSON of all fields but ``signature``: keys sorted, separators "," and ":", no other
white space, ASCII only, no floating point numbers. Times are UTC in ISO 8601.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torchlssvm.canonical_json import canonical, loads
from torchlssvm.errors import VerificationError
from torchlssvm.untrusted import read_regular

__all__ = ["Certificate"]

FORMAT = "torchlssvm-certificate-1"

MAX_CERTIFICATE_BYTES = 2**28
"""Bytes of a certificate: four million samples."""

MAX_COUNT = 2**63 - 1
"""The largest integer of SQLite, and so the largest position and number of samples."""

NONCE_BYTES = 32
"""Random bytes before an id in its commitment SHA-256(nonce || id): as many as the hash has, so no guess can be tested."""

EVENT_KINDS = ("add", "remove", "relabel", "replace", "request")
COMMITMENT = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Certificate:
    """Samples that were erased from a store, and the state of its head since then.

    Attributes:
        events: for each event its id, kind, position in the journal, time, number of samples and their commitments.
        digest: of the head's statistics at ``position`` (None for a machine without one).
        position: of the journal when this was issued, and ``chain``, its hash there.
        grid: the resolution of the features, and ``normalize`` and ``scale`` where the head uses them; ``fingerprint``: the
            network they come from.
        shape: features and classes; ``samples``: how many the head holds.
        compacted: whether the bytes are gone from the files too, and not only from the tables.
        scope: ``choices`` made from data, and whether they were made again; ``snapshots`` and ``checkpoints`` that are older
            than the erasure and still hold the samples.
        library, time: what issued it, and when.
        signature: Ed25519, as hex; empty when unsigned.
    """

    events: list[dict[str, Any]]
    digest: str | None
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
    format: str = FORMAT
    signature: str = field(default="")

    def payload(self) -> bytes:
        """The bytes that are signed."""
        body = asdict(self)
        body.pop("signature")
        return canonical(body)

    def to_json(self) -> str:
        """The certificate as one line of canonical JSON."""
        return canonical(asdict(self)).decode()

    def signed(self, signature: bytes) -> Certificate:
        """The same with a signature."""
        return replace(self, signature=signature.hex())

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
        wanted = hashlib.sha256(secret + sample_id.encode()).hexdigest()
        return any(wanted in event["commitments"] for event in self.events)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

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
        """Read canonical JSON; VerificationError when it is no certificate."""
        try:
            data = loads(text)
        except ValueError as error:
            raise VerificationError(f"not a certificate: no JSON ({str(error)[:200]})") from None
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Any) -> Certificate:
        """Check the fields and their types; VerificationError names the first that is wrong."""
        if not isinstance(data, Mapping):
            raise VerificationError(f"not a certificate: expected an object, got {type(data).__name__}")
        if data.get("format") != FORMAT:
            raise VerificationError(
                f"not a certificate: its format is {str(data.get('format'))[:40]!r}, not {FORMAT!r}"
            )
        names = [f.name for f in fields(cls)]
        for name in names:
            if name not in data:
                raise VerificationError(f"not a certificate: {name!r} is missing")
        for name in data:
            if name not in names:
                raise VerificationError(f"not a certificate: unknown field {str(name)[:40]!r}")
        for name, kinds in FIELD_TYPES.items():
            value = data[name]
            if not isinstance(value, kinds) or (isinstance(value, bool) and name != "compacted"):
                raise VerificationError(f"not a certificate: {name!r} is a {type(value).__name__}")
        if not data["events"]:
            raise VerificationError("not a certificate: it names no event")
        if not 0 <= data["position"] <= MAX_COUNT or not 0 <= data["samples"] <= MAX_COUNT:
            raise VerificationError("not a certificate: its position or its number of samples is out of range")
        seen: set[int] = set()
        for event in data["events"]:
            if not isinstance(event, dict) or set(event) != set(EVENT_TYPES):
                raise VerificationError(f"not a certificate: an event needs {', '.join(EVENT_TYPES)}")
            for name, kind in EVENT_TYPES.items():
                if not isinstance(event[name], kind) or isinstance(event[name], bool):
                    raise VerificationError(
                        f"not a certificate: {name!r} of an event is a {type(event[name]).__name__}"
                    )
            if event["kind"] not in EVENT_KINDS or not 0 < event["position"] <= MAX_COUNT or event["position"] in seen:
                raise VerificationError("not a certificate: an event has an unknown kind, or a position that cannot be")
            seen.add(event["position"])
            if len(event["commitments"]) != event["samples"]:
                raise VerificationError("not a certificate: an event has another number of commitments than of samples")
            if not all(isinstance(c, str) and COMMITMENT.fullmatch(c) for c in event["commitments"]):
                raise VerificationError("not a certificate: a commitment is not 64 digits of lower-case hex")
        for name, kinds in INNER_TYPES.items():
            for key, value in (data[name] or {}).items():
                if not isinstance(value, kinds) or isinstance(value, bool):
                    raise VerificationError(f"not a certificate: {key[:40]!r} of {name!r} is a {type(value).__name__}")
        scope = data["scope"]
        if not isinstance(scope.get("choices", {}), dict) or not all(
            isinstance(v, str) for part in scope.values() for v in (part.values() if isinstance(part, dict) else part)
        ):
            raise VerificationError("not a certificate: 'scope' holds something else than texts")
        return cls(**data)


FIELD_TYPES: dict[str, Any] = {
    "events": list,
    "digest": str | None,
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
    "signature": str,
}
INNER_TYPES: dict[str, Any] = {"grid": str | int, "shape": int, "scope": dict | list}
EVENT_TYPES: dict[str, type] = {
    "event_id": str,
    "kind": str,
    "position": int,
    "time": str,
    "samples": int,
    "commitments": list,
}
