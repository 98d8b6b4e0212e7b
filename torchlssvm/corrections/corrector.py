"""Events carried out on any head or kernel machine, with or without a store, each exactly once. No Trainer in here.

Samples that a kernel machine was given directly go by the ids it gave them, as text.

With a store the store is the truth: it knows its samples, and its journal knows which events were applied. Without one the
events carry the samples as they were added, and :class:`Corrector` remembers event ids, sample ids and a hash of each sample:
what is removed under an id must be, bit for bit, what was added under it. Its ``state_dict`` goes into the same checkpoint as
the head, so both go back together.

A run that learns its samples one by one tells the corrector which were offered so far (``Offered``):
an event for a sample that has not come by yet is then held instead of refused (:mod:`torchlssvm.corrections.pending_events`).

A burst is one change of the head: the sums of many events are one product of matrices. If the head refuses the burst, it is
halved until the bad events are alone; the others are applied in their order.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchlssvm.corrections.event_sources import Item
from torchlssvm.corrections.pending_events import Pending, PendingEvents
from torchlssvm.corrections.seen_samples import Offered
from torchlssvm.errors import RemovalError, StoreError, TorchLSSVMError
from torchlssvm.events import Add, Event, Relabel, Remove, Replace, kind_of, to_primitives
from torchlssvm.store import SampleStore
from torchlssvm.store.head_adapter import HeadAdapter, KernelAdapter, LinearAdapter, adapter_for
from torchlssvm.store.journal import now
from torchlssvm.store.sample_table import StoredRows

__all__ = ["Corrector", "DeadLetters", "Outcome"]

REFUSALS = (ValueError, TypeError, RuntimeError, TorchLSSVMError)
"""What a head or a store raises for a bad event, with its state as it was."""


UNCERTIFIED = "uncertified"
"""The note of a store with the removals that were applied and have no certificate yet."""


@dataclass(frozen=True)
class Outcome:
    """What became of an event: "applied", "repeated" (its id came before), "held" or "refused", for a reason."""

    event_id: str
    kind: str
    samples: int
    status: str
    reason: str = ""


class Corrector:
    """Applies events to a head or a kernel machine, or through a store to the store's head.

    Args:
        head: an :class:`~torchlssvm.LSSVMHead` or a kernel machine.
        store: a :class:`~torchlssvm.store.SampleStore` with this head.
        offered: the samples that a run has offered so far. With it, events for samples that have not come by are held.

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

    def __init__(self, head: Any, store: SampleStore | None = None, offered: Offered | None = None):
        self.head, self.store, self.offered = head, store, offered
        self.pending = PendingEvents(store if offered is not None else None)
        self.answered: list[tuple[Item, Outcome]] = []
        """What became of events that were held, until somebody takes it: :meth:`take_answered`."""
        self.certified = False
        """Whether removals are to be certified: the store then remembers which are not yet."""
        self.machine: HeadAdapter = adapter_for(head)
        self.applied: dict[str, None] = {}
        self.held: dict[str, bytes] = {}
        self.complete = self.machine.empty
        """Whether everything the head holds was added here, with ids: an unknown id is then an error."""

    def __contains__(self, sample_id: str) -> bool:
        """Whether a sample is held under this id."""
        if self.store is not None:
            return sample_id in self.store
        return sample_id in self.held or (
            isinstance(self.machine, KernelAdapter) and self.machine.find(sample_id) is not None
        )

    # -- applying ------------------------------------------------------------------------------------------------------

    def apply(self, events: Iterable[Event]) -> list[Outcome]:
        """Apply events in their order; one that is refused changes nothing and does not hold up the others.

        In a run, an event for a sample that has not come by yet is held, and so are later ones that name the same sample.
        """
        given = list(events)
        if self.offered is None:
            return self.apply_now(given)
        outcomes: dict[int, Outcome] = {}
        burst: dict[int, Event] = {}
        held: dict[int, Event] = {}
        changed = Changed()
        self.pending.reserve(given)
        for k, event in enumerate(given):
            earlier = next((e for e in held.values() if e.event_id == event.event_id), None)
            if earlier is not None or event.event_id in self.pending:
                outcomes[k] = self._second(event, earlier or self.pending[event.event_id].event)
            elif not self._knows(event) and self._must_wait(event, changed):
                held[k] = event
                changed.wait(event)
            else:
                burst[k] = event
                changed.note(event)
        self.pending.hold(list(held.values()))
        late: list[Event] = []
        for (k, event), outcome in zip(burst.items(), self.apply_now(list(burst.values())), strict=True):
            if outcome.status == "refused" and (self._waits(event) or self._uncertain(event, outcome)):
                held[k] = event
                late.append(event)
            else:
                outcomes[k] = outcome
        self.pending.hold(late)
        outcomes |= {k: Outcome(e.event_id, kind_of(e), 0, "held") for k, e in held.items()}
        return [outcomes[k] for k in range(len(given))]

    def apply_now(self, given: list[Event]) -> list[Outcome]:
        """Apply events; none is held."""
        if not given:
            return []
        if self.store is not None:
            return self._through_store(self.store, given)
        if isinstance(self.machine, KernelAdapter):
            return [o for event in given for o in self._jointly([event])]
        return self._jointly(given)

    def _through_store(self, store: SampleStore, given: list[Event]) -> list[Outcome]:
        notes = self._notes(store, given)
        kept_out = {e.event_id: self.pending[e.event_id].kept_out for e in given if e.event_id in self.pending}
        try:
            receipts = store.apply(given, notes=notes, kept_out=kept_out)
        except StoreError:  # the store's trouble, e.g. a full disk, and not the event's: it is to be tried again
            raise
        except REFUSALS as error:
            if len(given) == 1:
                return [refusal(given[0], error)]
            half = len(given) // 2
            return self._through_store(store, given[:half]) + self._through_store(store, given[half:])
        self.pending.applied({name: value for name, value in notes.items() if name != UNCERTIFIED})
        return [Outcome(r.event_id, r.kind, r.samples, "applied" if r.applied else "repeated") for r in receipts]

    def _notes(self, store: SampleStore, given: list[Event]) -> dict[str, Any]:
        """What is written with events: which are held no longer, and which removals are to be certified."""
        new = (
            [e for e in given if not store.has_applied(e.event_id)]
            if self.offered is not None or self.certified
            else []
        )
        notes = {} if self.offered is None else self.pending.notes_when_applied(new)
        if self.pending.unanswered:
            for event in (e for e in new if isinstance(e, Remove)):
                ids = event.ids or store.find(subject=event.subject)
                notes |= self.pending.notes_when_removed(ids, event.event_id, notes)
        removals = [e.event_id for e in new if isinstance(e, Remove)]
        if self.certified and removals:
            notes[UNCERTIFIED] = [*(store.note(UNCERTIFIED) or []), *removals]
        return notes

    # -- events that are held --------------------------------------------------------------------------------------------

    def _knows(self, event: Event) -> bool:
        """Whether its id was applied before."""
        return event.event_id in self.applied if self.store is None else self.store.has_applied(event.event_id)

    def _second(self, event: Event, earlier: Event) -> Outcome:
        if event == earlier:
            return Outcome(event.event_id, kind_of(event), 0, "repeated")
        return refusal(event, ValueError(f"another event with the id {event.event_id!r} is pending: each has its own"))

    def _must_wait(self, event: Event, changed: Changed) -> bool:
        names = Pending(event, "").names
        return any(changed.waits(n) or self.pending.earlier(n) for n in names) or self._waits(event, changed)

    def _waits(
        self, event: Event, changed: Changed | None = None, kept_out: Sequence[str] = (), final: bool = False
    ) -> bool:
        """Whether a sample of the event has not come by yet. ``changed``: what is about to be done before it."""
        if isinstance(event, Add) or self.offered is None or not self._answerable(event):
            return False
        changed = changed or Changed()
        if event.ids is None:
            assert self.store is not None
            if event.subject in changed.subjects:
                return False
            count = self.store.count_of(event.subject)
            if isinstance(event, Remove):
                return not count and not (final and kept_out)
            each = event.x if isinstance(event, Replace) else event.y
            return count < (1 if each.ndim == 0 else len(each))
        out = set(kept_out)
        absent = [i for i in event.ids if i not in out and not changed.held.get(i, i in self)]
        return bool(absent) and not any(i in self.offered or i in changed.held for i in absent)

    def _answerable(self, event: Event) -> bool:
        """Whether an event can be applied once its samples are there: without a store it has to carry them."""
        if self.store is not None:
            return True
        if event.ids is None or isinstance(self.machine, KernelAdapter):
            return event.ids is not None
        try:
            self._check_width(event)
            self._carried(event)  # type: ignore[arg-type]
        except REFUSALS:
            return False
        return self.complete or any(i in self.held for i in event.ids)

    def _uncertain(self, event: Event, outcome: Outcome) -> bool:
        """Whether samples without ids may yet bring what was refused: it is tried again at the end of a pass."""
        unnamed = self.store is None and not self.complete and isinstance(self.machine, LinearAdapter)
        unknown = unnamed and not isinstance(event, Add) and not any(i in self.held for i in event.ids or ())
        return unknown and outcome.reason.startswith(RemovalError.__name__)

    def remover(self, found: Sequence[Pending], sample_id: str, x: Tensor, y: Tensor) -> Pending | None:
        """Of the events that concern a sample x (J,), y that comes by, the one that keeps it out; None if it is learned.

        Without a store an event that carries another sample under this id is refused, whenever it comes.
        """
        standing = next((p for p in found if p.standing and isinstance(p.event, Remove)), None)
        first = next((p for p in found if not p.standing and not p.refusal), None)
        if standing is not None:
            earlier = first is not None and first.note < standing.note and isinstance(first.event, Remove)
            return first if earlier else standing
        if first is None or not isinstance(first.event, Remove) or self.pending.blocked(first):
            return None  # learned: what an earlier event does to another of its samples decides whether it is removed
        if self.store is None and isinstance(self.machine, LinearAdapter):
            carried = self._carried(first.event)[first.event.ids.index(sample_id)]
            return first if carried == hashes(x[None], y[None])[0] else None
        return first

    def settle(self, final: bool = False) -> None:
        """Apply the events that were held, as far as their samples have come by; :meth:`take_answered` tells of them.

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
                outcomes = self._answer(ready)
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
        """Those of them that can be applied now."""
        pending = self.pending
        changed = [p for p in pending if p.note in pending.touched and not p.standing and not p.refusal]
        free = [p for p in changed if (final and isinstance(p.event, Remove)) or not pending.blocked(p)]
        return [p for p in free if not self._waits(p.event, None, p.kept_out, final) and pending.is_held(p)]

    def _answer(self, ready: list[Pending]) -> list[Outcome]:
        if self.store is not None:
            return self._through_store(self.store, [p.event for p in ready])
        return [self._answer_alone(p) for p in ready]

    def _answer_alone(self, pending: Pending) -> Outcome:
        """Without a store: what was kept out need not be removed."""
        event, out = pending.event, set(pending.kept_out)
        rest = [k for k, i in enumerate(event.ids) if i not in out]
        if rest == list(range(len(event.ids))):
            return self.apply_now([event])[0]
        if rest:
            parts = {n: None if getattr(event, n) is None else getattr(event, n)[rest] for n in ("x", "y")}
            outcome = self.apply_now([Remove(ids=[event.ids[k] for k in rest], event_id=event.event_id, **parts)])[0]
            return replace(outcome, samples=len(event.ids)) if outcome.status == "applied" else outcome
        self.applied[event.event_id] = None
        return Outcome(event.event_id, kind_of(event), len(event.ids), "applied")

    def take_answered(self) -> list[tuple[Item, Outcome]]:
        """What became of events that were held, since the last time. A refused one is held until :meth:`give_up`."""
        taken, self.answered = self.answered, []
        return taken

    def give_up(self, event: Event) -> None:
        """Hold a refused event no longer: it is written down elsewhere. Another one with its id is held on."""
        if event.event_id in self.pending and self.pending[event.event_id].refusal:
            self.pending.forget(event.event_id)

    def _jointly(self, given: list[Event]) -> list[Outcome]:
        """All or, where the head refuses that, halves: what is held by id is worked out first, then the sums change once."""
        held: dict[str, bytes | None] = {}  # what changes
        outcomes, accepted, ids = [], [], set()
        for event in given:
            if event.event_id in self.applied or event.event_id in ids:
                outcomes.append(Outcome(event.event_id, kind_of(event), 0, "repeated"))
                continue
            try:
                held.update(self._after(event, held))
            except REFUSALS as error:
                outcomes.append(refusal(event, error))
                continue
            ids.add(event.event_id)
            accepted.append(event)
            outcomes.append(Outcome(event.event_id, kind_of(event), len(event.ids), "applied"))
        if accepted:
            try:
                self._change(accepted)
            except REFUSALS as error:
                if len(given) == 1:
                    return [refusal(given[0], error)]
                half = len(given) // 2
                return self._jointly(given[:half]) + self._jointly(given[half:])
        self.applied.update(dict.fromkeys(event.event_id for event in accepted))
        for name, value in held.items():
            if value is None:
                self.held.pop(name, None)
            else:
                self.held[name] = value
        return outcomes

    def _after(self, event: Event, changed: dict[str, bytes | None]) -> dict[str, bytes | None]:
        """The hash of each sample of the event once it is applied (None: gone); an error if it cannot be applied."""
        if event.ids is None:
            raise ValueError("there is no store here that knows subjects: give ids and the samples as they were added")
        if isinstance(self.machine, LinearAdapter):
            self._check_width(event)
        now_held = [changed[i] if i in changed else self.held.get(i) for i in event.ids]
        if isinstance(event, Add):
            twice = next((i for i, h in zip(event.ids, now_held, strict=True) if h is not None), None)
            if twice is not None:
                raise ValueError(f"a sample with the id {twice!r} is held already: remove or replace it")
            return dict(zip(event.ids, hashes(event.x, event.y), strict=True))
        old = None if isinstance(self.machine, KernelAdapter) else self._carried(event)
        for k, (name, hash_) in enumerate(zip(event.ids, now_held, strict=True)):
            unknown = self.machine.find(name) is None if isinstance(self.machine, KernelAdapter) else self.complete
            if hash_ is None and (unknown or name in changed):
                raise RemovalError(f"no sample with the id {name!r} is held")
            if hash_ is not None and old is not None and hash_ != old[k]:
                raise RemovalError(f"the sample carried for {name!r} is not, bit for bit, the one that was added")
        if isinstance(event, Remove):
            return dict.fromkeys(event.ids)
        if isinstance(event, Relabel):
            x = torch.zeros(len(event.ids), 0) if event.x is None else event.x
            return dict(zip(event.ids, hashes(x, event.y), strict=True))
        y = event.y if event.y is not None else event.y_old
        if y is None:
            raise ValueError("a Replace without a store needs y, or y_old")
        return dict(zip(event.ids, hashes(event.x, y), strict=True))

    def _check_width(self, event: Event) -> None:
        for name in ("x", "x_old"):
            x = getattr(event, name, None)
            if x is not None and x.shape[1] != self.head.in_features:
                raise ValueError(f"{name} must have shape (B, {self.head.in_features}), got {tuple(x.shape)}")

    def _carried(self, event: Remove | Relabel | Replace) -> list[bytes]:
        x = event.x_old if isinstance(event, Replace) else event.x
        y = event.y if isinstance(event, Remove) else event.y_old
        if x is None or y is None:
            raise ValueError(
                f"there is no store here: a {type(event).__name__} must carry the samples as they were added "
                f"({'x_old, y_old' if isinstance(event, Replace) else 'x, y_old' if isinstance(event, Relabel) else 'x, y'})"
            )
        return hashes(x, y)

    def _change(self, events: Sequence[Event]) -> None:
        """Change the head: a linear one jointly, a kernel machine (one event) by ids."""
        if isinstance(self.machine, KernelAdapter):
            return self._by_ids(self.machine, events[0])
        added, removed = [], []  # (x, y, ids)
        for event in events:
            if isinstance(event, Remove):
                removed.append((event.x, event.y, event.ids))
            elif isinstance(event, Add):
                added.append((event.x, event.y, event.ids))
            elif isinstance(event, Relabel):
                removed.append((event.x, event.y_old, event.ids))
                added.append((event.x, event.y, event.ids))
            else:
                removed.append((event.x_old, event.y_old, event.ids))
                added.append((event.x, event.y_old if event.y is None else event.y, event.ids))
        if removed:
            _ = self.head.bias  # removals of others are judged before, ours at once
        if all(isinstance(event, Relabel) for event in events):
            x, old, _, ids = self._joined(removed)
            self.head.relabel(x, old, self._joined(added)[1], ids=ids)
        else:
            pairs = {
                "add": self._joined(added) if added else None,
                "remove": self._joined(removed) if removed else None,
            }
            self.head.update(**pairs)
        if removed:
            _ = self.head.bias
        return None

    def _joined(self, parts: list[tuple[Tensor, Tensor, Sequence[str]]]) -> tuple[Tensor, Tensor, None, Any]:
        device = self.head.device
        x, y = torch.cat([p[0] for p in parts]).to(device), torch.cat([p[1] for p in parts]).to(device)
        stats = self.head.statistics
        return x, y, None, [i for p in parts for i in p[2]] if stats is not None and stats.folds else None

    def _by_ids(self, machine: KernelAdapter, event: Event) -> None:
        if isinstance(event, Add):
            return machine.add(event.ids, event.x, event.y)
        old_y = event.y if isinstance(event, Remove) else event.y_old
        empty = torch.zeros(0) if old_y is None else old_y
        rows = StoredRows(list(range(len(event.ids))), list(event.ids), [], empty, torch.zeros(0), [], [])
        if isinstance(event, Remove):
            return machine.remove(rows)
        if isinstance(event, Relabel):
            return machine.relabel(rows, event.y)
        return machine.replace(rows, event.x, old_y if event.y is None else event.y)

    def follow(self, position: int) -> list[Outcome]:
        """What others did to the store after ``position``; the head is in step with it when this returns."""
        if self.store is None:
            raise ValueError("only a store has a journal to follow")
        if self.store.position == position:
            return []
        _ = self.store.head
        entries = self.store.history()[position:]
        return [Outcome(e.event_id, e.kind, e.samples, "applied") for e in entries]

    # -- what goes into a checkpoint -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What was applied and what is held, as primitives and tensors; with a store it is all in the store."""
        if self.store is not None:
            return {}
        packed = torch.frombuffer(bytearray(b"".join(self.held.values())), dtype=torch.uint8) if self.held else None
        out: dict[str, Any] = {
            "applied": list(self.applied),
            "ids": list(self.held),
            "hashes": packed,
            "complete": self.complete,
            "pending": self.pending.state_dict(),
        }
        if isinstance(self.machine, KernelAdapter):
            out |= {"names": list(self.machine.where), "numbers": list(self.machine.where.values())}
        return out

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo :meth:`state_dict`; the head itself is loaded elsewhere."""
        if self.store is not None or not state:
            return
        packed = b"" if state["hashes"] is None else bytes(state["hashes"].tolist())
        self.applied = dict.fromkeys(state["applied"])
        self.held = {name: packed[16 * k : 16 * k + 16] for k, name in enumerate(state["ids"])}
        self.complete = state["complete"]
        self.pending.load_state_dict(state.get("pending", []))  # version 0.1.0 held no events
        if isinstance(self.machine, KernelAdapter):
            self.machine.where = dict(zip(state["names"], state["numbers"], strict=True))


class Changed:
    """What the events of a burst will have done: which samples are then held, or gone, and whose; and which events wait."""

    def __init__(self) -> None:
        self.held: dict[str, bool] = {}
        self.subjects: set[str] = set()
        self._waiting: set[tuple[str, str]] = set()

    def note(self, event: Event) -> None:
        """This event is applied."""
        if isinstance(event, Add):
            self.held |= dict.fromkeys(event.ids, True)
            self.subjects |= {s for s in event.subjects if s is not None}
        elif isinstance(event, Remove):
            self.held |= dict.fromkeys(event.ids or (), False)

    def wait(self, event: Event) -> None:
        """This one is held, and so are those behind it that name the same samples."""
        self._waiting.update(Pending(event, "").names)

    def waits(self, name: tuple[str, str]) -> bool:
        """Whether an event waits for this sample or subject."""
        return name in self._waiting


def hashes(x: Tensor, y: Tensor) -> list[bytes]:
    """16 bytes for each sample: BLAKE2b of its numbers, as float32 where that holds every one of the row, else as float64.

    So the same numbers have the same hash whatever dtype they come in, and float32, the usual one, is hashed as it is.
    """
    given, targets = _numbers(x), _numbers(y).astype(np.float64).reshape(len(y), -1)
    with np.errstate(over="ignore"):
        rows: Any = given.astype(np.float32, copy=False)
    if given.dtype not in (np.float32, np.float16):
        whole = given.astype(np.float64, copy=False)
        rows = [r if (r == w).all() else w for r, w in zip(rows, whole, strict=True)]
    return [
        hashlib.blake2b(r.tobytes() + t.tobytes(), digest_size=16).digest() for r, t in zip(rows, targets, strict=True)
    ]


def _numbers(t: Tensor) -> Any:
    """As a NumPy array, which costs less than a tensor where there are few numbers; bfloat16, which NumPy lacks, as float32."""
    t = t.detach().cpu()
    return (t.float() if t.dtype == torch.bfloat16 else t).numpy()


def refusal(event: Event, error: Exception) -> Outcome:
    """The outcome for an event that cannot be applied."""
    return Outcome(event.event_id, kind_of(event), 0, "refused", f"{type(error).__name__}: {error}")


class DeadLetters:
    """A JSONL file of what could not be applied: when, why, and the thing itself. Mend it and feed it again under a new id.

    A run that is resumed may refuse the same thing for the same reason once more; it is written once.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._written: set[str] | None = None

    def write(self, item: Item, reason: str) -> None:
        """Append one; it is on the disk when this returns."""
        letter = {"reason": reason, "event": item.raw if item.event is None else to_primitives(item.event)}
        key = json.dumps(letter, default=str)
        if self._written is None:
            self._written = self._read()
        if key in self._written:
            return
        self._written.add(key)
        line = json.dumps({"time": now(), **letter}, default=str)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> set[str]:
        """What the file has, without the times; a line that was cut short by a crash is passed over."""
        found: set[str] = set()
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []:
            try:
                letter = json.loads(line)
                found.add(json.dumps({"reason": letter["reason"], "event": letter["event"]}))
            except (ValueError, KeyError, TypeError):
                continue
        return found
