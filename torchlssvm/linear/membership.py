"""The rows a head holds, as keyed fingerprints: a removal is checked when it is made.

Of each row held there are 16 bytes (:mod:`torchlssvm.functional.row_fingerprints`) and, in clear, its label, fold and number.
A fingerprint leaves with its row, so nothing that stays confirms a guess about a row removed. A head and its checkpoints hold
the key too: with one of them, guesses about rows that are *present* can be tested.

A :class:`Membership` is immutable: a change makes a new one, and the head's :class:`HeldRows` takes it over with one
assignment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchlssvm.errors import RemovalError
from torchlssvm.functional import checks
from torchlssvm.functional.grid import FixedPoint
from torchlssvm.functional.row_fingerprints import (
    FINGERPRINT_KEY_BYTES,
    SECRET_VECTORS,
    keyed_hashes,
    products,
    secret_vectors,
)
from torchlssvm.functional.sparse_rows import pick, with_values
from torchlssvm.functional.threads import PASS_WORK, threads_for
from torchlssvm.statistics.batch import SampleBatch

FINGERPRINTED_ROWS = 1024
"""Rows that are gridded and multiplied at a time: they stay in the cache."""

FINGERPRINTED_NUMBERS = 2**20
"""Numbers (8 MiB) that are gridded at a time where rows are wide."""

MERGE_RATIO = 8
"""A run of fingerprints joins the one before it when it has an eighth of its size: few runs, and a row moves rarely."""

WAITING_BATCHES = 256
"""Batches that wait to be hashed: each is a few small tensors, which single rows would make 20 times as large as their hash."""

COLUMN_TYPES = ("<u8", "<i4", "<i4", "<i8")
"""Types of the columns of a run in a file."""

REMOVAL_REMEDY = (
    "What is removed must be, bit for bit, what was added (same features, label and weight): features computed again with "
    "another batch size, device or precision differ. Keep the features, or keep the samples in a SampleStore. Nothing was "
    "changed."
)


class Run(NamedTuple):
    """Fingerprints (n, 2) in ascending order, each once, with label, fold and number of rows (n,)."""

    hashes: NDArray[np.uint64]
    labels: NDArray[np.int32]
    folds: NDArray[np.int32]
    counts: NDArray[np.int64]

    def pick(self, index: Any) -> Run:
        """Some of the rows."""
        return Run(*(column[index] for column in self))


def combine(runs: Sequence[Run]) -> Run:
    """Sort fingerprints and add up the numbers of equal ones; those whose number is 0 are left out."""
    run = runs[0] if len(runs) == 1 else Run(*(np.concatenate(c) for c in zip(*runs, strict=True)))
    if len(run.counts) < 2:
        return run.pick(run.counts != 0)
    run = run.pick(np.lexsort((run.hashes[:, 1], run.hashes[:, 0])))
    first = np.ones(len(run.counts), bool)
    first[1:] = (run.hashes[1:] != run.hashes[:-1]).any(1)
    counts = np.add.reduceat(run.counts, first.nonzero()[0])
    run = run.pick(first)._replace(counts=counts)
    return run if counts.all() else run.pick(counts != 0)


def first_of_equals(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """For each fingerprint the place of the first one that is equal to it. hashes: (B, 2)."""
    out = np.arange(len(hashes))
    if len(hashes) > 1:
        order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # stable: of equal ones the first comes first
        new = np.ones(len(hashes), bool)
        new[1:] = (hashes[order[1:]] != hashes[order[:-1]]).any(1)
        out[order] = order[new][np.cumsum(new) - 1]
    return out


def find(run: Run, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Position of each fingerprint in the run, -1 if it is not there. hashes: (B, 2)."""
    size = len(run.counts)
    if not size:
        return np.full(len(hashes), -1)
    place = np.searchsorted(run.hashes[:, 0], hashes[:, 0])
    while True:  # first words that are equal in two rows are rare, but nothing rests on that
        at = np.minimum(place, size - 1)
        same = (place < size) & (run.hashes[at, 0] == hashes[:, 0])
        wrong = same & (run.hashes[at, 1] != hashes[:, 1])
        if not wrong.any():
            return np.where(same, at, -1)
        place = place + wrong


WaitingRows: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Rows that are not hashed yet: products (B, 4), labels, folds and numbers (B,), or None."""

HostRows: TypeAlias = tuple[NDArray[Any], NDArray[Any] | None, NDArray[Any] | None, NDArray[Any] | None]
"""The same on the host."""


def tensors_of(parts: Sequence[WaitingRows]) -> list[Tensor]:
    """The tensors of some parts, one after the other."""
    return [t for part in parts for t in part if t is not None]


def on_host(parts: Sequence[WaitingRows], values: Sequence[NDArray[Any]]) -> list[HostRows]:
    """Parts with the values of their tensors, in the order of :func:`tensors_of`."""
    rest = iter(values)
    return [tuple(None if t is None else next(rest) for t in part) for part in parts]  # type: ignore[misc]


def read_parts(parts: Sequence[WaitingRows]) -> list[HostRows]:
    """Parts on the host, in one read from the device."""
    return on_host(parts, checks.read(*tensors_of(parts)))


@dataclass(frozen=True)
class FingerprintTable:
    """The rows summed under one key: sorted runs, and products of rows that are not hashed yet."""

    key: bytes
    runs: tuple[Run, ...] = ()
    waiting: tuple[WaitingRows, ...] = ()

    def noted(self, batch: SampleBatch, sign: int) -> FingerprintTable:
        """The table with the rows of a batch added, or (sign -1) subtracted, whether they are held or not."""
        counts = (
            torch.full((len(batch),), float(sign), device=batch.x.device) if batch.mult is None else batch.mult * sign
        )
        part = (batch_products(batch, self.key), _copy(batch.labels), _copy(batch.folds), counts)
        return replace(self, waiting=(*self.waiting, part))

    def fingerprints(
        self,
        product: NDArray[np.int64],
        labels: NDArray[Any] | None,
        folds: NDArray[Any] | None,
        mult: NDArray[Any] | None,
    ) -> Run:
        """Fingerprints of products (B, 4), in the order given; all on the host."""
        none, one = np.full(len(product), -1, np.int64), np.ones(len(product), np.int64)
        of = [none if t is None else t.astype(np.int64) for t in (labels, folds)]
        counts = one if mult is None else mult.astype(np.int64)
        hashes = keyed_hashes(self.key, np.column_stack([product, *of]))
        return Run(hashes, of[0].astype(np.int32), of[1].astype(np.int32), counts)

    def fingerprints_of(self, batch: SampleBatch) -> Run:
        """Fingerprints of a checked batch that is not being summed, in its order."""
        return self.fingerprints(
            *read_parts([(batch_products(batch, self.key), batch.labels, batch.folds, batch.mult)])[0]
        )

    def hashed(self, waiting: Sequence[HostRows] | None = None) -> FingerprintTable:
        """The same rows, all of them hashed. ``waiting``: the parts that wait, if they were read already."""
        if not self.waiting:
            return self
        waiting = read_parts(self.waiting) if waiting is None else waiting
        runs = [*self.runs, combine([self.fingerprints(*part) for part in waiting])]
        while len(runs) > 1 and len(runs[-1].counts) * MERGE_RATIO >= len(runs[-2].counts):
            runs[-2:] = [combine(runs[-2:])]
        return FingerprintTable(self.key, tuple(r for r in runs if len(r.counts)))

    def whole(self) -> Run:
        """All rows in one run."""
        runs = self.hashed().runs
        return combine(runs) if runs else combine([_EMPTY_RUN])

    def held(self, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Number of rows held with each fingerprint (B,)."""
        total = np.zeros(len(hashes), np.int64)
        for run in self.runs:
            at = find(run, hashes)
            total += np.where(at >= 0, run.counts[at], 0)
        return total

    def without(self, wanted: Run) -> tuple[FingerprintTable, Run]:
        """Take rows out as far as they are held; returns the table and what is still wanted. wanted: each once."""
        runs, left = [], wanted.counts.copy()
        for run in reversed(self.runs):
            at = find(run, wanted.hashes)
            taken = np.where(at >= 0, np.minimum(run.counts[at], left), 0)
            if taken.any():
                counts = run.counts.copy()
                np.subtract.at(counts, at[at >= 0], taken[at >= 0])
                run = run.pick(counts != 0)._replace(counts=counts[counts != 0])
                left -= taken
            runs.append(run)
        return FingerprintTable(self.key, tuple(r for r in reversed(runs) if len(r.counts))), wanted._replace(
            counts=left
        )


class FingerprintChange:
    """Rows that were added and removed between two states: signed numbers, by key; ``runs`` None when they are not known.

    ``equal`` (m, 2, 6): pairs of a key (4 words) and a fingerprint (2 words) under it, both of one row that was removed.
    """

    def __init__(self, runs: dict[bytes, Run] | None, equal: NDArray[np.int64] | None = None) -> None:
        self.runs = runs
        self.equal = np.zeros((0, 2, 6), np.int64) if equal is None else equal

    @property
    def known(self) -> bool:
        """True when the rows are known."""
        return self.runs is not None

    def plus(self, other: FingerprintChange, sign: int = 1) -> FingerprintChange:
        """Both changes, or this one without the other."""
        if self.runs is None or other.runs is None:
            return FingerprintChange(None)
        out = dict(self.runs)
        for key, run in other.runs.items():
            theirs = run._replace(counts=sign * run.counts)
            out[key] = combine([out[key], theirs]) if key in out else theirs
        equal = np.concatenate([self.equal, other.equal])
        return FingerprintChange({key: run for key, run in out.items() if len(run.counts)}, equal)

    def settled(self) -> dict[bytes, Run]:
        """The numbers by key, where a row has less than 0 of them under one key made up for by those under another.

        A row that two ranks added is held under two keys. Ranks that remove copies of it all take them from the first one.
        """
        runs = dict(self.runs or {})
        if not len(self.equal) or not any((run.counts < 0).any() for run in runs.values()):
            return runs
        counts = {key: run.counts.copy() for key, run in runs.items()}
        for row in _equal_fingerprints(self.equal):
            held = [
                (key, int(find(runs[key], np.frombuffer(words, np.uint64)[None])[0]))
                for key, words in sorted(row)
                if key in runs
            ]
            places = [(key, at) for key, at in held if at >= 0]
            total = sum(int(counts[key][at]) for key, at in places)
            for k, (key, at) in enumerate(places, 1):  # the last one has what is missing, if anything is
                own = min(max(total, 0), max(int(counts[key][at]), 0)) if k < len(places) else total
                counts[key][at] = own
                total -= own
        runs = {key: run._replace(counts=counts[key]).pick(counts[key] != 0) for key, run in runs.items()}
        return {key: run for key, run in runs.items() if len(run.counts)}

    def least(self, fold: int | None, label: int | None) -> int:
        """The number of distinct rows of a class (None: of all) that are known to be in the change; 0 if nothing is known.

        Rows added less rows removed, or the other way round. A row known under two keys counts once.
        """
        added, removed = [0], [0]
        for run in (self.runs or {}).values():
            mine = np.ones(len(run.counts), bool)
            for column, value in ((run.folds, fold), (run.labels, label)):
                if value is not None:
                    mine &= column == value
            added.append(int((run.counts[mine] > 0).sum()))
            removed.append(int((run.counts[mine] < 0).sum()))
        return max(0, max(added) - sum(removed), max(removed) - sum(added))

    def to_rows(self) -> NDArray[np.int64]:
        """A row of nine integers for each: key (4), fingerprint (2), label, fold and number; then ``equal``, with number 0."""
        parts = [np.zeros((0, 9), np.int64)]
        for key, run in (self.runs or {}).items():
            keys = np.broadcast_to(np.frombuffer(key, "<i8"), (len(run.counts), FINGERPRINT_KEY_BYTES // 8))
            parts.append(np.column_stack([keys, run.hashes.view(np.int64), run.labels, run.folds, run.counts]))
        parts.append(np.pad(self.equal.reshape(-1, 6), ((0, 0), (0, 3))))
        return np.concatenate(parts)

    @classmethod
    def from_rows(cls, rows: NDArray[np.int64]) -> FingerprintChange:
        """Rows from what :meth:`to_rows` returned."""
        words, out, paired = FINGERPRINT_KEY_BYTES // 8, {}, rows[:, 8] == 0
        equal, rows = rows[paired][:, :6].reshape(-1, 2, 6), rows[~paired]
        for key in np.unique(rows[:, :words], axis=0):
            part = np.ascontiguousarray(rows[(rows[:, :words] == key).all(1)][:, words:])
            hashes = np.ascontiguousarray(part[:, :2]).view(np.uint64)
            run = Run(hashes, part[:, 2].astype(np.int32), part[:, 3].astype(np.int32), part[:, 4].copy())
            out[key.astype("<i8").tobytes()] = combine([run])
        return cls(out, equal)


def _equal_fingerprints(pairs: NDArray[np.int64]) -> list[set[tuple[bytes, bytes]]]:
    """Join pairs (m, 2, 6) into all keys and fingerprints of each row."""
    rows: dict[tuple[bytes, bytes], set[tuple[bytes, bytes]]] = {}
    for pair in np.unique(pairs.reshape(-1, 12), axis=0).reshape(-1, 2, 6):
        one, other = ((words[:4].astype("<i8").tobytes(), words[4:].tobytes()) for words in pair)
        both = rows.get(one, {one}) | rows.get(other, {other})
        rows.update(dict.fromkeys(both, both))
    return list({id(row): row for row in rows.values()}.values())


_EMPTY_RUN = Run(np.zeros((0, 2), np.uint64), np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int64))


@lru_cache(maxsize=16)
def _vectors(key: bytes, columns: int, device: torch.device) -> Tensor:
    return secret_vectors(key, columns).to(device)


class RowProducts:
    """Products (B, 4) of a checked batch's gridded features, and targets where they are no labels: a RowObserver.

    Rows that are added are on the grid anyway while they are summed: ``values`` is complete after that.
    """

    def __init__(self, batch: SampleBatch, key: bytes):
        """Take memory for the products of all rows."""
        (rows, J), self.targets = batch.x.shape, batch.targets
        columns = J if batch.targets is None else J + batch.targets.shape[1]
        vectors = _vectors(key, columns, batch.x.device)
        self.of_features, self.of_targets = vectors[:, :J], vectors[:, J:]
        self.values = torch.empty(rows, SECRET_VECTORS, dtype=torch.int64, device=batch.x.device)

    def __call__(self, pick: slice | Tensor, rows: Tensor) -> None:
        """Form the products of some rows. rows: (b, J), on the grid."""
        values = products(rows, self.of_features)
        if self.targets is not None:
            values += products(self.targets[pick], self.of_targets)
        self.values[pick] = values


def grid_products(x: Tensor, grid: FixedPoint, key: bytes) -> Tensor:
    """Products (B, 4) of the features of rows that are not being summed. x: (B, J)."""
    vectors = _vectors(key, x.shape[1], x.device)
    if x.is_sparse:
        return products(with_values(x, grid.quantize(x.values())), vectors)
    some = max(16, min(FINGERPRINTED_ROWS, FINGERPRINTED_NUMBERS // x.shape[1]))
    with threads_for(PASS_WORK * some * x.shape[1]):
        if len(x) <= some:
            return products(grid.quantize(x), vectors)
        rows = torch.empty(some, x.shape[1], dtype=torch.float64, device=x.device)
        scratch = torch.empty(rows.shape, dtype=torch.float32, device=x.device)
        return torch.cat([products(grid.quantize(part, rows[: len(part)], scratch), vectors) for part in x.split(some)])


def batch_products(batch: SampleBatch, key: bytes) -> Tensor:
    """Products (B, 4) of a checked batch that is not being summed."""
    assert batch.choices.grid is not None
    J = batch.x.shape[1]
    out = grid_products(batch.x, batch.choices.grid, key)
    if batch.targets is not None:
        out += products(batch.targets, _vectors(key, J + batch.targets.shape[1], batch.x.device)[:, J:])
    return out


@dataclass(frozen=True)
class Membership:
    """All rows of a head: a table of its own, and one for each key that came with a merge.

    ``unchecked`` says why rows are not known; the tables are then empty, and stay so until no row is left.
    ``equal``: pairs of fingerprints of rows removed since ranks agreed, see :class:`FingerprintChange`.
    """

    tables: tuple[FingerprintTable, ...] = field(
        default_factory=lambda: (FingerprintTable(os.urandom(FINGERPRINT_KEY_BYTES)),)
    )
    unchecked: str | None = None
    equal: tuple[NDArray[np.int64], ...] = ()

    def none_held(self) -> Membership:
        """No rows, under the same key."""
        return Membership((FingerprintTable(self.tables[0].key),))

    def dropped(self, reason: str) -> Membership:
        """Give up checking, and forget every fingerprint."""
        return Membership((), self.unchecked or reason)

    def hashed(self, waiting: Sequence[Sequence[HostRows]] | None = None) -> Membership:
        """The same rows, all of them hashed; a table without rows is left out, except one.

        ``waiting``: for each table the parts that wait, if they were read already.
        """
        if self.unchecked is not None:
            return self
        tables = [t.hashed(None if waiting is None else waiting[i]) for i, t in enumerate(self.tables)]
        kept = tuple(t for i, t in enumerate(tables) if i == 0 or t.runs)
        return replace(self, tables=kept)

    def changed(
        self, changes: list[tuple[SampleBatch, int]], agreed: bool = False
    ) -> tuple[Membership, list[tuple[SampleBatch, int]]]:
        """The rows after a change; RemovalError, naming the first row, if one to be removed is not held before it.

        Sum the changes returned in the place of those given: the fingerprints of rows added are formed on the way.
        agreed: ranks have agreed on rows, which are to be compared with again.
        """
        if self.unchecked is not None or any(checks.is_fake(b.x) for b, _ in changes):
            return self, changes
        out = self
        for batch in (b for b, s in changes if s < 0):
            out = out._without(batch, agreed)
        own = out.tables[0]
        if len(own.waiting) >= WAITING_BATCHES:
            own = own.hashed()
        new, watched = [], []
        for batch, sign in changes:
            if sign > 0:
                formed = RowProducts(batch, own.key)
                new.append((formed.values, _copy(batch.labels), _copy(batch.folds), _copy(batch.mult)))
                batch = replace(batch, observer=formed)
            watched.append((batch, sign))
        own = replace(own, waiting=(*own.waiting, *new))
        return replace(out, tables=(own, *out.tables[1:])), watched

    def question(self, x: Tensor, grid: FixedPoint) -> list[Tensor]:
        """Products of rows to be removed under each key, and of all rows that wait: what a removal has to read. x: (B, J)."""
        own = [grid_products(x, grid, t.key) for t in self.tables]
        return own + [t for table in self.tables for t in tensors_of(table.waiting)]

    def _without(self, batch: SampleBatch, agreed: bool) -> Membership:
        waiting: list[list[HostRows]] | None = None
        own: Sequence[NDArray[Any] | None] = [None] * len(self.tables)
        if batch.answer is not None:
            own, waiting = batch.answer[: len(self.tables)], []
            values = iter(batch.answer[len(self.tables) :])
            for table in self.tables:
                waiting.append(on_host(table.waiting, [next(values) for _ in tensors_of(table.waiting)]))
        start = self.hashed(waiting)
        known = {t.key: p for t, p in zip(self.tables, own, strict=True)}
        tables, asked = list(start.tables), []
        for t in tables:
            product = known[t.key]
            labels = batch.host_labels
            asked.append(t.fingerprints_of(batch) if product is None else t.fingerprints(product, labels, None, None))
        left = np.zeros(len(batch), np.int64)  # rows still wanted, at the first row of each kind
        kind: NDArray[np.int64] | None = None
        for i, run in enumerate(asked):
            if kind is None:  # equal rows are equal under every key
                kind = first_of_equals(run.hashes)
                np.add.at(left, kind, run.counts)
            want = np.flatnonzero(left)
            tables[i], rest = tables[i].without(run.pick(want)._replace(counts=left[want]))
            left[want] = rest.counts
            if not left.any():
                equal = start._equal(asked, kind) if agreed and len(asked) > 1 else ()
                return replace(start, tables=tuple(tables), equal=(*start.equal, *equal))
        raise start._refusal(batch, asked, int(np.flatnonzero(left)[0]))

    def _equal(self, asked: list[Run], kind: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Pairs (m, 2, 6) of fingerprints of rows that are held under another key than the first. asked: rows by key.

        A row that is added again goes under the first key, whatever key it was removed under.
        """
        rows = np.unique(kind)
        held = [table.held(run.hashes[rows]) > 0 for table, run in zip(self.tables, asked, strict=True)]
        rows = rows[np.any(held[1:], 0)]
        words = [
            np.column_stack(
                [np.broadcast_to(np.frombuffer(table.key, "<i8"), (len(rows), 4)), run.hashes[rows].view(np.int64)]
            )
            for table, run in zip(self.tables, asked, strict=True)
        ]
        for other in words[1:]:
            yield np.stack([words[0], other], 1)

    def _refusal(self, batch: SampleBatch, asked: list[Run], row: int) -> RemovalError:
        """The error for a row that is not held, or not so often, with the label under which it is held, if any."""
        held = sum(int(t.held(run.hashes[row : row + 1])[0]) for t, run in zip(self.tables, asked, strict=True))
        if held:
            same = (asked[0].hashes == asked[0].hashes[row]).all(1)
            wanted = int(asked[0].counts[same].sum())
            return RemovalError(
                f"row {row} is held {held} time(s), and was to be removed {wanted} time(s). {REMOVAL_REMEDY}"
            )
        label = "" if batch.labels is None else f" with label {int(batch.labels[row])}"
        where = ""
        for table in self.tables:
            known = np.unique(np.concatenate([r.labels for r in table.runs])) if table.runs else np.zeros(0)
            at = slice(row, row + 1)
            part = (
                batch_products(_row(batch, row), table.key),
                None,
                None if batch.folds is None else batch.folds[at],
                None,
            )
            product, _, folds, _ = read_parts([part])[0]
            for other in known.tolist() if batch.labels is not None else ():
                if table.held(table.fingerprints(product, np.array([other]), folds, None).hashes)[0]:
                    where = f" (it is held with label {int(other)})"
        return RemovalError(f"row {row} is not held{label}{where}. {REMOVAL_REMEDY}")

    def merged(self, other: Membership, sign: int) -> Membership:
        """The rows of two heads, or of this one without those of the other; RemovalError if they are not held."""
        if self.unchecked is not None or other.unchecked is not None:
            why = self.unchecked or f"a head was merged whose rows are not known ({other.unchecked})"
            return self.dropped(why)
        mine = {t.key: t for t in self.hashed().tables}
        for theirs in other.hashed().tables:
            if not theirs.runs:
                continue
            here = mine.get(theirs.key)
            if sign > 0:
                runs = theirs.runs if here is None else (combine([*here.runs, *theirs.runs]),)
                mine[theirs.key] = FingerprintTable(theirs.key, runs)
                continue
            if here is None:
                return self.dropped(
                    "another head was subtracted whose rows are known under another key only, so which rows left is not known"
                )
            mine[theirs.key], rest = here.without(theirs.whole())
            if rest.counts.any():
                raise checks.removal_error(f"{int(rest.counts.sum())} row(s) of the other head are not held here")
        return replace(self, tables=tuple(mine.values()))

    def since(self, earlier: Membership | None) -> FingerprintChange:
        """Difference from the rows of an earlier state; None stands for one that is not known."""
        if earlier is None or self.unchecked is not None or earlier.unchecked is not None:
            return FingerprintChange(None)
        now, then = (
            FingerprintChange({t.key: t.whole() for t in m.hashed().tables if t.runs or t.waiting})
            for m in (self, earlier)
        )
        change = now.plus(then, -1)
        return FingerprintChange(change.runs, np.concatenate([change.equal, *self.equal]))

    def advanced(self, change: FingerprintChange) -> Membership:
        """The rows after a change; RemovalError if it removes more than is held.

        Rows that come from here on go under the least key that has rows, so that ranks which agree use the same one.
        """
        if self.unchecked is not None or change.runs is None:
            return self.dropped("rows were exchanged that are not known by fingerprints")
        both = FingerprintChange({t.key: t.whole() for t in self.hashed().tables}).plus(change).settled()
        short = sum(int((run.counts < 0).sum()) for run in both.values())
        if short:
            raise checks.removal_error(f"{short} row(s) would be removed more often than they are held")
        return (
            Membership(tuple(FingerprintTable(key, (both[key],)) for key in sorted(both))) if both else self.none_held()
        )

    def without_class(self, label: int) -> Membership:
        """The rows of all other classes."""
        if self.unchecked is not None:
            return self
        tables = []
        for table in self.hashed().tables:
            runs = (run.pick(run.labels != label) for run in table.runs)
            tables.append(FingerprintTable(table.key, tuple(r for r in runs if len(r.counts))))
        return replace(self, tables=tuple(tables))

    @property
    def rows(self) -> int:
        """The number of different rows known."""
        return sum(len(t.whole().counts) for t in self.tables)

    # -- saving --------------------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """The tables, for a file: key, number of rows, and the columns of each. The order of the rows tells nothing.

        Nothing is written when rows are not known.
        """
        out = []
        for table in self.tables:
            run = table.whole()
            parts: tuple[NDArray[Any], ...] = run
            columns = (part.astype(kind).tobytes() for part, kind in zip(parts, COLUMN_TYPES, strict=True))
            out += [table.key, len(run.counts).to_bytes(8, "little"), *columns]
        return b"".join(out)

    @classmethod
    def from_bytes(cls, saved: bytes) -> Membership:
        """Undo :meth:`to_bytes`; ValueError when the tables are damaged."""
        tables, at = [], 0

        def take(size: int) -> bytes:
            nonlocal at
            at += size
            if at > len(saved):
                raise ValueError("the table of rows held is cut short")
            return saved[at - size : at]

        while at < len(saved):
            key, n = take(FINGERPRINT_KEY_BYTES), int.from_bytes(take(8), "little")
            columns = [
                np.frombuffer(take(n * width), kind) for width, kind in zip((16, 4, 4, 8), COLUMN_TYPES, strict=True)
            ]
            run = Run(
                columns[0].reshape(-1, 2).astype(np.uint64), columns[1].astype(np.int32), columns[2].astype(np.int32),
                columns[3].astype(np.int64),
            )  # fmt: skip
            if (run.counts <= 0).any():
                raise ValueError("the table of rows held is damaged: a row is held less than once")
            tables.append(FingerprintTable(key, (combine([run]),) if n else ()))
        if not tables:
            raise ValueError("the table of rows held is empty")
        return cls(tuple(tables))


@dataclass
class HeldRows:
    """The rows that a head holds, and those that it held when ranks last agreed.

    Attributes:
        impossible: why rows of this head can never be known; None if they can.
        recorded: False when the head is to keep no fingerprints.
        held: the rows now.
        agreed: the rows at the last agreement; None when they are not known.
    """

    impossible: str | None
    recorded: bool
    held: Membership = field(init=False)
    agreed: Membership | None = field(default_factory=lambda: Membership(()))

    def __post_init__(self) -> None:
        """Start with the rows of an empty head."""
        self.held = self.none()

    def none(self) -> Membership:
        """Rows of an empty head."""
        if self.impossible is not None:
            return Membership((), self.impossible)
        return Membership() if self.recorded else Membership((), "the head was made with membership=False")

    def changed(self, changes: list[tuple[SampleBatch, int]]) -> tuple[Membership, list[tuple[SampleBatch, int]]]:
        """The rows after a change, see :meth:`Membership.changed`."""
        return self.held.changed(changes, agreed=self.agreed is not None and bool(self.agreed.tables))

    def drop(self, reason: str) -> None:
        """Give up checking, and forget every fingerprint."""
        self.held = self.held.dropped(reason)

    def hash(self) -> None:
        """Hash the rows that wait for it: no product of a row is left."""
        self.held = self.held.hashed()

    def replaced(self, held: Membership, agreed: Membership | None) -> HeldRows:
        """Copy with other rows, for a file or another head: without the fingerprints of rows that were removed."""
        out = replace(self)
        out.held, out.agreed = replace(held, equal=()), agreed
        return out

    def agree(self, rows: Membership | None = None) -> None:
        """Take rows, or those held, for what was agreed on; what changes from here on is pending."""
        self.held = self.agreed = replace((self.held if rows is None else rows).hashed(), equal=())

    def agreed_or_unknown(self) -> Membership:
        """Rows at the last agreement, as a copy that may be changed."""
        if self.agreed is None or self.held.unchecked is not None:
            return self.held.dropped("which rows were agreed on is not known: the head was saved or copied since")
        return self.agreed if self.agreed.tables else self.held.none_held()

    def pending(self) -> FingerprintChange:
        """Rows that changed since the last agreement."""
        return self.held.since(self.agreed)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _row(batch: SampleBatch, row: int) -> SampleBatch:
    at = slice(row, row + 1)
    return replace(batch, x=pick(batch.x, at), targets=None if batch.targets is None else batch.targets[at])
