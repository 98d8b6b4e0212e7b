"""The queue of events whose samples have not arrived yet, in a store or in a checkpoint. No Trainer in here.

A run learns its samples batch by batch, and a correction may arrive before its sample does. Such an event waits. The batch that
brings the last of its samples is learned and the event applied in one transaction (:mod:`torchlssvm.corrections.corrector`).
Events that name the same sample are applied in the order in which they came.

An event that says the same of all samples of a subject (a Remove, or a Relabel with one label) is applied to those that are
held and then stays on watch: it is applied again with each batch that brings more of them, until the run ends.

A waiting event names samples in clear, because it has to recognise them. With a store each is a note of the store, deleted in
the transaction that applies it, so a compaction after that leaves no trace of it. An event that can never be answered is
dropped with ``torchlssvm drop``.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchlssvm.corrections.outcome import Outcome
from torchlssvm.errors import StoreError
from torchlssvm.events import Add, Event, Relabel, Remove, from_primitives, to_primitives
from torchlssvm.store import SampleStore

__all__ = ["Pending", "PendingEvents", "drop_pending"]

PENDING_NOTE_PREFIX = "pending/"
"""Names of the notes begin with this."""

NOTE_COUNTER = itertools.count()
"""Orders notes of this process that are made within one tick of the clock."""

Name = tuple[str, str]
"""("id", a sample's id) or ("subject", whose it is)."""


def new_note() -> str:
    """Make a unique name that sorts after all names made so far: the time, a counter and a random number."""
    return f"{PENDING_NOTE_PREFIX}{time.time_ns():020d}-{next(NOTE_COUNTER):09d}-{secrets.token_hex(4)}"


@dataclass(eq=False)
class Pending:
    """An event in the queue. ``applied``: how often it was applied; more than 0 while it is on watch for its subject."""

    event: Event
    applied: int = 0
    note: str = field(default_factory=new_note)
    gone: set[str] = field(default_factory=set)
    """Of a Remove that waits: samples that later events have removed meanwhile."""
    outcome: Outcome | None = None
    """Its outcome the last time it was looked at; not saved."""

    @property
    def refused(self) -> bool:
        """True if it was refused, and is kept only until that is written down elsewhere."""
        return self.outcome is not None and self.outcome.status == "refused"

    @property
    def names(self) -> list[Name]:
        """Samples and subjects that it concerns."""
        event = self.event
        whose = event.subjects if isinstance(event, Add) else (event.subject,)
        return [("id", i) for i in event.ids or ()] + [("subject", s) for s in dict.fromkeys(whose) if s is not None]

    @property
    def watches(self) -> bool:
        """True if it also concerns samples of its subject that come later: it says the same of each."""
        event = self.event
        return event.ids is None and (isinstance(event, Remove) or (isinstance(event, Relabel) and event.y.ndim == 0))

    def for_later(self, ids: Sequence[str]) -> Event:
        """Make the event that does the same to later samples of its subject; it has a random id of its own."""
        if isinstance(self.event, Relabel):
            return Relabel(ids=ids, y=self.event.y.expand(len(ids)))
        return Remove(ids=ids)

    def to_primitives(self, applied: int = 0) -> dict[str, Any]:
        """Convert to primitives, for a note or a checkpoint."""
        return {"event": to_primitives(self.event), "applied": applied or self.applied, "gone": sorted(self.gone)}

    def __str__(self) -> str:
        ids = self.event.ids or ()
        more = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
        whose = f"ids {', '.join(map(repr, ids[:3]))}{more}" if ids else f"subject {self.event.subject!r}"
        text = f"{self.event.kind} {self.event.event_id} ({whose})"
        if self.refused and self.outcome is not None:
            return f"{text}: refused, {self.outcome.reason}"
        return f"{text}: applied, on watch until the run ends" if self.applied else text


class PendingEvents:
    """The events that wait, first come, first served.

    >>> queue = PendingEvents()
    >>> for event in (
    ...     Remove(ids=["a", "b"], event_id="e1"),
    ...     Relabel(ids=["b"], y=[1], event_id="e2"),
    ...     Remove(ids=["c"]),
    ... ):
    ...     queue.insert(Pending(event))
    >>> [p.event.event_id for p in queue.about([("id", "a")])]  # the first, and the one that shares a sample with it
    ['e1', 'e2']
    """

    def __init__(self, store: SampleStore | None = None):
        self.store = store
        self._by_event: dict[str, Pending] = {}
        self._by_name: dict[Name, dict[str, Pending]] = {}
        for note, saved in ({} if store is None else store.notes(PENDING_NOTE_PREFIX)).items():
            try:
                self.insert(Pending(from_primitives(saved["event"]), saved["applied"], note, set(saved["gone"])))
            except (ValueError, KeyError, TypeError) as error:
                raise StoreError(f"a pending event of {store and store.path} cannot be read: {error}") from None

    def __len__(self) -> int:
        return len(self._by_event)

    def __iter__(self) -> Iterator[Pending]:
        return iter(list(self._by_event.values()))

    def __contains__(self, event_id: str) -> bool:
        return event_id in self._by_event

    def __getitem__(self, event_id: str) -> Pending:
        return self._by_event[event_id]

    @property
    def unanswered(self) -> list[Pending]:
        """Events that were never applied."""
        return [p for p in self if not p.applied]

    def insert(self, pending: Pending) -> None:
        """Put an event at the end of the queue; one that is in it stays where it is."""
        self._by_event.setdefault(pending.event.event_id, pending)
        for name in pending.names:
            self._by_name.setdefault(name, {})[pending.note] = pending

    def remove(self, pending: Pending) -> None:
        """Take an event out of the queue; its note in the store is left alone."""
        self._by_event.pop(pending.event.event_id, None)
        for name in pending.names:
            self._by_name.get(name, {}).pop(pending.note, None)
            if not self._by_name.get(name):
                self._by_name.pop(name, None)

    def about(self, names: Iterable[Name]) -> list[Pending]:
        """Find the events that concern samples or subjects, and all that share one with these, in their order."""
        found: dict[str, Pending] = {}
        waiting = list(names) if self._by_event else []
        known = set(waiting)
        while waiting:
            for note, pending in self._by_name.get(waiting.pop(), {}).items():
                if note not in found:
                    found[note] = pending
                    waiting += set(pending.names) - known
                    known.update(pending.names)
        return self.current(found[note] for note in sorted(found))

    def removes(self, sample_id: str, subject: str | None) -> bool:
        """True if a removal waits for a sample, or watches its subject."""
        names = [("id", sample_id)] + ([] if subject is None else [("subject", subject)])
        return any(isinstance(p.event, Remove) for name in names for p in self._by_name.get(name, {}).values())

    def current(self, queue: Iterable[Pending]) -> list[Pending]:
        """Select the events that no other process has dropped meanwhile and that were not refused."""
        out = []
        for pending in queue:
            if self.store is not None and self.store.note(pending.note) is None:
                self.remove(pending)
            elif not pending.refused:
                out.append(pending)
        return out

    def end_run(self) -> None:
        """Drop the events that are on watch."""
        ended = [p for p in self if p.applied]
        if self.store is not None and ended:
            self.store.apply([], notes=dict.fromkeys(p.note for p in ended))
        for pending in ended:
            self.remove(pending)

    def state_dict(self) -> list[dict[str, Any]]:
        """All events as primitives, in their order."""
        return [p.to_primitives() for p in self]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Restore the events of :meth:`state_dict`."""
        self._by_event, self._by_name = {}, {}
        for saved in state:
            self.insert(Pending(from_primitives(saved["event"]), saved["applied"], gone=set(saved["gone"])))


def drop_pending(store: SampleStore, event_ids: Sequence[str]) -> list[Pending]:
    """Drop events of a store that wait or are on watch; returns them. ValueError if one is not in the queue."""
    pending = PendingEvents(store)
    unknown = next((e for e in event_ids if e not in pending), None)
    if unknown is not None:
        raise ValueError(f"no event {unknown!r} is pending in {store.path}. Nothing was dropped.")
    dropped = [pending[e] for e in dict.fromkeys(event_ids)]
    store.apply([], notes=dict.fromkeys(p.note for p in dropped))
    return dropped
