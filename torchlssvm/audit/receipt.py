"""Receipts of erasures: the file that tells whom a certificate is about.

A certificate holds commitments SHA-256(nonce || id) only. Its receipt holds the ids, their nonces and the request, so it names
people: it is kept apart from store and certificate for as long as the answer may be questioned, and destroyed then.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from torchlssvm.audit.certificate import Certificate, sample_commitment
from torchlssvm.audit.checks import Check, Outcome
from torchlssvm.audit.documents import check_document, read_document, write_private
from torchlssvm.errors import VerificationError

__all__ = ["ErasureReceipt"]

RECEIPT_FORMAT = "torchlssvm-receipt-1"


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
    format: str = RECEIPT_FORMAT

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

    def check(self, certificate: Certificate) -> Check:
        """Check that a certificate is about these samples; VerificationError if it is not.

        The request, and with it the names of people, counts only if the certificate names it with the same names.
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
                raise VerificationError(
                    f"the receipt names {len(event['ids'])} samples of an erasure of another number"
                )
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
        """True if the certificate has the request as an event; VerificationError if that has other names."""
        if self.request is None:
            return False
        opened = [e for e in certificate.events if e["kind"] == "request" and e["event_id"] == self.request["id"]]
        for name in self.request["names"] if opened else []:
            if sample_commitment(name["name"], bytes.fromhex(name["nonce"])) not in opened[0]["commitments"]:
                raise VerificationError(f"the certificate's request does not name {name['name'][:80]!r}")
        return bool(opened)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a new file that only its owner can read, durable when this returns; FileExistsError if there is one."""
        write_private(path, (json.dumps(asdict(self), indent=1, ensure_ascii=True) + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ErasureReceipt:
        """Read it from a regular file; VerificationError when it holds no receipt."""
        return cls.from_dict(read_document(path, "receipt"))

    @classmethod
    def from_dict(cls, data: Any) -> ErasureReceipt:
        """Check the fields and their types; VerificationError names the first that is wrong."""
        found = cls(**check_document(data, "receipt"))
        if any(len(event["ids"]) != len(event["nonces"]) for event in found.events):
            raise VerificationError("not a receipt: an erasure needs a nonce for each id")
        return found
