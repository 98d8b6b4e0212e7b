"""Application of events to any head or kernel machine, with or without a store, each exactly once. No Trainer in here.

Samples that a kernel machine was given directly go by the ids it gave them, as text.

With a store the store is the truth: it knows its samples, and its journal knows which events were applied. Without one the
events carry the samples as they were added, and :class:`Corrector` remembers event ids, sample ids and a hash of each sample:
what is removed under an id must be, bit for bit, what was added under it. Its ``state_dict`` goes into the same checkpoint as
the head, so both go back together.

A run that learns its samples one by one tells the corrector which it has seen so far (``SeenSamples``):
an event for a sample that has not arrived yet is then held instead of refused (:mod:`torchlssvm.corrections.pending_events`).

A burst is one change of the head: the sums of many events are one product of matrices. If the head refuses the burst, it is
halved until the bad events are alone; the others are applied in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchlssvm.corrections.event_sources import Item
from torchlssvm.corrections.outcome import Outcome
from torchlssvm.corrections.pending_events import Pending, PendingEvents
from torchlssvm.corrections.planned_changes import PlannedChanges
from torchlssvm.corrections.sample_hashes import SAMPLE_HASH_BYTES, hash_samples
from torchlssvm.corrections.seen_samples import SeenSamples
from torchlssvm.errors import InterruptedUpdateError, RemovalError, StoreError
from torchlssvm.events import Add, Event, Relabel, Remove, Replace
from torchlssvm.functional.byte_tensors import bytes_to_tensor, tensor_to_bytes
from torchlssvm.linear import LinearHead
from torchlssvm.sample_adapter import SampleAdapter
from torchlssvm.store import SampleStore
from torchlssvm.store.transaction import REFUSAL_ERRORS

__all__ = ["Corrector"]

STORE_FAULTS = (StoreError, InterruptedUpdateError)
"""Of the refusals, errors that are not the event's, e.g. a full disk: they are raised, and the event is to be tried again."""

UNCERTIFIED_NOTE = "uncertified"
"""The note of a store with the removals that were applied and have no certificate yet."""


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
        """Outcomes of events that were held, until :meth:`take_answered` is called."""
        self.certified = False
        """True if removals are to be certified: the store then notes which are not yet."""
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

        In a run, an event for a sample that has not arrived yet is held, and so are later ones that name the same sample.
        """
        given = list(events)
        if self.seen is None:
            return self.apply_now(given)
        outcomes: dict[int, Outcome] = {}
        burst: dict[int, Event] = {}
        held: dict[int, Event] = {}
        planned = PlannedChanges()
        self.pending.reserve(given)
        for k, event in enumerate(given):
            earlier = next((e for e in held.values() if e.event_id == event.event_id), None)
            if earlier is not None or event.event_id in self.pending:
                outcomes[k] = self._second(event, earlier or self.pending[event.event_id].event)
            elif not self._was_applied(event) and self._must_wait(event, planned):
                held[k] = event
                planned.hold(event)
            else:
                burst[k] = event
                planned.apply(event)
        self.pending.hold(list(held.values()))
        late: list[Event] = []
        for (k, event), outcome in zip(burst.items(), self.apply_now(list(burst.values())), strict=True):
            if outcome.status == "refused" and (self._waits(event) or self._uncertain(event, outcome)):
                held[k] = event
                late.append(event)
            else:
                outcomes[k] = outcome
        self.pending.hold(late)
        outcomes |= {k: Outcome.of(e, "held") for k, e in held.items()}
        return [outcomes[k] for k in range(len(given))]

    def apply_now(self, given: list[Event]) -> list[Outcome]:
        """Apply events; none is held."""
        if not given:
            return []
        if self.store is not None:
            return self._apply_through_store(self.store, given)
        if self.samples.by_ids:
            return [o for event in given for o in self._apply_jointly([event])]
        return self._apply_jointly(given)

    def _apply_through_store(self, store: SampleStore, given: list[Event]) -> list[Outcome]:
        notes = self._notes(store, given)
        held = [] if self.seen is None else [e.event_id for e in given if e.event_id in self.pending]
        kept_out = {event_id: self.pending[event_id].kept_out for event_id in held}
        try:
            receipts = store.apply(given, notes=notes, kept_out=kept_out, keep_receipt=self.certified)
        except STORE_FAULTS:
            raise
        except REFUSAL_ERRORS as error:
            return _apply_in_halves(given, error, lambda part: self._apply_through_store(store, part))
        if self.seen is not None:
            self.pending.applied({name: value for name, value in notes.items() if name != UNCERTIFIED_NOTE})
        return [Outcome(r.event_id, r.kind, r.samples, "applied" if r.applied else "repeated") for r in receipts]

    def _notes(self, store: SampleStore, given: list[Event]) -> dict[str, Any]:
        """Notes to be written with events: which are held no longer, and which removals are to be certified."""
        if self.seen is None and not self.certified:
            return {}
        new = [e for e in given if not store.has_applied(e.event_id)]
        notes = {} if self.seen is None else self.pending.notes_when_applied(new)
        if self.seen is not None and self.pending.unanswered:
            for event in (e for e in new if isinstance(e, Remove)):
                ids = event.ids or store.find(subject=event.subject)
                notes |= self.pending.notes_when_removed(ids, event.event_id, notes)
        removals = [e.event_id for e in new if isinstance(e, Remove)]
        if self.certified and removals:
            notes[UNCERTIFIED_NOTE] = [*(store.note(UNCERTIFIED_NOTE) or []), *removals]
        return notes

    # -- events that are held --------------------------------------------------------------------------------------------

    def _was_applied(self, event: Event) -> bool:
        """True if an event with its id was applied before."""
        return event.event_id in self.applied if self.store is None else self.store.has_applied(event.event_id)

    def _second(self, event: Event, earlier: Event) -> Outcome:
        if event == earlier:
            return Outcome.of(event, "repeated")
        return Outcome.refusal(
            event, ValueError(f"another event with the id {event.event_id!r} is pending: each has its own")
        )

    def _must_wait(self, event: Event, planned: PlannedChanges) -> bool:
        names = Pending(event, "").names
        return any(planned.waits(n) or self.pending.earlier(n) for n in names) or self._waits(event, planned)

    def _waits(
        self, event: Event, planned: PlannedChanges | None = None, kept_out: Sequence[str] = (), final: bool = False
    ) -> bool:
        """True if a sample of the event has not arrived yet. ``planned``: the changes of the events before it."""
        if isinstance(event, Add) or self.seen is None or not self._answerable(event):
            return False
        planned = planned or PlannedChanges()
        if event.ids is None:
            assert self.store is not None
            if event.subject in planned.subjects:
                return False
            count = self.store.count_of(event.subject)
            if isinstance(event, Remove):
                return not count and not (final and kept_out)
            each = event.x if isinstance(event, Replace) else event.y
            return count < (1 if each.ndim == 0 else len(each))
        out = set(kept_out)
        absent = [i for i in event.ids if i not in out and not planned.held.get(i, i in self)]
        return bool(absent) and not any(i in self.seen or i in planned.held for i in absent)

    def _answerable(self, event: Event) -> bool:
        """True if an event can be applied once its samples are there: without a store it has to carry them."""
        if self.store is not None:
            return True
        if event.ids is None or self.samples.by_ids:
            return event.ids is not None
        try:
            self._check_width(event)
            self._attached_hashes(event)  # type: ignore[arg-type]
        except REFUSAL_ERRORS:
            return False
        return self.complete or any(i in self.hashes for i in event.ids)

    def _uncertain(self, event: Event, outcome: Outcome) -> bool:
        """True if samples without ids may yet bring the sample of a refused event: it is tried again at the end of a pass."""
        unnamed = self.store is None and not self.complete and not self.samples.by_ids
        unknown = unnamed and not isinstance(event, Add) and not any(i in self.hashes for i in event.ids or ())
        return unknown and outcome.reason.startswith(RemovalError.__name__)

    def remover(self, found: Sequence[Pending], sample_id: str, x: Tensor, y: Tensor) -> Pending | None:
        """Find, of the events that concern a sample x (J,), y, the one that keeps it out; None if it is learned.

        Without a store an event that carries another sample under this id is refused, whenever it comes.
        """
        standing = next((p for p in found if p.standing and isinstance(p.event, Remove)), None)
        first = next((p for p in found if not p.standing and not p.refusal), None)
        if standing is not None:
            earlier = first is not None and first.note < standing.note and isinstance(first.event, Remove)
            return first if earlier else standing
        if first is None or not isinstance(first.event, Remove) or self.pending.blocked(first):
            return None  # learned: what an earlier event does to another of its samples decides whether it is removed
        if self.store is None and not self.samples.by_ids:
            carried = self._attached_hashes(first.event)[first.event.ids.index(sample_id)]
            return first if carried == hash_samples(x[None], y[None])[0] else None
        return first

    def apply_pending(self, final: bool = False) -> None:
        """Apply the events that were held, as far as their samples have arrived; :meth:`take_answered` tells of them.

        ``final``: the pass is over. A removal of a subject that has kept samples out is then applied, and a removal waits no
        longer for an earlier event of the same sample that waits for another one.
        """
        pending = self.pending
        if final:
            pending.touched.update(p.note for p in pending)
        tried: set[str] = set()
        while ready := [p for p in self._touched(final) if p.note not in tried]:
            tried.update(p.note for p in ready)
            pending.touched.clear()
            try:
                outcomes = self._apply_ready(ready)
            except StoreError:
                pending.touched.update(p.note for p in ready)
                return
            for p, outcome in zip(ready, outcomes, strict=True):
                if outcome.status == "refused" and self._uncertain(p.event, outcome):
                    continue
                if outcome.status == "refused":
                    if p.kept_out:
                        lost = f"; {len(p.kept_out)} of its samples came by before and were kept out"
                        outcome = replace(outcome, reason=outcome.reason + lost)
                    pending.refuse(p, outcome.reason)
                elif p.event.event_id in pending and not pending[p.event.event_id].standing:
                    pending.forget(p.event.event_id)
                self.answered.append((Item(p.event), outcome))
        pending.touched.clear()

    def _touched(self, final: bool) -> list[Pending]:
        """Select the held events that can be applied now."""
        pending = self.pending
        changed = [p for p in pending if p.note in pending.touched and not p.standing and not p.refusal]
        free = [p for p in changed if (final and isinstance(p.event, Remove)) or not pending.blocked(p)]
        return [p for p in free if not self._waits(p.event, None, p.kept_out, final) and pending.is_held(p)]

    def _apply_ready(self, ready: list[Pending]) -> list[Outcome]:
        if self.store is not None:
            return self._apply_through_store(self.store, [p.event for p in ready])
        return [self._apply_without_store(p) for p in ready]

    def _apply_without_store(self, pending: Pending) -> Outcome:
        """Apply a held event without a store: samples that were kept out need not be removed."""
        event, out = pending.event, set(pending.kept_out)
        rest = [k for k, i in enumerate(event.ids) if i not in out]
        if rest == list(range(len(event.ids))):
            return self.apply_now([event])[0]
        if rest:
            parts = {n: None if getattr(event, n) is None else getattr(event, n)[rest] for n in ("x", "y")}
            outcome = self.apply_now([Remove(ids=[event.ids[k] for k in rest], event_id=event.event_id, **parts)])[0]
            return replace(outcome, samples=len(event.ids)) if outcome.status == "applied" else outcome
        self.applied[event.event_id] = None
        return Outcome.of(event, "applied", len(event.ids))

    def take_answered(self) -> list[tuple[Item, Outcome]]:
        """Return the outcomes, since the last call, of events that were held. A refused one is held until :meth:`give_up`."""
        taken, self.answered = self.answered, []
        return taken

    def give_up(self, event: Event) -> None:
        """Drop a refused event once it is written down elsewhere. Another one with its id stays held."""
        if event.event_id in self.pending and self.pending[event.event_id].refusal:
            self.pending.forget(event.event_id)

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
        if event.ids is None:
            raise ValueError("there is no store here that knows subjects: give ids and the samples as they were added")
        if not self.samples.by_ids:
            self._check_width(event)
        now_held = [changed[i] if i in changed else self.hashes.get(i) for i in event.ids]
        if isinstance(event, Add):
            twice = next((i for i, h in zip(event.ids, now_held, strict=True) if h is not None), None)
            if twice is not None:
                raise ValueError(f"a sample with the id {twice!r} is held already: remove or replace it")
            return dict(zip(event.ids, hash_samples(event.x, event.y), strict=True))
        old = None if self.samples.by_ids else self._attached_hashes(event)
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

    def _check_width(self, event: Event) -> None:
        for name in ("x", "x_old"):
            x = getattr(event, name, None)
            if x is not None and x.shape[1] != self.head.in_features:
                raise ValueError(f"{name} must have shape (B, {self.head.in_features}), got {tuple(x.shape)}")

    def _attached_hashes(self, event: Remove | Relabel | Replace) -> list[bytes]:
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
        adapter: Any = self.samples if self.store is None else self.store.machine
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
        self.pending.load_state_dict(state.get("pending", []))  # version 0.1.0 held no events
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
