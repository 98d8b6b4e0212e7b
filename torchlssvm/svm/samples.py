"""The vectors that the incremental SVM stores for its samples, by position, in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

Array = Any  # a NumPy array, float64 unless said otherwise

NO_POSITIONS = np.zeros(0, dtype=np.int64)

VECTOR_NAMES = ("y", "weight", "u", "alpha", "side", "rest", "g", "root", "rounding")
"""The vectors of :class:`Samples`. All are zero in free positions, so a free position changes no sum and no comparison."""


def upper_bounds(y: Array, weight: Array, C: tuple[float, float]) -> Array:  # (n,), (n,) -> (n,)
    """Return the upper bounds u of samples with these labels and weights."""
    return weight * np.where(y > 0, C[1], C[0])


class Batch(NamedTuple):
    """New samples that have passed the input checks."""

    x: Tensor  # (B, J) prepared rows, or (B, n + B) kernel values in the order of ids, new samples last
    y: Array  # (B,) -1, +1
    weight: Array  # (B,)
    u: Array  # (B,)


class Samples:
    """Vectors (capacity,) by position. A sample keeps its position until it is removed."""

    y: Array  # label -1 or +1
    weight: Array  # of C
    u: Array  # upper bound, weight C
    alpha: Array
    side: Array  # +1 reserve set R: g >= 0, -1 error set E: g <= 0, 0 margin set S
    rest: Array  # sum of Q_ij alpha_j over all j outside S
    g: Array
    root: Array  # sqrt(K_ii)
    rounding: Array  # variance, in units of EPS^2, of the rounding errors in rest since it was computed from the kernel

    def __init__(self) -> None:
        self.n, self.capacity = 0, 0  # number of samples; length of every vector
        self.ids = np.full(0, -1, dtype=np.int64)  # -1 in free positions
        self.where: dict[int, int] = {}  # id -> position
        self._free: list[int] = []  # free positions, the lowest last
        self._set(np.zeros((len(VECTOR_NAMES), 0)))

    def _set(self, vectors: Array) -> None:
        self.vectors = vectors
        for name, row in zip(VECTOR_NAMES, vectors, strict=True):
            setattr(self, name, row)

    def has_both_classes(self) -> bool:
        """Return True if each label has samples with u > 0. Otherwise, every alpha is 0."""
        y = self.y * (self.u > 0)
        return bool(y.max(initial=0.0) > 0.0 > y.min(initial=0.0))

    def grow(self, count: int) -> bool:
        """Make room for this many more samples. Returns True if the vectors became longer."""
        if self.n + count <= self.capacity:
            return False
        longer = 16 + self.n + count + (self.n + count) // 8
        vectors = np.zeros((len(VECTOR_NAMES), longer))
        vectors[:, : self.capacity] = self.vectors
        ids = np.full(longer, -1, dtype=np.int64)
        ids[: self.capacity] = self.ids
        self._free = [*range(longer - 1, self.capacity - 1, -1), *self._free]
        self.ids, self.capacity = ids, longer
        self._set(vectors)
        return True

    def place(self, ids: Sequence[int], y: Array, weight: Array, u: Array) -> Array:  # (B,) each -> (B,) int64
        """Give each new sample a free position, with alpha = 0. There must be room."""
        at = np.array([self._free.pop() for _ in ids], dtype=np.int64)
        self.ids[at] = ids
        self.where.update(zip(ids, at.tolist(), strict=True))
        self.y[at], self.weight[at], self.u[at], self.side[at] = y, weight, u, 1.0
        self.n += len(ids)
        return at

    def drop(self, at: Array) -> None:  # (k,)
        """Free these positions, and set their entries to zero."""
        for i in self.ids[at].tolist():
            del self.where[i]
        self.vectors[:, at] = 0.0
        self.ids[at] = -1
        self._free += at[::-1].tolist()
        self.n -= len(at)

    def order(self) -> Array:  # -> (n,) int64
        """Return the positions of all samples, in the order of their ids."""
        held = np.flatnonzero(self.ids >= 0)
        return held[np.argsort(self.ids[held])]

    def rename(self, at: Array, ids: Sequence[int]) -> None:
        """Give the samples in these positions other ids."""
        for i in self.ids[at].tolist():
            del self.where[i]
        self.ids[at] = ids
        self.where.update(zip(ids, at.tolist(), strict=True))
