"""Receipts of erasures, which name the samples of a certificate.

A certificate contains only commitments SHA-256(nonce || id), which reveal nothing without the nonces. The receipt contains the
nonces, the ids and the request, so it names people. Keep it away from the store and the certificate, and destroy it when
nobody can question the answer any longer.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from typing import Any

from torchlssvm.audit.certificate import Certificate, sample_commitment
from torchlssvm.audit.checks import Check, Outcome
from torchlssvm.audit.documents import check_document, read_document, write_private
from torchlssvm.errors import VerificationError
from torchlssvm.wording import counted

__all__ = ["ErasureReceipt"]

RECEIPT_FORMAT = "torchlssvm-receipt-1"


@dataclass(frozen=True, repr=False)
class ErasureReceipt:
    """The samples of some erasures and their nonces.

    Attributes:
        events: the erasures, each with its event id, position in the journal, the ids of its samples and their nonces (hex).
        request: the request that the erasures answer, or None. Its fields are ``id``, ``event_id`` (the id in the journal),
            ``received``, ``due`` and ``names``. Each name has ``kind`` ("subject" or "id"), ``name`` and the ``nonce`` of the
            commitment.
        time: when the receipt was written.
    """

    events: list[dict[str, Any]]
    request: dict[str, Any] | None
    time: str
    format: str = RECEIPT_FORMAT

    def __repr__(self) -> str:  # without names: it may end up in a log
        request = "" if self.request is None else f", request {self.request['id']!r}"
        events = counted(len(self.events), "event")
        return f"ErasureReceipt({counted(self.samples, 'sample')} in {events}{request}, written {self.time[:19]})"

    @property
    def ids(self) -> list[str]:
        """Ids of all samples."""
        return [i for event in self.events for i in event["ids"]]

    @property
    def subjects(self) -> list[str]:
        """Subjects that the request names."""
        return [n["name"] for n in (self.request or {"names": []})["names"] if n["kind"] == "subject"]

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.ids)

    def check(self, certificate: Certificate) -> Check:
        """Check that a certificate is about these samples. Raises VerificationError if it is not.

        The request, and the people named in it, are confirmed only if the certificate contains the same request with the same
        names.
        """
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
                raise VerificationError(f"the receipt names {len(event['ids'])} samples of an erasure of {len(known)}")
        named = self.is_request_of(certificate)
        facts = {
            "ids": self.ids,
            "subjects": self.subjects if named else [],
            "request": self.request["id"] if named and self.request else None,
            "unnamed_request": self.request is not None and not named,
            "more": sum(e["samples"] for e in certified.values()) - len(self.ids),
        }
        return Check("receipt", Outcome.HOLDS, facts)

    def is_request_of(self, certificate: Certificate) -> bool:
        """Return True if the certificate contains the request. Raises VerificationError if the names differ."""
        if self.request is None or self.request["id"] not in {request["id"] for request in certificate.requests}:
            return False
        event_id = self.request.get("event_id", self.request["id"])
        opened = [e for e in certificate.events if e["kind"] == "request" and e["event_id"] == event_id]
        for name in self.request["names"] if opened else []:
            if sample_commitment(name["name"], bytes.fromhex(name["nonce"])) not in opened[0]["commitments"]:
                raise VerificationError(f"the certificate's request does not name {name['name'][:80]!r}")
        return bool(opened)

    def with_earlier(self, earlier: ErasureReceipt) -> ErasureReceipt:
        """Return a receipt that also contains the erasures of an earlier receipt of the same request, and its names."""
        here = {event["event_id"] for event in self.events}
        events = [*(event for event in earlier.events if event["event_id"] not in here), *self.events]
        request = self.request
        if request is not None and earlier.request is not None:
            before = [name for name in earlier.request["names"] if name not in request["names"]]
            request = request | {"names": [*before, *request["names"]]}
        return replace(self, events=sorted(events, key=lambda event: event["position"]), request=request)

    def save(self, path: str | os.PathLike[str], overwrite: bool = False) -> None:
        """Write the receipt to a new file that only its owner can read.

        Raises FileExistsError if the file exists, unless ``overwrite`` is True.
        """
        write_private(path, (json.dumps(asdict(self), indent=1, ensure_ascii=True) + "\n").encode(), overwrite)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ErasureReceipt:
        """Read a receipt from a regular file. Raises VerificationError if the file contains no receipt."""
        return cls.from_dict(read_document(path, "receipt"))

    @classmethod
    def from_dict(cls, data: Any) -> ErasureReceipt:
        """Create a receipt from its fields. Raises VerificationError with the first wrong field."""
        found = cls(**check_document(data, "receipt"))
        if any(len(event["ids"]) != len(event["nonces"]) for event in found.events):
            raise VerificationError("not a receipt: every id needs a nonce")
        return found
