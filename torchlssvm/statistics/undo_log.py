"""The sums of a group as they were before it changed: as the few rows that changed it, or as a copy.

Rows of integers are undone exactly, so while they are few they are all that is kept: 4 bytes a number, J / 16 rows at most,
an eighth of what a copy of the sums takes at the very worst. More rows, or changes that are not rows, make a copy.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchlssvm.functional import gram


class UndoRows(NamedTuple):
    """Rows [q; z] (n, J + R) int32 with signed multiplicities (n,), or one for all; few enough to be summed exactly."""

    rows: Tensor
    mult: Tensor | None
    alpha: float

    def summed(self, J: int) -> Tensor:
        """Sum the rows: packed int64."""
        rows = self.rows.to(torch.float64)
        R = rows.shape[1] - J
        acc = torch.zeros(gram.packed_size(J, R, product=True), dtype=torch.float64, device=rows.device)
        gram.accumulate_(acc, rows, J, None if self.mult is None else rows * self.mult[:, None], self.alpha)
        return gram.carry_(None, acc, J, R, torch.int64)


class UndoLog:
    """One group before its first change. ``copied``: ``copy`` holds the sums (None: there were none)."""

    def __init__(self, J: int):
        """Start without a change. J: the number of features."""
        self.J = J
        self.parts: list[UndoRows] = []
        self.count = 0
        self.copied = False
        self.copy: Tensor | None = None

    @classmethod
    def of_copy(cls, J: int, sums: Tensor | None) -> UndoLog:
        """Make a log that holds the sums themselves (None: there were none)."""
        out = cls(J)
        out.copied, out.copy = True, sums
        return out

    def takes(self, rows: int) -> bool:
        """Tell if so many more rows may be kept as rows."""
        return not self.copied and self.count + rows <= max(1, self.J // 16)

    def append(self, part: UndoRows) -> None:
        """Keep rows that are about to be summed."""
        self.parts.append(part)
        self.count += part.rows.shape[0]

    def change(self, now: Tensor | None) -> Tensor | None:
        """Return the packed sums now less those before, in memory of its own; None if there are none."""
        if self.copied:
            if now is None:
                return None if self.copy is None else -self.copy
            return now.clone() if self.copy is None else now - self.copy
        total = None
        for part in self.parts:
            total = part.summed(self.J) if total is None else total.add_(part.summed(self.J))
        return total

    def value(self, now: Tensor | None) -> Tensor | None:
        """Return the sums before, given those of now: the copy, or memory of its own."""
        if self.copied:
            return self.copy
        change = self.change(now)
        if change is None:
            return None if now is None else now.clone()
        return change.neg_() if now is None else change.neg_().add_(now)

    def make_copy(self, now: Tensor | None) -> None:
        """Replace the rows by a copy, before a change that is no rows, or too many of them."""
        if not self.copied:
            self.copy = self.value(now)
            self.copied, self.parts, self.count = True, [], 0
