"""Coefficients near the optimum for many samples at once, by trades between two coefficients in working sets.

The solver climbs a ladder from few samples to all. A machine that learns every second sample with 2 C is, up to chance, the
machine that learns all samples with C. So each level starts from the solution of the level below, and most samples begin at the
bound where they end.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from torchlssvm.functional.modes import interrupt
from torchlssvm.svm.kernel_rows import KernelRows
from torchlssvm.svm.samples import Array, Samples

MAX_SAMPLES_WHOLE_MATRIX = 1024
"""Up to this many samples, the whole kernel matrix is computed: 8 MiB."""
WORKING_SET_SIZE = 256
"""Samples among which trades are made at a time. One matrix product computes their kernel rows."""


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
    # If the bounds are small, f differs little between samples.
    tolerance = violation * min(1.0, float((s.root**2).max() * s.u.max()))
    if alpha.any() or len(at) <= MAX_SAMPLES_WHOLE_MATRIX:
        top = Level(s, rows, at, s.u[at], trades)
        start, F = alpha[at], top.offsets(alpha[at])
    else:
        order = np.random.default_rng(0).permutation(at)
        sizes = [len(at)]
        while sizes[-1] > MAX_SAMPLES_WHOLE_MATRIX:
            sizes.append(sizes[-1] // 2)
        start, F, work = np.zeros(0), np.zeros(0), sum(size**2 for size in sizes)
        for size in reversed(sizes):
            at = order[:size]
            top = Level(s, rows, at, s.u[at] * (len(order) / size), trades)
            start, F = top.next_start(start, F)
            if report is not None:
                report(sum(below**2 for below in sizes if below < size) / work)
            if size < len(order):
                # The violation on a lower level of the ladder, as a multiple of that at the top: its
                # solution is only a guess.
                start, F = top.solve(start, F, 30.0 * tolerance)
    start, _ = top.solve(start, F, tolerance, report)
    out = np.zeros(s.capacity)
    out[at] = start
    return balanced(out, s.u, s.y), top.trades_left > 0


class Level:
    """Some of the samples, with their own bounds u. F_i = y_i - sum_j K_ij y_j alpha_j is b if sample i is on its margin."""

    def __init__(self, samples: Samples, rows: KernelRows, at: Array, u: Array, trades: int):  # (n,) positions, (n,)
        self.samples, self.rows, self.at, self.u = samples, rows, at, u
        self.y, self.diagonal = samples.y[at], samples.root[at] ** 2
        places = rows.in_gram(at)
        self.factors = None if rows.gram.has(places) else rows.gram.factors(places)
        self.trades_left = trades * len(at)

    def kernel(self, these: Array, columns: Array | None = None) -> Array:  # (k,), (l,) -> (k, l)
        """Compute K between these samples and all of the level, or ``columns``, in single precision if that is enough."""
        if self.factors is not None:
            left, right = self.factors
            K = left[these] @ (right if columns is None else right[:, columns])
            values: Array = K.clamp_(max=0.0).exp_().numpy()
            return values
        return self.rows.values(self.at[these], self.at if columns is None else self.at[columns])

    def offsets(self, alpha: Array) -> Array:  # (n,) -> (n,)
        """Compute F of these coefficients."""
        return self.move(self.y.copy(), alpha)

    def move(self, F: Array, change: Array) -> Array:  # (n,), (n,) -> (n,)
        """Update F in place for a change of the coefficients, and return it."""
        changed = np.flatnonzero(change)
        for k in range(0, len(changed), WORKING_SET_SIZE):
            part = changed[k : k + WORKING_SET_SIZE]
            K = self.kernel(part)
            F -= (self.y[part] * change[part]).astype(K.dtype) @ K
        return F

    def next_start(self, alpha: Array, F: Array) -> tuple[Array, Array]:  # (k,), (k,) -> (n,), (n,)
        """Return coefficients and F to start from, given those of a level with the first k samples of this level."""
        n, k = len(self.at), len(alpha)
        start = np.zeros(n)
        if not alpha.any():
            return start, self.y.copy()
        u = self.u[:k] * (n / k)
        free = (alpha > 0) & (alpha < u)
        b = float(np.median(F[free])) if free.any() else 0.5 * float(F.max() + F.min())
        start[:k] = alpha
        g = self.y * (self.y - self.offsets(start) + b) - 1.0
        start = np.where(g < 0, self.u, 0.0)
        start[:k] = np.minimum(alpha * (k / n), self.u[:k])
        start = balanced(start, self.u, self.y)
        F = self.offsets(start)
        # (Q alpha)_i = 1 - y_i F_i: where 1/2 alpha^T Q alpha - sum alpha is least on the way from 0 to alpha
        share = float(start.sum()) / max(float(start @ (1.0 - self.y * F)), 1e-300)
        # Share of the way from 0 to a start at which the objective is least. Below a half the start has overshot: 0
        # is used.
        return (start, F) if share > 0.5 else (np.zeros(n), self.y.copy())

    def solve(
        self, alpha: Array, F: Array, tolerance: float, report: Callable[[float], None] | None = None
    ) -> tuple[Array, Array]:  # (n,), (n,) -> (n,), (n,)
        """Trade in one working set after another until the largest violation is ``tolerance``; returns alpha and F.

        Once most samples are at a bound and far from leaving it, the other samples are solved separately, with shorter rows.
        report: called with the completed share of the whole ladder, of which this level is the last.
        """
        n, y, u = len(self.at), self.y, self.u
        if n <= MAX_SAMPLES_WHOLE_MATRIX:
            every = np.arange(n)
            K = self.kernel(every, every).astype(np.float64)
            self.trades_left -= trade(K, y, u, self.diagonal, alpha, F, tolerance, self.trades_left)
            return alpha, F
        kept: KeptRows | None = None
        first = done = 0.0
        while self.trades_left > 0:
            if interrupt.arrived:
                interrupt.hand_over()
            rise = np.where(np.where(y > 0, alpha < u, alpha > 0), F, -np.inf)
            fall = np.where(np.where(y > 0, alpha > 0, alpha < u), F, np.inf)
            high, low = float(rise.max()), float(fall.min())
            gap = high - low
            if not gap > tolerance:
                break
            first = max(first, gap)
            if report is not None:
                done = max(done, 0.25 + 0.75 * float(np.log(first / gap) / np.log(first / tolerance)))
                report(done)
            near = np.flatnonzero((rise > low - gap) | (fall < high + gap))
            if len(near) < n // 2:
                kept = None  # its memory is for those rows
                some = Level(self.samples, self.rows, self.at[near], u[near], 0)
                some.trades_left = self.trades_left
                before = alpha.copy()
                # The violation to which samples that may trade are solved on their own, as a share of that
                # of all: others move meanwhile.
                alpha[near], _ = some.solve(alpha[near], F[near], max(tolerance, 0.1 * gap))
                self.trades_left = some.trades_left - 1
                self.move(F, alpha - before)
                continue
            kept = kept or KeptRows(n, self.rows.gram.cache_bytes)
            W = np.union1d(_largest(rise, low), _largest(-fall, -high))
            at = kept.find(W, self.kernel)
            K = self.kernel(W, W).astype(np.float64)
            a, Fw = alpha[W], F[W]
            self.trades_left -= 1 + trade(
                K,
                y[W],
                u[W],
                self.diagonal[W],
                a,
                Fw,
                # The violation at which a working set is left, as a share of that of all samples.
                max(0.5 * tolerance, 0.02 * gap),
                self.trades_left,
            )
            change = (a - alpha[W]) * y[W]
            alpha[W] = a
            subtract(F, kept.rows, at, change)
        return alpha, F


def _largest(values: Array, least: float) -> Array:  # (n,) -> (k,)
    """Return the indices of the largest values above ``least``: half a working set of them at most."""
    above, k = np.flatnonzero(values > least), WORKING_SET_SIZE // 2
    return above if len(above) <= k else above[np.argpartition(-values[above], k)[:k]]


class KeptRows:
    """Kernel rows of one level in single precision. The most recently used rows are kept."""

    def __init__(self, n: int, cache_bytes: int):
        count = min(n, max(WORKING_SET_SIZE, cache_bytes // (4 * n)))
        self.rows = np.empty((count, n), dtype=np.float32)
        self.row_of, self.held = np.full(n, -1), np.full(count, -1)
        self.used, self.clock = np.zeros(count, dtype=np.int64), 0

    def find(self, W: Array, kernel: Callable[[Array], Array]) -> Array:  # (k,) -> (k,)
        """Return the numbers of the rows of these samples, and compute the rows that are not kept."""
        self.clock += 1
        at = self.row_of[W]
        self.used[at[at >= 0]] = self.clock
        missing = W[at < 0]
        if len(missing):
            free = np.argpartition(self.used, len(missing) - 1)[: len(missing)]
            old = self.held[free]
            self.row_of[old[old >= 0]] = -1
            self.rows[free] = kernel(missing)
            self.row_of[missing], self.held[free], self.used[free] = free, missing, self.clock
        found: Array = self.row_of[W]
        return found


def subtract(F: Array, rows: Array, at: Array, change: Array) -> None:  # (n,), (r, n), (k,), (k,)
    """F -= sum_k change_k K_k."""
    for k in range(len(at)):
        if change[k] != 0.0:
            F -= change[k] * rows[at[k]]


def trade(
    K: Array,  # (n, n)
    y: Array,  # (n,) -1, +1
    u: Array,  # (n,) upper bounds
    diagonal: Array,  # (n,) K_ii
    alpha: Array,  # (n,) in its box
    F: Array,  # (n,) y - K (y alpha), with the terms of samples outside
    tolerance: float,
    max_trades: int,
) -> int:
    """Sequential minimal optimization (Platt; second-order selection of Fan, Chen and Lin, JMLR 2005), in place.

    F_i is the value of b that would put sample i on its margin. At the optimum, no sample whose y alpha may rise has a larger F
    than a sample whose y alpha may fall. While some pair violates this by more than ``tolerance``, i with the largest F and j
    with the largest gain (F_i - F_j)^2 / (K_ii + K_jj - 2 K_ij) trade: y_i alpha_i rises and y_j alpha_j falls by the same
    amount, to the optimum along that line or to the first bound. Returns the number of trades.

    Example:
        >>> x, y, alpha = np.array([-1.0, 1.0]), np.array([-1.0, 1.0]), np.zeros(2)
        >>> trade(np.outer(x, x), y, np.full(2, 10.0), x * x, alpha, y.copy(), 1e-3, 100), alpha.tolist()
        (1, [0.5, 0.5])
    """
    # 0 where y alpha may rise (fall), infinite where it may not
    rise = np.where(np.where(y > 0, alpha < u, alpha > 0), 0.0, -np.inf)
    fall = np.where(np.where(y > 0, alpha > 0, alpha < u), 0.0, np.inf)
    for step in range(max_trades):
        i = (F + rise).argmax()
        lead = np.maximum(F[i] - (F + fall), 0.0)  # by how much i is ahead
        if rise[i] < 0 or not lead.max() > tolerance:
            return step
        curve = diagonal[i] + diagonal
        curve = np.maximum(curve - 2.0 * K[i], 1e-12 * curve + 1e-300)
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
        F -= amount * (K[i] - K[j])
    return max_trades


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
