"""The samples of a kernel machine: rows in slots, with ids that stay valid for life."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torchlssvm.errors import RemovalError
from torchlssvm.functional import checks

LEAST = 64
"""The smallest capacity. It doubles when it is full, so adding one row at a time costs a constant number of copies a row."""


class Rows:
    """x (capacity, J) and y (capacity, K) in slots. Free slots hold zeros; ``mask`` (capacity,) is one where a sample is."""

    def __init__(self, J: int, K: int, device: torch.device, capacity: int = LEAST):
        self.x = torch.zeros(capacity, J, dtype=torch.float64, device=device)
        self.y = torch.zeros(capacity, K, dtype=torch.float64, device=device)
        self.mask = torch.zeros(capacity, dtype=torch.float64, device=device)
        self.slot_of: dict[int, int] = {}  # in the order of ids
        self.top = 0  # slots from here on were never used
        self.free: list[int] = []  # slots below top that may be used again
        self.next_id = 0
        self.filled = False  # a compiled forward is guarded by this, not by the number of samples

    def __len__(self) -> int:
        return len(self.slot_of)

    @property
    def capacity(self) -> int:
        """How many rows there is room for."""
        return self.x.shape[0]

    @property
    def ids(self) -> Tensor:
        """The ids held (n,), ascending; a host tensor, like all names."""
        return torch.tensor(list(self.slot_of), dtype=torch.int64)

    def order(self) -> Tensor:
        """The slots (n,) in the order of ids."""
        return self.index(self.slot_of.values())

    def index(self, slots: Iterable[int]) -> Tensor:
        """Slots as a tensor on the device."""
        return torch.tensor(list(slots), dtype=torch.int64, device=self.x.device)

    def find(self, ids: Any) -> list[int]:
        """Python ids from whatever the caller gave: each one held, none twice; else RemovalError. Changes nothing."""
        if isinstance(ids, Tensor):
            if ids.dtype not in checks.INTEGERS or ids.ndim > 1:
                raise ValueError(f"ids must be a 1-D integer tensor, got shape {tuple(ids.shape)}, dtype {ids.dtype}")
            if checks.is_fake(ids):  # no data to go by: the oldest
                return list(self.slot_of)[: ids.numel()]
            ids = ids.reshape(-1).tolist()
        elif isinstance(ids, int):
            ids = [ids]
        try:
            wanted = [int(i) for i in ids]
        except (TypeError, ValueError) as error:
            raise ValueError(f"ids must be integers, got {ids!r}") from error
        unknown = [i for i in wanted if i not in self.slot_of]
        if unknown:
            raise RemovalError(
                f"unknown id(s) {unknown[:5]}: give ids that add returned and that are still held. Nothing was changed."
            )
        if len(set(wanted)) < len(wanted):
            twice = next(i for i in wanted if wanted.count(i) > 1)
            raise RemovalError(f"id {twice} is given twice. Nothing was changed.")
        return wanted

    def places(self, k: int) -> list[int]:
        """Slots for k more rows: free ones first, then new ones, below the capacity they need (:meth:`grow`)."""
        reused = self.free[:k]
        return reused + list(range(self.top, self.top + k - len(reused)))

    def put(self, x: Tensor, y: Tensor, slots: list[int], ids: list[int] | None = None) -> list[int]:
        """Write rows into slots from :meth:`places`; returns their ids, new ones unless given."""
        if ids is None:
            ids = list(range(self.next_id, self.next_id + len(slots)))
            self.next_id += len(slots)
        taken = set(slots)
        self.free = [s for s in self.free if s not in taken]
        self.top = max(self.top, *(s + 1 for s in slots))
        at = self.index(slots)
        self.x[at], self.y[at], self.mask[at] = x, y, 1.0
        self.slot_of.update(zip(ids, slots, strict=True))
        self.filled = True
        return ids

    def drop(self, ids: list[int]) -> None:
        """Erase rows. Their slots are not used again before :meth:`release`."""
        if not ids:
            return
        at = self.index(self.slot_of.pop(i) for i in ids)
        self.x[at], self.y[at], self.mask[at] = 0.0, 0.0, 0.0
        self.filled = bool(self.slot_of)

    def release(self) -> None:
        """Make every slot without a sample free for use."""
        used = set(self.slot_of.values())
        self.free = [s for s in range(self.top) if s not in used]

    def grow(self, capacity: int) -> None:
        """Room for at least this many slots."""
        if capacity > self.capacity:
            self._move(slice(0, self.top), max(LEAST, 2 ** (capacity - 1).bit_length()))

    @property
    def orderly(self) -> bool:
        """Whether there is no gap and the rows stand in the order of ids."""
        return self.top == len(self) and list(self.slot_of.values()) == list(range(self.top))

    def compact(self) -> Tensor:
        """Close the gaps and put the rows in the order of ids; returns the old slots (n,) in their new order."""
        old = list(self.slot_of.values())
        keep = self.index(old)
        capacity = self.capacity
        while capacity > LEAST and 4 * len(old) < capacity:
            capacity //= 2
        self._move(keep, capacity)
        self.slot_of = {i: slot for slot, i in enumerate(self.slot_of)}
        self.top, self.free = len(old), []
        return keep

    def _move(self, source: slice | Tensor, capacity: int) -> None:
        for name in ("x", "y", "mask"):
            old = getattr(self, name)
            new = old.new_zeros(capacity, *old.shape[1:])
            part = old[source]
            new[: len(part)] = part
            setattr(self, name, new)

    def rename(self, old: list[int], new: list[int]) -> None:
        """Give samples other ids."""
        names = dict(zip(old, new, strict=True))
        self.slot_of = dict(sorted((names.get(i, i), slot) for i, slot in self.slot_of.items()))

    def to(self, device: torch.device) -> None:
        """Move."""
        self.x, self.y, self.mask = self.x.to(device), self.y.to(device), self.mask.to(device)
