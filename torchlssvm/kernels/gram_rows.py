"""Samples by position, and rows of their Gram matrix, computed on the samples' device and cached on the host."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchlssvm.kernels.base import Kernel
from torchlssvm.kernels.basic import RBF

Array = Any  # a NumPy array, float64 unless said otherwise

FAR_HALF_SQUARE = 8.0
"""Limit of gamma |x - centre|^2. Beyond it, RBF values use differences, because the expanded square would lose digits."""


def index_of(at: Array) -> Any:  # (k,) int64
    """Return an index of these positions: a slice if they are consecutive, which NumPy handles several times faster."""
    k = len(at)
    if k == 1 or (k and at[-1] - at[0] == k - 1 and bool((at[1:] > at[:-1]).all())):
        return slice(int(at[0]), int(at[0]) + k)
    return at


def mostly_free(capacity: int, n: int) -> bool:
    """Return True if so few positions have a sample that shortening the arrays is cheaper than passing over the free ones."""
    return capacity > 512 + 4 * n


class RowCache:
    """A cache of rows that overwrites the oldest row first."""

    def __init__(self, capacity: int, count: int):
        self.rows = np.zeros((count, capacity))
        self.row_of = np.full(capacity, -1, dtype=np.int64)  # the row of each position, or -1
        self.held = np.full(count, -1, dtype=np.int64)  # the position of each row, or -1
        self.next, self.end = 0, 0  # the row that is overwritten next, and where the rows in use end

    def take_over(self, old: RowCache) -> None:
        """Copy the rows of a cache with fewer positions."""
        self.rows[: old.end, : old.rows.shape[1]] = old.rows[: old.end]
        self.held[: old.end], self.row_of[: len(old.row_of)] = old.held[: old.end], old.row_of
        self.end, self.next = old.end, old.end % len(self.held)

    def put(self, i: int, row: Array) -> None:  # (capacity,)
        """Overwrite the oldest row with this row, unless this row is already cached."""
        if self.row_of[i] >= 0:
            return
        k = self.next
        if self.held[k] >= 0:
            self.row_of[self.held[k]] = -1
        self.rows[k], self.held[k], self.row_of[i] = row, i, k
        self.next, self.end = (k + 1) % len(self.held), max(self.end, k + 1)


class GramRows:
    """Stores the rows x of samples on their device, or a precomputed Gram matrix, and computes rows of the kernel matrix K.

    Several machines with the same samples can share one object, which then computes each row once for all of them. Each sample
    has a position in the arrays, and values in free positions are undefined.

    On the host, this class computes RBF values itself, for speed. Like the kernel, it expands the square to |x|^2 + |z|^2 - 2
    x . z after subtracting a centre from the rows, so that an offset that all rows share costs no accuracy. The values of
    samples that are far from the centre are computed from differences instead.

    Attributes:
        x: (capacity, J), or (capacity, capacity) if the kernel is precomputed.
        held: (capacity,) bool, True in positions that have a sample.
        computed: the number of kernel values computed so far.
    """

    def __init__(self, kernel: Kernel | None, device: torch.device, cache_bytes: int):
        self.kernel, self.device, self.cache_bytes, self.computed = kernel, device, cache_bytes, 0
        self.x = torch.zeros(0, 0, dtype=torch.float64, device=device)
        self.held = np.zeros(0, dtype=bool)
        self._whole: Tensor | None = None  # (capacity, capacity) K on the device, once it has been asked for
        self._start_rbf()
        self.empty_cache()

    @property
    def capacity(self) -> int:
        """The number of positions."""
        return len(self.held)

    def _index(self, at: Array) -> Tensor:  # (k,) int64
        """Copy positions to the device without waiting. This is safe, because host memory is read before the call returns."""
        return torch.from_numpy(at).to(self.device, non_blocking=True)

    def _start_rbf(self) -> None:
        """Discard the arrays for RBF values. They are created again when the next value is computed."""
        self.version = None if self.kernel is None else self.kernel.version()
        self._rbf = type(self.kernel) is RBF and self.device.type == "cpu"
        self._centre: Array = None  # (J,)

    # -- adding and removing samples -----------------------------------------------------------------------------------

    def resize(self, capacity: int, J: int) -> None:
        """Extend the arrays to this number of positions, or create them for rows of width J."""
        k, old = self.capacity, self.x
        width = capacity if self.kernel is None else J
        if k == capacity and old.shape[1] == width:
            return
        self.x = torch.zeros(capacity, width, dtype=torch.float64, device=self.device)
        if self.held.any():
            self.x[:k, : old.shape[1]] = old
        else:
            self._centre = None
        self.held = np.concatenate([self.held, np.zeros(capacity - k, dtype=bool)])
        if self._whole is not None:
            self._whole = torch.nn.functional.pad(self._whole, (0, capacity - k, 0, capacity - k))
        if self._centre is not None:
            self._make_rbf(self._centre)
        old_cache = self.cache
        self.empty_cache()
        if old_cache.end <= len(self.cache.held):
            self.cache.take_over(old_cache)

    def put(self, at: Array, x: Tensor, order: Array) -> None:  # (B,), (B, J), (n,)
        """Store the rows of new samples, and add their values to cached rows.

        If the kernel is precomputed, x (B, n + B) holds the kernel values of the new samples with the samples in positions
        ``order``, followed by those among the new samples.
        """
        if not self.held.any():
            self._centre = None  # to be chosen from these samples
        if self.kernel is None:
            index, columns = self._index(at), self._index(np.concatenate([order, at]))
            x = torch.cat([x[:, : len(order)], (x[:, len(order) :] + x[:, len(order) :].T) * 0.5], 1)
            self.x[index[:, None], columns] = x
            self.x[columns[:, None], index] = x.T
        elif self._rbf:
            self.x.numpy()[index_of(at)] = x.numpy()
        else:
            self.x[self._index(at)] = x
        self.held[at] = True
        if self._centre is not None:
            self._shift(at)
        if self._whole is not None:
            self._write_whole(at)
        cache = self.cache
        if not cache.end:
            return
        if 2 * len(at) > len(cache.held):
            self.empty_cache()
            return
        K = self.block(at)
        cache.rows[: cache.end, index_of(at)] = K[:, cache.held[: cache.end]].T
        for i, row in zip(at.tolist(), K, strict=True):
            cache.put(i, row)

    def erase(self, at: Array) -> None:  # (k,)
        """Set all entries of these samples to zero."""
        i = index_of(at)
        self.held[i] = False
        if self._rbf:
            self.x.numpy()[i] = 0.0
        else:
            index = self._index(at)
            self.x[index] = 0.0
            if self.kernel is None:
                self.x[:, index] = 0.0
        if self._whole is not None:
            index = self._index(at)
            self._whole[index] = self._whole[:, index] = 0.0
        if self._centre is not None:
            self._shifted[i], self._squares[i], self._far[i] = 0.0, 0.0, False
        cache = self.cache
        cache.rows[: cache.end, i] = 0.0
        rows = cache.row_of[i]
        rows = rows[rows >= 0]
        cache.rows[rows], cache.held[rows], cache.row_of[i] = 0.0, -1, -1

    def rows_at(self, at: Array) -> Tensor:  # (k,) -> (k, J)
        """Return a copy of the rows x in these positions."""
        return self.x[self._index(at)]

    def renewed(self, kernel: Kernel | None) -> GramRows:
        """Return an object for the same samples and another kernel, with an empty cache."""
        new = copy.copy(self)
        new.kernel, new._whole = kernel, None
        new._start_rbf()
        new.empty_cache()
        return new

    def empty_cache(self) -> None:
        """Empty the cache."""
        n = self.capacity
        # Two rows are cached regardless of ``cache_bytes``, because an event needs two.
        self.cache = RowCache(n, max(2, min(n, self.cache_bytes // (8 * max(1, n)))))

    # -- values --------------------------------------------------------------------------------------------------------

    def fill_cache(self) -> None:
        """Compute the rows of all samples, if they fit into the cache."""
        missing = np.flatnonzero(self.held & (self.cache.row_of < 0))
        if np.count_nonzero(self.held) <= len(self.cache.held):
            for part in np.array_split(missing, max(1, len(missing) // 256)):
                for i, row in zip(part.tolist(), self.block(part), strict=True):
                    self.cache.put(i, row)

    def has(self, at: Array) -> bool:  # (k,)
        """Return True if all of these rows are cached."""
        return bool((self.cache.row_of[at] >= 0).all())

    def rows(self, at: Array, columns: Array | None = None) -> Array:  # (k,), (l,) -> (k, l)
        """Return a copy of these rows, or of some columns of them. Rows that are not cached are computed."""
        row_of = self.cache.row_of[at]
        missing = row_of < 0
        if missing.all():
            return self.block(at, columns)
        out: Array = self.cache.rows[row_of]
        if columns is not None:
            out = np.take(out, columns, 1, mode="clip")  # clip: three times as fast as a plain index
        if missing.any():
            out[missing] = self.block(at[missing], columns)
        return out

    def diagonal(self, at: Array) -> Array:  # (k,) -> (k,)
        """Return K_ii of these samples."""
        if self._rbf:
            return np.ones(len(at))
        index = self._index(at)
        if self.kernel is None:
            own = self.x[index, index]
        elif not self.kernel.deep:
            own = self.kernel.diag(self.x[index]).to(torch.float64)
        else:
            own = torch.cat([self.kernel.tiled(part, part).diagonal() for part in self.x[index].split(64)])
        return _finite(own.cpu().numpy())

    def block(self, at: Array, columns: Array | None = None) -> Array:  # (k,), (l,) -> (k, l)
        """Compute K between these positions and all, or those in ``columns``."""
        if self._rbf:
            K = self._gaussian(at, columns)
        else:
            # The row of a free position belongs to no sample and must not move a kernel's centre.
            live = np.flatnonzero(self.held) if columns is None else columns
            matrix = self.x if self.kernel is None else self._whole
            if matrix is not None:
                values = matrix[self._index(at)][:, self._index(live)].cpu().numpy()
            else:
                values = self._values(at, live).cpu().numpy()
            K = _finite(values)
            if columns is None and len(live) < self.capacity:
                K = np.zeros((len(at), self.capacity))
                K[:, live] = values
        self.computed += K.size
        return K

    def _values(self, at: Array, columns: Array) -> Tensor:  # (k,), (l,) -> (k, l)
        """Compute K between these positions by the kernel, on the device."""
        assert self.kernel is not None
        return self.kernel.tiled(self.x[self._index(at)], self.x[self._index(columns)]).to(torch.float64)

    def whole(self) -> Tensor:  # -> (capacity, capacity)
        """Return K on the device, zero in free positions. K is kept, and updated when samples are added or removed."""
        if self.kernel is None:
            return self.x
        if self._whole is None:
            self._whole = torch.zeros(self.capacity, self.capacity, dtype=torch.float64, device=self.device)
            self._write_whole(np.flatnonzero(self.held))
        return self._whole

    def _write_whole(self, at: Array) -> None:  # (k,)
        """Compute the rows and columns of K of these samples."""
        assert self._whole is not None
        live = np.flatnonzero(self.held)
        index, columns, K = self._index(at), self._index(live), self._values(at, live)
        self._whole[index[:, None], columns] = K
        self._whole[columns[:, None], index] = K.T
        own = self._whole[index[:, None], index]
        self._whole[index[:, None], index] = (own + own.T) * 0.5

    def _make_rbf(self, centre: Array | None = None) -> None:
        """Make the arrays for RBF values."""
        n, J = self.x.shape
        self._shifted, self._squares, self._far = np.zeros((n, J)), np.zeros(n), np.zeros(n, dtype=bool)
        at = np.flatnonzero(self.held)
        # The median, unlike the mean, does not move towards samples far from all others.
        self._centre = np.median(self.x.numpy()[at], 0) if centre is None else centre
        self._shift(at)

    def _shift(self, at: Array) -> None:
        """Compute the rows of these samples about the centre, for RBF values."""
        assert isinstance(self.kernel, RBF)
        i = index_of(at)
        x = (self.x.numpy()[i] - self._centre) * (2.0 * self.kernel.gamma) ** 0.5
        with np.errstate(over="ignore"):
            squares = _finite(0.5 * (x * x).sum(1))
        self._shifted[i], self._squares[i], self._far[i] = x, squares, squares > FAR_HALF_SQUARE
        self._any_far = bool(self._far.any())

    def _gaussian(self, at: Array, columns: Array | None) -> Array:
        """Compute exp(-|p - q|^2 / 2) from shifted and scaled rows p and q, or exp(-gamma |x - z|^2) for far samples."""
        assert isinstance(self.kernel, RBF)
        if self._centre is None:
            self._make_rbf()
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
            # Differences to far samples are computed 2 MiB at a time, which fit the processor's cache.
            step = max(1, 2**18 // max(1, len(far) * x.shape[1]))
            for k in range(0, len(at) if len(far) else 0, step):
                K[k : k + step, far] = np.exp(-gamma * ((x[k : k + step, None] - z[far]) ** 2).sum(2))
        return K

    def factors(self, at: Array) -> tuple[Tensor, Tensor] | None:  # (k,) -> (k, J + 2), (J + 2, k)
        """Return float32 factors whose product is ln K between these samples. None if float32 is too coarse, or not an RBF."""
        if not self._rbf:
            return None
        if self._centre is None:
            self._make_rbf()
        # Up to gamma |x - centre|^2 = 2^12, single precision gives RBF values to three digits (2^12 times 2^-24 is
        # about 2e-4).
        if float(self._squares[at].max(initial=0.0)) > 2.0**12:
            return None
        p, own, one = self._shifted[at], -self._squares[at][:, None], np.ones((len(at), 1))
        left, right = np.concatenate([p, own, one], 1), np.concatenate([p, one, own], 1)
        return torch.from_numpy(left).float(), torch.from_numpy(right).float().T.contiguous()


def _finite(values: Array) -> Array:
    """Return the values. Raises ValueError if any is NaN or infinite."""
    with np.errstate(invalid="ignore", over="ignore"):
        finite = np.isfinite(values.sum()) or np.isfinite(values).all()
    if not finite:
        raise ValueError(
            f"the kernel gives {int((~np.isfinite(values)).sum())} NaN or infinite value(s) for the samples given: "
            "scale the features, or use another kernel"
        )
    return values
