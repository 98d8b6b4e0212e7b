"""Events for samples that have not arrived yet: held until they do, in a store or in a checkpoint. No Trainer in here.

A run learns its samples batch by batch, and a correction may arrive before its sample does. Such an event is held. When its
samples arrive, those of a Remove are kept out and those of a Relabel or a Replace are learned and corrected at once; the
event is applied as a whole when the last of them is there. Events that name the same sample are applied in their order.

An event for a subject is applied to the samples that are held, and then stands for the later ones of the same run: a removal
keeps them out, a Relabel with one label for all gives it to them. A removal of a subject of which nothing is held is applied
at the end of the pass, with all that it kept out.

What is held names samples in clear, for as long as it is held and no longer: it has to know them when they come. With a store
each event is a note of the store, written and taken away in the transaction that holds or applies it, so a compaction after
that leaves no trace of it. An event that can never be answered is dropped with ``torchlssvm drop``.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchlssvm.errors import StoreError
from torchlssvm.events import Add, Event, Relabel, Remove, from_primitives, kind_of, to_primitives
from torchlssvm.store import SampleStore

__all__ = ["Pending", "PendingEvents", "drop_pending"]

PENDING_NOTE_PREFIX = "pending/"
"""Names of notes begin with this; the time, a counter and a random number keep them in order and apart."""

NOTE_COUNTER = itertools.count()
"""Orders notes of this process that are made within one tick of the clock."""

MAX_LISTED_IDS = 3
"""Ids listed in the text of an event, so that it fits on a line."""


@dataclass
class Pending:
    """One event that is held, or that is applied and stands for its subject's later samples.

    ``kept_out``: ids of samples that arrived and were not learned because of it; ``refusal``: why it was refused.
    """

    event: Event
    note: str
    kept_out: list[str] = field(default_factory=list)
    standing: bool = False
    refusal: str = ""

    @property
    def names(self) -> list[tuple[str, str]]:
        """Samples it concerns: ("id", ...) for each, and ("subject", ...) where it names subjects."""
        event = self.event
        whose = event.subjects if isinstance(event, Add) else (event.subject,)
        return [("id", i) for i in event.ids or ()] + [("subject", s) for s in dict.fromkeys(whose) if s is not None]

    def to_primitives(self) -> dict[str, Any]:
        """Convert to primitives, for a note or a checkpoint."""
        return {"event": to_primitives(self.event), "kept_out": list(self.kept_out), "standing": self.standing}

    def __str__(self) -> str:
        whose = f"subject {self.event.subject!r}" if self.event.ids is None else f"ids {list_some_ids(self.event.ids)}"
        text = f"{kind_of(self.event)} {self.event.event_id} ({whose})"
        if self.standing:
            return f"{text}: applied, stands for later samples of the run"
        return f"{text}: refused, {self.refusal}" if self.refusal else text


def new_note() -> str:
    """Make a unique name that sorts behind all names made so far."""
    return f"{PENDING_NOTE_PREFIX}{time.time_ns():020d}-{next(NOTE_COUNTER):09d}-{secrets.token_hex(4)}"


def list_some_ids(ids: Sequence[str]) -> str:
    """List the first few of many ids."""
    more = f" and {len(ids) - MAX_LISTED_IDS} more" if len(ids) > MAX_LISTED_IDS else ""
    return ", ".join(map(repr, ids[:MAX_LISTED_IDS])) + more


class PendingEvents:
    """The events that are held, in the order they came.

    >>> pending = PendingEvents()
    >>> pending.hold([Remove(ids=["a", "b"], event_id="e1"), Relabel(ids=["b"], y=[1], event_id="e2")])
    >>> [p.event.event_id for p in pending.of("b", None)], pending.blocked(pending["e2"])
    (['e1', 'e2'], True)
    """

    def __init__(self, store: SampleStore | None = None):
        self.store = store
        self._by_note: dict[str, Pending] = {}
        self._by_event: dict[str, Pending] = {}
        self._by_name: dict[tuple[str, str], dict[str, Pending]] = {}
        self.touched: set[str] = set()
        """Notes of events whose samples have changed since they were last tried."""
        self._unsaved: set[str] = set()
        self._reserved: dict[str, str] = {}
        for note, saved in ({} if store is None else store.notes(PENDING_NOTE_PREFIX)).items():
            try:
                self._insert(Pending(from_primitives(saved["event"]), note, saved["kept_out"], saved["standing"]))
            except (ValueError, KeyError, TypeError) as error:
                raise StoreError(f"a pending event of {store and store.path} cannot be read: {error}") from None
        self.touched = set(self._by_note)

    def __len__(self) -> int:
        return len(self._by_note)

    def __iter__(self) -> Iterator[Pending]:
        return iter([self._by_note[note] for note in sorted(self._by_note)])

    def __contains__(self, event_id: str) -> bool:
        return event_id in self._by_event

    def __getitem__(self, event_id: str) -> Pending:
        return self._by_event[event_id]

    @property
    def unanswered(self) -> list[Pending]:
        """Events that are not applied yet."""
        return [p for p in self if not p.standing]

    def _insert(self, pending: Pending) -> None:
        self._by_note[pending.note] = self._by_event[pending.event.event_id] = pending
        for name in pending.names:
            self._by_name.setdefault(name, {})[pending.note] = pending

    def reserve(self, events: Sequence[Event]) -> None:
        """Give events their places in the order, whether they will be held or not."""
        self._reserved = {event.event_id: new_note() for event in events}

    def _note_of(self, event_id: str) -> str:
        held = self._by_event.get(event_id)
        return held.note if held is not None else self._reserved.get(event_id) or new_note()

    def hold(self, events: Sequence[Event]) -> None:
        """Hold events; with a store they are on the disk when this returns."""
        new = [Pending(event, self._note_of(event.event_id)) for event in events]
        if self.store is not None and new:
            self.store.apply([], notes={p.note: p.to_primitives() for p in new})
        for pending in new:
            self._insert(pending)

    def forget(self, event_id: str) -> None:
        """Hold an event no longer, here and in the store."""
        pending = self._by_event[event_id]
        if self.store is not None:
            self.store.set_note(pending.note, None)
        self.remove(pending)

    def of(self, sample_id: str, subject: str | None) -> list[Pending]:
        """Find the events that concern a sample, in their order, without those dropped meanwhile."""
        found = dict(self._by_name.get(("id", sample_id), {}))
        if subject is not None:
            found |= self._by_name.get(("subject", subject), {})
        return [found[note] for note in sorted(found) if self.is_held(found[note])]

    def is_held(self, pending: Pending) -> bool:
        """True if an event is still held: another process may have dropped it."""
        if self.store is None or self.store.note(pending.note) is not None:
            return True
        self.remove(pending)
        return False

    def blocked(self, pending: Pending) -> bool:
        """True if an earlier event that is not applied yet names one of the same samples."""
        return any(self.earlier(name, pending.note) for name in pending.names)

    def earlier(self, name: tuple[str, str], before: str | None = None) -> bool:
        """True if an event waits for this sample or subject, before another one."""
        waiting = self._by_name.get(name, {}).values()
        return any(not p.standing and not p.refusal and (before is None or p.note < before) for p in waiting)

    def keep_out(self, pending: Pending, sample_id: str) -> None:
        """Note that a sample arrived and is not learned because of this event; write :meth:`changed_notes` afterwards."""
        if not pending.standing:
            pending.kept_out.append(sample_id)
            self.touched.add(pending.note)
            self._unsaved.add(pending.note)

    def changed_notes(self) -> dict[str, Any]:
        """Notes of the events that have kept samples out since the last time, to be written with the batch."""
        changed, self._unsaved = self._unsaved, set()
        return {note: self._by_note[note].to_primitives() for note in sorted(changed) if note in self._by_note}

    def remove(self, pending: Pending) -> None:
        """Drop an event from memory; those behind it may be free now. Its note in the store is left alone."""
        self._by_note.pop(pending.note, None)
        self._by_event.pop(pending.event.event_id, None)
        self.touched.discard(pending.note)
        for name in pending.names:
            others = self._by_name.get(name, {})
            others.pop(pending.note, None)
            self.touched.update(others)
            if not others:
                self._by_name.pop(name, None)

    def refuse(self, pending: Pending, reason: str) -> None:
        """Mark an event that cannot be applied: those behind it are free. It is held until it is written down elsewhere."""
        pending.refusal = reason
        for name in pending.names:
            self.touched.update(self._by_name[name])

    def notes_when_applied(self, events: Sequence[Event]) -> dict[str, Any]:
        """Notes to be written with events: those that were held go, those that stand for their subject stay."""
        notes: dict[str, Any] = {}
        for event in events:
            note = self._note_of(event.event_id)
            if concerns_later_samples(event):
                notes[note] = Pending(event, note, standing=True).to_primitives()
            elif event.event_id in self:
                notes[note] = None
        return notes

    def notes_when_removed(self, ids: Sequence[str], by: str, notes: dict[str, Any]) -> dict[str, Any]:
        """Notes to be written when samples are removed: earlier removals that also name them list them as kept out."""
        before = self._note_of(by)
        out: dict[str, Any] = {}
        for i in ids:
            for pending in self._by_name.get(("id", i), {}).values():
                waits = isinstance(pending.event, Remove) and not pending.standing and pending.event.event_id != by
                if waits and pending.note < before and pending.note not in notes:
                    saved = out.setdefault(pending.note, pending.to_primitives())
                    saved["kept_out"] = list(dict.fromkeys([*saved["kept_out"], i]))
        return out

    def applied(self, notes: dict[str, Any]) -> None:
        """Accept notes that were written with their events."""
        for note, saved in notes.items():
            if saved is not None and not saved["standing"]:
                self._by_note[note].kept_out = saved["kept_out"]
                self.touched.add(note)
                continue
            if note in self._by_note:
                self.remove(self._by_note[note])
            if saved is not None:
                self._insert(Pending(from_primitives(saved["event"]), note, standing=True))

    def end_run(self) -> None:
        """Drop the events that stand for the run that ends."""
        ended = [p for p in self if p.standing]
        if self.store is not None and ended:
            self.store.apply([], notes=dict.fromkeys(p.note for p in ended))
        for pending in ended:
            self.remove(pending)

    # -- what goes into a checkpoint, and to other ranks ---------------------------------------------------------------

    def state_dict(self) -> list[dict[str, Any]]:
        """All events as primitives."""
        return [p.to_primitives() | {"note": p.note} for p in self]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Restore the events of :meth:`state_dict`."""
        self._by_note, self._by_event, self._by_name = {}, {}, {}
        for saved in state:
            event = from_primitives(saved["event"])
            self._insert(Pending(event, saved["note"], list(saved["kept_out"]), saved["standing"]))
        self.touched = set(self._by_note)

    def merge(self, others: Sequence[dict[str, list[str]]]) -> None:
        """Merge the samples that other ranks kept out, by notes."""
        for kept in others:
            for note, ids in kept.items():
                pending = self._by_note.get(note)
                if pending is not None:
                    pending.kept_out = list(dict.fromkeys([*pending.kept_out, *ids]))
                    self.touched.add(note)

    def kept_out(self) -> dict[str, list[str]]:
        """Samples that were kept out here, by notes."""
        return {p.note: list(p.kept_out) for p in self if p.kept_out}


def concerns_later_samples(event: Event) -> bool:
    """True if an event for a subject also concerns its later samples: one that says the same of each."""
    return event.ids is None and (isinstance(event, Remove) or (isinstance(event, Relabel) and event.y.ndim == 0))


def drop_pending(store: SampleStore, event_ids: Sequence[str]) -> list[Pending]:
    """Drop pending events of a store, or what stands for a run; returns them. ValueError if one is not held."""
    pending = PendingEvents(store)
    unknown = next((e for e in event_ids if e not in pending), None)
    if unknown is not None:
        raise ValueError(f"no event {unknown!r} is pending in {store.path}. Nothing was dropped.")
    dropped = [pending[e] for e in dict.fromkeys(event_ids)]
    store.apply([], notes=dict.fromkeys(p.note for p in dropped))
    return dropped
