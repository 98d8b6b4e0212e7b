r"""Leave-one-out by unlearning every support vector from one tableau, and by the span rule.

Let P be b and the margin vectors S, M = [[0, y^T], [y, Q]] over b and all samples, R = (M_PP)^-1 (7). Row k of the tableau T
holds the effect of a unit change of k, while the coefficients a of P move so that g_S = 0 and (3) still hold:

    k outside P: alpha_k grows by 1.   T_kP = beta_k = -R M_Pk (10),  T_ki = gamma_ik = M_ik + M_iP beta_k (12)
    k inside P:  g_k grows by 1.       T_kP = R_Pk,                   T_ki = M_iP R_Pk

Let x hold a inside P and g outside. For other sets, let D be the samples that enter or leave S. Their changes t follow from one
small system: sum_k t_k T_kj takes x_j to the bound of j if j leaves S, and to g_j = 0 if j enters. Then x + t T is the solution
for these sets. If this puts samples on the wrong side, they change sets too, until no sample is on the wrong side. To save
time, all samples are left out side by side, and only the support vectors and the nearest reserve vectors take part. At the
end, (2) and (3) are checked for every sample.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchlssvm.errors import ConvergenceError, NumericalWarning
from torchlssvm.functional.modes import interrupt
from torchlssvm.functional.svm_path import AT_BOUND_SHARE, EPS, MAX_ROUNDING_UNITS
from torchlssvm.svm import device_paths
from torchlssvm.svm.samples import NO_POSITIONS, Array
from torchlssvm.svm.solver import PathSolver

MIN_RESERVE_TRACKED, RESERVE_PER_TRACKED = 64, 16
"""Reserve vectors that take part: the nearest sixteenth, and at least 64. At the end, all are checked."""
MAX_ROUNDS, MAX_EXCHANGED = 12, 64
"""Rounds, and samples that may enter or leave S, after which a sample is left to the solver. Three to six rounds are usual."""


class LeaveOneOut(NamedTuple):
    """The margin of each sample by the machine without it, in the order of ``ids``."""

    ids: Tensor  # (n,)
    margin: Tensor  # (n,) g_c = y_c f(x_c) - 1 without c; with ``early_exit``, any value below -1 for an error
    error: Tensor  # (n,) whether c is misclassified without it: g_c < -1
    rate: float  # the share of errors; margins that are NaN (no solution found) do not count


def exact(solver: PathSolver, stop_below: float) -> Array:  # -> (capacity,)
    """Compute g_c of every sample without itself, or g_c if that is below ``stop_below``. If unsolved: NaN and a warning."""
    s = solver.samples
    out = np.where(s.side == 0, 0.0, s.g)
    support = np.flatnonzero((s.alpha > 0) & (out >= stop_below))
    found = np.full(len(support), np.nan)
    if device_paths.used_for(solver.rows):
        gone = support[:, None] == np.arange(s.capacity)
        found = device_paths.margins_without(solver.rows, solver.margin, gone)[gone]
    elif len(solver.margin) > 2:
        found = Tableau(solver).margins(support)
    for k in np.flatnonzero(np.isnan(found)).tolist():
        if interrupt.arrived:
            interrupt.hand_over()
        with contextlib.suppress(ConvergenceError):
            found[k] = margins_by_solver(solver, support[k : k + 1])[0]
    if (lost := np.isnan(found)).any():
        warnings.warn(
            f"{int(lost.sum())} sample(s) have no leave-one-out margin, the first is {int(s.ids[support[lost][0]])}: without "
            "it no solution could be certified. Its margin is NaN, and the error rate does not count it",
            NumericalWarning,
            stacklevel=4,
        )
    out[support] = found
    return out


def margins_without(solver: PathSolver, gone: Array) -> Array:  # (T, capacity) bool -> (capacity,)
    """Compute g of the samples of each row by the machine without them. Each sample is in one row."""
    out = np.full(solver.samples.capacity, np.nan)
    if device_paths.used_for(solver.rows):
        row, at = gone.nonzero()
        out[at] = device_paths.margins_without(solver.rows, solver.margin, gone)[row, at]
    for some in gone:
        if np.isnan(out[some]).any():
            out[some] = margins_by_solver(solver, np.flatnonzero(some))
    return out


def margins_by_solver(solver: PathSolver, gone: Array) -> Array:  # (k,) -> (k,)
    """Compute g of samples by the solver without them. The solver is unchanged afterwards."""
    with solver.trial():
        solver.solve_change(NO_POSITIONS, gone)
        margin = solver.margin
        return solver.samples.rest[gone] + margin.a @ margin.QS[:, gone] - 1.0


def squared_distances(solver: PathSolver) -> Array:  # -> (capacity,)
    """Return gamma_c, the squared distance in feature space of each sample to the span of the (other) margin vectors (21)."""
    s, m = solver.samples, solver.margin
    if not len(m):
        return np.full(s.capacity, np.inf)  # alpha cannot move, as no margin vector balances it
    H = m.QS * m.used[:, None]  # (slots, capacity) [y_c; Q_Sc] of each sample
    gamma = s.root**2 - ((m.R @ H) * H).sum(0)
    slots = m.slots()
    own = m.R[slots, slots]
    gamma[m.at[slots]] = 1.0 / np.where(own > 0, own, np.nan) if len(slots) > 1 else np.inf
    return np.maximum(gamma, 0.0)


def span_rule(solver: PathSolver) -> Array:  # -> (capacity,)
    """Compute g_c - alpha_c gamma_c; -infinity if alpha_c > 0 and no margin vector can balance it."""
    s = solver.samples
    distance = squared_distances(solver)
    shift = np.where(s.alpha > 0, s.alpha, 1.0) * distance
    return np.where(s.side == 0, 0.0, s.g) - np.where(s.alpha > 0, shift, 0.0)


class Tableau:
    """T and x of the machine. Index 0 is b, then come the m - 1 margin vectors, then the other samples that take part."""

    def __init__(self, solver: PathSolver):
        self.samples, self.rows = solver.samples, solver.rows
        s, margin = solver.samples, solver.margin
        used = np.concatenate([[0], margin.slots()])
        self.m = len(used)
        self.T = self.R = margin.R[np.ix_(used, used)]
        self.x, self.QS = margin.a[used], margin.QS[used]
        self.X = self.R[:, :0]  # (m, N - m) R M_PO of the others O
        self.tracked = margin.at[used[1:]]  # (N - 1,) position of index 1..
        self.index = np.full(s.capacity, -1, dtype=np.int64)  # of each position
        self.index[self.tracked] = np.arange(1, self.m)
        far = np.flatnonzero((self.index < 0) & (s.ids >= 0))
        slack = np.where(s.side[far] > 0, s.g[far], -1.0)
        error = int((slack < 0).sum())
        near = error + max(MIN_RESERVE_TRACKED, (len(slack) - error) // RESERVE_PER_TRACKED)
        self.track(far[np.argsort(slack)[:near]])

    def track(self, new: Array) -> None:  # (k,) positions
        """Let more samples take part. They get rows of their own, and entries in every row."""
        s, m, N, k = self.samples, self.m, len(self.x), np.arange(len(new))
        Z = self.QS[:, new]
        X = self.R @ Z
        self.X, self.tracked = np.concatenate([self.X, X], 1), np.concatenate([self.tracked, new])
        self.index[new] = N + k
        gamma = self.rows.block(new, self.tracked[m - 1 :]) - Z.T @ self.X
        T = np.empty((N + len(new), N + len(new)))
        T[:N, :N], T[:m, N:], T[N:, :m] = self.T, X, -X.T
        T[N:, m:], T[m:N, N:] = gamma, gamma[:, : N - m].T
        self.T, self.x = T, np.concatenate([self.x, s.g[new]])
        self.side, self.y, self.root = (np.concatenate([[0.0], v[self.tracked]]) for v in (s.side, s.y, s.root))
        self.u = np.concatenate([[np.inf], s.u[self.tracked]])
        self.alpha = np.where(self.side == 0, self.x, np.concatenate([[0.0], s.alpha[self.tracked]]))

    @np.errstate(all="ignore")  # what overflows does not pass the checks at the end
    def without(self, c: Array) -> tuple[Array, Array, Array]:  # (B,) -> (B, N), (B, N), (B,)
        """Unlearn each sample c alone: return the moves of the coefficients, the sets, and whether these were found."""
        number, side = np.arange(len(c)), np.repeat(self.side[None], len(c), 0)
        side[number, c] = 1.0
        moved, sets, ended = np.zeros(side.shape), side.copy(), np.zeros(len(c), dtype=bool)
        for _ in range(MAX_ROUNDS):
            bound = np.where(side < 0, self.u, 0.0)
            known = np.where((self.side == 0) | (side == 0), 0.0, bound - self.alpha)
            t, x = self.respond(side, self.x, known, np.where(self.side == 0, bound, 0.0))
            a = np.where(side != 0, bound, np.where(self.side == 0, x, self.alpha + t))
            g: Array = np.where(self.side == 0, t, x)
            b, size = a[:, :1], (np.abs(a) @ self.root)[:, None]
            wrong = side * g < -64.0 * EPS * (np.abs(g + 1.0 - b * self.y) + size * self.root + np.abs(b) + 1.0)
            new = np.where(side == 0, (a <= 0) * 1.0 - (a >= self.u) * 1.0, np.where(wrong, 0.0, side))
            new[:, 0], new[np.arange(len(c)), c] = 0.0, 1.0
            same = (new == side).all(1)
            at = number[same]
            ended[at], moved[at], sets[at] = True, a[same] - self.alpha, side[same]
            go_on = ~same & (((new == 0) != (self.side == 0)).sum(1) <= MAX_EXCHANGED)
            if not go_on.any():
                break
            number, c, side = number[go_on], c[go_on], new[go_on]
        return moved, sets, ended

    def respond(self, side: Array, x: Array, t: Array, target: Array) -> tuple[Array, Array]:  # (B, N) each
        """Return the changes t, and x after them, if the sets are these: x_D reaches its target by changes of D."""
        used = np.flatnonzero(t.any(0))
        x = t[:, used] @ self.T[used] + x
        row, j = ((self.side == 0) != (side == 0)).nonzero()
        count = np.bincount(row, minlength=len(side))
        at = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        shape = len(side), int(count.max(initial=0))
        D, lack = np.zeros(shape, dtype=np.int64), np.zeros((*shape, 1))
        D[row, at], lack[row, at, 0] = j, target[row, j] - x[row, j]
        A = self.T[D[:, None, :], D[:, :, None]]
        b, k = (np.arange(D.shape[1]) >= count[:, None]).nonzero()
        A[b, k] = A[b, :, k] = 0.0
        A[b, k, k] = 1.0
        change = np.zeros(side.shape)
        solved: Tensor = torch.linalg.solve_ex(torch.from_numpy(A), torch.from_numpy(lack))[0]
        change[row, j] = solved.numpy()[row, at, 0]
        return t + change, x + change @ self.T

    def margins(self, positions: Array) -> Array:  # (B,) -> (B,)
        """Return g_c of each sample c by the machine without it; NaN if the sample is left to the solver."""
        index, result, left = self.index[positions], np.full(len(positions), np.nan), np.arange(len(positions))
        for _ in range(4):  # with more tracked samples each time; one or two rounds are usual
            found = []
            # 256 samples side by side are enough for array operations, and few enough for their arrays to stay in the cache.
            for first in range(0, len(left), 256):
                if interrupt.arrived:
                    interrupt.hand_over()
                part = left[first : first + 256]
                moved, sets, ended = self.without(index[part])
                part = part[ended]
                result[part], more = self._ends(index[part], moved[ended], sets[ended])
                found.append(more)
            left = left[np.isnan(result[left])]
            more = np.unique(np.concatenate(found)) if found else NO_POSITIONS
            if not len(more) or not len(left):
                break
            self.track(more)
        return result

    @np.errstate(all="ignore")
    def _ends(self, c: Array, moved: Array, side: Array) -> tuple[Array, Array]:  # (B,), (B, N), (B, N) -> (B,), (k,)
        """Return g_c at the ends, NaN if (2) or (3) do not hold, and the positions of untracked samples on the wrong side.

        The residuals r of (3) and g_S should be 0; g_c is corrected by the effect of making them 0.
        """
        s, inside = self.samples, self.side == 0
        B, b = len(c), self.x[0] + moved[:, :1]
        margins = self._margins(moved)
        g = np.concatenate([moved @ self.y[:, None], margins(self.tracked, np.float64)], 1)
        wrong, found = np.zeros(B, dtype=bool), [NO_POSITIONS]
        size, shift = (np.abs(moved) @ self.root).max(initial=0.0), np.abs(moved[:, 0]).max(initial=0.0)
        untracked = np.flatnonzero((self.index < 0) & (s.ids >= 0))
        for at in np.split(untracked, range(4096, len(untracked), 4096)):  # which bounds the memory
            # The distance of 1.0 to the next float32: one for each term of g bounds its error in single precision.
            error = 2.0**-23 * len(self.x) * (size * s.root[at] + shift)
            at = at[~(margins(at, np.float32).min(0, initial=np.inf) >= error)]
            part = margins(at, np.float64)
            bad = part < -MAX_ROUNDING_UNITS * EPS * (np.abs(part + 1.0 - b * s.y[at]) + np.abs(b) + 1.0)
            wrong |= bad.any(1)
            found.append(at[bad.any(0)])
        r = np.where(side == 0, g, 0.0)
        change, x = self.respond(side, 0.0, np.where(inside, -r, 0.0), np.where(inside, 0.0, -r))
        out = (g + np.where(inside, change, x))[np.arange(B), c]
        r[:, 0] /= np.maximum(np.abs(moved[:, 1:]).max(1, initial=0.0), 1e-300)
        loose = np.abs(r).max(1, initial=0.0)
        wrong |= ~(loose <= 1e-8)  # beyond, one correction does not mend it
        unit = EPS * (np.abs(g + 1.0 - b * self.y) + np.abs(b) + 1.0)
        off = (-side * g > MAX_ROUNDING_UNITS * unit + 16.0 * loose[:, None]) & (side != 0)
        off[np.arange(B), c] = False
        # If every margin vector is at a bound, b has an interval, and the solver uses its middle.
        a = moved + self.alpha
        inner = (np.minimum(a, self.u - a) > AT_BOUND_SHARE * self.u) & (side == 0)
        wrong |= off.any(1) | ~inner[:, 1:].any(1)
        return np.where(wrong, np.nan, out), np.concatenate(found)

    def _margins(self, moved: Array) -> Callable[[Array, type], Array]:  # (B, N); (k,) -> (B, k)
        """Return a function that computes g of samples in given positions after these moves, in a given precision."""
        s, m = self.samples, self.m
        used = np.flatnonzero(moved[:, m:].any(0)) + m
        others = self.tracked[used - 1]

        def margins(at: Array, precision: type) -> Array:
            g: Array = moved[:, :m].astype(precision) @ self.QS[:, at].astype(precision)
            g += np.where(s.side[at] == 0, 0.0, s.g[at]).astype(precision)
            if len(used):
                g += moved[:, used].astype(precision) @ self.rows.block(others, at).astype(precision)
            return g

        return margins
