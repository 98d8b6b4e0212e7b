"""The samples of a kernel machine in slots, with permanent ids."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, constant_pad_nd

from torchlssvm.functional import checks
from torchlssvm.kernels import input_checks

SMALLEST_CAPACITY = 64
"""Slots of an empty machine. A full machine doubles its capacity, so adding one by one copies each row only a few times."""


class SampleSlots:
    """Rows x (capacity, J) and targets y (capacity, K) in slots. Slots without a sample are zero.

    ``columns`` (capacity, K + 1 + carried) holds y, a mask that is one in slots with a sample, and ``carried`` numbers that
    move with a sample from slot to slot and are infinite for a new sample.
    """

    def __init__(self, J: int, K: int, device: torch.device, carried: int = 0, next_id: int = 0):
        self.x = torch.zeros(SMALLEST_CAPACITY, J, dtype=torch.float64, device=device)
        self.columns = torch.zeros(SMALLEST_CAPACITY, K + 1 + carried, dtype=torch.float64, device=device)
        self.K = K
        self.slot_of: dict[int, int] = {}  # in the order of ids
        self.top = 0  # slots from here on are empty
        self.next_id = next_id
        self.filled = False  # a compiled forward is guarded by this, not by the number of samples
        self._order: Tensor | None = None
        self._in_order: bool | None = (
            None  # whether the slots 0..n-1 hold the samples in the order of ids; None: not known
        )

    def __len__(self) -> int:
        return len(self.slot_of)

    @property
    def capacity(self) -> int:
        """The number of slots."""
        return self.x.shape[0]

    @property
    def y(self) -> Tensor:
        """The targets in slots (capacity, K)."""
        return self.columns[:, : self.K]

    @property
    def mask(self) -> Tensor:
        """One where a sample is (capacity,)."""
        return self.columns[:, self.K]

    @property
    def carried(self) -> Tensor:
        """Numbers that follow the samples (capacity, carried)."""
        return self.columns[:, self.K + 1 :]

    @property
    def nothing(self) -> tuple[Tensor, Tensor]:
        """No rows and no targets, for a change that only removes. The tensors are new, as a slice would keep x in memory."""
        return self.x.new_zeros(0, self.x.shape[1]), self.columns.new_zeros(0, self.K)

    @property
    def targets(self) -> Tensor:
        """Targets and the mask (top, K + 1): the right-hand sides of a machine with a bias."""
        return self.columns[: self.top, : self.K + 1]

    @property
    def has_gaps(self) -> bool:
        """Return True if a slot below ``top`` holds no sample."""
        return self.top > len(self.slot_of)

    @property
    def ids(self) -> Tensor:
        """The ids of all samples (n,), ascending; on the host, like all ids."""
        return torch.tensor(list(self.slot_of), dtype=torch.int64)

    def order(self) -> Tensor:
        """The slots (n,) in the order of ids."""
        if self._order is None:
            self._order = self.index(self.slot_of.values())
        return self._order

    def order_index(self) -> slice | Tensor:
        """Return the slots in the order of ids as an index: a slice if possible, which makes a view.

        Sums in this order are the same to the bit, regardless of the slots of the samples.
        """
        if self._in_order is None:
            self._in_order = not self.has_gaps and list(self.slot_of.values()) == list(range(self.top))
        return slice(0, self.top) if self._in_order else self.order()

    def index(self, slots: Iterable[int]) -> Tensor:
        """Slots as a tensor on the device."""
        if self.x.device.type == "cpu":
            return torch.from_numpy(np.array(list(slots), dtype=np.int64))  # half the time of torch.tensor
        return torch.tensor(list(slots), dtype=torch.int64, device=self.x.device)

    def at(self, slots: list[int]) -> slice | Tensor:
        """Return slots as an index: a slice if they are consecutive, which costs less than a gather."""
        first, k = slots[0], len(slots)
        if k == 1 or slots == list(range(first, first + k)):
            return slice(first, first + k)
        return self.index(slots)

    def at_ids(self, ids: list[int]) -> slice | Tensor:
        """The slots of ids as an index."""
        return self.at([self.slot_of[i] for i in ids])

    def find(self, ids: Any) -> list[int]:
        """Return Python ids from a tensor, list or number. Raises RemovalError if an id is unknown or given twice."""
        if isinstance(ids, Tensor):
            if ids.dtype not in checks.INTEGER_DTYPES or ids.ndim > 1:
                raise ValueError(f"ids must be a 1-D integer tensor, got shape {tuple(ids.shape)}, dtype {ids.dtype}")
            ids = ids.reshape(-1).tolist()
            known = set(ids)
            if len(known) == len(ids) and known <= self.slot_of.keys():
                return list(ids)
        return input_checks.known_ids(ids, self.slot_of)

    def put(self, x: Tensor, y: Tensor, ids: list[int] | None = None) -> list[int]:
        """Write rows into the next slots, for which there must be room, and return their ids, which are new unless given."""
        k, at = len(x), slice(self.top, self.top + len(x))
        if ids is None:
            ids = list(range(self.next_id, self.next_id + k))
            self.next_id += k
        self.x[at] = x
        self.columns[at] = self._columns_of(y)
        self.slot_of.update(zip(ids, range(at.start, at.stop), strict=True))
        self.top, self.filled, self._order, self._in_order = at.stop, True, None, None
        return ids

    def without(self, ids: list[int]) -> dict[int, int]:
        """The slots of all samples but these, by id, in the order of ids."""
        left = self.slot_of.copy()
        for i in ids:
            del left[i]
        return left

    def rebuild(self, left: dict[int, int], kept: slice | Tensor, X: Tensor, x: Tensor, y: Tensor) -> list[int]:
        """Keep some samples, close the gaps, and append new samples; returns the ids of the new samples.

        left: ids and slots of the samples that stay (:meth:`without`); kept: their slots as an index; X: (n + k, J) their rows
        and the new rows x (k, J); y: (k, K).
        """
        n, k = len(left), y.shape[0]
        capacity = self._capacity_for(n + k)
        if n + k > capacity:
            capacity = 2 ** (n + k - 1).bit_length()
        if isinstance(kept, slice) and capacity == self.capacity:  # nothing moves
            if k:
                self.x[n : n + k], self.columns[n : n + k] = x, self._columns_of(y)
        else:
            columns = self.columns[kept]
            room = (0, 0, 0, capacity - n - k)
            columns = torch.cat([columns, self._columns_of(y)]) if k else columns
            self.x, self.columns = constant_pad_nd(X, room), constant_pad_nd(columns, room)
        new = range(self.next_id, self.next_id + k)
        if left is not self.slot_of or not isinstance(kept, slice):  # slots of those that stay change
            self.slot_of = dict(zip(left, range(n), strict=True))
        self.slot_of.update(zip(new, range(n, n + k), strict=True))
        self.next_id += k
        self.top, self.filled = n + k, n + k > 0
        self._order, self._in_order = None, True
        return list(new)

    def _columns_of(self, y: Tensor) -> Tensor:
        """The columns of new samples with the targets y (k, K)."""
        out, carried = constant_pad_nd(y, (0, 1), 1.0), self.columns.shape[1] - self.K - 1
        return constant_pad_nd(out, (0, carried), torch.inf) if carried else out

    def load(self, x: Tensor, y: Tensor, ids: list[int], next_id: int) -> None:
        """Fill empty slots with saved samples, in the order of ids."""
        if ids:
            self.grow(len(ids))
            self.put(x, y, ids)
        self.next_id = next_id

    def drop(self, ids: list[int]) -> None:
        """Erase rows. Their slots stay empty until :meth:`close_gaps`."""
        at = self.at([self.slot_of.pop(i) for i in ids])
        self.x[at], self.columns[at] = 0.0, 0.0
        self.filled, self._order, self._in_order = bool(self.slot_of), None, None

    def close_gaps(self) -> tuple[Tensor, Tensor]:
        """Move samples from the last slots to empty slots. Returns the old and the new slots (k,) of these samples."""
        n, used = len(self), set(self.slot_of.values())
        empty = (slot for slot in range(n) if slot not in used)
        moves = {slot: next(empty) for slot in range(n, self.top) if slot in used}
        old, new = self.index(moves), self.index(moves.values())
        for array in (self.x, self.columns):
            array[new] = array[old]
            array[n : self.top] = 0.0
        self.slot_of = {i: moves.get(slot, slot) for i, slot in self.slot_of.items()}
        self.top, self._order, self._in_order = n, None, None
        capacity = self._capacity_for(n)
        if capacity < self.capacity:
            self._move(slice(0, n), capacity)
        return old, new

    def _capacity_for(self, n: int) -> int:
        """Return the capacity for n samples: the present one, or less if they fill less than a quarter of it."""
        capacity = self.capacity
        while capacity > SMALLEST_CAPACITY and 4 * n < capacity:
            capacity //= 2
        return capacity

    def grow(self, capacity: int) -> None:
        """Make room for at least this many slots."""
        if capacity > self.capacity:
            self._move(slice(0, self.top), max(SMALLEST_CAPACITY, 2 ** (capacity - 1).bit_length()))

    def _move(self, source: slice, capacity: int) -> None:
        room = (0, 0, 0, capacity - source.stop)
        self.x, self.columns = constant_pad_nd(self.x[source], room), constant_pad_nd(self.columns[source], room)

    def rename(self, old: list[int], new: list[int]) -> None:
        """Give samples other ids."""
        names = dict(zip(old, new, strict=True))
        self.slot_of = dict(sorted((names.get(i, i), slot) for i, slot in self.slot_of.items()))
        self._order, self._in_order = None, None

    def copy(self) -> SampleSlots:
        """Copy the samples and their ids."""
        other = copy.copy(self)
        other.x, other.columns = self.x.clone(), self.columns.clone()
        other.slot_of = dict(self.slot_of)
        return other

    def to(self, device: torch.device) -> None:
        """Move to another device."""
        self.x, self.columns, self._order = self.x.to(device), self.columns.to(device), None
