"""Application of events to any head or kernel machine, with or without a store, each exactly once. No Trainer in here.

Samples that a kernel machine was given directly go by the ids it gave them, as text.

With a store the store is the truth: it knows its samples, and its journal knows which events were applied. Without one the
events carry the samples as they were added, and :class:`Corrector` remembers event ids, sample ids and a hash of each sample:
what is removed under an id must be, bit for bit, what was added under it. Its ``state_dict`` goes into the same checkpoint as
the head, so both go back together.

**Learn, then remove.** A run that learns its samples batch by batch tells the corrector which it has seen so far
(``SeenSamples``). An event that names a sample which has not arrived waits in a queue
(:mod:`torchlssvm.corrections.pending_events`). The batch that brings the last of its samples is learned and the event applied
in one transaction, Add then Remove: on a grid that leaves the bits of never added, and nothing that was asked to go is ever
durable or served. A sample that a suppression list leaves out, or that is to be removed and cannot be learned, counts as
arrived.

A burst is one change of the head: the sums of many events are one product of matrices. If it is refused, it is halved until the
bad events are alone; the others are applied in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchlssvm.corrections.event_sources import Item
from torchlssvm.corrections.outcome import Outcome
from torchlssvm.corrections.pending_events import Name, Pending, PendingEvents
from torchlssvm.corrections.sample_hashes import SAMPLE_HASH_BYTES, hash_samples
from torchlssvm.corrections.seen_samples import SeenSamples
from torchlssvm.errors import InterruptedUpdateError, RemovalError, StoreError
from torchlssvm.events import Add, Event, Relabel, Remove, Replace
from torchlssvm.functional.byte_tensors import bytes_to_tensor, tensor_to_bytes
from torchlssvm.functional.grid import FixedPoint
from torchlssvm.linear import LinearHead
from torchlssvm.sample_adapter import SampleAdapter
from torchlssvm.store import SampleStore
from torchlssvm.store.transaction import REFUSAL_ERRORS

__all__ = ["Corrector"]

STORE_FAULTS = (StoreError, InterruptedUpdateError)
"""Of the refusals, errors that are not the event's, e.g. a full disk: they are raised, and the event is to be tried again."""

UNCERTIFIED_NOTE = "uncertified"
"""The note of a store with the removals that were applied and have no certificate yet."""


@dataclass(frozen=True)
class Ready:
    """An event can be applied; ``event`` is what is left of it to do, None for nothing."""

    event: Event | None


@dataclass(frozen=True)
class Waiting:
    """A sample of the event has not arrived."""


@dataclass(frozen=True)
class Refused:
    """An event can never be applied."""

    error: Exception


Planned = dict[str, tuple[bool, str | None]]
"""For samples that a change adds or removes: whether they are held after it, and their subject."""

ReadyEvents = list[tuple[Pending, Event | None]]


class Corrector:
    """Applies events to a head or a kernel machine, or through a store to the store's head.

    Args:
        head: an :class:`~torchlssvm.LSSVMHead`, a :class:`~torchlssvm.MarginHead` or a kernel machine.
        store: a :class:`~torchlssvm.store.SampleStore` with this head.
        seen: the samples that a run has seen so far. With it, events for samples that have not arrived are held.

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
    >>> [o.status for o in corrector.apply(events)], head.n
    (['applied', 'applied', 'refused'], 5)
    >>> [o.status for o in corrector.apply(events[:2])], head.n
    (['repeated', 'repeated'], 5)
    """

    def __init__(self, head: Any, store: SampleStore | None = None, seen: SeenSamples | None = None):
        self.head, self.store, self.seen = head, store, seen
        self.pending = PendingEvents(store if seen is not None else None)
        self.answered: list[tuple[Item, Outcome]] = []
        """Outcomes of events that waited, until :meth:`take_answered` is called."""
        self.certified = False
        """True if removals are to be certified: the store then notes which are not yet."""
        self.suppressed: set[str] = set()
        """Samples that arrived here and were not learned, since they were erased on request."""
        self.unusable: set[str] = set()
        """Samples that arrived here, cannot be learned, and were to be removed."""
        self.samples = SampleAdapter(head)
        if not self.samples.by_ids:
            if not isinstance(head, LinearHead):
                raise ValueError(f"events are for a linear head or a kernel machine, got {type(head).__name__}")
            head.drop_membership("its rows are checked by a store, or by the ids and hashes of a Corrector")
        self.applied: dict[str, None] = {}
        self.hashes: dict[str, bytes] = {}
        """The hash of each sample that is held under an id, without a store."""
        self.complete = self.samples.count == 0
        """True if all samples of the head were added here, with ids: an unknown id is then an error."""

    def __contains__(self, sample_id: str) -> bool:
        """True if a sample is held under this id."""
        if self.store is not None:
            return sample_id in self.store
        return sample_id in self.hashes or (self.samples.by_ids and self.samples.find(sample_id) is not None)

    # -- applying ------------------------------------------------------------------------------------------------------

    def apply(self, events: Iterable[Event]) -> list[Outcome]:
        """Apply events in their order; one that is refused changes nothing and does not hold up the others.

        In a run, an event for a sample that has not arrived waits, and so do later ones that name the same sample.
        """
        given = [Pending(event) for event in events]
        new = []
        for pending in given:
            if pending.event.event_id in self.pending:
                pending.outcome = second_outcome(pending.event, self.pending[pending.event.event_id].event)
            else:
                new.append(pending)
        names = [name for pending in new for name in pending.names]
        if len(self.pending) and self.store is not None:
            whose = [p.event.subject for p in new if isinstance(p.event, Remove) and p.event.ids is None]
            names += [("id", i) for subject in whose for i in self.store.find(subject=subject)]
        earlier = self.pending.about(names)
        self._settle([], [*earlier, *new])
        return [pending.outcome for pending in given if pending.outcome is not None]

    def apply_pending(self, final: bool = False) -> None:
        """Apply the events that waited, as far as their samples have arrived; :meth:`take_answered` returns their outcomes.

        ``final``: the pass over the samples is over. A removal then waits no longer for an earlier event of the same sample
        that waits for another one.
        """
        if len(self.pending):
            self._settle([], self.pending.current(self.pending), final)

    def learn(self, additions: list[Add], notes: dict[str, Any] | None = None, settle: bool = True) -> None:
        """Learn new samples and apply the events that waited for them, as one change; ``notes`` go into the store with it.

        ``settle=False``: the events wait until ranks have added up what they learned.
        """
        names = [name for event in additions for name in Pending(event).names]
        names += [("id", i) for i in self.unusable]
        self._settle(additions, self.pending.about(names) if settle else [], notes=notes)

    def leave_out_unusable(
        self, x: Tensor, ids: list[str], subjects: list[str | None] | None, new: list[int]
    ) -> list[int]:
        """Return the places of new samples x[new] without those that cannot be learned and are to be removed anyway.

        Features that are not finite, or beyond the limit of the head's grid, cannot be learned.
        """
        grid = getattr(self.head, "grid", None)
        limit = grid.max_value if isinstance(grid, FixedPoint) else torch.finfo(torch.float64).max
        bad = {k for k in new if not bool((x[k].abs() <= limit).all())} if len(self.pending) else set()
        out = {k for k in bad if self.pending.removes(ids[k], None if subjects is None else subjects[k])}
        self.unusable.update(ids[k] for k in out)
        return [k for k in new if k not in out]

    def _settle(
        self, additions: list[Add], queue: list[Pending], final: bool = False, notes: dict[str, Any] | None = None
    ) -> None:
        """Apply additions and the events of the queue that can then be applied, and note the outcome of each."""
        waited = [p for p in queue if p.event.event_id in self.pending]
        ready = self._plan(additions, queue, final)
        self._hold([p for p in queue if p not in waited and p.outcome is not None and p.outcome.status == "held"])
        problem = None
        if self.store is not None:
            self._commit(self.store, additions, ready, notes or {})
        else:
            problem = self._change_head(additions, ready)
        late = [p for p, _ in ready if not final and self._may_still_come(p)]
        for pending in late:
            pending.outcome = Outcome.of(pending.event, "held")
        self._hold([p for p in late if p not in waited])
        for pending in waited:
            if pending.outcome is not None and pending.outcome.status != "held":
                self.answered.append((Item(pending.event), pending.outcome))
        if problem is not None:
            raise problem

    def _hold(self, events: list[Pending]) -> None:
        """Put events into the queue; with a store they are on the disk when this returns."""
        if self.store is not None and events:
            self.store.apply([], notes={p.note: p.to_primitives() for p in events})
        for pending in events:
            self.pending.insert(pending)

    def _done(self, pending: Pending, outcome: Outcome) -> None:
        """Record the outcome of an event: it leaves the queue, unless it was refused, or watches its subject from now on."""
        pending.outcome = outcome
        if self.seen is None or outcome.status == "refused":
            return
        if pending.watches and outcome.status in ("applied", "watched"):
            pending.applied += 1
            self.pending.insert(pending)
        elif pending.event.event_id in self.pending:
            self.pending.remove(pending)

    # -- which events can be applied -------------------------------------------------------------------------------------

    def _plan(self, additions: list[Add], queue: list[Pending], final: bool) -> ReadyEvents:
        """Select the events that can be applied once the additions are learned; the others get their outcomes.

        An event that waits blocks the later ones that name one of its samples.
        """
        arriving = {i: whose for event in additions for i, whose in zip(event.ids, event.subjects, strict=True)}
        planned: Planned = {i: (True, whose) for i, whose in arriving.items()}
        blocked: set[Name] = set()
        waiting: dict[str, Event] = {}
        ready: ReadyEvents = []
        removals: list[Pending] = []  # those that wait
        for pending in queue:
            event, pending.outcome = pending.event, None
            if event.event_id in waiting:
                pending.outcome = second_outcome(event, waiting[event.event_id])
                continue
            if pending.applied:  # on watch: it concerns what arrives now
                later = [i for i, whose in arriving.items() if whose == event.subject and planned[i][0]]
                if not later:
                    continue
                verdict: Ready | Waiting | Refused = Ready(pending.for_later(later))
            elif not blocked.isdisjoint(pending.names) and not (final and isinstance(event, Remove)):
                verdict = Waiting()
            else:
                verdict = self._judge(event, planned, pending.gone)
            if isinstance(verdict, Waiting):
                pending.outcome = Outcome.of(event, "held")
                removals += [pending] if isinstance(event, Remove) else []
                waiting[event.event_id] = event
                blocked.update(pending.names)
            elif isinstance(verdict, Refused):
                pending.outcome = Outcome.refusal(event, verdict.error)
            else:
                ready.append((pending, verdict.event))
                if isinstance(verdict.event, Add):
                    planned |= {i: (True, s) for i, s in zip(event.ids, event.subjects, strict=True)}  # type: ignore[union-attr]
                elif isinstance(verdict.event, Remove):
                    removed = verdict.event.ids or self._ids_of(verdict.event.subject, planned)
                    planned |= dict.fromkeys(removed, (False, None))
                    for earlier in removals:
                        earlier.gone.update(set(removed).intersection(earlier.event.ids or ()))
        return ready

    def _judge(self, event: Event, planned: Planned, gone: set[str]) -> Ready | Waiting | Refused:
        """Decide whether an event can be applied, after the changes that are planned.

        ``gone``: samples that later events have removed while it waited.
        """
        if self.seen is None or isinstance(event, Add) or self._was_applied(event) or self._is_unnamed(event):
            return Ready(event)
        if self.store is None:
            try:
                self._check_carried(event)
            except REFUSAL_ERRORS as error:
                return Refused(error)
        if event.ids is None:
            each = event.x if isinstance(event, Replace) else event.y
            needed = 1 if isinstance(event, Remove) or each.ndim == 0 else len(each)
            return Ready(event) if len(self._ids_of(event.subject, planned)) >= needed else Waiting()
        missing = [i for i in event.ids if not (planned[i][0] if i in planned else i in self)]
        arrived = [i for i in missing if i in planned or i in self.seen]
        left_out = self._left_out(arrived) | gone
        unknown = next((i for i in arrived if i not in left_out or not isinstance(event, Remove)), None)
        if unknown is not None:
            return Refused(RemovalError(f"no sample with the id {unknown!r} is held. Nothing was changed."))
        if len(arrived) < len(missing):
            return Waiting()
        return Ready(without_samples(event, missing))

    def _ids_of(self, subject: str, planned: Planned) -> list[str]:
        """List the samples of a subject after the changes that are planned."""
        held = [] if self.store is None else self.store.find(subject=subject)
        new = [i for i, (is_held, whose) in planned.items() if is_held and whose == subject]
        return [i for i in held if i not in planned] + new

    def _left_out(self, ids: Sequence[str]) -> set[str]:
        """Select the samples that arrived and were never learned."""
        if self.store is None or not ids:
            return self.unusable.intersection(ids)
        listed = self.store.suppression.erased(ids, [None] * len(ids))
        here = (self.suppressed | self.unusable).intersection(ids)
        return here.union(i for i, erased in zip(ids, listed, strict=True) if erased)

    def _was_applied(self, event: Event) -> bool:
        """True if an event with its id was applied before."""
        return event.event_id in self.applied if self.store is None else self.store.has_applied(event.event_id)

    def _is_unnamed(self, event: Event) -> bool:
        """True if only the head can tell whether it holds the samples of an event: some came without ids."""
        if self.store is not None or self.complete or self.samples.by_ids or isinstance(event, Add):
            return False
        return event.ids is not None and not any(i in self.hashes for i in event.ids)

    def _may_still_come(self, pending: Pending) -> bool:
        """True if an event was refused for a sample that is not held and may arrive later."""
        outcome = pending.outcome
        if self.seen is None or outcome is None or outcome.error is None or not issubclass(outcome.error, RemovalError):
            return False
        return self._is_unnamed(pending.event) or isinstance(self._judge(pending.event, {}, set()), Waiting)

    def take_answered(self) -> list[tuple[Item, Outcome]]:
        """Return the outcomes, since the last call, of events that waited. A refused one is kept until :meth:`give_up`."""
        taken, self.answered = self.answered, []
        return taken

    def give_up(self, event: Event) -> None:
        """Drop a refused event once it is written down elsewhere. Another one with its id stays in the queue."""
        if event.event_id in self.pending and self.pending[event.event_id].refused:
            pending = self.pending[event.event_id]
            if self.store is not None:
                self.store.set_note(pending.note, None)
            self.pending.remove(pending)

    # -- with a store ----------------------------------------------------------------------------------------------------

    def _commit(self, store: SampleStore, additions: list[Add], ready: ReadyEvents, notes: dict[str, Any]) -> None:
        """Apply additions and events in one transaction; of those refused, the outcome says so.

        With additions it stays one transaction: bad events are found by trying, and left out. Without, it is halved.
        """
        events = [*additions, *(event for _, event in ready if event is not None)]
        notes = notes | self._notes(store, ready)
        if not events and not notes:
            receipts = []
        else:
            try:
                receipts = store.apply(events, notes=notes, keep_receipt=self.certified)
            except STORE_FAULTS:
                raise
            except REFUSAL_ERRORS as error:
                if not ready:
                    raise
                if additions:
                    self._commit(store, additions, self._acceptable(store, additions, ready), notes)
                elif len(ready) == 1:
                    self._done(ready[0][0], Outcome.refusal(ready[0][0].event, error))
                else:
                    half = len(ready) // 2
                    self._commit(store, [], ready[:half], {})
                    self._commit(store, [], ready[half:], {})
                return
        self.suppressed.update(i for receipt in receipts for i in receipt.left_out)
        results = iter(receipts[len(additions) :])
        for pending, event in ready:
            if event is None:
                self._done(pending, Outcome.of(pending.event, "applied"))
                continue
            r = next(results)
            status = "watched" if pending.applied else "applied" if r.applied else "repeated"
            self._done(pending, Outcome(r.event_id, r.kind, r.samples, status))

    def _acceptable(self, store: SampleStore, additions: list[Add], ready: ReadyEvents) -> ReadyEvents:
        """Select the events that the store accepts after the additions; the others are refused."""
        store.preview(additions)
        accepted: ReadyEvents = []
        for pending, event in ready:
            trial = [*additions, *(e for _, e in accepted if e is not None), *([] if event is None else [event])]
            try:
                store.preview(trial)
            except STORE_FAULTS:
                raise
            except REFUSAL_ERRORS as error:
                self._done(pending, Outcome.refusal(pending.event, error))
            else:
                accepted.append((pending, event))
        return accepted

    def _notes(self, store: SampleStore, ready: ReadyEvents) -> dict[str, Any]:
        """Notes to be written with events: which wait no longer or are on watch, and which removals are to be certified."""
        notes: dict[str, Any] = {}
        for pending, _ in ready if self.seen is not None else []:
            if pending.watches and (pending.applied or not self._was_applied(pending.event)):
                notes[pending.note] = pending.to_primitives(pending.applied + 1)
            elif pending.event.event_id in self.pending:
                notes[pending.note] = None
        notes |= {
            p.note: p.to_primitives() for p in self.pending if p.gone and p.note not in notes and store.note(p.note)
        }
        removals = [e.event_id for _, e in ready if isinstance(e, Remove) and not store.has_applied(e.event_id)]
        if self.certified and removals:
            notes[UNCERTIFIED_NOTE] = [*(store.note(UNCERTIFIED_NOTE) or []), *removals]
        return notes

    # -- without a store -------------------------------------------------------------------------------------------------

    def _change_head(self, additions: list[Add], ready: ReadyEvents) -> ValueError | None:
        """Apply additions and events to the head, as one change where it can; returns an error if additions are refused."""
        given: list[Event] = [*additions, *(event for _, event in ready if event is not None)]
        parts = [[event] for event in given] if self.samples.by_ids else [given]
        outcomes = [outcome for part in parts if part for outcome in self._apply_jointly(part)]
        results = iter(outcomes[len(additions) :])
        for pending, event in ready:
            self._done(pending, Outcome.of(pending.event, "applied") if event is None else next(results))
        refused = next((o for o in outcomes[: len(additions)] if o.status != "applied"), None)
        return None if refused is None else ValueError(f"samples cannot be added: {refused.reason}")

    def _apply_jointly(self, given: list[Event]) -> list[Outcome]:
        """Apply events as one change, or in halves where the head refuses that; samples are checked by their ids first."""
        held: dict[str, bytes | None] = {}  # what changes
        outcomes, accepted, ids = [], [], set()
        for event in given:
            if event.event_id in self.applied or event.event_id in ids:
                outcomes.append(Outcome.of(event, "repeated"))
                continue
            try:
                held.update(self._hashes_after(event, held))
            except REFUSAL_ERRORS as error:
                outcomes.append(Outcome.refusal(event, error))
                continue
            ids.add(event.event_id)
            accepted.append(event)
            outcomes.append(Outcome.of(event, "applied", len(event.ids)))
        if accepted:
            try:
                self._change(accepted)
            except STORE_FAULTS:
                raise
            except REFUSAL_ERRORS as error:
                return _apply_in_halves(given, error, self._apply_jointly)
        self.applied.update(dict.fromkeys(event.event_id for event in accepted))
        for name, value in held.items():
            if value is None:
                self.hashes.pop(name, None)
            else:
                self.hashes[name] = value
        return outcomes

    def _hashes_after(self, event: Event, changed: dict[str, bytes | None]) -> dict[str, bytes | None]:
        """The hash of each sample of the event once it is applied (None: gone); an error if it cannot be applied."""
        old = self._check_carried(event)
        now_held = [changed[i] if i in changed else self.hashes.get(i) for i in event.ids]
        if isinstance(event, Add):
            twice = next((i for i, h in zip(event.ids, now_held, strict=True) if h is not None), None)
            if twice is not None:
                raise ValueError(f"a sample with the id {twice!r} is held already: remove or replace it")
            return dict(zip(event.ids, hash_samples(event.x, event.y), strict=True))
        for k, (name, hash_) in enumerate(zip(event.ids, now_held, strict=True)):
            unknown = self.samples.find(name) is None if self.samples.by_ids else self.complete
            if hash_ is None and (unknown or name in changed):
                raise RemovalError(f"no sample with the id {name!r} is held. Nothing was changed.")
            if hash_ is not None and old is not None and hash_ != old[k]:
                raise RemovalError(f"the sample carried for {name!r} is not, bit for bit, the one that was added")
        if isinstance(event, Remove):
            return dict.fromkeys(event.ids)
        if isinstance(event, Relabel):
            x = torch.zeros(len(event.ids), 0) if event.x is None else event.x
            return dict(zip(event.ids, hash_samples(x, event.y), strict=True))
        y = event.y if event.y is not None else event.y_old
        if y is None:
            raise ValueError("a Replace without a store needs y, or y_old")
        return dict(zip(event.ids, hash_samples(event.x, y), strict=True))

    def _check_carried(self, event: Event) -> list[bytes] | None:
        """Check that an event carries the samples it changes, as a head without a store needs them; returns their hashes."""
        if event.ids is None:
            raise ValueError("there is no store here that knows subjects: give ids and the samples as they were added")
        if self.samples.by_ids:
            return None
        for name in ("x", "x_old"):
            x = getattr(event, name, None)
            if x is not None and x.shape[1] != self.head.in_features:
                raise ValueError(f"{name} must have shape (B, {self.head.in_features}), got {tuple(x.shape)}")
        if isinstance(event, Add):
            return None
        x = event.x_old if isinstance(event, Replace) else event.x
        y = event.y if isinstance(event, Remove) else event.y_old
        if x is None or y is None:
            raise ValueError(
                f"there is no store here: a {type(event).__name__} must carry the samples as they were added "
                f"({'x_old, y_old' if isinstance(event, Replace) else 'x, y_old' if isinstance(event, Relabel) else 'x, y'})"
            )
        return hash_samples(x, y)

    def _change(self, events: Sequence[Event]) -> None:
        """Change the head by events: a linear one jointly, a kernel machine by one event."""
        added: list[tuple[Any, ...]] = []  # (ids, x, y)
        removed: list[tuple[Any, ...]] = []
        for event in events:
            if isinstance(event, Add):
                added.append((event.ids, event.x, event.y))
            elif isinstance(event, Remove):
                removed.append((event.ids, event.x, event.y))
            elif isinstance(event, Relabel):
                removed.append((event.ids, event.x, event.y_old))
                added.append((event.ids, event.x, event.y))
            else:
                removed.append((event.ids, event.x_old, event.y_old))
                added.append((event.ids, event.x, event.y_old if event.y is None else event.y))
        new, old = self._join_samples(added), self._join_samples(removed)
        judged = bool(removed) and not self.samples.by_ids
        if judged:
            _ = self.head.bias  # earlier removals are judged before, these at once
        if old is not None and new is not None and all(isinstance(event, Relabel) for event in events):
            self.samples.relabel(old[0], new[2], *old[1:])
        else:
            self.samples.exchange(new, old)
        if judged:
            _ = self.head.bias

    def _join_samples(self, parts: list[tuple[Any, ...]]) -> tuple[Any, ...] | None:
        """Join the samples of several events, on the head's device; a kernel machine is given those of one."""
        if not parts or self.samples.by_ids:
            return parts[0] if parts else None
        x, y = (torch.cat([part[k] for part in parts]).to(self.head.device) for k in (1, 2))
        return [i for part in parts for i in part[0]], x, y

    def machine_ids(self, ids: Sequence[str]) -> list[int] | None:
        """Return a kernel machine's own ids of samples; None for a head, which has none."""
        if not self.samples.by_ids:
            return None
        adapter: Any = self.samples if self.store is None else self.store.live.adapter
        return [adapter.find(name) for name in ids]

    def follow(self, position: int) -> list[Outcome]:
        """List the changes of other processes to the store after ``position``, and bring the head in step with it."""
        if self.store is None:
            raise ValueError("only a store has a journal to follow")
        if self.store.position == position:
            return []
        _ = self.store.head
        entries = self.store.history()[position:]
        return [Outcome(e.event_id, e.kind, e.samples, "applied") for e in entries]

    # -- what goes into a checkpoint -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Applied events and held samples, as primitives and tensors; empty with a store, which keeps them."""
        if self.store is not None:
            return {}
        packed = bytes_to_tensor(b"".join(self.hashes.values())) if self.hashes else None
        out: dict[str, Any] = {
            "applied": list(self.applied),
            "ids": list(self.hashes),
            "hashes": packed,
            "complete": self.complete,
            "pending": self.pending.state_dict(),
        }
        if self.samples.by_ids:
            out |= {"names": list(self.samples.ids), "numbers": list(self.samples.ids.values())}
        return out

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`; the head itself is loaded elsewhere."""
        if self.store is not None or not state:
            return
        packed = b"" if state["hashes"] is None else tensor_to_bytes(state["hashes"])
        self.applied = dict.fromkeys(state["applied"])
        self.hashes = {
            name: packed[SAMPLE_HASH_BYTES * k : SAMPLE_HASH_BYTES * (k + 1)] for k, name in enumerate(state["ids"])
        }
        self.complete = state["complete"]
        self.pending.load_state_dict(state["pending"])
        if self.samples.by_ids:
            self.samples.ids = dict(zip(state["names"], state["numbers"], strict=True))


def _apply_in_halves(
    given: list[Event], error: Exception, apply: Callable[[list[Event]], list[Outcome]]
) -> list[Outcome]:
    """Apply the two halves of a burst that was refused; of one event alone, the refusal."""
    if len(given) == 1:
        return [Outcome.refusal(given[0], error)]
    half = len(given) // 2
    return apply(given[:half]) + apply(given[half:])


def second_outcome(event: Event, earlier: Event) -> Outcome:
    """Return the outcome of an event whose id is that of one in the queue."""
    if event == earlier:
        return Outcome.of(event, "repeated")
    return Outcome.refusal(
        event, ValueError(f"another event with the id {event.event_id!r} is pending: each has its own")
    )


def without_samples(event: Event, gone: Sequence[str]) -> Event | None:
    """A Remove without the samples that are named; None if nothing is left of it. Any other event as it is."""
    if not gone or not isinstance(event, Remove):
        return event
    keep = [k for k, i in enumerate(event.ids) if i not in gone]
    parts = {name: None if getattr(event, name) is None else getattr(event, name)[keep] for name in ("x", "y")}
    return Remove(ids=[event.ids[k] for k in keep], event_id=event.event_id, **parts) if keep else None
