"""The samples near the margin: the ones a walk looks at. All others are brought up to date, and checked, where it ends.

Far from the margin are reserve vectors with a large slack. Their g matters only in the end: if all are on their side there, (2)
and (3) hold for all samples, and that makes it the solution, whatever happened on the way. One that is not is a sample with
alpha = 0 and g < 0, as if it had just been added, and is learned like one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchlssvm.functional.loops import load
from torchlssvm.machines.svm_samples import Samples

SHARE = 6  # the nearest part of the reserve vectors that is looked at, and
LEAST = 64  # so many at least
FROM = 400  # samples below which all are looked at

_NONE = (np.empty((0, 0)), np.empty(0, dtype=np.int64))


class Near:
    """Their positions, in columns, and of the margin vectors' rows of Q the part that belongs to them. On the CPU only."""

    def __init__(self, samples: Samples):
        self.samples = samples
        self.forget()

    def forget(self) -> None:
        """To be chosen anew."""
        self.count = self.chosen = 0

    def _choose(self, k: int, QS: Tensor, top: int) -> None:  # (slots, capacity)
        """Everything but the reserve vectors, and the nearest of those, k together."""
        s = self.samples
        slack = np.where(s.hsign > 0, s.hslack, -1.0)
        room = k + 64 + k // 4
        self._positions = np.zeros(room, dtype=np.int64)
        self._positions[:k] = np.argpartition(slack, k - 1)[:k]
        self.place = np.full(s.capacity, -1, dtype=np.int64)  # the column of each position, -1 if it is far
        self.place[self._positions[:k]] = np.arange(k)
        self._Q = torch.zeros(len(QS), room, dtype=torch.float64, device="cpu")
        self._hQ = self._Q.numpy()
        if (loops := load("svm_loops")) is not None:
            loops.columns(QS.numpy(), top, self._positions[:k], self._hQ)
        else:
            self._hQ[:top, :k] = QS.numpy()[:top, self._positions[:k]]
        self.count = self.chosen = k

    @property
    def positions(self) -> Any:
        """The position of each column (count,)."""
        return self._positions[: self.count]

    def columns(self, top: int) -> Tensor:
        """y and the columns of Q, slot by slot (count, top)."""
        return self._Q[:top, : self.count].T

    def buffer(self) -> tuple[Any, Any]:
        """The columns of Q slot by slot, and the position of each; none of them where nothing has been chosen."""
        return (self._hQ, self.positions) if self.count else _NONE

    def ready(self, QS: Tensor, top: int) -> bool:
        """Whether they are worth it; chosen anew where they have become many, or the buffers have changed."""
        s = self.samples
        if s.n < FROM:
            return False
        grown = self.count > self.chosen + 32 + self.chosen // 8
        if not self.count or grown or len(self.place) != s.capacity or len(self._hQ) != len(QS):
            inner = int((s.hsign <= 0).sum())
            k = inner + max(LEAST, (s.n - inner) // SHARE)
            if 2 * k >= s.n:
                return False
            self._choose(k, QS, top)
        return True

    def entered(self, slot: int, hrow: Any) -> None:  # (n,)
        """A margin vector has come to a slot."""
        if self.count and slot < len(self._hQ):
            self._hQ[slot, : self.count] = hrow[self.positions]

    def slots(self, count: int) -> None:
        """Room for so many slots."""
        if self.count and count > len(self._hQ):
            Q = torch.zeros(count, self._Q.shape[1], dtype=torch.float64, device="cpu")
            Q[: len(self._Q)] = self._Q
            self._Q, self._hQ = Q, Q.numpy()

    def insert(self, i: int, hQS: Any, top: int) -> None:  # (slots, capacity)
        """Position i has come near."""
        if self.place[i] >= 0:
            return
        c = self.count
        if c == len(self._positions):
            self._positions = np.concatenate([self._positions, np.zeros_like(self._positions)])
            self._Q = torch.cat([self._Q, torch.zeros_like(self._Q)], 1)
            self._hQ = self._Q.numpy()
        self._hQ[:top, c] = hQS[:top, i]
        self._positions[c], self.place[i] = i, c
        self.count += 1

    def moved(self, last: int, i: int, top: int) -> None:
        """Position ``last`` becomes position i; what was in i is gone."""
        if not self.count:
            return
        c, end = int(self.place[i]), self.count - 1
        if c >= 0:
            if c != end:
                self._hQ[:top, c] = self._hQ[:top, end]
                self._positions[c] = self._positions[end]
                self.place[self._positions[c]] = c
            self.place[i] = -1
            self.count = end
        if last != i and (c := int(self.place[last])) >= 0:
            self._positions[c], self.place[i], self.place[last] = i, c, -1
