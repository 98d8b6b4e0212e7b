"""The events of one call, applied first to the rows in one SQLite transaction and then to the head in one change.

After an error the SQLite transaction is rolled back. The head rarely needs to be restored, because it is changed last and
stays unchanged if it refuses samples. It is restored from the rows only if it had already changed when the journal or the
commit failed, or a later part of :meth:`Transaction._change_head` failed.

Samples that are added and removed in the same call never reach the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from torchlssvm.errors import RemovalError, TorchLSSVMError
from torchlssvm.events import Add, Event, Relabel, Remove, Replace, check_event_id
from torchlssvm.sample_adapter import SampleAdapter
from torchlssvm.store.database import ADAPTED_NOTE, NOTE_PREFIX
from torchlssvm.store.erasure.suppression import Suppression
from torchlssvm.store.head_adapter import HeadAdapter
from torchlssvm.store.journal import Entry, Journal, commitments
from torchlssvm.store.sample_table import ROWS_PER_BATCH, Codec, SampleTable, StoredRows
from torchlssvm.wording import counted

REFUSAL_ERRORS = (ValueError, TypeError, TorchLSSVMError)
"""Errors of a head for samples that it does not take, with its state as it was. Others, e.g. torch out of memory or an
interrupt, may come in the middle of a change."""

LARGEST_EXCHANGE = 2**26
"""Features that are read back for one exchange: 512 MB as float64. Larger removals change the head in parts."""


@dataclass(frozen=True)
class EventResult:
    """The result of an event, which is durable.

    ``nonces`` maps ids to the secrets of the samples. Keep the nonce of an erased sample to check later whether a certificate
    covers it (``Certificate.covers(id, nonce)``), because the store no longer has it.
    """

    event_id: str
    kind: str
    position: int
    applied: bool
    samples: int
    digest: str | None
    nonces: dict[str, str] = field(default_factory=dict, repr=False)
    left_out: tuple[str, ...] = ()
    """Samples of an Add that were not learned, because they were erased on request."""

    def __str__(self) -> str:
        done = "applied" if self.applied else "was applied before, nothing was changed"
        if self.left_out:
            rest = "the others were added" if self.applied else "nothing was added"
            done = f"{counted(len(self.left_out), 'sample')} erased on request, not learned again; {rest}"
        return f"{self.kind} {self.event_id}: {done} ({counted(self.samples, 'sample')}, position {self.position})"

    @property
    def commitment_bytes(self) -> list[bytes]:
        """The commitments to the event's samples that the journal records."""
        return commitments(map(bytes.fromhex, self.nonces.values()), self.nonces)


class NetChange:
    """The difference between the current samples of a head and its future samples, collected over several events."""

    def __init__(self) -> None:
        self._blocks: list[tuple[Sequence[str], Tensor, Tensor]] = []  # samples to add: ids, x (B, J), y
        self._block_of: dict[str, int] = {}  # the block of each sample to add; a sample that was dropped has no block
        self._old: list[tuple[Sequence[str], Tensor, Tensor]] = []  # samples to remove
        self.relabels_only = True
        self.features = 0
        """Number of features of the samples to remove: they are held in memory."""

    def add(self, ids: Sequence[str], x: Tensor, y: Tensor) -> None:
        """Note samples that the head must hold."""
        self.relabels_only = False
        self._block_of.update(dict.fromkeys(ids, len(self._blocks)))
        self._blocks.append((ids, x, y))

    def remove(self, ids: Sequence[str], x: Tensor, y: Tensor) -> None:
        """Note samples that the head must no longer hold.

        Samples added in the same call are dropped from the additions and not removed.
        """
        self.relabels_only = False
        held = [k for k, i in enumerate(ids) if self._block_of.pop(i, None) is None]
        if held:
            whole = len(held) == len(ids)
            self._old.append((ids, x, y) if whole else ([ids[k] for k in held], x[held], y[held]))
            self.features += self._old[-1][1].numel()

    def exchange(self, ids: Sequence[str], x: Tensor, y: Tensor, new_x: Tensor, new_y: Tensor) -> None:
        """Note samples that get new features or targets. If the features are unchanged, the samples are relabelled."""
        relabels_only = self.relabels_only and new_x is x and self._block_of.keys().isdisjoint(ids)
        self.remove(ids, x, y)
        self.add(ids, new_x, new_y)
        self.relabels_only = relabels_only

    def _new(self) -> Iterator[tuple[Sequence[str], Tensor, Tensor]]:
        for number, (ids, x, y) in enumerate(self._blocks):
            keep = [k for k, i in enumerate(ids) if self._block_of.get(i) == number]
            if len(keep) == len(ids):
                yield ids, x, y
            elif keep:
                yield [ids[k] for k in keep], x[keep], y[keep]

    def apply(self, adapter: HeadAdapter | SampleAdapter, device: torch.device | None = None) -> None:
        """Change the head, all or nothing. The samples are first moved to ``device`` together."""
        new, old = joined([*self._new()], device), joined(self._old, device)
        if self.relabels_only and new is not None and old is not None:
            adapter.relabel(new[0], new[2], old[1], old[2])
        elif new is not None or old is not None:
            adapter.exchange(new, old)


def joined(
    blocks: Sequence[tuple[Sequence[str], Tensor, Tensor]], device: torch.device | None = None
) -> tuple[Sequence[str], Tensor, Tensor] | None:
    """Join blocks of samples on ``device``; None without blocks. Raises ValueError if labels and targets are mixed."""
    if not blocks:
        return None
    first = blocks[0][1].device
    targets = [y.to(first) for _, _, y in blocks]
    if any(y.ndim == 2 for y in targets):
        targets = [y.reshape(len(y), -1) for y in targets]
    if len({y.shape[1:] for y in targets}) > 1:
        raise ValueError("labels (B,) and float targets (B, K) do not mix. Nothing was changed.")
    if len(blocks) == 1:
        return blocks[0][0], blocks[0][1].to(device or first), targets[0].to(device or first)
    x, y = torch.cat([x.to(first) for _, x, _ in blocks]), torch.cat(targets)
    return [i for ids, _, _ in blocks for i in ids], x.to(device or first), y.to(device or first)


class Transaction:
    """The events of one call. The caller opens and commits the database transaction.

    Attributes:
        done: the events that this call applied; events that were applied before are left out.
        position: the journal position of the last applied event.
        erased: the ids and subjects of the samples that Remove events removed.
    """

    def __init__(
        self, table: SampleTable, journal: Journal, adapter: HeadAdapter, suppression: Suppression, source: str | None
    ):
        """``source``: the fingerprint of the network, for features that come without a fingerprint."""
        self.table, self.journal, self.adapter, self.suppression = table, journal, adapter, suppression
        self.source, self.position = source, 0
        self.done: list[EventResult] = []
        self._results: dict[str, EventResult] = {}  # those of done, by their ids in the journal
        self.erased: set[str] = set()
        self._change = NetChange()

    def apply(self, events: Sequence[Event]) -> list[EventResult]:
        """Apply events to the rows. :meth:`finish` then updates the head and the journal."""
        self.position = self.table.db.get("state")["position"]
        with torch.inference_mode(False), torch.no_grad():
            return [self._apply(event) for event in events]

    def finish(self) -> str | None:
        """Apply the changes of all events to the head at once, and write the journal; return the digest of the head."""
        with torch.inference_mode(False), torch.no_grad():
            self._change_head()
        events = [(done.event_id, done.kind, done.commitment_bytes) for done in self.done]
        digest: str | None = self.journal.append(events, self.adapter.digest() if self.done else None)["digest"]
        return digest

    def _change_head(self) -> None:
        """Update the head to match the current rows."""
        change, self._change = self._change, NetChange()
        before, self.adapter.in_doubt = self.adapter.in_doubt, True
        try:
            change.apply(self.adapter)
        except REFUSAL_ERRORS:
            self.adapter.in_doubt = before
            raise

    def _apply(self, event: Event) -> EventResult:
        recorded = self.journal.recorded_id(event.event_id)
        past: EventResult | Entry | None = self._results.get(recorded) or self.journal.of(recorded)
        if past is not None:
            if isinstance(event, Add) and len(event.ids) > past.samples:  # some may have been left out the first time
                event = self.suppression.screen(event)[0] or event
            check_repetition(self.table, event, past)
            return EventResult(event.event_id, past.kind, past.position, False, past.samples, None)
        left_out: Sequence[str] = ()
        if isinstance(event, Add):
            rest, left_out = self.suppression.screen(event)
            if rest is None:  # all samples were erased on request, so the journal gets no entry
                return EventResult(event.event_id, "add", self.position, False, 0, None, left_out=tuple(left_out))
            event = rest
        handlers: dict[type, Callable[[Any], tuple[Sequence[str], list[bytes]]]] = {
            Add: self._add, Remove: self._remove, Relabel: self._relabel, Replace: self._replace,
        }  # fmt: skip
        ids, secrets = handlers[type(event)](event)
        self.position += 1
        nonces = {i: nonce.hex() for i, nonce in zip(ids, secrets, strict=True)}
        done = EventResult(
            event.event_id, event.kind, self.position, True, len(ids), None, nonces, left_out=tuple(left_out)
        )
        self.done.append(done)
        self._results[recorded] = done
        return done

    def _add(self, event: Add) -> tuple[Sequence[str], list[bytes]]:
        empty = self.table.empty
        self._check_source(event.fingerprint or self.source, empty)
        self._change.add(event.ids, event.x, event.y)
        if empty:  # the head determines the grid, and an automatic grid depends on the first samples
            self._change_head()
            self.table.adopt_codec(replace(self.adapter.codec(), J=event.x.shape[1]))
        else:
            self._check_width(event.x)
        return event.ids, self.table.insert(event.ids, event.subjects, event.x, event.y, self.position + 1)

    def _check_source(self, given: str | None, empty: bool) -> None:
        """Refuse features of another network. The first features with a fingerprint bind an empty store to their network."""
        bound = self.table.db.get("fingerprint") or None
        if given == bound:
            return None
        if bound is None and empty:
            return self.table.db.put("fingerprint", given)
        raise ValueError(
            f"these features come from another network than those of the store: their fingerprint is {given!r}, that of the "
            f"store {bound!r}. Pass the fingerprint to Add, or to SampleStore when you open it. Nothing was changed."
        )

    def _check_width(self, x: Tensor) -> None:
        if x.shape[1] != self.table.codec.J:
            raise ValueError(f"x must have shape (B, {self.table.codec.J}) like the stored rows, got {tuple(x.shape)}")

    def _change_rows(
        self, event: Remove | Relabel | Replace, seqs: list[int], change: Callable[[StoredRows, slice], None]
    ) -> tuple[list[str], list[bytes]]:
        """Read the rows of an event in batches and change each batch; return the ids and nonces."""
        ids: list[str] = []
        nonces: list[bytes] = []
        for start in range(0, len(seqs), ROWS_PER_BATCH):
            part = slice(start, start + ROWS_PER_BATCH)
            rows = self.table.read(seqs[part], None if event.ids is None else event.ids[part], event.subject)
            check_event_id(event.event_id, [*rows.ids, *rows.subjects])
            change(rows, part)
            ids += rows.ids
            nonces += rows.nonces
            if self._change.features > LARGEST_EXCHANGE:
                self._change_head()
        return ids, nonces

    def _remove(self, event: Remove) -> tuple[Sequence[str], list[bytes]]:
        seen = self.table.db.get(NOTE_PREFIX + ADAPTED_NOTE, {"ids": [], "subjects": []})
        known: set[str] = set()

        def change(rows: StoredRows, part: slice) -> None:
            known.update(
                set(rows.ids) & set(seen["ids"]) | {s for s in rows.subjects if s is not None and s in seen["subjects"]}
            )
            self._change.remove(*rows.samples)
            self.table.erase(rows)
            self.erased.update(rows.ids, (s for s in rows.subjects if s is not None))
            if known:  # the certificate issuer refuses them
                name = self.journal.recorded_id(event.event_id)
                self.table.db.put(f"{NOTE_PREFIX}{ADAPTED_NOTE}/{name}", sorted(known))

        return self._change_rows(event, self.table.find(event.ids, event.subject), change)

    def _relabel(self, event: Relabel) -> tuple[Sequence[str], list[bytes]]:
        seqs = self.table.find(event.ids, event.subject)
        targets = event.y.expand(len(seqs)) if event.y.ndim == 0 else event.y  # one label for all samples of a subject
        if targets.shape[0] != len(seqs):
            raise ValueError(
                f"y has {targets.shape[0]} entries for {counted(len(seqs), 'sample')}. Nothing was changed."
            )

        def change(rows: StoredRows, part: slice) -> None:
            if event.y_old is not None:
                self._check_labels(rows, event.y_old[part])
            self._change.exchange(*rows.samples, rows.x, targets[part])
            self.table.rewrite(rows, None, targets[part], self.position + 1)

        return self._change_rows(event, seqs, change)

    def _check_labels(self, rows: StoredRows, expected: Tensor) -> None:
        """Raise RemovalError if a sample has another label than a Relabel expects."""
        held, wanted = map(self.table.codec.labels_and_targets, (rows.y, expected))
        if held == wanted:
            return
        labels, old = held[0], wanted[0]
        if labels is None or old is None:
            raise RemovalError("the samples have other labels or targets than y_old. Nothing was changed.")
        row = next(k for k, label in enumerate(labels) if label != old[k])
        error = RemovalError(
            f"the sample {rows.ids[row]!r} has the label {labels[row]}, not {old[row]} (y_old): it was relabelled since. Look "
            "at it again. Nothing was changed."
        )
        error.label, error.held_label = old[row], labels[row]
        raise error

    def _replace(self, event: Replace) -> tuple[Sequence[str], list[bytes]]:
        seqs = self.table.find(event.ids, event.subject)
        if event.x.shape[0] != len(seqs):
            raise ValueError(f"x has {event.x.shape[0]} rows for {counted(len(seqs), 'sample')}. Nothing was changed.")
        self._check_width(event.x)

        def change(rows: StoredRows, part: slice) -> None:
            y = None if event.y is None else event.y[part]
            self._change.exchange(*rows.samples, event.x[part], rows.y if y is None else y)
            self.table.rewrite(rows, event.x[part], y, self.position + 1)

        return self._change_rows(event, seqs, change)


# -- events that come a second time ------------------------------------------------------------------------------------

# The journal keeps only the kind of an event, its number of samples and a commitment to each. A repeated event is compared by
# kind and number; by commitment, for samples that are still held; and by content, for rows that no later event has written.


def check_repetition(table: SampleTable, event: Event, past: EventResult | Entry) -> None:
    """Raise ValueError if an event differs from the event applied under its id, or if that event is no longer in effect."""
    if event.kind != past.kind:
        raise taken_id_error(event, past, f"it is a {event.kind}")
    if event.ids is not None and len(event.ids) != past.samples:
        raise taken_id_error(event, past, f"it has {len(event.ids)}")
    seqs = table.of_subject(event.subject) if event.ids is None else list(table.held(event.ids).values())
    if isinstance(event, Remove):
        if seqs:
            raise taken_id_error(event, past, f"{len(seqs)} of its samples are in the store")
        return
    table.load_codec()
    known, wanted = 0, set(past.commitment_bytes)
    place = None if event.ids is None else {sample: k for k, sample in enumerate(event.ids)}
    for start in range(0, len(seqs), ROWS_PER_BATCH):
        rows = table.read(seqs[start : start + ROWS_PER_BATCH])
        found = [c in wanted for c in rows.commitments]
        known += sum(found)
        if place is not None and not all(found):
            sample = rows.ids[found.index(False)]
            raise taken_id_error(event, past, f"the sample {sample!r} that is held is another one, or was added since")
        same = [i for i in range(len(rows)) if found[i] and rows.positions[i] == past.position]
        if place is not None:
            at = [place[rows.ids[i]] for i in same]
        else:  # a subject's samples are in the order of addition, which is known only while all exist
            at = [start + i for i in same] if len(seqs) == len(wanted) else []
        if at and not same_content(table.codec, event, at, rows, same):
            raise taken_id_error(event, past, "features, labels or subjects of its samples are others")
    if (seqs and not known) or (known < len(wanted) and table.count(wanted) > known):
        raise taken_id_error(event, past, "the samples it names are others")


def same_content(
    codec: Codec, event: Add | Relabel | Replace, at: list[int], rows: StoredRows, same: list[int]
) -> bool:
    """True if the samples ``at`` of an event equal the rows ``same``, compared in their stored form."""
    if isinstance(event, Add) and [event.subjects[k] for k in at] != [rows.subjects[i] for i in same]:
        return False
    if not isinstance(event, Relabel) and (
        max(at) >= len(event.x) or codec.encode(event.x[at].double()) != codec.encode(rows.x[same].double())
    ):
        return False
    if event.y is None:
        return True
    y = event.y.expand(max(at) + 1) if event.y.ndim == 0 else event.y
    return max(at) < len(y) and codec.labels_and_targets(y[at]) == codec.labels_and_targets(rows.y[same])


def taken_id_error(event: Event, past: EventResult | Entry, why: str) -> ValueError:
    """The error for an event id that is already used."""
    return ValueError(
        f"the event id {event.event_id!r} was used before, at position {past.position}, for a {past.kind} of "
        f"{counted(past.samples, 'sample')}, and this is not that event in effect: {why}. Give it an id of its own. Nothing "
        "was changed."
    )
