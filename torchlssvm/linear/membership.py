"""Keyed hashes of the rows that a head holds, so that a removal is checked when it is made.

For each row the head keeps 16 bytes (:mod:`torchlssvm.functional.sample_identity`) and, unhashed, its fold, label and count. A
row hash is deleted with its row, so the remaining data cannot confirm a guess about a removed row. A head and its
checkpoints also contain the key. Anyone who has a head or a checkpoint can therefore test guesses about rows that are
*present*.

All heads of a process share one key, and so do the ranks of a process group. Rows with different keys cannot be compared. This
happens if a head that was loaded from a file of another run is merged with a head of this run. The merged head reports that it
is ``unchecked``, and its removals are tested by their sums.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchlssvm.errors import RemovalError
from torchlssvm.functional import checks
from torchlssvm.functional.sample_identity import (
    KEY_BYTES,
    key_factors,
    key_vectors,
    row_keys,
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


class RowList(NamedTuple):
    """Rows in the order of a batch: (fold, label) with -1 if missing, words or row hash (16 bytes), and count."""

    groups: list[tuple[int, int]]
    rows: list[bytes]
    counts: list[int]

    @classmethod
    def of(
        cls,
        words: NDArray[np.int64],
        labels: NDArray[Any] | None,
        folds: NDArray[Any] | None,
        mult: NDArray[Any] | None,
    ) -> RowList:
        """Rows by their words (B, 2), with labels, folds and multiplicities (B,); all on the host."""
        none = [-1] * len(words)
        groups = zip(*(none if t is None else t.tolist() for t in (folds, labels)), strict=True)
        counts = [1] * len(words) if mult is None else mult.astype(np.int64).tolist()
        return cls(list(groups), split_words(words), counts)

    def hashed(self, key: bytes) -> RowList:
        """The same rows by their row hashes instead of their words."""
        return self._replace(rows=row_keys(self.rows, np.array(self.groups, "<i8").reshape(-1, 2), key))


def split_words(words: NDArray[np.int64]) -> list[bytes]:
    """Words (B, 2) as 16 bytes for each row."""
    return np.ascontiguousarray(words).view("V16").ravel().tolist()


class RowCounts:
    """A multiset of rows, or with negative counts a change of one: a count for each row, by (fold, label).

    >>> rows = RowCounts()
    >>> rows.add(RowList([(-1, 0), (-1, 0)], [b"a", b"b"], [1, 2]))
    >>> rows.add(RowList([(-1, 0)], [b"a"], [1]), -1)
    >>> len(rows), rows.count((-1, 0), b"b")
    (1, 2)
    """

    def __init__(self) -> None:
        self.groups: dict[tuple[int, int], Counter[bytes]] = {}

    def __len__(self) -> int:
        """The number of different rows."""
        return sum(map(len, self.groups.values()))

    def count(self, group: tuple[int, int], row: bytes) -> int:
        """The count of a row."""
        own = self.groups.get(group)
        return 0 if own is None else own.get(row, 0)

    def add(self, rows: RowList, sign: int = 1) -> None:
        """Add rows, or (sign -1) subtract them. Rows whose count becomes zero are deleted."""
        for group, row, n in zip(*rows, strict=True):
            self.change(group, row, sign * n)

    def change(self, group: tuple[int, int], row: bytes, n: int) -> None:
        """Add n, which may be negative, to the count of a row."""
        own = self.groups.get(group)
        if own is None:
            own = self.groups[group] = Counter()
        count = own.get(row, 0) + n
        if count:
            own[row] = count
        else:
            del own[row]

    def add_many(self, words: NDArray[np.int64], labels: NDArray[Any] | None, folds: NDArray[Any] | None) -> None:
        """Add many rows, each once, by their words (B, 2): fold by fold and class by class."""
        fold, label = (np.full(len(words), -1) if t is None else t for t in (folds, labels))
        width = int(label.max()) + 2
        codes = (fold + 1) * width + label + 1
        for code in np.bincount(codes).nonzero()[0].tolist():
            group = (code // width - 1, code % width - 1)
            self.groups.setdefault(group, Counter()).update(split_words(words[codes == code]))

    def plus(self, other: RowCounts, sign: int = 1) -> RowCounts:
        """Return the sum, or difference; groups that do not change are shared."""
        out = RowCounts()
        out.groups = dict(self.groups)
        for group, rows in other.groups.items():
            out.groups[group] = Counter(self.groups.get(group))
            for row, n in rows.items():
                out.change(group, row, sign * n)
        return out

    def copy(self) -> RowCounts:
        """Return an independent copy."""
        out = RowCounts()
        out.groups = {group: Counter(rows) for group, rows in self.groups.items() if rows}
        return out

    @property
    def negative(self) -> int:
        """The number of rows that are removed more often than added."""
        return sum(n < 0 for rows in self.groups.values() for n in rows.values())

    @property
    def least(self) -> int:
        """The fewest different rows of any fold and class that changed: the rows added minus those removed, but at least 1."""
        net = [abs(sum(1 if n > 0 else -1 for n in rows.values())) for rows in self.groups.values() if rows]
        return max(1, min(net, default=1))

    def to_array(self) -> NDArray[np.int64]:
        """Five integers for each row: row hash (2), fold, label and count. The order of the rows reveals nothing."""
        items = [(row, *group, n) for group, rows in self.groups.items() for row, n in rows.items()]
        out = np.empty((len(items), 5), np.int64)
        if items:
            rows, folds, labels, counts = zip(*sorted(items), strict=True)
            out[:, :2] = np.frombuffer(b"".join(rows), "<i8").reshape(-1, 2)
            out[:, 2], out[:, 3], out[:, 4] = folds, labels, counts
        return out

    @classmethod
    def from_array(cls, rows: NDArray[np.int64]) -> RowCounts:
        """Undo :meth:`to_array`."""
        data, out = np.ascontiguousarray(rows[:, :2], "<i8").tobytes(), cls()
        hashes = [data[at : at + 16] for at in range(0, len(data), 16)]
        groups = list(zip(rows[:, 2].tolist(), rows[:, 3].tolist(), strict=True))
        out.add(RowList(groups, hashes, rows[:, 4].tolist()))
        return out


def rows_of(batch: SampleBatch, key: bytes) -> RowList:
    """The rows of a checked batch that is not being summed, by their words, in its order."""
    words, *mult = checks.read(batch_words(batch, key), *([] if batch.mult is None else [batch.mult]))
    return RowList.of(words, batch.host_labels, batch.host_folds, mult[0] if mult else None)


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
    """Rows that are not read yet: words (B, 2) and multiplicities (B,) on their device, the rest on the host."""

    words: Tensor
    mult: Tensor | None
    labels: NDArray[np.int64] | None
    folds: NDArray[np.int64] | None


class StagedRows:
    """A checked change of rows, which takes effect with :meth:`HeldRows.commit`."""

    def __init__(self) -> None:
        self.removed: list[tuple[RowList, RowList]] = []  # by words, and by row hashes
        self.added: list[RowWords] = []


class HeldRows:
    """The rows that a head holds, and those that changed since machines last agreed.

    Attributes:
        unchecked: why rows are not known; None while they are.
        key: the key of the row hashes; None before the first row.
        held: the rows by row hashes. Rows added since the last save or exchange are in ``fresh`` instead, by words, because
            hashing takes a microsecond per row and many heads only add samples.
        changed: net changes since the last agreement; None if they are not known, or if there was no agreement yet.
        recorded: False if the head keeps no row hashes.
        waiting: batches that were added and are still on their device.
    """

    def __init__(self, impossible: str | None, recorded: bool):
        """``impossible``: why rows of this head can never be known; None if they can."""
        self.impossible, self.recorded = impossible, recorded
        self.changed: RowCounts | None = None
        self.key: bytes | None = None
        self.clear()

    def clear(self) -> None:
        """Hold no row. An empty head knows its rows again."""
        unrecorded = None if self.recorded else "the head was made with membership=False"
        self.unchecked = self.impossible or unrecorded
        self.held, self.fresh, self.waiting = RowCounts(), RowCounts(), list[WaitingBatch]()
        if self.changed is None:
            self.key = None

    def drop(self, reason: str) -> None:
        """Give up checking, and forget every row hash."""
        self.unchecked = self.unchecked or reason
        self.held, self.fresh, self.waiting, self.changed, self.key = RowCounts(), RowCounts(), [], None, None

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
        staged = StagedRows()
        if self.unchecked is not None:
            return staged, changes
        key, watched = self.own_key(), []
        wanted: Counter[tuple[tuple[int, int], bytes]] = Counter()
        for batch, sign in changes:
            if sign < 0:
                words, *mult = self.read_waiting(batch_words(batch, key), *([] if batch.mult is None else [batch.mult]))
                rows = RowList.of(words, batch.host_labels, batch.host_folds, mult[0] if mult else None)
                hashed = rows.hashed(key) if self.held.groups or self.changed is not None else rows
                for i, (group, row, n) in enumerate(zip(*rows, strict=True)):
                    wanted[group, row] += n
                    if wanted[group, row] > self.fresh.count(group, row) + self.held.count(group, hashed.rows[i]):
                        raise self._refusal(batch, rows, i)
                staged.removed.append((rows, hashed))
            else:
                staged.added.append(RowWords(batch, key))
                batch = replace(batch, observer=staged.added[-1])
            watched.append((batch, sign))
        return staged, watched

    def commit(self, staged: StagedRows) -> None:
        """Count rows after they were summed."""
        for rows, hashed in staged.removed:
            for group, row, fingerprint, n in zip(*rows[:2], hashed.rows, rows.counts, strict=True):
                known = min(n, self.fresh.count(group, row))
                for table, name, count in ((self.fresh, row, known), (self.held, fingerprint, n - known)):
                    if count:
                        table.change(group, name, -count)
            if self.changed is not None:
                self.changed.add(hashed, -1)
        for formed in staged.added:
            batch = formed.batch
            labels, folds = (None if t is None else t.copy() for t in (batch.host_labels, batch.host_folds))
            self.waiting.append(WaitingBatch(formed.values, _copy(batch.mult), labels, folds))
        # 256 batches of single rows are 20 times as large as their hashes; 4,096 rows are read in about a millisecond
        if len(self.waiting) > 256 or sum(len(w.words) for w in self.waiting) > 4096:
            self.read_waiting()

    def read_waiting(self, *more: Tensor) -> list[NDArray[Any]]:
        """Read the waiting rows and further tensors in one read from the device, and return those tensors."""
        parts = [t for w in self.waiting for t in (w.words, w.mult) if t is not None]
        host = checks.read(*more, *parts) if more or parts else []
        values = iter(host[len(more) :])
        for w in self.waiting:
            words, mult = next(values), None if w.mult is None else next(values)
            if mult is None and self.changed is None and len(words) >= 64:  # many: class by class
                self.fresh.add_many(words, w.labels, w.folds)
                continue
            rows = RowList.of(words, w.labels, w.folds, mult)
            self.fresh.add(rows)
            if self.changed is not None:
                self.changed.add(rows.hashed(self.own_key()))
        self.waiting = []
        return host[: len(more)]

    def flush(self) -> None:
        """Know all rows by their row hashes, for a file or another machine."""
        self.read_waiting()
        for group, rows in self.fresh.groups.items():
            if rows:
                self.held.add(RowList([group] * len(rows), list(rows), list(rows.values())).hashed(self.own_key()))
        self.fresh = RowCounts()

    def _refusal(self, batch: SampleBatch, rows: RowList, i: int) -> RemovalError:
        """The error for a row that is not held, or not often enough, with the label under which it is held, if any."""
        self.flush()
        (group, row), key = (rows.groups[i], rows.rows[i]), self.own_key()

        def count(label: int) -> int:
            hashed = RowList([(group[0], label)], [row], [1]).hashed(key)
            return self.held.count((group[0], label), hashed.rows[0])

        held = count(group[1])
        if held:
            wanted = sum(n for g, r, n in zip(*rows, strict=True) if (g, r) == (group, row))
            return RemovalError(
                f"row {i} is held {counted(held, 'time')}, and was to be removed {counted(wanted, 'time')}. {REMOVAL_REMEDY}"
            )
        others = [label for fold, label in self.held.groups if fold == group[0] and count(label)]
        where = f" (it is held with label {others[0]})" if others else ""
        label = "" if batch.labels is None else f" with label {group[1]}"
        under = "" if batch.ids is None or batch.host_folds is None else f" in the fold of the id {batch.ids[i]!r}"
        error = RemovalError(f"row {i} is not held{label}{under}{where}. {REMOVAL_REMEDY}")
        if batch.labels is not None:
            error.row, error.label, error.held_label = i, group[1], others[0] if others else None
        return error

    def known(self) -> RowCounts | None:
        """Return the rows held, by their row hashes; None if they are not known."""
        self.flush()
        return None if self.unchecked is not None else self.held

    def take_class(self, label: int) -> RowCounts:
        """Remove the rows of a class, and return them."""
        self.flush()
        gone = RowCounts()
        gone.groups = {group: rows for group, rows in self.held.groups.items() if group[1] == label}
        self.held = self.held.plus(gone, -1)
        return gone

    def joined(self, other: RowCounts | None, key: bytes | None, sign: int) -> RowCounts | None:
        """Return the rows held together with, or without, others; None if they cannot be compared, with nothing changed.

        Raises RemovalError if the count of a row would fall below zero.
        """
        self.flush()
        if self.unchecked is not None or other is None or (len(other) and len(self.held) and key != self.key):
            return None
        rows = self.held.plus(other, sign)
        if short := rows.negative:
            raise checks.removal_error(f"{short} row(s) would be removed more often than they are held")
        return rows

    def replace(self, rows: RowCounts | None, key: bytes | None, reason: str) -> None:
        """Hold other rows; None if they are not known, for the reason given."""
        if rows is None:
            self.drop(reason)
        else:
            self.held, self.key = rows, key or self.key
            self.fresh, self.waiting = RowCounts(), []

    # -- saving ----------------------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """The rows held, for a file: the key, then five integers for each row."""
        self.flush()
        return self.own_key() + self.held.to_array().astype("<i8").tobytes()

    def load(self, saved: bytes) -> None:
        """Hold the rows of :meth:`to_bytes`. Raises ValueError if they are damaged."""
        if len(saved) < KEY_BYTES or (len(saved) - KEY_BYTES) % 40:
            raise ValueError("the table of rows held is cut short")
        rows = RowCounts.from_array(np.frombuffer(saved[KEY_BYTES:], "<i8").reshape(-1, 5).astype(np.int64))
        if rows.negative:
            raise ValueError("the table of rows held is damaged: a row is held less than once")
        self.clear()
        self.held, self.key = rows, saved[:KEY_BYTES]

    def copy(self) -> HeldRows:
        """Return an independent copy of the rows held."""
        self.flush()
        out = HeldRows(self.impossible, self.recorded)
        out.unchecked, out.key, out.held = self.unchecked, self.key, self.held.copy()
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


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
