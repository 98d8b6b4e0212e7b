"""Rows of Q = y y^T K: computed in blocks on the samples' device, used on the host, and cached there."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchlssvm.functional.modes import interrupt
from torchlssvm.kernels import RBF, Kernel
from torchlssvm.svm.samples import Array, Samples

FAR_HALF_SQUARE = 8.0
"""gamma |x - centre|^2 beyond which RBF values are computed from differences: the expanded square would lose digits there."""
KERNEL_VALUES_PER_BLOCK = 2**22
"""Kernel values computed at a time: 32 MiB."""


def index_of(at: Array) -> Any:  # (k,) int64
    """Return an index of these positions: a slice where they are consecutive, which NumPy handles several times faster."""
    k = len(at)
    if k == 1 or (k and at[-1] - at[0] == k - 1 and bool((at[1:] > at[:-1]).all())):
        return slice(int(at[0]), int(at[0]) + k)
    return at


class RowCache:
    """Cached rows, of which the oldest is overwritten first."""

    def __init__(self, capacity: int, count: int):
        self.rows = np.zeros((count, capacity))
        self.row_of = np.full(capacity, -1, dtype=np.int64)  # the row of each position, or -1
        self.held = np.full(count, -1, dtype=np.int64)  # the position of each row, or -1
        self.next, self.end = 0, 0  # the row that is overwritten next, and where the rows in use end

    def put(self, i: int, row: Array) -> None:  # (capacity,)
        """Put a row of Q into the cache instead of the oldest, unless it is there."""
        if self.row_of[i] >= 0:
            return
        k = self.next
        if self.held[k] >= 0:
            self.row_of[self.held[k]] = -1
        self.rows[k], self.held[k], self.row_of[i] = row, i, k
        self.next, self.end = (k + 1) % len(self.held), max(self.end, k + 1)


class KernelRows:
    """The samples' rows x on their device, or their Gram matrix, and rows of Q computed from them.

    RBF on the host is computed here, for speed and to all digits: by the expanded square of x shifted by a centre, so that a
    common offset costs no digits, and by differences for samples that are far from the centre.
    """

    def __init__(self, samples: Samples, kernel: Kernel | None, device: torch.device, cache_bytes: int):
        self.samples, self.kernel, self.device, self.cache_bytes = samples, kernel, device, cache_bytes
        self.x = self._new(0, 0)  # (capacity, J), or (capacity, capacity) Gram matrix if there is no kernel
        self._start_rbf()
        self.empty_cache()

    def _new(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float64, device=self.device)

    def _index(self, at: Array) -> Tensor:  # (k,) int64
        """Copy positions to the device, without waiting: the driver reads host memory before the call returns."""
        return torch.from_numpy(at).to(self.device, non_blocking=True)

    def _start_rbf(self) -> None:
        """Allocate the arrays for RBF values, if they are computed here."""
        n, J = self.x.shape
        self.version = None if self.kernel is None else self.kernel.version()
        self._rbf = type(self.kernel) is RBF and self.device.type == "cpu"
        self._centre: Array = np.zeros(J)
        self._any_far = False
        if self._rbf:
            self._shifted, self._squares, self._far = np.zeros((n, J)), np.zeros(n), np.zeros(n, dtype=bool)

    # -- samples that come and go --------------------------------------------------------------------------------------

    def fit_capacity(self, J: int) -> None:
        """Lengthen the arrays when the samples' vectors have become longer, or begin with rows of width J."""
        n, k, old, centre = self.samples.capacity, len(self.x), self.x, self._centre
        if k == n and (self.kernel is None or old.shape[1] == J):
            return
        self.x = self._new(n, n if self.kernel is None else J)
        self.empty_cache()
        self._start_rbf()
        if self.kernel is None or old.shape[1] == J:  # nothing was held otherwise
            self.x[:k, : old.shape[1]] = old
            if self._rbf:
                self._centre = centre
                self._shift(np.flatnonzero(self.samples.ids[:k] >= 0))

    def put(self, at: Array, x: Tensor, order: Array) -> None:  # (B,), (B, J), (n,)
        """Take over rows of new samples. Cached rows of Q lack them until :meth:`extend_cache`.

        With no kernel x (B, n + B) holds kernel values with the samples in positions ``order``, then with the new ones.
        """
        if self._rbf:
            self.x.numpy()[index_of(at)] = x.numpy()
        elif self.kernel is not None:
            self.x[self._index(at)] = x
        else:
            index, columns = self._index(at), self._index(np.concatenate([order, at]))
            x = torch.cat([x[:, : len(order)], (x[:, len(order) :] + x[:, len(order) :].T) * 0.5], 1)
            self.x[index[:, None], columns] = x
            self.x[columns[:, None], index] = x.T
        self._set_root(at)

    def _shift(self, at: Array) -> None:
        """Compute the rows of these samples about the centre, for RBF values."""
        assert isinstance(self.kernel, RBF)
        i = index_of(at)
        x = (self.x.numpy()[i] - self._centre) * (2.0 * self.kernel.gamma) ** 0.5
        with np.errstate(over="ignore"):
            squares = self._finite(0.5 * (x * x).sum(1))
        self._shifted[i], self._squares[i], self._far[i] = x, squares, squares > FAR_HALF_SQUARE
        self._any_far = bool(self._far.any())

    def _set_root(self, at: Array) -> None:
        """Compute sqrt(K_ii) of new samples, and for RBF their shifted rows."""
        s = self.samples
        if self._rbf:
            if s.n == len(at):  # there were none before
                self._centre = np.median(self.x.numpy()[at], 0)  # samples far from all others do not count
            self._shift(at)
            s.root[index_of(at)] = 1.0
            return
        index = self._index(at)
        if self.kernel is None:
            own = self.x[index, index]
        elif not self.kernel.deep:
            own = self.kernel.diag(self.x[index]).to(torch.float64)
        else:
            own = torch.cat([self.kernel.tiled(part, part).diagonal() for part in self.x[index].split(64)])
        s.root[at] = np.sqrt(np.maximum(self._finite(own.cpu().numpy()), 0.0))

    def extend_cache(self, at: Array, Q: Array) -> None:  # (B,), (B, capacity)
        """Set the entries of cached rows for new samples, whose rows these are."""
        cache = self.cache
        # rows that no longer belong to a sample get any value
        cache.rows[: cache.end, index_of(at)] = Q[:, cache.held[: cache.end]].T

    def erase(self, at: Array) -> None:  # (k,)
        """Set all entries of these samples to zero."""
        i = index_of(at)
        if self._rbf:
            self.x.numpy()[i] = 0.0
            self._shifted[i], self._squares[i], self._far[i] = 0.0, 0.0, False
        else:
            index = self._index(at)
            self.x[index] = 0.0
            if self.kernel is None:
                self.x[:, index] = 0.0
        cache = self.cache
        cache.rows[: cache.end, i] = 0.0
        rows = cache.row_of[i]
        rows = rows[rows >= 0]
        cache.rows[rows], cache.held[rows], cache.row_of[i] = 0.0, -1, -1

    def renewed(self, kernel: Kernel | None) -> KernelRows:
        """Return rows of the same samples by this kernel, with nothing kept of the values computed before."""
        new = copy.copy(self)
        new.kernel = kernel
        new._start_rbf()
        new.empty_cache()
        if new._rbf:
            new._centre = self._centre
            new._shift(np.flatnonzero(self.samples.ids >= 0))
        return new

    def empty_cache(self) -> None:
        """Empty the cache."""
        n = self.samples.capacity
        # Rows cached whatever ``cache_bytes`` says: an event needs that many.
        k = max(2, min(n, self.cache_bytes // (8 * max(1, n))))
        self.cache = RowCache(n, k)

    # -- values --------------------------------------------------------------------------------------------------------

    def row(self, i: int) -> Array:  # -> (capacity,)
        """Return row i of Q from the cache, where it is put first if need be. It must not be written to."""
        if self.cache.row_of[i] < 0:
            for j, row in zip(*self._with_next_rows(i), strict=True):
                self.cache_row(j, row)
        return self.cache.rows[self.cache.row_of[i]]

    def _with_next_rows(self, i: int) -> tuple[list[int], Array]:
        """Compute row i; on a device also the rows of samples near the margin, before it, which the next events will need."""
        at, s, room = np.array([i]), self.samples, len(self.cache.held) // 4
        if self.device.type != "cpu" and room > 1:
            missing = np.flatnonzero((s.ids >= 0) & (self.cache.row_of < 0))
            # Rows copied from a device at a time: the host waits once for all of them.
            near = missing[np.argsort(np.abs(s.g[missing]), kind="stable")][: min(room, 64) - 1]
            at = np.append(near[near != i], i)
        return at.tolist(), self.block(at)

    def rows_of(self, at: Array) -> Array:  # (k,) -> (k, capacity)
        """Rows of Q, a copy: from the cache where they are there, the others computed."""
        row_of = self.cache.row_of[at]
        missing = row_of < 0
        if len(at) and missing.all():
            return self.block(at)
        out: Array = self.cache.rows[row_of]
        if missing.any():
            out[missing] = self.block(at[missing])
        return out

    def cache_row(self, i: int, row: Array) -> None:  # (capacity,)
        """Put this row of Q into the cache."""
        self.cache.put(i, row)

    def block(self, at: Array, columns: Array | None = None) -> Array:  # (k,), (l,) -> (k, l)
        """Compute Q between these positions and all, or those in ``columns``."""
        s = self.samples
        y = s.y if columns is None else s.y[columns]
        if self._rbf:
            Q = self._gaussian(at, columns)
            Q *= y * s.y[at[0]] if len(at) == 1 else y
            if len(at) > 1:
                Q *= s.y[at][:, None]
            return Q
        with np.errstate(invalid="ignore", over="ignore"):
            Q = self._values(at, columns) * y
            Q *= s.y[at][:, None]
            finite = np.isfinite(Q.sum())
        if not finite:
            self._finite(Q)
        return Q

    def _values(self, at: Array, columns: Array | None) -> Array:
        """Compute K; zero where a column is a free position, whose row is no sample's and must not move a kernel's centre."""
        live = np.flatnonzero(self.samples.ids >= 0) if columns is None else columns
        part = self.x[self._index(at)]
        if self.kernel is None:
            values = part[:, self._index(live)]
        else:
            values = self.kernel.tiled(part, self.x[self._index(live)]).to(torch.float64)
        if len(live) == self.samples.capacity or columns is not None:
            return values.cpu().numpy()
        out = np.zeros((len(at), self.samples.capacity))
        out[:, live] = values.cpu().numpy()
        return out

    def _gaussian(self, at: Array, columns: Array | None) -> Array:
        """exp(-|p - q|^2 / 2), p and q shifted and scaled; exp(-gamma |x - z|^2) for far samples."""
        assert isinstance(self.kernel, RBF)
        i = index_of(at)
        p, own = self._shifted[i], self._squares[i]
        q, other, far = self._shifted, self._squares, self._far
        if columns is not None:
            q, other, far = q[columns], other[columns], far[columns]
        K = (q @ p[0])[None] if len(at) == 1 else p @ q.T
        K -= other
        K -= own[:, None]
        np.minimum(K, 0.0, out=K)
        if len(at) == 1:
            np.exp(K, out=K)
        else:
            torch.from_numpy(K).exp_()
        if self._any_far:
            x = self.x.numpy()
            z, x, gamma = x if columns is None else x[columns], x[i], self.kernel.gamma
            for k in np.flatnonzero(self._far[i]).tolist():
                K[k] = np.exp(-gamma * ((z - x[k]) ** 2).sum(1))
            far = np.flatnonzero(far)
            # Differences to far samples computed at a time: 2 MiB, which fit the processor's cache.
            step = max(1, 2**18 // max(1, len(far) * x.shape[1]))
            for k in range(0, len(at) if len(far) else 0, step):
                K[k : k + step, far] = np.exp(-gamma * ((x[k : k + step, None] - z[far]) ** 2).sum(2))
        return K

    def factors(self, at: Array) -> tuple[Tensor, Tensor] | None:  # (k,) -> (k, J + 2), (J + 2, k)
        """Return factors of ln K between these samples in single precision; None where that is too coarse, or not an RBF."""
        # gamma |x - centre|^2 up to which single precision gives RBF values to three digits: 2^12 times 2^-24 is
        # about 2e-4.
        if not self._rbf or float(self._squares[at].max(initial=0.0)) > 2.0**12:
            return None
        p, own, one = self._shifted[at], -self._squares[at][:, None], np.ones((len(at), 1))
        left, right = np.concatenate([p, own, one], 1), np.concatenate([p, one, own], 1)
        return torch.from_numpy(left).float(), torch.from_numpy(right).float().T.contiguous()

    def _finite(self, values: Array) -> Array:
        if not np.isfinite(values).all():
            raise ValueError(
                f"the kernel gives {int((~np.isfinite(values)).sum())} NaN or infinite value(s) for the samples given: "
                "scale the features, or use another kernel"
            )
        return values

    def blocks(
        self, at: Array, columns: Array | None = None
    ) -> Iterator[tuple[Array, Array]]:  # (k,), (c,) -> (l,), (l, capacity) or (l, c)
        """Yield positions and their rows of Q, or those columns of them, in blocks of KERNEL_VALUES_PER_BLOCK."""
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
