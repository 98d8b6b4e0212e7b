r"""Leave-one-out: every support vector unlearned, from one tableau; the span rule.

Let P be b and the margin vectors S, M = [[0, y^T], [y, Q]] over b and all samples, R = (M_PP)^-1 (7). *Column* k of the tableau
holds the effect of a unit of k, a in P being moved so that g_S = 0 and (3) still hold:

    k outside P: alpha_k grows by 1.   u_k[P] = beta_k = -R M_Pk (10),  u_k[i] = gamma_ik = M_ik + M_iP beta_k (12)
    k inside P:  g_k grows by 1.       u_k[P] = R_Pk,                   u_k[i] = M_iP R_Pk

An event exchanges the two for one k: (13) where it enters S, (14) where it leaves. Both are the same *pivot* on p = u_k[k]:

    w = u_k with w[k] = 1;    u_j <- u_j with u_j[k] = 0, minus w u_j[k] / p;    u_k <- w / p

So a path needs no matrix of its own. It keeps (k, p, w) of its events. A column of its tableau is a column of the common one,
pivoted once for each event. Paths track the support vectors and the nearest reserve vectors only. Where a path ends, every
sample is checked: if (2) and (3) hold for all, the end is the solution.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from torch import Tensor

from torchlssvm.errors import ConvergenceError, NumericalWarning
from torchlssvm.functional.modes import interrupt
from torchlssvm.svm import steps
from torchlssvm.svm.samples import Array
from torchlssvm.svm.solver import NO_POSITIONS, PathSolver
from torchlssvm.svm.steps import AT_BOUND_SHARE, EPS, MAX_ROUNDING_UNITS, PathStart

MIN_RESERVE_TRACKED, RESERVE_PER_TRACKED = 64, 16
"""Reserve vectors that paths track: the nearest sixteenth, and not fewer than 64. Where a path ends, all are checked."""
MAX_PATH_EVENTS = 64
"""Events of a path before its sample is left to the solver: the cost of a column grows with them."""
PATH_VALUES_PER_BLOCK = 2**22
"""Values in an array (paths, samples tracked): 32 MiB."""
MAX_TRACKING_ROUNDS = 4
"""Rounds in which paths are repeated with more samples tracked; one or two are usual."""
MAX_END_RESIDUAL = 1e-8
"""Residual of g_S and (3) at the end of a path up to which one correction mends it; beyond, the solver takes over."""
SAMPLES_PER_CHECK = 4096
"""Untracked samples checked at a time, which bounds the memory for their kernel values."""
FLOAT32_EPS = 2.0**-23
"""The distance of 1.0 to the next float32: one for each term of g bounds its error in single precision."""


class LeaveOneOut(NamedTuple):
    """The margin of each sample by the machine without it, in the order of ``ids``."""

    ids: Tensor  # (n,)
    margin: Tensor  # (n,) g_c = y_c f(x_c) - 1 without c; where a path ended early, a value below -1 that it had passed
    error: Tensor  # (n,) whether c is misclassified without it: g_c < -1
    rate: float  # the share of errors

    @classmethod
    def from_margins(cls, ids: Tensor, margin: Tensor) -> LeaveOneOut:
        """Count the errors among these margins; NaN, where there is no answer, is not counted."""
        error = margin < -1.0
        known = ~margin.isnan()
        return cls(ids, margin, error, float(error[known].double().mean()) if bool(known.any()) else float("nan"))


def exact(solver: PathSolver, stop_below: float, batched: bool) -> Array:  # -> (capacity,)
    """Compute g_c of every sample without itself. Paths end early below ``stop_below``. NaN, with a warning, is no answer."""
    s = solver.samples
    out = np.where(s.side == 0, 0.0, s.g)
    support = np.flatnonzero((s.alpha > 0) & (out >= stop_below))
    found = np.full(len(support), np.nan)
    if batched and len(solver.margin) > 2:
        found = Paths(solver, support, stop_below).run()
    for k in np.flatnonzero(np.isnan(found)).tolist():
        if interrupt.arrived:
            interrupt.hand_over()
        found[k] = margin_by_solver(solver, int(support[k]))
    if (lost := np.isnan(found)).any():
        warnings.warn(
            f"{int(lost.sum())} sample(s) have no leave-one-out margin, the first is {int(s.ids[support[lost][0]])}: without "
            "it no point passes the certificate of a solution. NaN stands for it, and the rate leaves it out",
            NumericalWarning,
            stacklevel=4,
        )
    out[support] = found
    return out


def margin_by_solver(solver: PathSolver, c: int) -> float:
    """Compute g_c without sample c by the solver, which is unchanged afterwards; NaN if there is no certified solution."""
    before = solver.snapshot(with_R=True)
    try:
        solver.solve_change(NO_POSITIONS, np.array([c]))
        m = solver.margin.m
        return float(solver.samples.rest[c] + m.a @ m.QS[:, c] - 1.0)
    except ConvergenceError:
        return float("nan")
    finally:
        solver.restore(before)


def squared_distances(solver: PathSolver) -> Array:  # -> (capacity,)
    """gamma_c: the squared distance in feature space of each sample to the span of the (other) margin vectors (21)."""
    s, m = solver.samples, solver.margin.m
    if not len(solver.margin):
        return np.full(s.capacity, np.inf)  # alpha cannot move, as no margin vector balances it
    H = m.QS * m.used[:, None]  # (slots, capacity) [y_c; Q_Sc] of each sample
    R = solver.margin.R
    gamma = s.root**2 - ((R @ H) * H).sum(0)
    slots = solver.margin.slots()
    own = R[slots, slots]
    gamma[m.at[slots]] = 1.0 / np.where(own > 0, own, np.nan) if len(slots) > 1 else np.inf
    return np.maximum(gamma, 0.0)


def span_rule(solver: PathSolver) -> Array:  # -> (capacity,)
    """Compute g_c - alpha_c gamma_c; -infinity where alpha_c > 0 and no margin vector can balance it."""
    s = solver.samples
    distance = squared_distances(solver)
    shift = np.where(s.alpha > 0, s.alpha, 1.0) * distance
    return np.where(s.side == 0, 0.0, s.g) - np.where(s.alpha > 0, shift, 0.0)


class Tableau:
    """Columns of the tableau, as rows of T. Index 0 is b, then come the m - 1 margin vectors, then the others tracked."""

    def __init__(self, solver: PathSolver):
        self.samples, self.rows = solver.samples, solver.rows
        s = solver.samples
        m, slots = solver.margin.m, solver.margin.slots()
        used = np.concatenate([[0], slots])
        self.m = len(used)
        self.R, self.QS = solver.margin.R[np.ix_(used, used)], m.QS[used]
        self.tracked = m.at[slots]  # (N - 1,) position of index 1..
        self.index = np.full(s.capacity, -1, dtype=np.int64)  # of each position
        self.index[self.tracked] = np.arange(1, self.m)
        self.X = self.R[:, :0]  # (m, N - m), R M_PO
        a = m.a[used]
        bounds = np.concatenate([[np.inf], s.u[self.tracked]])
        root = np.concatenate([[0.0], s.root[self.tracked]])
        self.start = PathStart(self.R, np.zeros(self.m), a, m.lower[used], m.upper[used], a, bounds, root)
        far = np.flatnonzero((self.index < 0) & (s.ids >= 0))
        slack = np.where(s.side[far] > 0, s.g[far], -1.0)
        error = int((slack < 0).sum())
        self.track(
            far[np.argsort(slack)[: error + max(MIN_RESERVE_TRACKED, (len(slack) - error) // RESERVE_PER_TRACKED)]]
        )

    @property
    def N(self) -> int:
        """The number of indices: b and the samples tracked."""
        return len(self.start.x)

    def track(self, new: Array) -> None:  # (k,) positions
        """Track more samples: they get columns, and entries of every column."""
        s, m, N, t, k = self.samples, self.m, self.N, self.start, np.arange(len(new))
        Z = self.QS[:, new]
        X = self.R @ Z
        self.X, self.tracked = np.concatenate([self.X, X], 1), np.concatenate([self.tracked, new])
        self.index[new] = N + k
        gamma = self.rows.block(new, self.tracked[m - 1 :])
        size = np.abs(gamma[k, N - m + k]) + np.abs(X * Z).sum(0)
        gamma -= Z.T @ self.X
        T = np.empty((N + len(new), N + len(new)))
        T[:N, :N], T[:m, N:], T[N:, :m] = t.T, X, -X.T
        T[N:, m:], T[m:N, N:] = gamma, gamma[:, : N - m].T
        error, u = s.side[new] < 0, s.u[new]
        more = (size, s.g[new], np.where(error, -np.inf, 0.0), np.where(error, 0.0, np.inf), u * error, u, s.root[new])
        self.start = PathStart(T, *(np.concatenate(pair) for pair in zip(t[1:], more, strict=True)))


class Paths:
    """The paths of samples c (B,) leaving; none of them changes the machine."""

    def __init__(self, solver: PathSolver, c: Array, stop_below: float):
        self.samples, self.rows, self.b = solver.samples, solver.rows, solver.margin.b
        self.tableau, self.stop_below = Tableau(solver), stop_below
        self.c = self.tableau.index[c]
        self.g, self.alpha = np.where(self.samples.side[c] == 0, 0.0, self.samples.g[c]), self.samples.alpha[c]
        self.result = np.full(len(c), np.nan)

    def run(self) -> Array:  # -> (B,)
        """Return g_c without c, below ``stop_below`` where the path ended early; NaN where it is left to the solver."""
        paths = np.arange(len(self.c))
        for _ in range(MAX_TRACKING_ROUNDS):
            step = max(16, PATH_VALUES_PER_BLOCK // self.tableau.N)
            found = [self._walk(paths[first : first + step]) for first in range(0, len(paths), step)]
            paths = paths[np.isnan(self.result[paths])]
            more = np.unique(np.concatenate(found)) if found else NO_POSITIONS
            if not len(more) or not len(paths):
                break
            self.tableau.track(more)
        return self.result

    def _walk(self, paths: Array) -> Array:  # (k,) -> (l,)
        """Set the results of these paths; returns the positions of samples that they should have tracked."""
        t, c = self.tableau, self.c[paths]
        moved, beta = np.zeros((len(paths), t.N)), np.zeros((len(paths), t.N))
        done = np.zeros(len(paths), dtype=bool)
        given = c, self.alpha[paths], self.g[paths], self.stop_below, MAX_PATH_EVENTS
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            steps.removal_paths(t.start, t.m, *given, moved, beta, done)
        out, found = self._ends(c[done], moved[done], beta[done])
        early = moved[done, c[done]] > (1e-12 - 1.0) * self.alpha[paths[done]]
        self.result[paths[done]] = np.where(early & (out >= self.stop_below), np.nan, out)
        return found

    def _ends(self, c: Array, moved: Array, beta: Array) -> tuple[Array, Array]:  # (B,), (B, N) twice -> (B,), (k,)
        """Return g_c where paths end, and the positions of untracked samples that are on the wrong side there.

        Both follow from how far the coefficients have moved; beta is beta_c at the end, zero outside P. Let r be the residuals
        of (3) and g_S, which should be 0: moving a by -R r makes them so, and changes g_c by beta_c^T r. The result is NaN
        where r is not small, or a tracked sample is on the wrong side by more than rounding and r.
        """
        s, t = self.samples, self.tableau
        B, b = len(c), self.b + moved[:, :1]
        margins = self._margins(c, moved)
        g = np.concatenate([moved[:, 1:] @ s.y[t.tracked, None], margins(t.tracked, np.float64)], 1)
        wrong, found = np.zeros(B, dtype=bool), [NO_POSITIONS]
        size, shift = (np.abs(moved) @ t.start.root).max(initial=0.0), np.abs(moved[:, 0]).max(initial=0.0)
        for first in range(0, s.capacity, SAMPLES_PER_CHECK):
            at = np.arange(first, min(s.capacity, first + SAMPLES_PER_CHECK))
            at = at[(t.index[at] < 0) & (s.ids[at] >= 0)]
            with np.errstate(over="ignore", invalid="ignore"):  # an overflow counts as not clear
                clear = margins(at, np.float32).min(0, initial=np.inf) >= FLOAT32_EPS * t.N * (
                    size * s.root[at] + shift
                )
            at = at[~clear]
            part = margins(at, np.float64)
            unit = EPS * (np.abs(part + 1.0 - b * s.y[at]) + np.abs(b) + 1.0)
            bad = part < -MAX_ROUNDING_UNITS * unit
            wrong |= bad.any(1)
            found.append(at[bad.any(0)])
        out, outside = g[np.arange(B), c], beta == 0
        r = np.where(outside, 0.0, g)
        out += (beta * r).sum(1)
        r[:, 0] /= np.maximum(np.abs(moved[:, 1:]).max(1), 1e-300)
        loose = np.abs(r).max(1)
        wrong |= ~(loose <= MAX_END_RESIDUAL)
        y = np.concatenate([[0.0], s.y[t.tracked]])
        unit = EPS * (np.abs(g + 1.0 - b * y) + np.abs(b) + 1.0)
        error = moved + t.start.alpha > 0.5 * t.start.u
        off = (np.where(error, g, -g) > MAX_ROUNDING_UNITS * unit + 16.0 * loose[:, None]) & outside
        off[np.arange(B), c] = False
        # with every margin vector at a bound, b has an interval, in which the solver takes the middle
        a, u = moved + t.start.alpha, t.start.u
        wrong |= ~((np.minimum(a, u - a) > AT_BOUND_SHARE * u) & ~outside)[:, 1:].any(1)
        return np.where(wrong | off[:, 1:].any(1), np.nan, out), np.concatenate(found)

    def _margins(self, c: Array, moved: Array) -> Callable[[Array, type], Array]:  # (B,), (B, N); (k,) -> (B, k)
        """Return a function that computes g of samples in given positions, where paths end, in a given precision."""
        s, t = self.samples, self.tableau
        m, own = t.m, np.flatnonzero(c >= t.m)  # paths of error vectors: each has a row of Q of its own
        rest = moved[:, m:].copy()
        rest[own, c[own] - m] = 0.0
        used = np.flatnonzero(rest.any(0))
        rest, others = rest[:, used], t.tracked[used + m - 1]

        def margins(at: Array, precision: type) -> Array:
            g = moved[:, :m].astype(precision) @ t.QS[:, at].astype(precision)
            g += np.where(s.side[at] == 0, 0.0, s.g[at]).astype(precision)
            if len(others):
                g += rest.astype(precision) @ self.rows.block(others, at).astype(precision)
            if len(own):
                g[own] += self.rows.block(t.tracked[c[own] - 1], at) * moved[own, c[own]][:, None]
            return g

        return margins
