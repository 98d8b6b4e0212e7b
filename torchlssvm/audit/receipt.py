"""Receipts of erasures: the file that tells whom a certificate is about.

A certificate holds commitments SHA-256(nonce || id) only. Its receipt holds the ids, their nonces and the request, so it names
people: it is kept apart from store and certificate for as long as the answer may be questioned, and destroyed then.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchlssvm.audit.certificate import Certificate, sample_commitment
from torchlssvm.canonical_json import loads
from torchlssvm.errors import VerificationError
from torchlssvm.untrusted import read_regular
from torchlssvm.wording import counted, listed

__all__ = ["ErasureReceipt"]

RECEIPT_FORMAT = "torchlssvm-receipt-1"

MAX_RECEIPT_BYTES = 2**31
"""Bytes of a receipt: more than a store can keep of one erasure, which SQLite limits to a billion."""

HEX_NONCE = re.compile("[0-9a-f]{64}")
EVENT_FIELDS: dict[str, type] = {"event_id": str, "position": int, "ids": list, "nonces": list}
NAME_FIELDS: dict[str, type] = {"kind": str, "name": str, "nonce": str}


@dataclass(frozen=True)
class ErasureReceipt:
    """The samples of some erasures and their nonces.

    Attributes:
        events: for each erasure its event id, its position in the journal, the ids of its samples and a nonce for each (hex).
        request: the request they belong to: ``id``, ``received``, ``due``, and ``names``, each with ``kind`` ("subject" or
            "id"), ``name`` and the ``nonce`` of its commitment in the journal; None without a request.
        time: when the receipt was made.
    """

    events: list[dict[str, Any]]
    request: dict[str, Any] | None
    time: str
    format: str = field(default=RECEIPT_FORMAT)

    @property
    def ids(self) -> list[str]:
        """The ids of all samples."""
        return [i for event in self.events for i in event["ids"]]

    @property
    def subjects(self) -> list[str]:
        """The subjects that the request names."""
        return [n["name"] for n in (self.request or {"names": []})["names"] if n["kind"] == "subject"]

    @property
    def samples(self) -> int:
        """The number of samples."""
        return len(self.ids)

    def check(self, certificate: Certificate) -> str:
        """Check that a certificate is about these samples, and say so in words; VerificationError if it is not."""
        certified = {event["event_id"]: event for event in certificate.events if event["kind"] == "remove"}
        for event in self.events:
            if event["event_id"] not in certified:
                raise VerificationError(
                    f"the certificate is not about the erasure {event['event_id'][:80]!r} of the receipt"
                )
            known = set(certified[event["event_id"]]["commitments"])
            for sample, nonce in zip(event["ids"], event["nonces"], strict=True):
                if sample_commitment(sample, bytes.fromhex(nonce)) not in known:
                    raise VerificationError(f"the certificate is not about the sample {sample[:80]!r} of the receipt")
            if len(known) != len(set(event["ids"])) or len(known) != len(event["ids"]):
                raise VerificationError(
                    f"the receipt names {len(event['ids'])} samples of an erasure of another number"
                )
        if self.request is not None and any(event["event_id"] == self.request["id"] for event in certificate.events):
            for name in self.request["names"]:
                if not certificate.covers(name["name"], name["nonce"]):
                    raise VerificationError(f"the certificate's request does not name {name['name'][:80]!r}")
        more = sum(e["samples"] for e in certified.values()) - self.samples
        others = f"; not in this receipt: {counted(more, 'further sample')} of the certificate" if more else ""
        request = f", request {self.request['id']}" if self.request else ""
        whose = f" of {listed(self.subjects)}" if self.subjects else ""
        return f"the certificate is about {counted(self.samples, 'sample')}{whose}{request}: {listed(self.ids)}{others}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a new file that only its owner can read, durable when this returns; FileExistsError if there is one."""
        text = json.dumps(asdict(self), indent=1, ensure_ascii=True) + "\n"
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "w", encoding="ascii") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            Path(path).unlink(missing_ok=True)  # no incomplete receipt stays
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ErasureReceipt:
        """Read it from a regular file; VerificationError when it holds no receipt."""
        try:
            data = loads(read_regular(path, MAX_RECEIPT_BYTES))
        except ValueError as error:
            raise VerificationError(f"not a receipt: {str(error)[:200]}") from None
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Any) -> ErasureReceipt:
        """Check the fields and their types; VerificationError names the first that is wrong."""
        if not isinstance(data, Mapping) or data.get("format") != RECEIPT_FORMAT:
            raise VerificationError(f"not a receipt: its format is not {RECEIPT_FORMAT!r}")
        if set(data) != {"format", "events", "request", "time"} or not isinstance(data["time"], str):
            raise VerificationError("not a receipt: it needs events, request and time")
        if not isinstance(data["events"], list) or not data["events"]:
            raise VerificationError("not a receipt: it names no erasure")
        for event in data["events"]:
            check_receipt_fields(event, EVENT_FIELDS, "an erasure")
            if len(event["ids"]) != len(event["nonces"]) or not all(isinstance(i, str) for i in event["ids"]):
                raise VerificationError("not a receipt: an erasure needs a nonce for each id")
            if not all(isinstance(n, str) and HEX_NONCE.fullmatch(n) for n in event["nonces"]):
                raise VerificationError("not a receipt: a nonce is not 64 digits of lower-case hex")
        request = data["request"]
        if request is not None:
            check_receipt_fields(request, {"id": str, "received": str, "due": str, "names": list}, "the request")
            for name in request["names"]:
                check_receipt_fields(name, NAME_FIELDS, "a name of the request")
                if not HEX_NONCE.fullmatch(name["nonce"]):
                    raise VerificationError("not a receipt: a nonce is not 64 digits of lower-case hex")
        return cls(**data)


def check_receipt_fields(value: Any, types: Mapping[str, type], what: str) -> None:
    """VerificationError unless a value is a dict with just these fields, each of its type."""
    if not isinstance(value, dict) or set(value) != set(types):
        raise VerificationError(f"not a receipt: {what} needs {', '.join(types)}")
    for name, kind in types.items():
        if not isinstance(value[name], kind) or isinstance(value[name], bool):
            raise VerificationError(f"not a receipt: {name!r} of {what} is a {type(value[name]).__name__}")
