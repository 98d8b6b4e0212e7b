"""Rows of Q = y y^T K: computed on the samples' device in blocks, used on the host, some of them kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchlssvm.functional import checks
from torchlssvm.kernels import RBF, Kernel
from torchlssvm.svm import steps
from torchlssvm.svm.samples import Array, Samples

WIDE = 8.0
"""gamma |x - centre|^2 beyond which a sample's RBF values come from differences: the expanded square would cost digits there."""
BLOCK_NUMBERS = 2**22
"""Kernel values computed at a time: 32 MiB."""
LEAST_ROWS = 2
"""Rows kept whatever ``cache_bytes`` says: what an event needs."""


class RowCache(NamedTuple):
    """Rows kept, the oldest overwritten first; a tuple of arrays, for compiled steps."""

    rows: Array  # (k, capacity)
    row_of: Array  # (capacity,) int64, the row of each position, or -1
    held: Array  # (k,) int64, the position of each row, or -1
    clock: Array  # (1,) int64, the row that is overwritten next


class KernelRows:
    """The samples' rows x on their device, or their Gram matrix, and rows of Q computed from them."""

    def __init__(self, samples: Samples, kernel: Kernel | None, device: torch.device, cache_bytes: int):
        self.samples, self.kernel, self.device, self.cache_bytes = samples, kernel, device, cache_bytes
        self.x = self._new(0, 0)  # (capacity, J), or (capacity, capacity) Gram matrix if there is no kernel
        self._centre: Tensor | None = None
        self._shifted, self._squares = self._new(0, 0), self._new(0)  # RBF: x - centre, and its squared length
        self._wide = np.zeros(0, dtype=bool)
        self.forget()

    def _new(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float64, device=self.device)

    # -- samples that come and go --------------------------------------------------------------------------------------

    def fit_capacity(self, J: int) -> None:
        """Follow the samples' vectors when they have become longer, or begin with rows of width J."""
        n = self.samples.capacity
        if len(self.x) == n and (self.kernel is None or self.x.shape[1] == J):
            return
        old, self.x = self.x, self._new(n, n if self.kernel is None else J)
        same = self.kernel is None or old.shape[1] == J  # else nothing was held
        if same:
            self.x[: len(old), : old.shape[1]] = old
        if type(self.kernel) is RBF:
            shifted, squares, wide = self._new(n, J), self._new(n), np.zeros(n, dtype=bool)
            if same:
                shifted[: len(old)], squares[: len(old)], wide[: len(old)] = self._shifted, self._squares, self._wide
            self._shifted, self._squares, self._wide = shifted, squares, wide
        self.forget()

    def put(
        self, at: Array, x: Tensor
    ) -> None:  # (B,), (B, J) or, with no kernel, (B, capacity) in the order of positions
        """Take over new samples' rows. Cached rows of Q lack them until :meth:`extend`."""
        index = torch.from_numpy(at).to(self.device)
        self.x[index] = x
        if self.kernel is None:
            self.x[:, index] = x.T
        self._measure(at, index)

    def _measure(self, at: Array, index: Tensor) -> None:
        s = self.samples
        if type(self.kernel) is RBF:
            if self._centre is None or s.n == len(at):
                self._centre = self.x[index].mean(0)
            shifted = self.x[index] - self._centre
            squares = shifted.square().sum(1)
            self._shifted[index], self._squares[index] = shifted, squares
            if not checks.is_fake(squares):
                self._wide[at] = (squares * self.kernel.gamma > WIDE).cpu().numpy()
        if checks.is_fake(self.x):
            return
        if type(self.kernel) is RBF:
            s.root[at] = 1.0
            return
        if self.kernel is None:
            own = self.x[index, index]
        elif not self.kernel.deep:
            own = self.kernel.diag(self.x[index]).to(torch.float64)
        else:
            own = torch.cat([self.kernel.tiled(part, part).diagonal() for part in self.x[index].split(64)])
        s.root[at] = np.sqrt(np.maximum(self._finite(own.cpu().numpy()), 0.0))

    def extend(self, at: Array, Q: Array) -> None:  # (B,), (B, capacity)
        """Give cached rows their entries for new samples, whose rows these are."""
        kept = self.cache.held >= 0
        self.cache.rows[np.ix_(kept, at)] = Q[:, self.cache.held[kept]].T

    def erase(self, at: Array) -> None:  # (k,)
        """Overwrite what is here of these samples."""
        index = torch.from_numpy(at).to(self.device)
        self.x[index] = 0.0
        if self.kernel is None:
            self.x[:, index] = 0.0
        if type(self.kernel) is RBF:
            self._shifted[index], self._squares[index], self._wide[at] = 0.0, 0.0, False
        cache = self.cache
        cache.rows[:, at] = 0.0
        rows = cache.row_of[at]
        rows = rows[rows >= 0]
        cache.rows[rows], cache.held[rows], cache.row_of[at] = 0.0, -1, -1

    def change_kernel(self, kernel: Kernel | None, x: Tensor | None = None) -> None:
        """Another kernel on the same rows, or another Gram matrix (capacity, capacity)."""
        self.kernel = kernel
        if x is not None:
            self.x = x
        n, J = self.x.shape
        self._shifted, self._squares, self._wide = self._new(n, J), self._new(n), np.zeros(n, dtype=bool)
        self.forget()
        at = np.flatnonzero(self.samples.ids >= 0)
        if len(at):
            self._measure(at, torch.from_numpy(at).to(self.device))

    def forget(self) -> None:
        """Empty the cache."""
        n = self.samples.capacity
        k = max(LEAST_ROWS, min(n, self.cache_bytes // (8 * max(1, n))))
        empty = np.full(k, -1, dtype=np.int64)
        self.cache = RowCache(np.zeros((k, n)), np.full(n, -1, dtype=np.int64), empty, np.zeros(1, dtype=np.int64))

    # -- values --------------------------------------------------------------------------------------------------------

    def row(self, i: int) -> Array:  # -> (capacity,)
        """Q_i:, from the cache, where it is afterwards. Not to be written to."""
        if self.cache.row_of[i] < 0:
            self.keep(i, self.block(np.array([i]))[0])
        return self.cache.rows[self.cache.row_of[i]]

    def keep(self, i: int, row: Array) -> None:  # (capacity,)
        """Put a row of Q, computed already, into the cache."""
        steps.keep_row(*self.cache, i, row)

    def block(self, at: Array, columns: Array | None = None) -> Array:  # (k,), (l,) -> (k, l)
        """Q between these positions and all, or those in ``columns``; not from the cache."""
        s = self.samples
        y = s.y if columns is None else s.y[columns]
        with np.errstate(invalid="ignore", over="ignore"):
            Q = self._values(at, columns) * y
            Q *= s.y[at][:, None]
            finite = np.isfinite(Q.sum())
        if not finite:
            Q[:, y == 0] = 0.0  # a kernel may have no value for the zeros in free positions
            self._finite(Q)
        return Q

    def _values(self, at: Array, columns: Array | None) -> Array:
        index = torch.from_numpy(at).to(self.device)
        every = slice(None) if columns is None else torch.from_numpy(columns).to(self.device)
        if type(self.kernel) is RBF:
            K = self._gaussian(self.kernel.gamma, index, every, at, columns)
        elif self.kernel is None:
            K = self.x[index][:, every] if columns is not None else self.x[index]
        else:
            K = self.kernel.tiled(self.x[index], self.x[every]).to(torch.float64)
        return K.cpu().numpy()

    def _gaussian(self, gamma: float, index: Tensor, every: Any, at: Array, columns: Array | None) -> Tensor:
        """exp(-gamma |x - z|^2) by the expanded square, where either sample is wide by differences."""
        p, q, own, other = self._shifted[index], self._shifted[every], self._squares[index], self._squares[every]
        K = torch.mv(q, p[0])[None] if len(at) == 1 else p @ q.T
        K.mul_(2.0 * gamma).sub_(other * gamma).sub_((own * gamma)[:, None]).clamp_(max=0.0).exp_()
        if self._wide.any():
            rows, wide = self._wide[at], self._wide if columns is None else self._wide[columns]
            for k in np.flatnonzero(rows).tolist():
                K[k] = (q - p[k]).square_().sum(1).mul_(-gamma).exp_()
            for k in np.flatnonzero(wide).tolist():
                K[:, k] = (p - q[k]).square_().sum(1).mul_(-gamma).exp_()
        return K

    def _finite(self, values: Array) -> Array:
        if not np.isfinite(values).all():
            raise ValueError(
                f"the kernel gives {int((~np.isfinite(values)).sum())} NaN or infinite value(s) for the samples given and held: "
                "scale the features, or use another kernel"
            )
        return values

    def blocks(self, at: Array) -> Iterator[tuple[Array, Array]]:  # (k,) -> (l,), (l, capacity)
        """Positions and their rows of Q, as many at a time as fit in BLOCK_NUMBERS."""
        step = max(1, BLOCK_NUMBERS // max(1, self.samples.capacity))
        for first in range(0, len(at), step):
            part = at[first : first + step]
            yield part, self.block(part)

    def product(self, v: Array) -> Array:  # (capacity,) -> (capacity,)
        """Q v, from the columns where v is not zero."""
        out = np.zeros(len(v))
        for part, Q in self.blocks(np.flatnonzero(v)):
            out += v[part] @ Q
        return out

    def sums(self, at: Array, alpha: Array) -> Array:  # (k,), (capacity,) -> (k,)
        """sum_j |Q_ij| alpha_j of these samples."""
        support = np.flatnonzero(alpha)
        out = np.zeros(len(at))
        step = max(1, BLOCK_NUMBERS // max(1, len(support)))
        for first in range(0, len(at), step):
            out[first : first + step] = np.abs(self.block(at[first : first + step], support)) @ alpha[support]
        return out
