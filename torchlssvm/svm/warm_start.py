"""Coefficients near the optimum for many samples at once, by trades between two coefficients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from torchlssvm.functional.modes import interrupt
from torchlssvm.svm.kernel_rows import KernelRows
from torchlssvm.svm.samples import Array, Samples

MAX_SAMPLES_WHOLE_MATRIX = 4096
"""Up to this many samples, the whole kernel matrix is computed beforehand: 128 MiB."""


def approximate_optimum(
    samples: Samples,
    rows: KernelRows,
    alpha: Array,
    violation: float = 1e-3,
    trades: int = 100,
    report: Callable[[float], None] | None = None,
) -> tuple[Array, bool]:  # (capacity,) -> (capacity,)
    """Return alpha in its box with y^T alpha = 0, near the optimum, from another such alpha; False if trades ran out.

    violation: the violation of (2) that the result may have, in units of g, if C K_ii is 1 or more; SVC stops at 1e-3.
    trades: the number of trades, for each sample, after which the approximation ends.
    report: called from time to time with the share of the work that is done, between 0 and 1.
    """
    s = samples
    at = np.flatnonzero((s.ids >= 0) & (s.u > 0))
    K, y, u, near, left = TradedRows(rows, at), s.y[at], s.u[at], alpha[at], trades * len(at)
    F, v = y.copy(), y * near
    for part in np.array_split(np.flatnonzero(v), 1 + np.count_nonzero(v) // 256):
        block = K.kernel(part)
        F -= v[part].astype(block.dtype) @ block
    # If the bounds are small, f differs little between samples.
    tolerance = violation * min(1.0, float((s.root**2).max() * s.u.max()))
    first, gap = 0.0, np.inf
    while gap > tolerance and left > 0:
        if interrupt.arrived:
            interrupt.hand_over()
        made = min(left, 256)  # trades between two reports
        gap = trade(K.row, y, u, s.root[at] ** 2, near, F, tolerance, made)
        left -= made
        if report is not None and gap > tolerance:
            first = max(first, gap)
            report(float(np.log(first / gap) / np.log(first / tolerance)))
    out = np.zeros(s.capacity)
    out[at] = near
    return balanced(out, s.u, s.y), gap <= tolerance


class TradedRows:
    """Rows of K among some samples: the whole matrix, or the most recently used rows in single precision."""

    def __init__(self, rows: KernelRows, at: Array):  # (n,) positions
        self.source, self.at, n, places = rows, at, len(at), rows.in_gram(at)
        self.factors = None if rows.gram.has(places) else rows.gram.factors(places)
        self.row_of, count = np.full(n, -1), min(n, max(2, rows.gram.cache_bytes // (4 * n)))
        if n <= MAX_SAMPLES_WHOLE_MATRIX:
            self.row_of, count = np.arange(n), n
            self.rows = self.kernel(self.row_of).astype(np.float64, copy=False)
        else:
            self.rows = np.empty((count, n), dtype=np.float32)
        self.held, self.used, self.clock = np.full(count, -1), np.zeros(count, dtype=np.int64), 0

    def kernel(self, these: Array) -> Array:  # (k,) -> (k, n)
        """Compute K between these samples and all, in single precision if that is enough."""
        if self.factors is None:
            return self.source.values(self.at[these], self.at)
        left, right = self.factors
        return (left[these] @ right).clamp_(max=0.0).exp_().numpy()

    def row(self, i: int) -> Array:  # -> (n,)
        """Return row i, which is computed unless it is kept."""
        k = self.row_of[i]
        if k < 0:
            k = self.used.argmin()
            if self.held[k] >= 0:
                self.row_of[self.held[k]] = -1
            self.rows[k] = self.kernel(np.array([i]))[0]
            self.row_of[i], self.held[k] = k, i
        self.clock += 1
        self.used[k] = self.clock
        return self.rows[k]


def trade(
    row: Callable[[int], Array],  # -> (n,) of K
    y: Array,  # (n,) -1, +1
    u: Array,  # (n,) upper bounds
    diagonal: Array,  # (n,) K_ii
    alpha: Array,  # (n,) in its box
    F: Array,  # (n,) y - K (y alpha), with the terms of samples outside
    tolerance: float,
    max_trades: int,
) -> float:
    """Sequential minimal optimization (Platt; second-order selection of Fan, Chen and Lin, JMLR 2005), in place.

    Let F_i be the value of b that would put sample i on its margin. At the optimum, no sample whose y alpha may rise has a
    larger F than a sample whose y alpha may fall. As long as some pair violates this by more than ``tolerance``, two samples
    trade: i, which has the largest F, and j, which has the largest gain (F_i - F_j)^2 / (K_ii + K_jj - 2 K_ij). In a trade,
    y_i alpha_i rises and y_j alpha_j falls by the same amount, to the optimum along that line or to the first bound. Returns
    the largest violation before the last trade.

    Example:
        >>> x, y, alpha = np.array([-1.0, 1.0]), np.array([-1.0, 1.0]), np.zeros(2)
        >>> trade(np.outer(x, x).__getitem__, y, np.full(2, 10.0), x * x, alpha, y.copy(), 1e-3, 100), alpha.tolist()
        (0.0, [0.5, 0.5])
    """
    # 0 where y alpha may rise (fall), infinite where it may not
    rise = np.where(np.where(y > 0, alpha < u, alpha > 0), 0.0, -np.inf)
    fall = np.where(np.where(y > 0, alpha > 0, alpha < u), 0.0, np.inf)
    for _ in range(max_trades):
        i = (F + rise).argmax()
        lead = np.maximum(F[i] - (F + fall), 0.0)  # by how much i is ahead
        gap = float(lead.max()) if rise[i] == 0 else 0.0
        if not gap > tolerance:
            return gap
        curve = diagonal[i] + diagonal
        K_i = row(i)
        curve = np.maximum(curve - 2.0 * K_i, 1e-12 * curve + 1e-300)
        j = (lead * lead / curve).argmax()
        room_i = u[i] - alpha[i] if y[i] > 0 else alpha[i]
        room_j = alpha[j] if y[j] > 0 else u[j] - alpha[j]
        amount = min(lead[j] / curve[j], min(room_i, room_j))
        for k, change in ((i, y[i] * amount), (j, -y[j] * amount)):
            value = alpha[k] + change
            if value < 1e-12 * u[k]:
                value = 0.0
            elif value > (1.0 - 1e-12) * u[k]:
                value = u[k]
            alpha[k] = value
            rise[k] = 0.0 if (value < u[k] if y[k] > 0 else value > 0) else -np.inf
            fall[k] = 0.0 if (value > 0 if y[k] > 0 else value < u[k]) else np.inf
        F -= amount * (K_i - row(j))
    return gap


def balanced(alpha: Array, u: Array, y: Array) -> Array:  # (n,) x 3 -> (n,)
    """Return alpha in its box with y^T alpha = 0. Coefficients of the heavier class are scaled down, the free ones first."""
    excess = float(y @ alpha)
    heavy = y * excess > 0
    for giving in (heavy & (alpha < u), heavy):
        total, excess = float(alpha[giving].sum()), abs(float(y @ alpha))
        if excess <= 1e-15 * float(alpha.sum()):
            break  # coefficients at their bound stay there
        if total > 0:
            alpha = np.where(giving, alpha * max(1.0 - excess / total, 0.0), alpha)
    return alpha
