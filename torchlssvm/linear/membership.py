"""Keyed hashes of the rows that a head holds, so that a removal is checked when it is made.

For each row the head keeps a *name* of 32 bytes: a keyed hash (:mod:`torchlssvm.functional.sample_identity`) and, unhashed, the
fold and the label. A dict maps these names to counts. A name is deleted with its row, so the remaining data cannot confirm a
guess about a removed row. But a head and its checkpoints also contain the key, so anyone who has them can test guesses about
rows that are *present*.

All heads of a process share one key, and so do the ranks of a process group, because rows can be compared only under the same
key. If you merge a head of this run with a head from a file of another run, the keys differ. The merged head then reports that
it is ``unchecked``, and its removals are tested by their sums.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchlssvm.errors import RemovalError
from torchlssvm.functional import checks
from torchlssvm.functional.sample_identity import (
    HASH_BYTES,
    KEY_BYTES,
    key_factors,
    key_vectors,
    row_names,
    row_words,
    shared_key,
)
from torchlssvm.functional.sparse_rows import with_values
from torchlssvm.functional.threads import PASS_WORK, threads_for
from torchlssvm.statistics.batch import SampleBatch
from torchlssvm.wording import counted

REMOVAL_REMEDY = (
    "What is removed must be, bit for bit, what was added (same features, label and weight): features computed again with "
    "another batch size, device or precision differ. Keep the features, or keep the samples in a SampleStore. Nothing was "
    "changed."
)

Counts: TypeAlias = dict[bytes, int]
"""A multiset of names, or with negative counts a change of one. No count is zero."""


def add_counts(total: Counts, change: Counts, sign: int = 1) -> None:
    """Compute total += sign * change. Names whose count becomes zero are deleted."""
    for name, n in change.items():
        count = total.get(name, 0) + sign * n
        if count:
            total[name] = count
        else:
            del total[name]


def sum_of_counts(a: Counts, b: Counts, sign: int = 1) -> Counts:
    """Return a + sign * b."""
    out = dict(a)
    add_counts(out, b, sign)
    return out


def count_negative(counts: Counts) -> int:
    """The number of rows that are removed more often than added."""
    return sum(n < 0 for n in counts.values())


def fewest_rows(change: Counts) -> int:
    """The fewest different rows of any fold and class that changed: the rows added minus those removed, but at least 1."""
    net: Counter[bytes] = Counter()
    for name, n in change.items():
        net[name[HASH_BYTES:]] += 1 if n > 0 else -1
    return max(1, min(map(abs, net.values()), default=1))


def counts_to_array(rows: Counts) -> NDArray[np.int64]:
    """Five integers for each row: hash (2), fold, label and count. The order of the rows reveals nothing."""
    out = np.empty((len(rows), 5), "<i8")
    out[:, :4] = np.frombuffer(b"".join(sorted(rows)), "<i8").reshape(-1, 4)
    out[:, 4] = [rows[name] for name in sorted(rows)]
    return out


def counts_from_array(array: NDArray[np.int64]) -> Counts:
    """Undo :func:`counts_to_array`."""
    names = np.ascontiguousarray(array[:, :4], "<i8").view("V32").ravel().tolist()
    return dict(zip(names, array[:, 4].tolist(), strict=True))


def groups_of(batch: SampleBatch) -> NDArray[np.int64]:
    """Fold and label of each row of a batch (B, 2), -1 if missing."""
    out = np.full((len(batch), 2), -1, "<i8")
    for column, values in enumerate((batch.host_folds, batch.host_labels)):
        if values is not None:
            out[:, column] = values
    return out


def rows_of(batch: SampleBatch, key: bytes) -> Counts:
    """The rows of a checked batch that is not being summed."""
    words, *mult = checks.read(batch_words(batch, key), *([] if batch.mult is None else [batch.mult]))
    return count_names(row_names(words, groups_of(batch), key), mult[0] if mult else None)


def count_names(names: list[bytes], mult: NDArray[Any] | None) -> Counts:
    """How often each name occurs. mult: (B,) multiplicities of the rows, 1 unless given."""
    if mult is None:
        return Counter(names)
    out: Counts = {}
    for name, n in zip(names, mult.astype(np.int64).tolist(), strict=True):
        out[name] = out.get(name, 0) + n
    return out


def batch_words(batch: SampleBatch, key: bytes) -> Tensor:
    """Words (B, 2) of a checked batch that is not being summed."""
    grid, x = batch.choices.grid, batch.x
    assert grid is not None
    observer = RowWords(batch, key)
    some = max(16, 2**20 // x.shape[1])  # 8 MiB stay in the cache
    if x.is_sparse:
        observer(slice(None), with_values(x, grid.quantize(x.values())))
    else:
        with threads_for(PASS_WORK * min(some, len(x)) * x.shape[1]):
            for start in range(0, len(x), some):
                part = slice(start, start + some)
                observer(part, grid.quantize(x[part]))
    return observer.values


class RowWords:
    """A RowObserver that forms words (B, 2) of a checked batch's features on the grid, and of its float targets, if any.

    Added rows are rounded to the grid when they are summed, so ``values`` is complete after the sum.
    """

    def __init__(self, batch: SampleBatch, key: bytes):
        """Take memory for the words of all rows."""
        (rows, J), self.batch = batch.x.shape, batch
        columns = J if batch.targets is None else J + batch.targets.shape[1]
        vectors, self.factors = key_vectors(key, columns, batch.x.device), key_factors(key, batch.x.device)
        self.of_features, self.of_targets = vectors[:, :J], vectors[:, J:]
        self.values = torch.empty(rows, 2, dtype=torch.int64, device=batch.x.device)

    def __call__(self, rows: slice | Tensor, features: Tensor) -> None:
        """Form the words of some rows. features: (b, J), on the grid."""
        values = row_words(features, self.of_features, self.factors)
        if self.batch.targets is not None:
            values += row_words(self.batch.targets[rows], self.of_targets, self.factors)
        self.values[rows] = values


class WaitingBatch(NamedTuple):
    """Rows that are not read yet: words (B, 2) and multiplicities (B,) on their device, fold and label (B, 2) on the host."""

    words: Tensor
    mult: Tensor | None
    groups: NDArray[np.int64]


class StagedRows(NamedTuple):
    """A checked change of rows, which takes effect with :meth:`HeldRows.commit`."""

    removed: Counts
    added: list[RowWords]


class HeldRows:
    """The rows that a head holds, and those that changed since machines last agreed.

    Attributes:
        unchecked: why rows are not known; None while they are.
        key: the key of the names; None before the first row.
        held: the rows, except those that wait.
        changed: net changes since the last agreement; None if they are not known, or if there was no agreement yet.
        recorded: False if the head keeps no names.
        waiting: batches that were added and are still on their device.
    """

    def __init__(self, impossible: str | None, recorded: bool):
        """``impossible``: why rows of this head can never be known; None if they can."""
        self.impossible, self.recorded = impossible, recorded
        self.changed: Counts | None = None
        self.key: bytes | None = None
        self.clear()

    def clear(self) -> None:
        """Hold no row. An empty head knows its rows again."""
        unrecorded = None if self.recorded else "the head was made with membership=False"
        self.unchecked = self.impossible or unrecorded
        self._hold({})
        if self.changed is None:
            self.key = None

    def _hold(self, rows: Counts) -> None:
        self.held, self.waiting = rows, list[WaitingBatch]()

    def drop(self, reason: str) -> None:
        """Give up checking, and forget every name."""
        self.unchecked = self.unchecked or reason
        self._hold({})
        self.changed, self.key = None, None

    def own_key(self) -> bytes:
        """Return the key, chosen when it is first needed."""
        if self.key is None:
            self.key = shared_key()
        return self.key

    # -- changes ---------------------------------------------------------------------------------------------------------

    def stage(self, changes: list[tuple[SampleBatch, int]]) -> tuple[StagedRows, list[tuple[SampleBatch, int]]]:
        """Check a change. Raises RemovalError, naming the first row, if a row to be removed is not held before the change.

        Sum the returned changes instead of the given ones, because summing them forms the words of the added rows.
        """
        staged, watched = StagedRows({}, []), []
        if self.unchecked is not None:
            return staged, changes
        key, wanted = self.own_key(), staged.removed
        for batch, sign in changes:
            if sign < 0:
                words, *mult = self.read_waiting(batch_words(batch, key), *([] if batch.mult is None else [batch.mult]))
                times = mult[0].astype(np.int64).tolist() if mult else [1] * len(batch)
                for i, name in enumerate(row_names(words, groups_of(batch), key)):
                    wanted[name] = wanted.get(name, 0) + times[i]
                    if wanted[name] > self.held.get(name, 0):
                        raise self._refusal(batch, words, times, i)
            else:
                staged.added.append(RowWords(batch, key))
                batch = replace(batch, observer=staged.added[-1])
            watched.append((batch, sign))
        return staged, watched

    def commit(self, staged: StagedRows) -> None:
        """Count rows after they were summed."""
        self._count(staged.removed, -1)
        for formed in staged.added:
            batch = formed.batch
            mult = None if batch.mult is None else batch.mult.clone()
            self.waiting.append(WaitingBatch(formed.values, mult, groups_of(batch)))
        # 256 batches of single rows are 20 times as large as their hashes; 4,096 rows are read in a few milliseconds
        if len(self.waiting) > 256 or sum(len(w.words) for w in self.waiting) > 4096:
            self.read_waiting()

    def _count(self, rows: Counts, sign: int) -> None:
        for table in (self.held, self.changed):
            if table is not None:
                add_counts(table, rows, sign)

    def read_waiting(self, *more: Tensor) -> list[NDArray[Any]]:
        """Read the waiting rows and further tensors in one read from the device, and return those tensors."""
        parts = [t for w in self.waiting for t in (w.words, w.mult) if t is not None]
        host = checks.read(*more, *parts) if more or parts else []
        values = iter(host[len(more) :])
        for w in self.waiting:
            names = row_names(next(values), w.groups, self.own_key())
            self._count(count_names(names, None if w.mult is None else next(values)), 1)
        self.waiting = []
        return host[: len(more)]

    def _refusal(self, batch: SampleBatch, words: NDArray[np.int64], times: list[int], i: int) -> RemovalError:
        """The error for a row that is not held, or not often enough, with the label under which it is held, if any."""
        groups, key = groups_of(batch), self.own_key()
        names, label = row_names(words, groups, key), int(groups[i, 1])
        if held := self.held.get(names[i], 0):
            wanted = sum(n for n, name in zip(times, names, strict=True) if name == names[i])
            return RemovalError(
                f"row {i} is held {counted(held, 'time')}, and was to be removed {counted(wanted, 'time')}. {REMOVAL_REMEDY}"
            )
        if label < 0:
            return RemovalError(f"row {i} is not held. {REMOVAL_REMEDY}")
        every = np.column_stack([np.full(batch.classes, groups[i, 0]), np.arange(batch.classes)])
        same = row_names(np.repeat(words[i : i + 1], batch.classes, 0), every, key)
        other = next((k for k, name in enumerate(same) if name in self.held), None)
        where = "" if other is None else f" (it is held with label {other})"
        under = "" if batch.ids is None or batch.host_folds is None else f" in the fold of the id {batch.ids[i]!r}"
        error = RemovalError(f"row {i} is not held with label {label}{under}{where}. {REMOVAL_REMEDY}")
        error.row, error.label, error.held_label = i, label, other
        return error

    def known(self) -> Counts | None:
        """Return the rows held; None if they are not known."""
        self.read_waiting()
        return None if self.unchecked is not None else self.held

    def take_class(self, label: int) -> Counts:
        """Remove the rows of a class, and return them."""
        self.read_waiting()
        end = label.to_bytes(8, "little")
        gone = {name: n for name, n in self.held.items() if name.endswith(end)}
        self.held = {name: n for name, n in self.held.items() if name not in gone}
        return gone

    def joined(self, other: Counts | None, key: bytes | None, sign: int) -> Counts | None:
        """Return the rows held together with, or without, others; None if they cannot be compared, with nothing changed.

        Raises RemovalError if the count of a row would fall below zero.
        """
        held = self.known()
        if held is None or other is None or (other and held and key != self.key):
            return None
        rows = sum_of_counts(held, other, sign)
        if short := count_negative(rows):
            raise checks.removal_error(f"{short} row(s) would be removed more often than they are held")
        return rows

    def replace(self, rows: Counts | None, key: bytes | None, reason: str) -> None:
        """Hold other rows; None if they are not known, for the reason given."""
        if rows is None:
            self.drop(reason)
        else:
            self._hold(rows)
            self.key = key or self.key

    # -- saving ----------------------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """The rows held, for a file: the key, then five integers for each row."""
        self.read_waiting()
        return self.own_key() + counts_to_array(self.held).tobytes()

    def load(self, saved: bytes) -> None:
        """Hold the rows of :meth:`to_bytes`. Raises ValueError if they are damaged."""
        if len(saved) < KEY_BYTES or (len(saved) - KEY_BYTES) % 40:
            raise ValueError("the table of rows held is cut short")
        rows = counts_from_array(np.frombuffer(saved[KEY_BYTES:], "<i8").reshape(-1, 5))
        if count_negative(rows):
            raise ValueError("the table of rows held is damaged: a row is held less than once")
        self.clear()
        self.held, self.key = rows, saved[:KEY_BYTES]

    def copy(self) -> HeldRows:
        """Return an independent copy of the rows held."""
        self.read_waiting()
        out = HeldRows(self.impossible, self.recorded)
        out.unchecked, out.key, out.held = self.unchecked, self.key, dict(self.held)
        return out

    def __deepcopy__(self, memo: Any) -> HeldRows:
        """Copy within the process."""
        return self.copy()

    def __getstate__(self) -> dict[str, Any]:
        """State for pickling: the rows held, in an order that reveals nothing."""
        known = None if self.unchecked is not None else self.to_bytes()
        about = {"impossible": self.impossible, "recorded": self.recorded, "unchecked": self.unchecked}
        return about | {"rows": known}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`__getstate__` returned."""
        self.__init__(state["impossible"], state["recorded"])  # type: ignore[misc]
        if state["rows"] is not None:
            self.load(state["rows"])
        self.unchecked = state["unchecked"]
