"""The samples that a margin head holds: distinct rows on the grid, as integers, each with its label and number of copies."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchlssvm.errors import GridError, RemovalError
from torchlssvm.functional.sample_identity import HASH_BYTES, row_keys
from torchlssvm.linear.membership import REMOVAL_REMEDY
from torchlssvm.statistics.batch import SampleBatch
from torchlssvm.wording import counted


@dataclass
class RowChange:
    """A checked change that is ready to be made.

    ``slots`` (c,) are places of rows, and ``copies`` (c,) is the number of copies added or removed there. The new rows are
    q (m, J), int32, with labels (m,), counts (m,) of copies, and keys.
    """

    slots: Tensor
    copies: Tensor
    q: Tensor
    labels: Tensor
    counts: Tensor
    keys: list[bytes] = field(default_factory=list)


class GridRows:
    """Rows q (n, J) as int32 with labels (n,), numbers of copies (n,) and norms (n,), in no particular order.

    A sample added twice is stored as one row with two copies, because its copies are always on the same side of a margin. If a
    folder is given, the rows are in an unlinked memory-mapped file there, which the system frees when the process ends.
    """

    def __init__(self, in_features: int, device: torch.device, folder: str | None = None):
        if folder is not None and device.type != "cpu":
            raise ValueError(f"rows_folder is for a head on the CPU: the rows of this one are on {device}")
        self.in_features, self.device, self.folder = in_features, device, folder
        self._salt = os.urandom(HASH_BYTES)
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self.n = 0
        self._q = torch.empty(0, self.in_features, dtype=torch.int32, device=self.device)
        self._labels = torch.empty(0, dtype=torch.int64, device=self.device)
        self._copies = torch.empty(0, dtype=torch.float64, device=self.device)
        self._norms = torch.empty(0, dtype=torch.float64, device=self.device)
        self._keys: list[bytes] = []
        self._where: dict[bytes, int] = {}

    @property
    def q(self) -> Tensor:
        """Rows on the grid (n, J), int32. Do not write to it."""
        return self._q[: self.n]

    @property
    def labels(self) -> Tensor:
        """Labels (n,)."""
        return self._labels[: self.n]

    @property
    def copies(self) -> Tensor:
        """Copies of each row (n,), float64."""
        return self._copies[: self.n]

    @property
    def norms(self) -> Tensor:
        """Euclidean norms of the rows (n,), in steps."""
        return self._norms[: self.n]

    # -- changes -------------------------------------------------------------------------------------------------------

    def plan(self, changes: list[tuple[SampleBatch, int]]) -> RowChange:
        """Check a change. Raises RemovalError, naming the first row, if a row to be removed is not held before the change."""
        net: dict[bytes, int] = {}
        source: dict[bytes, tuple[NDArray[np.int32], int]] = {}
        for batch, sign in sorted(changes, key=lambda change: change[1]):  # removals first: of earlier rows
            counts = [1] * len(batch) if batch.mult is None else [int(v) for v in batch.mult.tolist()]
            for i, ((row, label, key), count) in enumerate(zip(self._keyed(batch), counts, strict=True)):
                net[key] = net.get(key, 0) + sign * count
                if sign > 0:
                    source.setdefault(key, (row, label))
                    continue
                slot = self._where.get(key)
                same = slot is not None and np.array_equal(self._q[slot].cpu().numpy(), row)
                held = int(self._copies[slot]) if same else 0
                if held < -net[key]:
                    raise self._refusal(row, label, i, held, -net[key])
        slots = [(self._where[key], delta) for key, delta in net.items() if delta and key in self._where]
        new = [(key, delta) for key, delta in net.items() if delta and key not in self._where]
        q_new = np.stack([source[k][0] for k, _ in new]) if new else np.zeros((0, self.in_features), np.int32)
        counts_new = np.array([c for _, c in new], np.float64)
        self._refuse_heavy(q_new, counts_new, slots)
        return RowChange(
            torch.tensor([s for s, _ in slots], dtype=torch.int64, device=self.device),
            torch.tensor([c for _, c in slots], dtype=torch.float64, device=self.device),
            torch.from_numpy(q_new).to(self.device),
            torch.tensor([source[k][1] for k, _ in new], dtype=torch.int64, device=self.device),
            torch.from_numpy(counts_new).to(self.device),
            [k for k, _ in new],
        )

    def apply(self, change: RowChange) -> tuple[Tensor, Tensor]:
        """Make a planned change. The last rows fill the places of removed rows. Returns these places and their sources."""
        self._copies.index_add_(0, change.slots, change.copies)
        gone = change.slots[self._copies[change.slots] == 0]
        left, whole = self.n - len(gone), torch.ones(self.n, dtype=torch.bool, device=self.device)
        whole[gone] = False
        places, sources = gone[gone < left], left + torch.nonzero(whole[left:])[:, 0]
        for slot in gone.tolist():
            del self._where[self._keys[slot]]
        for place, source in zip(places.tolist(), sources.tolist(), strict=True):
            self._keys[place] = self._keys[source]
            self._where[self._keys[place]] = place
        for column in self._columns():
            column[places] = column[sources]
            column[left : self.n] = 0  # erase the rows that left
        del self._keys[left:]
        self.n = left
        self._append(change)
        return places, sources

    def _columns(self) -> tuple[Tensor, ...]:
        return self._q, self._labels, self._copies, self._norms

    def reserve(self, m: int) -> None:
        """Make room for m more rows."""
        if self.n + m <= len(self._q):
            return
        room = max(self.n + m, 2 * self.n if self.n > 64 else 64) if self.n else self.n + m
        grown = []
        for old in self._columns():
            if old is self._q and self.folder is not None:
                new = mapped_rows(self.folder, room, self.in_features)
            else:
                new = torch.zeros((room, *old.shape[1:]), dtype=old.dtype, device=self.device)
            new[: self.n] = old[: self.n]
            grown.append(new)
        self._q, self._labels, self._copies, self._norms = grown

    def _append(self, change: RowChange) -> None:
        m = len(change.q)
        if not m:
            return
        self.reserve(m)
        at = slice(self.n, self.n + m)
        self._q[at], self._labels[at], self._copies[at] = change.q, change.labels, change.counts
        self._norms[at] = change.q.to(torch.float64).square().sum(1).sqrt()
        for i, key in enumerate(change.keys):
            self._where[key] = self.n + i
        self._keys += change.keys
        self.n += m

    def find(self, q: Tensor, labels: Tensor) -> Tensor:
        """Places (B,) of rows q (B, J), in steps, with labels (B,); RemovalError, naming the first, if one is not held."""
        rows, out = np.ascontiguousarray(q.cpu().numpy().astype(np.int32)), []
        for i, key in enumerate(row_keys(rows, labels.cpu().numpy(), self._salt)):
            if key not in self._where:
                raise self._refusal(rows[i], int(labels[i]), i, 0, 1)
            out.append(self._where[key])
        return torch.tensor(out, dtype=torch.int64, device=self.device)

    def folds(self, count: int) -> Tensor:
        """The fold of each row (n,), by a hash of its features and label: the same on every machine and in any order."""
        hashes = row_keys(self.q.cpu().numpy(), self.labels.cpu().numpy())
        return torch.tensor([int.from_bytes(h, "little") % count for h in hashes], device=self.device)

    # -- saving --------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Rows, labels and copies in an order that depends on the rows alone, for a file."""
        order = self.saved_order()
        return {"q": self.q[order], "labels": self.labels[order], "copies": self.copies[order].to(torch.int64)}

    def saved_order(self, slots: Tensor | None = None) -> Tensor:
        """Numbers of the rows (n,), or of the rows at ``slots`` (m,), in ascending order of features and label.

        The order depends on the rows alone.
        """
        q, labels = (self.q, self.labels) if slots is None else (self.q[slots], self.labels[slots])
        whole = np.column_stack([q.cpu().numpy(), labels.cpu().numpy()]).astype(">i4")
        whole ^= np.array(-(2**31), ">i4")  # the bytes of integers without a sign sort as the numbers do
        order = (
            np.argsort(np.ascontiguousarray(whole).view(f"V{4 * whole.shape[1]}")[:, 0]) if len(whole) else np.arange(0)
        )
        return torch.from_numpy(order.astype(np.int64)).to(self.device)

    def load(self, state: dict[str, Tensor], K: int) -> None:
        """Restore what :meth:`state` returned; ValueError when it does not fit."""
        q, labels, copies = (state[k].to(self.device) for k in ("q", "labels", "copies"))
        shapes = (tuple(q.shape), tuple(labels.shape), tuple(copies.shape))
        n = len(labels)
        if shapes != ((n, self.in_features), (n,), (n,)) or q.dtype != torch.int32:
            raise ValueError(f"the saved rows have shapes {shapes} and dtype {q.dtype}")
        change = RowChange(
            labels[:0], self._copies[:0], q.clone(), labels.to(torch.int64), copies.to(torch.float64),
        )  # fmt: skip
        if n and not (int(labels.min()) >= 0 and int(labels.max()) < K and int(copies.min()) > 0):
            raise ValueError("the saved rows are damaged: a label or a number of copies is out of range")
        change.keys = row_keys(q.cpu().numpy(), change.labels.cpu().numpy(), self._salt)
        if len(set(change.keys)) < n:
            raise ValueError("the saved rows are damaged: a row is there twice")
        self.clear()
        self._append(change)

    def copy(self, device: torch.device | None = None) -> GridRows:
        """A copy of the rows in memory, in the order in which they are saved, and of nothing else."""
        out = GridRows(self.in_features, device or self.device)
        out.load(self.state(), 2**62)
        return out

    def empty(self) -> GridRows:
        """No rows, to be kept where these are."""
        return GridRows(self.in_features, self.device, self.folder)

    # -- the index -----------------------------------------------------------------------------------------------------

    def _keyed(self, batch: SampleBatch) -> Iterator[tuple[NDArray[np.int32], int, bytes]]:
        """Rows of a checked batch on its grid, each with its label and key."""
        if not len(batch):
            return
        assert batch.labels is not None
        assert batch.choices.grid is not None
        q = np.ascontiguousarray(batch.choices.grid.integers(batch.x).cpu().numpy())
        labels = batch.labels.cpu().numpy()
        yield from zip(q, labels.tolist(), row_keys(q, labels, self._salt), strict=True)

    def _refusal(self, row: NDArray[np.int32], label: int, index: int, held: int, wanted: int) -> RemovalError:
        if held:
            return RemovalError(
                f"row {index} is held {counted(held, 'time')}, and was to be removed {counted(wanted, 'time')}. "
                f"{REMOVAL_REMEDY}"
            )
        others = sorted({int(v) for v in self.labels.unique().tolist()} - {label})
        keys = row_keys([row] * len(others), np.array(others, np.int64), self._salt)
        known = [other for other, key in zip(others, keys, strict=True) if key in self._where]
        where = f" (it is held with label {known[0]})" if known else ""
        return RemovalError(f"row {index} with label {label} is not held{where}. {REMOVAL_REMEDY}")

    def _refuse_heavy(self, q: NDArray[np.int32], counts: NDArray[np.float64], slots: list[tuple[int, int]]) -> None:
        more = [(slot, float(self._copies[slot]) + delta) for slot, delta in slots if delta > 0]
        rows = np.concatenate([q, self._q[[slot for slot, _ in more]].cpu().numpy()])
        counts = np.concatenate([counts, [copies for _, copies in more]])
        peaks = np.maximum(rows.max(1, initial=1), -rows.min(1, initial=-1)).astype(np.float64)
        heavy = (counts * peaks**2).max(initial=0.0)
        if heavy > 2**52:  # copies of a row times its largest square: beyond this a product is not exact in float64
            raise GridError(
                f"a row and its copies have the weight {heavy:.3g}, but products are exact only up to 2^52: use a smaller "
                "weight or a coarser grid. Nothing was changed."
            )


def mapped_rows(folder: str, rows: int, J: int) -> Tensor:
    """Zeros (rows, J), int32, in a memory-mapped file without a name; OSError where the folder has no room for it."""
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, rows * J * 4)  # a full disk is noticed now, not when a page is written
        whole: NDArray[np.int32] = np.memmap(file, np.int32, "r+", shape=(rows, J))
        return torch.from_numpy(whole)
