"""The sums of a group as they were before it changed: as the few rows that changed it, or as a copy.

Rows of integers are undone exactly, so while they are few they are all that is kept: 4 bytes a number, J / 16 rows at most,
an eighth of what a copy of the sums takes at the very worst. More rows, or changes that are not rows, make a copy.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchlssvm.functional import gram


class Chunk(NamedTuple):
    """Rows [q; z] (n, J + R) int32 with signed multiplicities (n,), or one for all; few enough to be summed exactly."""

    rows: Tensor
    mult: Tensor | None
    alpha: float

    def summed(self, J: int) -> Tensor:
        """The packed int64 sums of the rows."""
        rows = self.rows.to(torch.float64)
        R = rows.shape[1] - J
        acc = torch.zeros(gram.packed_size(J, R, product=True), dtype=torch.float64, device=rows.device)
        gram.accumulate_(acc, rows, J, None if self.mult is None else rows * self.mult[:, None], self.alpha)
        return gram.fold_(None, acc, J, R, torch.int64)


class Before:
    """One group before its first change. ``copied``: whether ``copy`` holds the sums (None: there were none)."""

    def __init__(self, J: int):
        """No change yet."""
        self.J = J
        self.chunks: list[Chunk] = []
        self.count = 0
        self.copied = False
        self.copy: Tensor | None = None

    def takes(self, rows: int) -> bool:
        """Whether so many more rows may be kept as rows."""
        return not self.copied and self.count + rows <= max(1, self.J // 16)

    def append(self, chunk: Chunk) -> None:
        """Keep rows that are about to be summed."""
        self.chunks.append(chunk)
        self.count += chunk.rows.shape[0]

    def change(self) -> Tensor | None:
        """The packed sums of the rows kept; None if there are none."""
        total = None
        for chunk in self.chunks:
            total = chunk.summed(self.J) if total is None else total.add_(chunk.summed(self.J))
        return total

    def value(self, now: Tensor | None) -> Tensor | None:
        """The sums before, given those of now; memory of its own, or the copy."""
        if self.copied:
            return self.copy
        change = self.change()
        if change is None:
            return None if now is None else now.clone()
        return change.neg_() if now is None else change.neg_().add_(now)

    def make_copy(self, now: Tensor | None) -> None:
        """From rows to a copy: a change that is not rows, or too many of them, is about to come."""
        if not self.copied:
            self.copy = self.value(now)
            self.copied, self.chunks, self.count = True, [], 0
