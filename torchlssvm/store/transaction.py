"""Events applied to rows and head together, and taken back together.

Each event runs in a savepoint. What it does to the head is noted as an undo step, which is run, last one first, after the
rows are back to what they were before the event: a removed sample is then read again and added again. On a grid that gives
the old state bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchlssvm.events import Add, Event, Relabel, Remove, Replace, check_event_id
from torchlssvm.functional.modes import exactly
from torchlssvm.store.head_adapter import HeadAdapter
from torchlssvm.store.journal import Journal, commitments
from torchlssvm.store.repeated_events import PastEvent, check_repetition
from torchlssvm.store.sample_table import ROWS_PER_BATCH, SampleTable, StoredRows
from torchlssvm.store.suppression import Suppression

log = logging.getLogger("torchlssvm.store")


@dataclass(frozen=True)
class Receipt:
    """Answer to the caller for an event that is durable.

    ``nonces`` are the samples' secrets: with one, and only with it, ``Certificate.covers(id, nonce)`` tells whether the sample
    is meant. After an erasure the store no longer has them.
    """

    event_id: str
    kind: str
    position: int
    applied: bool
    samples: int
    digest: str | None
    nonces: dict[str, str] = field(default_factory=dict, repr=False)
    left_out: tuple[str, ...] = ()
    """Samples of an Add that were not learned, since they were erased on request."""

    def __str__(self) -> str:
        done = "applied" if self.applied else "was applied before, nothing was changed"
        if self.left_out:
            rest = "the others were added" if self.applied else "nothing was added"
            done = f"{len(self.left_out)} samples were erased on request and stay out, {rest}"
        return f"{self.kind} {self.event_id}: {done} ({self.samples} samples, position {self.position})"


@dataclass
class AppliedEvent:
    """An event that is applied but not yet committed."""

    event: Event
    position: int
    ids: Sequence[str]
    nonces: list[bytes]
    left_out: Sequence[str] = ()
    """Samples of an Add that were not added, since they were erased on request."""

    @property
    def commitments(self) -> list[bytes]:
        """The commitments that the journal keeps of its samples."""
        return commitments(self.nonces, self.ids)

    def receipt(self, digest: str | None) -> Receipt:
        """The receipt of the event, once it is committed."""
        nonces = {i: n.hex() for i, n in zip(self.ids, self.nonces, strict=True)}
        return Receipt(
            self.event.event_id,
            self.event.kind,
            self.position,
            True,
            len(self.ids),
            digest,
            nonces,
            tuple(self.left_out),
        )


@dataclass
class EmptyEvent:
    """An Add of which nothing was added, since all of its samples were erased on request; the journal has no entry of it."""

    event: Event
    position: int
    left_out: Sequence[str]

    def receipt(self, digest: str | None) -> Receipt:
        """The receipt, which says what was left out."""
        return Receipt(
            self.event.event_id, self.event.kind, self.position, False, 0, digest, left_out=tuple(self.left_out)
        )


class Transaction:
    """The events of one call, applied to rows and head together; the database's own transaction is the caller's."""

    def __init__(
        self, table: SampleTable, journal: Journal, adapter: HeadAdapter, suppression: Suppression, source: str | None
    ):
        """``source``: the network whose features come without a fingerprint of their own."""
        self.table, self.journal, self.adapter, self.suppression = table, journal, adapter, suppression
        self.source, self.position = source, 0
        self.done: list[AppliedEvent] = []
        self.undo_steps: list[list[Callable[[], None]]] = []

    # -- applying ------------------------------------------------------------------------------------------------------

    def apply(self, events: Sequence[Event], position: int) -> list[AppliedEvent | EmptyEvent | int]:
        """Apply events behind a position of the journal; of one that was applied before, its position."""
        self.position = position
        with torch.inference_mode(False), torch.no_grad():
            return [self._apply(event) for event in events]

    def _apply(self, event: Event) -> AppliedEvent | EmptyEvent | int:
        past = self._past_event(event.event_id)
        if past is not None:
            if isinstance(event, Add) and len(event.ids) > len(past.commitments):  # some may have been left out then
                event = self.suppression.screen(event)[0] or event
            check_repetition(self.table, event, past)
            return past.position
        left_out: Sequence[str] = ()
        if isinstance(event, Add):
            rest, left_out = self.suppression.screen(event)
            if rest is None:
                return EmptyEvent(event, self.position, left_out)
            event = rest
        self.table.db.run(f"SAVEPOINT event{len(self.undo_steps)}")
        self.undo_steps.append([])
        handlers: dict[type, Callable[[Any], tuple[Sequence[str], list[bytes]]]] = {
            Add: self._add, Remove: self._remove, Relabel: self._relabel, Replace: self._replace,
        }  # fmt: skip
        done = AppliedEvent(event, self.position + 1, *handlers[type(event)](event), left_out=left_out)
        self.position += 1
        self.done.append(done)
        return done

    def _past_event(self, event_id: str) -> PastEvent | None:
        """The event that was applied under an id, in this call or before."""
        for done in self.done:
            if done.event.event_id == event_id:
                return PastEvent(done.position, done.event.kind, done.commitments)
        entry = self.journal.of(event_id)
        if entry is None:
            return None
        return PastEvent(entry.position, entry.kind, entry.commitment_bytes)

    def _undo_by(self, step: Callable[[], None]) -> None:
        self.undo_steps[-1].append(step)

    def _add(self, event: Add) -> tuple[Sequence[str], list[bytes]]:
        self._check_source(event.fingerprint or self.source)
        x, y = event.x, event.y
        if not self.adapter.empty:
            self._check_width(x)
        self.adapter.add(event.ids, x, y)
        self._undo_by(lambda: self.adapter.remove(event.ids, x, y))
        self.table.adopt_codec(replace(self.adapter.codec(), J=x.shape[1]))  # the first samples decide an "auto" grid
        return event.ids, self.table.insert(event.ids, event.subjects, x, y, self.position + 1)

    def _check_source(self, given: str | None) -> None:
        """Refuse features of another network; the first ones with a fingerprint bind an empty store."""
        bound = self.table.db.get("fingerprint")
        if given == bound:
            return None
        if bound is None and self.adapter.empty:
            return self.table.db.put("fingerprint", given)
        raise ValueError(
            f"these features are not of the network this store is bound to: their fingerprint is {given!r}, the store's "
            f"{bound!r}. Give the fingerprint to Add, or to SampleStore when opening it. Nothing was changed."
        )

    def _check_width(self, x: Tensor) -> None:
        if x.shape[1] != self.table.codec.J:
            raise ValueError(f"x must have shape (B, {self.table.codec.J}) like the rows held, got {tuple(x.shape)}")

    def _change_rows(
        self, event: Remove | Relabel | Replace, seqs: list[int], change: Callable[[StoredRows, slice], None]
    ) -> tuple[list[str], list[bytes]]:
        """Read the rows of an event in batches and change each; returns their ids and nonces."""
        ids: list[str] = []
        nonces: list[bytes] = []
        for start in range(0, len(seqs), ROWS_PER_BATCH):
            part = slice(start, start + ROWS_PER_BATCH)
            rows = self.table.read(seqs[part], None if event.ids is None else event.ids[part], event.subject)
            check_event_id(event.event_id, [*rows.ids, *rows.subjects])
            change(rows, part)
            ids += rows.ids
            nonces += rows.nonces
        return ids, nonces

    def _undo_removal(self, seqs: list[int]) -> None:
        """Add removed samples to the head again, after their rows were restored."""
        self.adapter.add_rows(self.table.read(seqs), self.table.codec)

    def _remove(self, event: Remove) -> tuple[Sequence[str], list[bytes]]:
        def change(rows: StoredRows, part: slice) -> None:
            self.adapter.exchange(None, rows.samples)
            self._undo_by(partial(self._undo_removal, rows.seq))
            self.table.erase(rows)

        return self._change_rows(event, self.table.find(event.ids, event.subject), change)

    def _relabel(self, event: Relabel) -> tuple[Sequence[str], list[bytes]]:
        seqs = self.table.find(event.ids, event.subject)
        targets = self._targets_for(event.y, len(seqs))

        def change(rows: StoredRows, part: slice) -> None:
            self.adapter.relabel(rows.ids, targets[part], rows.x, rows.y)
            seq = rows.seq
            self._undo_by(lambda: back(self.table.read(seq), targets[part]))
            self.table.rewrite(rows, None, targets[part], self.position + 1)

        def back(rows: StoredRows, now: Tensor) -> None:
            self.adapter.relabel(rows.ids, rows.y, rows.x, now)

        return self._change_rows(event, seqs, change)

    def _replace(self, event: Replace) -> tuple[Sequence[str], list[bytes]]:
        seqs = self.table.find(event.ids, event.subject)
        if event.x.shape[0] != len(seqs):
            raise ValueError(f"x has {event.x.shape[0]} rows for {len(seqs)} samples. Nothing was changed.")
        self._check_width(event.x)

        def change(rows: StoredRows, part: slice) -> None:
            seq, x, y = rows.seq, event.x[part], None if event.y is None else event.y[part]
            self.adapter.exchange((rows.ids, x, rows.y if y is None else y), rows.samples)
            self._undo_by(lambda: back(self.table.read(seq), x, y))
            self.table.rewrite(rows, x, y, self.position + 1)

        def back(rows: StoredRows, x: Tensor, y: Tensor | None) -> None:
            self.adapter.exchange(rows.samples, (rows.ids, x, rows.y if y is None else y))

        return self._change_rows(event, seqs, change)

    def _targets_for(self, y: Tensor, count: int) -> Tensor:
        """Targets for ``count`` samples; one label or one row of targets for a subject is repeated for all of its samples."""
        if y.ndim == 0:
            return y.expand(count)
        if y.shape[0] != count:
            raise ValueError(f"y has {y.shape[0]} entries for {count} samples. Nothing was changed.")
        return y

    # -- finishing and undoing -----------------------------------------------------------------------------------------

    def finish(self) -> tuple[str | None, bytes]:
        """Write the journal, before the database commits; returns the digest and the end of the chain."""
        events = [(d.event.event_id, d.event.kind, d.commitments) for d in self.done]
        state = self.journal.append(events, self.adapter.digest() if events else None)
        return state["digest"], bytes.fromhex(state["chain"])

    @exactly
    def undo(self) -> bool:
        """Take rows and head back; False when the head could not follow and has to be restored from the rows."""
        connection = self.table.db.connection
        try:
            while self.undo_steps:
                if not connection.in_transaction:
                    return False
                self.table.db.run(f"ROLLBACK TO event{len(self.undo_steps) - 1}")
                self.table.load_codec()
                for step in reversed(self.undo_steps.pop()):
                    step()
            return True
        except Exception:  # of any kind: the caller restores the head from the rows, and the first error is raised
            log.exception("taking the head back failed")
            return False
        finally:
            self.table.db.roll_back()
            self.table.load_codec()
