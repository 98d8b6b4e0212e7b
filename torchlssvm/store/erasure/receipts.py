"""Receipts of erasures in a store, kept until compaction: a crash before the file is written loses none.

A record "receipt/<event id>" holds ids and nonces of an erasure. The file is written from it and the record says so then;
compaction removes the records, and refuses while one is not written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torchlssvm.audit.receipt import ErasureReceipt
from torchlssvm.errors import StoreError
from torchlssvm.store.database import Database
from torchlssvm.store.journal import now

if TYPE_CHECKING:
    from torchlssvm.store.transaction import AppliedEvent

RECEIPT_PREFIX = "receipt/"


class KeptReceipts:
    """The receipts of one store that were not compacted yet."""

    def __init__(self, db: Database):
        self.db = db

    def keep(self, done: Iterable[AppliedEvent], request: str | None) -> None:
        """Keep ids and nonces of removals, inside their transaction."""
        for removal in done:
            if removal.event.kind != "remove":
                continue
            record = {
                "request": request,
                "position": removal.position,
                "ids": list(removal.ids),
                "nonces": [nonce.hex() for nonce in removal.nonces],
                "written": False,
            }
            self.db.put(RECEIPT_PREFIX + removal.event.event_id, record)

    def all(self) -> dict[str, dict[str, Any]]:
        """The records by event ids, in the order of the journal; StoreError if one cannot be read."""
        found = self.db.records(RECEIPT_PREFIX)
        for name, record in found.items():
            if len(record["ids"]) != len(record["nonces"]):
                raise self.db.damaged(f"the receipt of {name!r} cannot be read")
        return dict(sorted(found.items(), key=lambda item: item[1]["position"]))

    def unwritten(self) -> list[str]:
        """Ids of the events whose receipts are not written to a file yet."""
        return [event_id for event_id, record in self.all().items() if not record["written"]]

    def make(self, event_ids: Sequence[str], request: dict[str, Any] | None) -> ErasureReceipt:
        """The receipt of some erasures, with what it says of their request; StoreError if one is not kept (any more)."""
        records = self.all()
        missing = [e for e in event_ids if e not in records]
        if missing or not event_ids:
            raise StoreError(
                f"there is no receipt of {', '.join(map(repr, missing[:3])) or 'any erasure'} in {self.db.path.parent}: none "
                "was asked for, or a compaction has removed it after it was written"
            )
        kept = ("position", "ids", "nonces")
        events = [{"event_id": e} | {k: r[k] for k in kept} for e, r in records.items() if e in event_ids]
        return ErasureReceipt(events, request, now())

    def mark_written(self, event_ids: Iterable[str]) -> None:
        """Note, inside a transaction, that receipts are written to files."""
        for event_id in event_ids:
            self.db.put(RECEIPT_PREFIX + event_id, self.db.get(RECEIPT_PREFIX + event_id) | {"written": True})

    def clear(self) -> None:
        """Remove all records, inside a transaction, before a compaction; StoreError while one is not written."""
        waiting = self.unwritten()
        if waiting:
            raise StoreError(
                f"{self.db.path.parent} is not compacted: the receipts of {len(waiting)} erasures are not written to a file, "
                f"and nobody could tell any more whom they were about (the first is {waiting[0]!r}). torchlssvm receipt STORE "
                "--out FILE writes them. Nothing was changed."
            )
        for event_id in self.all():
            self.db.delete(RECEIPT_PREFIX + event_id)
