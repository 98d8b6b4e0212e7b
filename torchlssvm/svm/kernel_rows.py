"""Rows of Q = y y^T K for the samples of one machine."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from torchlssvm.functional.modes import interrupt
from torchlssvm.kernels.gram_rows import GramRows
from torchlssvm.svm.samples import Array, Samples

KERNEL_VALUES_PER_BLOCK = 2**22
"""Kernel values computed at a time: 32 MiB."""


class KernelRows:
    """Rows of Q, computed from rows of K in ``gram``, which belongs to the machine or is shared with other machines.

    places: (capacity,) int64 position in a shared ``gram`` of each sample; None if ``gram`` is the machine's own.
    """

    def __init__(self, samples: Samples, gram: GramRows, places: Array | None = None):
        self.samples, self.gram, self.places = samples, gram, places

    def in_gram(self, at: Array) -> Array:  # (k,) -> (k,)
        """Return the positions in ``gram``."""
        return at if self.places is None else self.places[at]

    def x(self, at: Array) -> Tensor:  # (k,) -> (k, J)
        """Return a copy of the rows x of these samples."""
        return self.gram.rows_at(self.in_gram(at))

    # -- samples that come and go --------------------------------------------------------------------------------------

    def put(self, at: Array, x: Tensor | Array, order: Array) -> None:  # (B,), (B, J) or (B,), (n,)
        """Take over rows of new samples, or their positions in a shared ``gram``."""
        s = self.samples
        if self.places is None:
            self.gram.resize(s.capacity, x.shape[1])
            self.gram.put(at, x, order)
        else:
            if len(self.places) < s.capacity:
                self.places = np.concatenate([self.places, np.zeros(s.capacity - len(self.places), dtype=np.int64)])
            self.places[at] = x
        s.root[at] = np.sqrt(np.maximum(self.gram.diagonal(self.in_gram(at)), 0.0))

    def erase(self, at: Array) -> None:  # (k,)
        """Set all entries of these samples to zero. The owner of a shared ``gram`` erases the rows in it."""
        if self.places is None:
            self.gram.erase(at)

    # -- values --------------------------------------------------------------------------------------------------------

    def row(self, i: int) -> Array:  # -> (capacity,)
        """Return row i of Q. Its values of K are cached, unless the machine has few of the shared samples."""
        gram, s = self.gram, self.samples
        p = i if self.places is None else int(self.places[i])
        k = gram.cache.row_of[p]
        if k < 0:
            if self.places is not None and 4 * s.capacity < gram.capacity:
                return self.block(np.array([i]))[0]
            gram.cache.put(p, gram.block(np.array([p]))[0])
            k = gram.cache.row_of[p]
        K = gram.cache.rows[k]
        row: Array = (K if self.places is None else K[self.places]) * s.y
        if s.y[i] < 0:
            np.negative(row, out=row)
        return row

    def keep_row(self, i: int, row: Array) -> None:  # (capacity,)
        """Put the values of this row of Q into the cache, unless they are there."""
        s = self.samples
        if self.places is None and self.gram.cache.row_of[i] < 0:
            self.gram.cache.put(i, row * s.y * s.y[i])

    def values(self, at: Array, columns: Array | None = None) -> Array:  # (k,), (l,) -> (k, l)
        """Return K between these positions and all, or the positions in ``columns``, from the cache where possible."""
        return self.gram.rows(self.in_gram(at), self.places if columns is None else self.in_gram(columns))

    def block(self, at: Array, columns: Array | None = None) -> Array:  # (k,), (l,) -> (k, l)
        """Return Q between these positions and all, or the positions in ``columns``."""
        s = self.samples
        Q = self.values(at, columns)
        Q *= s.y if columns is None else s.y[columns]
        Q *= s.y[at][:, None]
        return Q

    def blocks(self, at: Array, columns: Array | None = None) -> Iterator[tuple[Array, Array]]:  # (k,), (c,)
        """Yield positions and their rows of Q (or some columns of these rows), in blocks of KERNEL_VALUES_PER_BLOCK."""
        step = max(1, KERNEL_VALUES_PER_BLOCK // max(1, self.samples.capacity if columns is None else len(columns)))
        for first in range(0, len(at), step):
            if interrupt.arrived:
                interrupt.hand_over()
            part = at[first : first + step]
            yield part, self.block(part, columns)

    def product(self, v: Array) -> Array:  # (capacity,) -> (capacity,)
        """Return Q v, from the rows where v is not zero."""
        out = np.zeros(len(v))
        for part, Q in self.blocks(np.flatnonzero(v)):
            out += v[part] @ Q
        return out

    def product_at(self, at: Array, v: Array) -> Array:  # (k,), (capacity,) -> (k,)
        """Return the entries of Q v for these samples."""
        columns = np.flatnonzero(v)
        parts = [Q @ v[columns] for _, Q in self.blocks(at, columns)] if len(columns) else [np.zeros(len(at))]
        return np.concatenate(parts)

    def absolute_products(self, at: Array, alpha: Array) -> Array:  # (k,), (capacity,) -> (k,)
        """Return sum_j |Q_ij| alpha_j for these samples i."""
        support = np.flatnonzero(alpha)
        return np.concatenate([np.zeros(0), *(np.abs(Q) @ alpha[support] for _, Q in self.blocks(at, support))])
