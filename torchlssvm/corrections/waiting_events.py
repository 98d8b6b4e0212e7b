"""The queue of events whose samples have not arrived yet, kept in a store or in a checkpoint. It needs no Trainer.

A waiting event contains the plain ids of its samples, because it has to recognise them. If there is a store, each waiting
event is a note in the store, which is deleted by the transaction that applies the event; the next compaction removes its last
trace. An event on watch keeps its note until a compaction or until the run ends, so that a run that was killed can be resumed.
To drop an event that can never be applied, use ``torchlssvm drop``.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from torchlssvm.errors import StoreError
from torchlssvm.events import Add, Event, Relabel, Remove, from_primitives, to_primitives
from torchlssvm.store import SampleStore
from torchlssvm.store.database import WAITING_NOTE_PREFIX

__all__ = ["EventOutcome", "EventStatus", "WaitingEvent", "WaitingEvents", "drop_waiting"]

Name = tuple[str, str]
"""("id", a sample's id) or ("subject", whose it is)."""


class EventStatus(StrEnum):
    """The status of an event."""

    APPLIED = "applied"
    REPEATED = "repeated"
    """Its id was used before: nothing was changed."""
    WAITING = "waiting"
    """It names samples that have not arrived."""
    WATCHED = "watched"
    """It is about a subject and was applied again, to samples that arrived later."""
    REFUSED = "refused"


@dataclass(frozen=True)
class EventOutcome:
    """Result of an event: the status, the number of samples changed and, for a refused event, the reason."""

    event_id: str
    kind: str
    samples: int
    status: EventStatus
    reason: str = ""

    @classmethod
    def of(cls, event: Event, status: EventStatus) -> EventOutcome:
        """Create the outcome of an event that changed no sample."""
        return cls(event.event_id, event.kind, 0, status)

    @classmethod
    def refusal(cls, event: Event, error: Exception) -> EventOutcome:
        """Create the outcome of an event that cannot be applied."""
        return cls(event.event_id, event.kind, 0, EventStatus.REFUSED, f"{type(error).__name__}: {error}")


@dataclass(eq=False)
class WaitingEvent:
    """An event in the queue. ``on_watch`` means that it was applied and waits for more samples of its subject."""

    event: Event
    on_watch: bool = False
    note: str = ""
    outcome: EventOutcome | None = None
    """Its last outcome; None while it waits. Not saved."""

    @property
    def refused(self) -> bool:
        """True if the event was refused. It is kept only until the refusal is recorded elsewhere."""
        return self.outcome is not None and self.outcome.status is EventStatus.REFUSED

    @cached_property
    def names(self) -> frozenset[Name]:
        """Samples and subjects that the event concerns."""
        event = self.event
        whose = event.subjects if isinstance(event, Add) else (event.subject,)
        return frozenset([("id", i) for i in event.ids or ()] + [("subject", s) for s in whose if s is not None])

    @property
    def watches(self) -> bool:
        """True if the event also applies to samples of its subject that arrive later."""
        event = self.event
        return event.ids is None and (isinstance(event, Remove) or (isinstance(event, Relabel) and event.y.ndim == 0))

    def for_later(self, ids: Sequence[str]) -> Event:
        """Create the event that makes the same change to later samples of the subject, under a new random id."""
        if isinstance(self.event, Relabel):
            return Relabel(ids=ids, y=self.event.y.expand(len(ids)))
        return Remove(ids=ids)

    def to_primitives(self, on_watch: bool = False) -> dict[str, Any]:
        """Convert to primitives, for a note or a checkpoint."""
        return {"event": to_primitives(self.event), "on_watch": on_watch or self.on_watch}

    def __str__(self) -> str:
        ids = self.event.ids or ()
        more = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
        whose = f"ids {', '.join(map(repr, ids[:3]))}{more}" if ids else f"subject {self.event.subject!r}"
        text = f"{self.event.kind} {self.event.event_id} ({whose})"
        if self.refused and self.outcome is not None:
            return f"{text}: refused, {self.outcome.reason}"
        return f"{text}: applied, on watch until the run ends" if self.on_watch else text


class WaitingEvents:
    """The waiting events by event id, in the order they arrived.

    >>> queue = WaitingEvents()
    >>> queue.insert(WaitingEvent(Remove(ids=["a", "b"], event_id="e1")))
    >>> queue.insert(WaitingEvent(Relabel(ids=["b"], y=[1], event_id="e2")))
    >>> [str(waiting) for waiting in queue]
    ["remove e1 (ids 'a', 'b')", "relabel e2 (ids 'b')"]
    """

    def __init__(self, store: SampleStore | None = None):
        self.store = store
        self._events: dict[str, WaitingEvent] = {}
        self._last = 0  # the number in the name of the last note
        for note, saved in ({} if store is None else store.notes(WAITING_NOTE_PREFIX)).items():
            try:
                self._last = int(note.removeprefix(WAITING_NOTE_PREFIX).partition("-")[0])
                self.insert(WaitingEvent(from_primitives(saved["event"]), saved["on_watch"], note))
            except (ValueError, KeyError, TypeError) as error:
                raise StoreError(f"a waiting event of {store and store.path} cannot be read: {error}") from None

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[WaitingEvent]:
        return iter(list(self._events.values()))

    def __contains__(self, event_id: str) -> bool:
        return event_id in self._events

    def __getitem__(self, event_id: str) -> WaitingEvent:
        return self._events[event_id]

    @property
    def unanswered(self) -> list[WaitingEvent]:
        """Events that were never applied."""
        return [p for p in self if not p.on_watch]

    def new(self, event: Event) -> WaitingEvent:
        """Prepare an event for the queue. The name of its note is unique and sorts after all earlier names."""
        self._last += 1
        return WaitingEvent(event, note=f"{WAITING_NOTE_PREFIX}{self._last:020d}-{secrets.token_hex(4)}")

    def insert(self, waiting: WaitingEvent) -> None:
        """Append an event to the queue. An event that is already in the queue keeps its place."""
        self._events.setdefault(waiting.event.event_id, waiting)

    def remove(self, waiting: WaitingEvent) -> None:
        """Remove an event from the queue. Its note in the store is not deleted."""
        self._events.pop(waiting.event.event_id, None)

    def was_dropped(self, waiting: WaitingEvent) -> bool:
        """True if another process has dropped an event of the queue. The event is then removed from the queue."""
        event_id = waiting.event.event_id
        if event_id not in self or self.store is None or self.store.note(waiting.note) is not None:
            return False
        if waiting.on_watch:  # the note may have been removed by a compaction, which does not end the watch of this run
            recorded = self.store.recorded_id(event_id)
            if any(entry.event_id == recorded for entry in self.store.history()[: self.store.compacted]):
                return False
        self.remove(waiting)
        return True

    def removes(self, sample_id: str, subject: str | None) -> bool:
        """True if a removal waits for a sample, or watches its subject."""
        names = {("id", sample_id), ("subject", subject)}
        return any(isinstance(p.event, Remove) and not names.isdisjoint(p.names) for p in self)

    def end_run(self) -> None:
        """Drop the events that are on watch."""
        ended = [p for p in self if p.on_watch]
        if self.store is not None and ended:
            self.store.apply([], notes=dict.fromkeys(p.note for p in ended))
        for waiting in ended:
            self.remove(waiting)

    def state_dict(self) -> list[dict[str, Any]]:
        """All events as primitives, in their order."""
        return [p.to_primitives() for p in self]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Restore the events of :meth:`state_dict`."""
        self._events = {}
        for saved in state:
            self.insert(WaitingEvent(from_primitives(saved["event"]), saved["on_watch"]))


def drop_waiting(store: SampleStore, event_ids: Sequence[str]) -> list[WaitingEvent]:
    """Drop waiting or watching events of a store; return them. Raises ValueError if one is not in the queue."""
    queue = WaitingEvents(store)
    unknown = next((e for e in event_ids if e not in queue), None)
    if unknown is not None:
        raise ValueError(f"no event {unknown!r} is waiting in {store.path}. Nothing was dropped.")
    dropped = [queue[e] for e in dict.fromkeys(event_ids)]
    store.apply([], notes=dict.fromkeys(p.note for p in dropped))
    return dropped
