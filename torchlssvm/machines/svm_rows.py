"""Rows of the kernel that the incremental SVM has computed once and may need again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


class RowCache:
    """Rows Q_i: by position, the one not used for the longest time dropped first; it may have no room at all."""

    def __init__(self, capacity: int, cache_bytes: int, device: torch.device, host: Callable[[Tensor], Any]):
        room = min(cache_bytes // (8 * capacity), capacity) if capacity else 0
        self.rows = torch.empty(room, capacity, dtype=torch.float64, device=device)
        self.held = torch.zeros(room, dtype=torch.int64, device=device)  # the position of each row
        self.hrows, self.hheld = host(self.rows), host(self.held)
        self.row_of: dict[int, int] = {}  # position -> row, least recently used first
        self.free = list(range(room))[::-1]
        self.high = 0  # rows that have ever been used
        self.place = np.full(capacity, -1, dtype=np.int64)  # the row of each position, or -1

    def __len__(self) -> int:
        return len(self.row_of)

    def __contains__(self, i: int) -> bool:
        return i in self.row_of

    def get(self, i: int, n: int) -> Tensor | None:
        """Q_i: (n,), if it is here. Not to be written to."""
        row = self.row_of.pop(i, None)
        if row is None:
            return None
        self.row_of[i] = row  # used last
        return self.rows[row, :n]

    def put(self, i: int, values: Any, n: int) -> None:  # (n,) Tensor or host array
        """Keep Q_i:."""
        if not len(self.hheld):
            return
        row = self.row_of.pop(i, None)
        if row is None:
            row = self.free.pop() if self.free else self._drop(next(iter(self.row_of)))
        self._note(i, row)
        self.hheld[row] = i
        self.hrows[row, :n] = values

    def _note(self, i: int, row: int) -> None:
        self.row_of[i] = self.place[i] = row
        self.high = max(self.high, row + 1)

    def _drop(self, i: int) -> int:
        self.place[i] = -1
        return self.row_of.pop(i)

    def spare(self, count: int) -> Any:  # -> (k,)
        """Rows that are free, the next ones first, at most so many."""
        return np.array(self.free[: -count - 1 : -1], dtype=np.int64)

    def filled(self, i: int, row: int) -> None:
        """The next free row has been filled with Q_i:."""
        self.free.pop()
        self._note(i, row)

    def extend(
        self, start: int, stop: int, Q: Any
    ) -> None:  # (B, n) host array: rows of Q of the samples appended last
        """Fill in the columns of samples just appended."""
        if self.row_of:  # rows that are free get numbers too, which nobody reads
            self.hrows[: self.high, start:stop] = Q[:, self.hheld[: self.high]].T

    def move(self, last: int, i: int) -> None:
        """Position ``last`` becomes position i; what was in i is gone."""
        if i in self.row_of:
            row = self._drop(i)
            self.free.append(row)
            self.hheld[row] = 0
        if last != i:
            if last in self.row_of:
                row = self._drop(last)
                self._note(i, row)
                self.hheld[row] = i
            if self.high:
                self.hrows[: self.high, i] = self.hrows[: self.high, last]
