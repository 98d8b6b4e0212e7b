"""Erasure requests and their receipts: who asked and when, when the answer is due, and what was done.

A request is a record in the store. Its names (subjects and ids) stay readable only while they are needed: the compaction after
its erasure, or after its answer, replaces the names with the commitments that the journal recorded when the request was
opened.
"""

from __future__ import annotations

import calendar
import json
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from typing import Any, TypeAlias

from torchlssvm.audit.certificate import NONCE_BYTES
from torchlssvm.audit.receipt import ErasureReceipt
from torchlssvm.errors import StoreError
from torchlssvm.events import as_list, check_free_text, check_text, tells_of
from torchlssvm.store.database import Database
from torchlssvm.store.journal import Journal, commitments, now
from torchlssvm.store.sample_table import SampleTable
from torchlssvm.store.transaction import EventResult

REQUEST_PREFIX = "request/"
RECEIPT_PREFIX = "receipt/"
READMISSION_PREFIX = "readmission/"
REQUEST_STEPS = ("received", "previewed", "erased", "compacted", "certified", "answered")
"""The steps of a request, in order. The state of a request is its last completed step."""

KEPT_TEXTS = ("id", "reason", "operator", "answer")
FORGOTTEN_TEXT = "(deleted: it named an erased sample or subject)"
"""Replaces a text of a request once a sample or subject that it names has been erased."""

Journalize: TypeAlias = Callable[[str, str, list[bytes], Callable[[], None]], None]


@dataclass(frozen=True)
class RequestedName:
    """A subject or sample id named in a request. Name and nonce are None once only the commitment is left."""

    kind: str
    name: str | None
    nonce: str | None
    commitment: str

    @classmethod
    def new(cls, kind: str, name: str) -> RequestedName:
        """Create a name with a fresh nonce."""
        nonce = os.urandom(NONCE_BYTES)
        return cls(kind, name, nonce.hex(), commitments([nonce], [name])[0].hex())


@dataclass(frozen=True)
class ErasureRequest:
    """An erasure request: the time of each step, the ids of its erasures (``events``) and the last day to answer (``due``)."""

    id: str
    received: str
    due: str
    names: list[RequestedName]
    reason: str
    operator: str
    steps: dict[str, str]
    events: list[str] = field(default_factory=list)
    answer: str = ""

    @property
    def state(self) -> str:
        """The last completed step."""
        return [step for step in REQUEST_STEPS if step in self.steps][-1]

    @property
    def open(self) -> bool:
        """True until the request is answered."""
        return "answered" not in self.steps

    @property
    def days_left(self) -> int:
        """Days until the answer is due; negative after that day."""
        return (date.fromisoformat(self.due) - datetime.now(UTC).date()).days

    @property
    def overdue(self) -> bool:
        """True if the request should have been answered before today."""
        return self.open and self.days_left < 0

    @property
    def skipped(self) -> list[str]:
        """Missing steps that an erasure requires before the request is answered."""
        return [step for step in ("erased", "compacted", "certified") if step not in self.steps]

    def named(self, kind: str) -> list[str]:
        """The subjects or ids that are still readable, i.e. not yet replaced with commitments."""
        return [n.name for n in self.names if n.kind == kind and n.name is not None]

    @property
    def forgotten(self) -> bool:
        """True if the names have been replaced with commitments."""
        return all(n.name is None for n in self.names)

    def for_receipt(self, recorded_id: str, held: Collection[RequestedName] = ()) -> dict[str, Any]:
        """The part of the request that goes into a receipt. It omits names with samples that are still ``held``."""
        kept = [n for n in self.names if n.name is not None and n not in held]
        names = [{"kind": n.kind, "name": n.name, "nonce": n.nonce} for n in kept]
        return {"id": self.id, "event_id": recorded_id, "received": self.received, "due": self.due, "names": names}

    def for_certificate(self) -> dict[str, str]:
        """The part of the request that goes into a certificate. It omits the names and the operator."""
        return {"id": self.id, "received": self.received, "due": self.due, "reason": self.reason}

    def matches(self, certified: dict[str, str]) -> bool:
        """Compare the request with the part of it in a certificate, apart from texts that were deleted since."""
        kept = {name: text for name, text in self.for_certificate().items() if name != "id" and text != FORGOTTEN_TEXT}
        return all(certified[name] == text for name, text in kept.items())


class Requests:
    """The requests of one store.

    Args:
        db, table, journal: the parts of the store.
        journalize: a function that appends an entry (event id, kind, commitments) to the journal, and calls another function in
            the same transaction.
    """

    def __init__(self, db: Database, table: SampleTable, journal: Journal, journalize: Journalize):
        self.db, self.table, self.journal, self._journalize = db, table, journal, journalize

    # -- reading -------------------------------------------------------------------------------------------------------

    def all(self) -> list[ErasureRequest]:
        """All requests: first the overdue ones, then the open ones by due date, then the answered ones."""
        found = [self._read(name, record) for name, record in self.db.records(REQUEST_PREFIX).items()]
        return sorted(found, key=lambda r: (not r.open, r.due, r.received))

    def get(self, request_id: str) -> ErasureRequest:
        """Return the request with this id. Raises ValueError if the store has no such request."""
        request_id = check_text(request_id, "request_id")
        for name in (request_id, self.journal.recorded_id(request_id)):
            record = self.db.get(REQUEST_PREFIX + name, None)
            if record is not None:
                return self._read(name, record)
        raise ValueError(f"there is no request {request_id!r} in {self.db.path.parent}")

    def answered_by(self, event_ids: Iterable[str]) -> list[ErasureRequest]:
        """The requests whose journal entry, or one of whose erasures, is among these events, oldest first."""
        events = set(event_ids)
        found = [r for r in self.all() if not events.isdisjoint([self.journal.recorded_id(r.id), *r.events])]
        return sorted(found, key=lambda r: (r.received, r.id))

    def _read(self, name: str, record: Any) -> ErasureRequest:
        try:
            if record["id"] != name:
                raise ValueError("it has another id")
            date.fromisoformat(record["due"])
            return ErasureRequest(**(record | {"names": [RequestedName(**n) for n in record["names"]]}))
        except (KeyError, TypeError, ValueError) as error:
            raise self.db.damaged(f"the request {name!r} cannot be read: {error}") from None

    # -- writing -------------------------------------------------------------------------------------------------------

    def open(
        self,
        subjects: Any = (),
        ids: Any = (),
        *,
        request_id: str | None = None,
        received: str | datetime | date | None = None,
        due: str | date | None = None,
        reason: str = "",
        operator: str = "",
    ) -> ErasureRequest:
        """Open a request about one or more subjects, or about samples given by their ids.

        Args:
            subjects: the subjects to erase, as one string or several.
            ids: the ids of the samples to erase.
            request_id: the id of the request, which stays in the journal permanently. Default: a new id.
            received: when the request arrived, as a day or a time in ISO 8601. Default: now.
            due: the last day to answer. Default: one month after the request was received.
            reason: legal basis or reason. Do not name the people concerned, because texts are kept after the erasure. A text
                that names other samples is deleted when these samples are erased.
            operator: the person who handles the request.
        """
        names = [RequestedName.new("subject", s) for s in name_list(subjects, "subject")]
        names += [RequestedName.new("id", i) for i in name_list(ids, "an id")]
        if not names:
            raise ValueError("a request names at least one subject or id")
        arrived = as_time(received)
        if arrived > datetime.now(UTC) + timedelta(hours=14):  # the local day may be up to 14 hours ahead of UTC
            raise ValueError(f"received is in the future: {arrived.isoformat()}")
        last = add_month(arrived.date()) if due is None else as_time(due).date()
        if last < arrived.date():
            raise ValueError(f"due ({last}) is before the request was received ({arrived.date()})")
        with self.db.view():
            concerned = {n.name for n in names if n.name is not None}
            concerned |= {name.partition("@")[0] for name in concerned if "@" in name}  # the start of an e-mail address
            for n in names:
                if n.kind == "subject" and n.name is not None:
                    concerned.update(self.table.ids(n.name))
        chosen = request_id if request_id is not None else f"R-{arrived.date()}-{secrets.token_hex(4)}"
        request = ErasureRequest(
            check_free_text(check_text(chosen, "request_id"), "request_id", concerned),
            arrived.isoformat(timespec="seconds"),
            last.isoformat(),
            names,
            check_free_text(reason, "reason", concerned),
            check_free_text(operator, "operator", concerned),
            {"received": now()},
        )

        def write() -> None:
            if self.db.get(REQUEST_PREFIX + request.id, None) is not None:
                raise ValueError(f"there is a request {request.id!r} already. Nothing was changed.")
            self._write(request)

        self._journalize(request.id, "request", [bytes.fromhex(n.commitment) for n in names], write)
        return request

    def _write(self, request: ErasureRequest) -> None:
        self.db.put(REQUEST_PREFIX + request.id, asdict(request))

    def take_step(self, request_id: str, step: str) -> ErasureRequest:
        """Record that a step was taken. Only the first time is recorded."""
        if step not in REQUEST_STEPS:
            raise ValueError(f"step must be one of {', '.join(REQUEST_STEPS)}; got {step!r}")
        with self.db.transaction():
            return self._take_step(self.get(request_id), step)

    def _take_step(self, request: ErasureRequest, step: str) -> ErasureRequest:
        if step in request.steps:
            return request
        changed = replace(request, steps=request.steps | {step: now()})
        self._write(changed)
        return changed

    def certified(self, event_ids: Iterable[str]) -> None:
        """Record that a certificate was written, for each erased request whose erasures are all among these events."""
        events = set(map(self.journal.recorded_id, event_ids))
        with self.db.transaction():
            for request in self.all():
                if "erased" in request.steps and request.events and set(request.events) <= events:
                    self._take_step(request, "certified")

    def close(self, request_id: str, answer: str = "") -> ErasureRequest:
        """Record that the request was answered. ``answer`` gives the reason; it is required without a certified erasure."""
        with self.db.transaction():
            request = self.get(request_id)
            if not request.open:
                raise ValueError(f"the request {request_id!r} was answered before, on {request.steps['answered'][:10]}")
            if answer and request.forgotten:
                raise ValueError(
                    f"the names of the request {request_id!r} are no longer kept, so a text cannot be checked for them: close "
                    "it without an answer, after a certificate. Nothing was changed."
                )
            last = max((e.position for e in map(self.journal.of, request.events) if e is not None), default=0)
            if last > self.db.get("compacted"):
                raise ValueError(
                    f"samples of the request {request_id!r} are erased, but their bytes may still be in the files: finish it "
                    f"with torchlssvm remove {self.db.path.parent} --request {request_id} --compact --certificate FILE. "
                    "Nothing was changed."
                )
            check_free_text(answer, "answer", [*request.named("subject"), *request.named("id")])
            if request.skipped and not answer:
                raise ValueError(
                    f"the request {request_id!r} is not {' and not '.join(request.skipped)}: do that first, or say why it is "
                    "answered without (--answer TEXT). Nothing was changed."
                )
            return self._take_step(replace(request, answer=answer), "answered")

    # -- with an erasure and a compaction, inside their transactions ---------------------------------------------------

    def check_erasure(self, request_id: str, subjects: Iterable[str], ids: Iterable[str]) -> None:
        """Raise ValueError if a request is already answered, or names neither these subjects and ids nor the ids' subjects."""
        request = self.get(request_id)
        if not request.open:
            raise ValueError(f"the request {request_id!r} is answered: open another one. Nothing was changed.")
        if "compacted" in request.steps:
            raise ValueError(
                f"the request {request_id!r} is compacted and no longer has any names: open another one. Nothing was changed."
            )
        unknown = [s for s in subjects if s not in request.named("subject")]
        if unknown:
            raise ValueError(
                f"the request {request_id!r} does not name the subject {unknown[0]!r}. Nothing was changed."
            )
        others = self.table.held([i for i in ids if i not in request.named("id")])
        owned = (
            {row for subject in request.named("subject") for row in self.table.of_subject(subject)} if others else set()
        )
        foreign = next((i for i, row in others.items() if row not in owned), None)
        if foreign is not None:
            raise ValueError(
                f"the request {request_id!r} names neither the sample {foreign!r} nor its subject. Nothing was changed."
            )

    def forget_texts(self, names: Collection[str]) -> None:
        """Delete the texts of requests and lawful returns that contain the name of an erased sample or subject.

        A text may name samples that were added after it was written. The id of such a request becomes its id in the journal.
        """
        for prefix in (REQUEST_PREFIX, READMISSION_PREFIX):
            if not tells_of("\n".join(self._texts(prefix)), names):
                continue
            for name, record in self.db.records(prefix).items():
                texts = {key: record[key] for key in KEPT_TEXTS if record.get(key)}
                told = dict.fromkeys((key for key, text in texts.items() if tells_of(text, names)), FORGOTTEN_TEXT)
                if "id" in told:
                    self.db.put(prefix + name, None)
                    name = told["id"] = self.journal.recorded_id(name)
                if told:
                    self.db.put(prefix + name, record | told)

    def _texts(self, prefix: str) -> Iterator[str]:
        """The texts of all records with a prefix, read without checking the records, which takes 20 times as long."""
        found = self.db.all("SELECT value FROM meta WHERE name GLOB ?", (f"{prefix}*",))
        try:
            for record in json.loads(f"[{','.join(value for (value,) in found)}]"):
                yield from (record[key] for key in KEPT_TEXTS if record.get(key))
        except (AttributeError, TypeError, ValueError):
            raise self.db.damaged(f"the records {prefix}* cannot be read") from None

    def note_erasure(self, request_id: str, done: Sequence[EventResult]) -> None:
        """Record removals that belong to a request."""
        if not done:
            return
        request = self.get(request_id)
        events = [*request.events, *(self.journal.recorded_id(removal.event_id) for removal in done)]
        steps = {step: at for step, at in request.steps.items() if step in ("received", "previewed")}
        if not self.still_held(request):
            steps["erased"] = now()
        self._write(replace(request, events=events, steps=steps))

    def still_held(self, request: ErasureRequest) -> list[RequestedName]:
        """The names in a request that still have samples in the store."""
        named = [(n, n.name) for n in request.names if n.name is not None]
        return [
            n for n, name in named if (self.table.of_subject(name) if n.kind == "subject" else self.table.held([name]))
        ]

    def forget_names(self) -> None:
        """Replace names with commitments in answered requests, and in requests whose erasures left no samples of theirs.

        An open request without an erasure of its own keeps its names, even if the samples are gone: it has to be answered.
        """
        for request in self.all():
            if request.forgotten or not (request.events or not request.open):
                continue
            kept = self.still_held(request) if request.open else []
            names = [n if n in kept else replace(n, name=None, nonce=None) for n in request.names]
            self._write(replace(request, names=names))

    def note_compaction(self) -> None:
        """Record the compaction in all requests whose samples are erased."""
        for request in self.all():
            if "erased" in request.steps:
                self._take_step(request, "compacted")


class KeptReceipts:
    """Receipts that a store keeps until its next compaction, so that no receipt is lost if a crash precedes its file.

    A record "receipt/<event id>" contains the ids and nonces of an erasure. The receipt file is written from this record, and
    the record then notes the file. Compaction removes these records, so it refuses to run while a receipt has not been written
    to a file.
    """

    def __init__(self, db: Database, journal: Journal):
        self.db, self.journal = db, journal

    def keep(self, done: Iterable[EventResult], request: str | None) -> None:
        """Keep the ids and nonces of removals, inside their transaction."""
        for removal in done:
            if removal.kind == "remove":
                samples = {"ids": list(removal.nonces), "nonces": list(removal.nonces.values())}
                record = {"request": request, "position": removal.position, "written": False} | samples
                self.db.put(RECEIPT_PREFIX + self.journal.recorded_id(removal.event_id), record)

    def all(self) -> dict[str, dict[str, Any]]:
        """The records by event id, in the order of the journal. Raises StoreError if a record cannot be read."""
        found = self.db.records(RECEIPT_PREFIX)
        for name, record in found.items():
            if len(record["ids"]) != len(record["nonces"]):
                raise self.db.damaged(f"the receipt of {name!r} cannot be read")
        return dict(sorted(found.items(), key=lambda item: item[1]["position"]))

    def unwritten(self) -> list[str]:
        """Ids of the events whose receipts have not been written to a file."""
        return [event_id for event_id, record in self.all().items() if not record["written"]]

    def make(self, event_ids: Sequence[str], request: dict[str, Any] | None) -> ErasureReceipt:
        """Create the receipt of these erasures, with the data of their request. StoreError if an erasure has no receipt."""
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
        """Record, inside a transaction, that receipts were written to files."""
        for event_id in event_ids:
            self.db.put(RECEIPT_PREFIX + event_id, self.db.get(RECEIPT_PREFIX + event_id) | {"written": True})

    def clear(self) -> None:
        """Remove all records, inside a transaction, before a compaction. StoreError if a receipt has not been written."""
        waiting = self.unwritten()
        if waiting:
            raise StoreError(
                f"{self.db.path.parent} is not compacted: the receipts of {len(waiting)} erasures are not written to a file, "
                f"and compaction would delete the names in them (the first is {waiting[0]!r}). torchlssvm receipt STORE "
                "--out FILE writes them. Nothing was changed."
            )
        for event_id in self.all():
            self.db.put(RECEIPT_PREFIX + event_id, None)


def name_list(given: Any, what: str) -> list[str]:
    """Return names without duplicates, from one string or several."""
    names = [given] if isinstance(given, str | int) else as_list(given)
    if names is None:
        raise ValueError(f"{what} must be a text or a list of texts; got {given!r}")
    return list(dict.fromkeys(check_text(name, what) for name in names))


def as_time(given: str | datetime | date | None) -> datetime:
    """Return a point in time, in UTC. A day stands for its beginning."""
    if given is None:
        return datetime.now(UTC)
    if isinstance(given, str):
        try:
            given = datetime.fromisoformat(given.replace("Z", "+00:00"))
        except ValueError:
            raise ValueError(f"not a day or a time such as 2026-05-31 or 2026-05-31T14:00: {given!r}") from None
    if not isinstance(given, date):
        raise ValueError(f"a time is a text such as 2026-05-31, a date or a datetime; got {given!r}")
    if not isinstance(given, datetime):
        given = datetime(given.year, given.month, given.day)
    try:
        return given.replace(tzinfo=UTC) if given.tzinfo is None else given.astimezone(UTC)
    except OverflowError:
        raise ValueError(f"a time must be in the years 1 to 9999 in UTC; got {given.isoformat()}") from None


def add_month(day: date) -> date:
    """The same day of the next month, or the last day of that month if it has no such day.

    >>> add_month(date(2027, 1, 31))
    datetime.date(2027, 2, 28)
    """
    year, month = (day.year + 1, 1) if day.month == 12 else (day.year, day.month + 1)
    return date(year, month, min(day.day, calendar.monthrange(year, month)[1]))
