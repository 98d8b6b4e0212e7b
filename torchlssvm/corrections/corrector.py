"""Apply events to a head or kernel machine, each exactly once, with or without a store. No Trainer is needed.

If there is a store, it knows its samples, and its journal records which events were applied. Without a store,
:class:`~torchlssvm.corrections.head_samples.HeadSamples` keeps this record, and the events carry the samples as they were
added.

**Learn, then remove.** A run that learns its samples batch by batch records which samples it has seen so far (``SeenSamples``).
An event that names a sample which has not arrived waits in a queue. Later events that name one of its samples wait too. When a
batch brings the last missing sample, one transaction learns the batch and applies the event: Add, then Remove. If the head sums
on a grid, its result equals, bit for bit, that of a head that never saw the sample. The sample is never durable and never used
for predictions. A sample also counts as arrived if a suppression list excludes it, or if it is to be removed and cannot be
learned. If some samples of a Remove have arrived and been removed already, the Remove is applied to the remaining samples.

An event that treats all samples of a subject alike (a Remove, or a Relabel with one label) also applies to samples that arrive
later. It is applied to the samples that are held, and then stays on watch: until the run ends, it is applied again with each
batch that brings more samples of the subject.

To save time, events that arrive together change the head once, with one matrix product. If the head refuses them, they are
tried in halves to find the invalid events, and the other events are applied in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchlssvm.corrections.event_sources import Item
from torchlssvm.corrections.head_samples import HeadSamples
from torchlssvm.corrections.seen_samples import SeenSamples
from torchlssvm.corrections.waiting_events import EventOutcome, EventStatus, Name, WaitingEvent, WaitingEvents
from torchlssvm.errors import InterruptedUpdateError, RemovalError, StoreError
from torchlssvm.events import Add, Event, Remove, Replace
from torchlssvm.functional.grid import FixedPoint
from torchlssvm.linear import LinearHead
from torchlssvm.store import SampleStore
from torchlssvm.store.transaction import REFUSAL_ERRORS, EventResult

__all__ = ["Corrector"]

STORE_FAULTS = (StoreError, InterruptedUpdateError)
"""Errors that the event did not cause, e.g. a full disk. They are raised, and the event is tried again later."""

UNCERTIFIED_NOTE = "uncertified"
"""Name of the store's note that lists applied removals without a certificate."""


ReadyEvents = list[tuple[WaitingEvent, Event | None]]
"""Events that can be applied, each with the part that is left to do (None: nothing is left)."""


class MissingSample(Exception):
    """Raised if a sample of an event has not arrived."""


class Corrector:
    """Apply events to a head or a kernel machine, directly or through a store, each event once.

    Args:
        head: an :class:`~torchlssvm.LSSVMHead`, a :class:`~torchlssvm.MarginHead` or a kernel machine.
        store: a :class:`~torchlssvm.store.SampleStore` with this head.
        seen: the samples that a run has seen so far. Pass it to keep events for samples that have not arrived in a queue.

    >>> import torch
    >>> from torchlssvm import FixedPoint, LSSVMHead
    >>> head = LSSVMHead(4, 2, grid=FixedPoint(8.0))
    >>> corrector = Corrector(head)
    >>> x, y = torch.randn(6, 4), torch.arange(6) % 2
    >>> events = [
    ...     Add(ids=list("abcdef"), x=x, y=y),
    ...     Remove(ids=["b"], x=x[1:2], y=y[1:2]),
    ...     Remove(ids=["z"], x=x[:1], y=y[:1]),
    ... ]
    >>> [str(o.status) for o in corrector.apply(events)], head.n
    (['applied', 'applied', 'refused'], 5)
    >>> [str(o.status) for o in corrector.apply(events[:2])], head.n
    (['repeated', 'repeated'], 5)
    """

    def __init__(self, head: Any, store: SampleStore | None = None, seen: SeenSamples | None = None):
        self.head, self.store, self.seen = head, store, seen
        self.samples: SampleStore | HeadSamples = HeadSamples(head) if store is None else store
        self.queue = WaitingEvents(store if seen is not None else None)
        self.answered: list[tuple[Item, EventOutcome]] = []
        """Outcomes of events that waited, until :meth:`take_answered` is called."""
        self.certified = False
        """True if removals are to be certified: the store then notes which are not yet."""
        self.suppressed: set[str] = set()
        """Samples that arrived here and were not learned, since they were erased on request."""
        self.unusable: set[str] = set()
        """Samples that arrived here, cannot be learned, and were to be removed."""
        if isinstance(head, LinearHead):
            head._drop_membership("its rows are checked by a store, or by the ids and hashes of a Corrector")
        elif not hasattr(head, "ids"):
            raise ValueError(f"events are for a linear head or a kernel machine, got {type(head).__name__}")

    def apply(self, events: Iterable[Event]) -> list[EventOutcome]:
        """Apply events in order. A refused event changes nothing and does not block the others.

        In a run, an event for a sample that has not arrived waits, and so do later events that name the same sample.
        """
        given = [self.queue.new(event) for event in events]
        for waiting in given:
            if waiting.event.event_id in self.queue:
                waiting.outcome = second_outcome(waiting.event, self.queue[waiting.event.event_id].event)
        new = [waiting for waiting in given if waiting.outcome is None]
        self._settle([], new, {name for waiting in new for name in waiting.names})
        return [waiting.outcome or EventOutcome.of(waiting.event, EventStatus.WAITING) for waiting in given]

    def apply_waiting(self, final: bool = False) -> None:
        """Apply the waiting events whose samples have arrived. :meth:`take_answered` returns their outcomes.

        Set ``final`` when the pass over the samples is over, because events then have nothing left to wait for: a removal is
        applied even if an earlier event about the same sample still waits for another sample.
        """
        if len(self.queue):
            self._settle([], [], None, final)

    def learn(self, additions: list[Add], notes: dict[str, Any] | None = None, settle: bool = True) -> None:
        """Learn new samples and apply the events that waited for them, as one change that also writes ``notes`` to the store.

        With ``settle=False``, the events wait until all ranks have added up the samples that they learned.
        """
        arrived = {("id", i) for i in self.unusable}.union(*(WaitingEvent(event).names for event in additions))
        self._settle(additions, [], arrived if settle else set(), notes=notes)

    def leave_out_unusable(
        self, x: Tensor, ids: list[str], subjects: list[str | None] | None, new: list[int]
    ) -> list[int]:
        """Return the indices ``new`` without samples that cannot be learned and that a waiting event removes anyway.

        Features that are not finite, or that exceed the limit of the head's grid, cannot be learned.
        """
        grid = getattr(self.head, "grid", None)
        limit = grid.max_value if isinstance(grid, FixedPoint) else torch.finfo(torch.float64).max
        bad = {k for k in new if not bool((x[k].abs() <= limit).all())} if len(self.queue) else set()
        out = {k for k in bad if self.queue.removes(ids[k], None if subjects is None else subjects[k])}
        self.unusable.update(ids[k] for k in out)
        return [k for k in new if k not in out]

    def take_answered(self) -> list[tuple[Item, EventOutcome]]:
        """Return the outcomes of waiting events since the last call. A refused event is kept until :meth:`give_up`."""
        taken, self.answered = self.answered, []
        return taken

    def give_up(self, event: Event) -> None:
        """Drop a refused event after it was recorded elsewhere. Another event with the same id stays in the queue."""
        if event.event_id in self.queue and self.queue[event.event_id].refused:
            waiting = self.queue[event.event_id]
            if self.store is not None:
                self.store.set_note(waiting.note, None)
            self.queue.remove(waiting)

    # -- which events can be applied -------------------------------------------------------------------------------------

    def _select(
        self, additions: list[Add], queue: Iterable[WaitingEvent], touched: set[Name] | None, final: bool
    ) -> ReadyEvents:
        """Select the events that can be applied once the additions are learned.

        A waiting event blocks later events that name one of its samples. If ``touched`` is given, only events about these
        samples and subjects, and the events blocked by them, are examined. None examines all events.
        """
        arriving = {i: whose for event in additions for i, whose in zip(event.ids, event.subjects, strict=True)}
        new, gone = dict(arriving), set[str]()  # the samples that the change so far adds, and those that it removes
        blocked: set[Name] = set()
        ready: ReadyEvents = []
        for waiting in queue:
            event, names = waiting.event, waiting.names
            behind = not blocked.isdisjoint(names) and not (final and isinstance(event, Remove))
            waits = not waiting.on_watch and (behind or (touched is not None and touched.isdisjoint(names)))
            later = []
            if waiting.on_watch:
                later = [i for i, whose in arriving.items() if whose == event.subject and i not in gone]
            if (waiting.on_watch and not later) or (not waits and self.queue.was_dropped(waiting)):
                continue
            try:
                if waits:
                    raise MissingSample
                rest = waiting.for_later(later) if waiting.on_watch else self._left_to_do(event, new, gone)
            except MissingSample:
                blocked.update(names)
                continue
            except REFUSAL_ERRORS as error:
                waiting.outcome = EventOutcome.refusal(event, error)
            else:
                ready.append((waiting, rest))
                if isinstance(rest, Add):
                    new |= dict(zip(rest.ids, rest.subjects, strict=True))
                    gone.difference_update(rest.ids)
                elif isinstance(rest, Remove):
                    gone.update(rest.ids or self._ids_of(rest.subject, new))
            if touched is not None:
                touched |= names
        return ready

    def _left_to_do(self, event: Event, new: dict[str, str | None], gone: set[str]) -> Event | None:
        """Return the part of an event that remains, given the samples that arrive (``new``, with subjects) and are removed.

        Raises MissingSample if the event must wait, and another error if it can never be applied.
        """
        if self.seen is None or isinstance(event, Add) or self.samples.has_applied(event.event_id):
            return event
        if isinstance(self.samples, HeadSamples):
            if self.samples.is_unnamed(event):
                return event
            self.samples.check(event)
        if event.ids is None:
            each = event.x if isinstance(event, Replace) else event.y
            needed = 1 if isinstance(event, Remove) or each.ndim == 0 else len(each)
            if len([i for i in self._ids_of(event.subject, new) if i not in gone]) < needed:
                raise MissingSample
            return event
        missing = [i for i in event.ids if i in gone or not (i in new or i in self.samples)]
        arrived = [i for i in missing if i in gone or i in self.seen]
        too_late = arrived and not isinstance(event, Remove)
        if len(arrived) < len(missing) and not too_late:
            raise MissingSample
        if too_late or (len(arrived) == len(event.ids) and not self._were_left_out(arrived)):
            raise RemovalError(f"no sample with the id {arrived[0]!r} is held. Nothing was changed.")
        return without_samples(event, missing)

    def _ids_of(self, subject: str, new: dict[str, str | None]) -> list[str]:
        """List the samples of a subject that are held or arriving."""
        return list(dict.fromkeys([*self.samples.find(subject=subject), *(i for i in new if new[i] == subject)]))

    def _were_left_out(self, ids: Sequence[str]) -> bool:
        """True if some samples arrived but were never learned."""
        rest = [i for i in ids if i not in self.suppressed | self.unusable]
        return not rest or (self.store is not None and all(self.store.suppression.erased(rest, [None] * len(rest))))

    # -- applying them ---------------------------------------------------------------------------------------------------

    def _settle(
        self,
        additions: list[Add],
        new: list[WaitingEvent],
        touched: set[Name] | None,
        final: bool = False,
        notes: dict[str, Any] | None = None,
    ) -> None:
        """Apply additions, and all queued and new events that can then be applied. The other events wait."""
        waited = [waiting for waiting in self.queue if not waiting.refused]
        ready = self._select(additions, [*waited, *new], touched, final)
        chosen = {id(waiting) for waiting, _ in ready}
        fresh: dict[str, WaitingEvent] = {}  # the new events that wait
        for waiting in new:
            if waiting.outcome is None and id(waiting) not in chosen:
                first = fresh.setdefault(waiting.event.event_id, waiting)
                if first is not waiting:
                    waiting.outcome = second_outcome(waiting.event, first.event)
        self._commit(additions, ready, (notes or {}) | {p.note: p.to_primitives() for p in fresh.values()}, final)
        for waiting in [*fresh.values(), *(p for p, _ in ready if self.seen is not None)]:
            done = waiting.outcome
            if done is None or (waiting.watches and done.status in (EventStatus.APPLIED, EventStatus.WATCHED)):
                waiting.on_watch = done is not None
                self.queue.insert(waiting)
            elif done.status is not EventStatus.REFUSED:
                self.queue.remove(waiting)
        for waiting in waited:
            if waiting.outcome is not None and (id(waiting) in chosen or not waiting.on_watch):
                self.answered.append((Item(waiting.event), waiting.outcome))

    def _commit(self, additions: list[Add], ready: ReadyEvents, notes: dict[str, Any], final: bool) -> None:
        """Apply additions and events in one transaction. Invalid events are found by trial and left out."""
        by_ids = isinstance(self.samples, HeadSamples) and self.samples.machine.by_ids
        if by_ids and len(additions) + len(ready) > 1:  # a kernel machine without a store takes one event at a time
            for addition in additions:
                self._commit([addition], [], {}, final)
            for one in ready:
                self._commit([], [one], {}, final)
            return
        try:
            results = self._write(additions, ready, notes)
        except STORE_FAULTS:
            raise
        except REFUSAL_ERRORS:
            if not ready:
                raise
            if additions:
                self.samples.preview(additions)
            ready = self._acceptable(additions, ready, final)
            results = self._write(additions, ready, notes)
        self.suppressed.update(i for result in results for i in result.left_out)
        answers = iter(results[len(additions) :])
        for waiting, event in ready:
            if event is None:
                waiting.outcome = EventOutcome.of(waiting.event, EventStatus.APPLIED)
                continue
            r = next(answers)
            status = EventStatus.APPLIED if r.applied else EventStatus.REPEATED
            if waiting.on_watch:
                status = EventStatus.WATCHED
            waiting.outcome = EventOutcome(r.event_id, r.kind, r.samples, status)

    def _write(self, additions: list[Add], ready: ReadyEvents, notes: dict[str, Any]) -> list[EventResult]:
        """Apply events. The notes record which events no longer wait, which are on watch, and which removals to certify."""
        events = [*additions, *(event for _, event in ready if event is not None)]
        notes = dict(notes)
        for waiting, _ in ready if self.seen is not None else []:
            if waiting.watches and not self.samples.has_applied(waiting.event.event_id):
                notes[waiting.note] = waiting.to_primitives(on_watch=True)
            elif waiting.event.event_id in self.queue and not waiting.on_watch:
                notes[waiting.note] = None
        if self.store is not None and self.certified:
            given = [e.event_id for e in events if isinstance(e, Remove) and not self.store.has_applied(e.event_id)]
            if given:
                notes[UNCERTIFIED_NOTE] = [*(self.store.note(UNCERTIFIED_NOTE) or []), *given]
        return self.samples.apply(events, notes=notes, keep_receipt=self.certified) if events or notes else []

    def _acceptable(self, base: Sequence[Event], ready: ReadyEvents, final: bool) -> ReadyEvents:
        """Select the events that are accepted after others by trying them in halves. The rest get their outcomes."""
        try:
            self.samples.preview([*base, *(event for _, event in ready if event is not None)])
        except STORE_FAULTS:
            raise
        except REFUSAL_ERRORS as error:
            if len(ready) > 1:
                half = len(ready) // 2
                first = self._acceptable(base, ready[:half], final)
                return first + self._acceptable([*base, *(e for _, e in first if e is not None)], ready[half:], final)
            waiting = ready[0][0]
            unnamed = isinstance(self.samples, HeadSamples) and self.samples.is_unnamed(waiting.event)
            if final or self.seen is None or not unnamed or not isinstance(error, RemovalError):
                waiting.outcome = EventOutcome.refusal(waiting.event, error)  # otherwise its sample may still arrive
            return []
        return ready

    # -- the store and kernel machines -----------------------------------------------------------------------------------

    def machine_ids(self, ids: Sequence[str]) -> list[int] | None:
        """Return a kernel machine's own ids of samples; None for a head, which removes samples by their features."""
        if not hasattr(self.head, "ids"):
            return None
        machine: Any = self.samples.machine if isinstance(self.samples, HeadSamples) else self.samples.live.adapter
        return [machine.find(name) for name in ids]

    def follow(self, position: int) -> list[EventOutcome]:
        """List the changes that other processes made to the store after ``position``, and update the head accordingly."""
        if self.store is None:
            raise ValueError("only a store has a journal to follow")
        if self.store.position == position:
            return []
        _ = self.store.head
        entries = self.store.history()[position:]
        return [EventOutcome(e.event_id, e.kind, e.samples, EventStatus.APPLIED) for e in entries]

    def state_dict(self) -> dict[str, Any]:
        """Return applied events, held samples and waiting events for a checkpoint; empty with a store, which keeps them."""
        if not isinstance(self.samples, HeadSamples):
            return {}
        return self.samples.state_dict() | {"waiting": self.queue.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`. The head itself must be loaded separately."""
        if state and isinstance(self.samples, HeadSamples):
            self.samples.load_state_dict(state)
            self.queue.load_state_dict(state["waiting"])


def second_outcome(event: Event, earlier: Event) -> EventOutcome:
    """Return the outcome of an event whose id is already in the queue."""
    if event == earlier:
        return EventOutcome.of(event, EventStatus.REPEATED)
    return EventOutcome.refusal(
        event, ValueError(f"another event with the id {event.event_id!r} is waiting: each has its own")
    )


def without_samples(event: Event, gone: Sequence[str]) -> Event | None:
    """Return a Remove without the samples in ``gone``, or None if no sample is left. Other events are returned unchanged."""
    if not gone or not isinstance(event, Remove):
        return event
    keep = [k for k, i in enumerate(event.ids) if i not in gone]
    parts = {name: None if getattr(event, name) is None else getattr(event, name)[keep] for name in ("x", "y")}
    return Remove(ids=[event.ids[k] for k in keep], event_id=event.event_id, **parts) if keep else None
