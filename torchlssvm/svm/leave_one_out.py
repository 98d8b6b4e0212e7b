r"""Leave-one-out by unlearning every support vector from one tableau, and by the span rule.

Let P be b and the margin vectors S, M = [[0, y^T], [y, Q]] over b and all samples, R = (M_PP)^-1 (7). *Column* k of the tableau
holds the effect of a unit change of k, while the coefficients a of P move so that g_S = 0 and (3) still hold:

    k outside P: alpha_k grows by 1.   u_k[P] = beta_k = -R M_Pk (10),  u_k[i] = gamma_ik = M_ik + M_iP beta_k (12)
    k inside P:  g_k grows by 1.       u_k[P] = R_Pk,                   u_k[i] = M_iP R_Pk

An event moves one k from one case to the other: (13) if k enters S, (14) if it leaves. Both are the same *pivot* on p = u_k[k]:

    w = u_k with w[k] = 1;    u_j <- u_j with u_j[k] = 0, minus w u_j[k] / p;    u_k <- w / p

So a path needs no matrix of its own. It stores (k, p, w) of its events, and a column of its tableau is a column of the common
tableau, pivoted once for each event. A path tracks only the support vectors and the nearest reserve vectors. At its end, every
sample is checked: if (2) and (3) hold for all samples, the end is the solution.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from torch import Tensor

from torchlssvm.errors import ConvergenceError, NumericalWarning
from torchlssvm.functional.modes import interrupt
from torchlssvm.functional.svm_path import EPS, MAX_ROUNDING_UNITS, RATE_ROUNDING_UNITS, SIMULTANEOUS_STEP
from torchlssvm.svm import device_paths
from torchlssvm.svm.margin_set import DEPENDENT_SHARE
from torchlssvm.svm.samples import NO_POSITIONS, Array
from torchlssvm.svm.solver import AT_BOUND_SHARE, PathSolver

MIN_RESERVE_TRACKED, RESERVE_PER_TRACKED = 64, 16
"""Reserve vectors that paths track: the nearest sixteenth, and at least 64. At the end of a path, all are checked."""


class LeaveOneOut(NamedTuple):
    """The margin of each sample by the machine without it, in the order of ``ids``."""

    ids: Tensor  # (n,)
    margin: Tensor  # (n,) g_c = y_c f(x_c) - 1 without c; where a path ended early, a value below -1 that it had passed
    error: Tensor  # (n,) whether c is misclassified without it: g_c < -1
    rate: float  # the share of errors

    @classmethod
    def from_margins(cls, ids: Tensor, margin: Tensor) -> LeaveOneOut:
        """Count the errors among these margins; NaN (no solution found) is not counted."""
        error = margin < -1.0
        known = ~margin.isnan()
        return cls(ids, margin, error, float(error[known].double().mean()) if bool(known.any()) else float("nan"))


def exact(solver: PathSolver, stop_below: float) -> Array:  # -> (capacity,)
    """Compute g_c of every sample without itself. Paths end early below ``stop_below``. If unsolved: NaN and a warning."""
    s = solver.samples
    out = np.where(s.side == 0, 0.0, s.g)
    support = np.flatnonzero((s.alpha > 0) & (out >= stop_below))
    found = np.full(len(support), np.nan)
    if device_paths.used_for(solver.rows):
        gone = support[:, None] == np.arange(s.capacity)
        found = device_paths.margins_without(solver.rows, solver.margin, gone)[gone]
    elif len(solver.margin) > 2:
        found = Paths(solver, support, stop_below).run()
    for k in np.flatnonzero(np.isnan(found)).tolist():
        if interrupt.arrived:
            interrupt.hand_over()
        with contextlib.suppress(ConvergenceError):
            found[k] = margins_by_solver(solver, support[k : k + 1])[0]
    if (lost := np.isnan(found)).any():
        warnings.warn(
            f"{int(lost.sum())} sample(s) have no leave-one-out margin, the first is {int(s.ids[support[lost][0]])}: without "
            "it no point passes the certificate of a solution. NaN stands for it, and the rate leaves it out",
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
    before = solver.snapshot(with_R=True)
    callback, solver.path.callback = solver.path.callback, None
    try:
        solver.solve_change(NO_POSITIONS, gone)
        margin = solver.margin
        found: Array = solver.samples.rest[gone] + margin.a @ margin.QS[:, gone] - 1.0
        return found
    finally:
        solver.path.callback = callback
        solver.restore(before)


def squared_distances(solver: PathSolver) -> Array:  # -> (capacity,)
    """Return gamma_c, the squared distance in feature space of each sample to the span of the (other) margin vectors (21)."""
    s, m = solver.samples, solver.margin
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
    """Compute g_c - alpha_c gamma_c; -infinity if alpha_c > 0 and no margin vector can balance it."""
    s = solver.samples
    distance = squared_distances(solver)
    shift = np.where(s.alpha > 0, s.alpha, 1.0) * distance
    return np.where(s.side == 0, 0.0, s.g) - np.where(s.alpha > 0, shift, 0.0)


class Tableau:
    """Columns of the tableau, as rows of T. Index 0 is b, then come the m - 1 margin vectors, then the others tracked."""

    def __init__(self, solver: PathSolver):
        self.samples, self.rows = solver.samples, solver.rows
        s = solver.samples
        m, slots = solver.margin, solver.margin.slots()
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
        """The number of indices: b and the tracked samples."""
        return len(self.start.x)

    def track(self, new: Array) -> None:  # (k,) positions
        """Track more samples. They get columns of their own, and entries in every column."""
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


class PathStart(NamedTuple):
    """The state in which all paths start. Index 0 is b, followed by S and the other tracked samples."""

    T: Array  # (N, N) columns of the tableau, as rows
    size: Array  # (N,) the size of the terms of u_k[k]
    x: Array  # (N,) a inside P, g outside
    lower: Array  # (N,) of x
    upper: Array  # (N,) of x
    alpha: Array  # (N,)
    u: Array  # (N,)
    root: Array  # (N,) sqrt(K_ii), 0 for b


class RemovalPaths:
    """The paths on which samples c (B,) leave. Each step takes one event of every path.

    Event e of a path pivots on ``keys[e]`` with W[e]. To pivot a column, event e subtracts share_e W_e from it. share_e is the
    column's entry keys[e] after the pivots before e, divided by the pivot. So share = T entries, where T is the inverse of a
    lower triangle. A pivot first sets its own entry to 0, so earlier values of that entry do not count. The entries keys[e]
    are therefore -U share, U[e, f] = W[f, keys[e]], f >= e.
    """

    def __init__(self, t: PathStart, m: int, c: Array, alpha: Array, g: Array, stop_below: float):  # (B,) each
        B, N, E = len(c), len(t.x), 8  # E: events for which there is room
        self.t, self.c, self.g, self.stop_below, self.d = t, c, g.copy(), stop_below, -alpha
        self.number = np.arange(B)  # of each path that is followed
        self.x, self.lower, self.upper = (np.repeat(v[None], B, 0) for v in (t.x, t.lower, t.upper))
        self.lower[self.number, c], self.upper[self.number, c] = -np.inf, np.inf
        self.inside, self.moved = np.zeros((B, N), dtype=bool), np.zeros((B, N))
        self.inside[:, :m] = True
        self.p, self.count, self.events = np.zeros(B), np.full(B, m), 0
        self.last = np.full((B, N), -1)  # the last event of each key
        self.keys, self.before = np.zeros((2, B, E), dtype=np.int64)  # before: the last event with the same key, or -1
        self.W, self.T, self.U = np.empty((B, E, N)), np.zeros((B, E, E)), np.zeros((B, E, E))
        self.ended, self.moved_at_end, self.beta_at_end = np.zeros(B, dtype=bool), np.zeros((B, N)), np.zeros((B, N))
        # Margin vectors leave P, by (14), before they are driven. The first event of the others is empty: w = 0, on b.
        in_P = c < m
        w, pivot = t.T[c], np.where(in_P, t.T[c, c], 1.0)
        w[self.number[in_P], c[in_P]] = 1.0
        self.rate = (self.d / pivot)[:, None] * w
        self._record(np.where(in_P, c, 0), self.last[:, 0], pivot, w * in_P[:, None])
        self.last[:, 0] = -1
        self.inside[self.number, c] = False
        self.count -= in_P
        self._keep(pivot > 0.0)

    def _keep(self, which: Array) -> None:  # (B,)
        """Drop all other paths."""
        if not which.all():
            for name in self.__dict__.keys() - {"t", "stop_below", "events", "ended", "moved_at_end", "beta_at_end"}:
                setattr(self, name, getattr(self, name)[which])

    @np.errstate(divide="ignore", invalid="ignore", over="ignore")
    def follow(self) -> None:
        """Follow the paths. Sets ``ended``, the moves of the coefficients at the end, and beta_c there (zero outside P)."""
        t = self.t
        while len(self.c):
            b = np.arange(len(self.c))
            # -- the next event of each path
            speed = np.abs(self.rate)
            inner = speed * self.inside
            terms = inner @ t.root + np.abs(self.d) * t.root[self.c]
            noise = RATE_ROUNDING_UNITS * EPS * (terms[:, None] * t.root + inner[:, :1])
            floor = np.where(self.inside, EPS * inner[:, 1:].max(1)[:, None], noise)
            floor[:, 0] = np.inf
            # The bound ahead is the one that is not behind. A branch would be mispredicted half of the time.
            slowness = 1.0 / self.rate
            steps = np.maximum((self.upper - self.x) * slowness, (self.lower - self.x) * slowness)
            steps = np.where(speed > floor, np.maximum(steps, 0.0), np.inf)
            k = steps.argmin(1)
            step = np.minimum(steps[b, k], 1.0 - self.p)
            # -- the step
            stuck = (step < SIMULTANEOUS_STEP) & (self.p + step < 1.0)
            self.g += step * self.rate[b, self.c]
            self.p += step
            self.x += step[:, None] * self.rate
            end = ((self.p >= 1.0) | (self.g < self.stop_below)) & ~stuck
            self._note_ends(end)
            go_on = ~end & ~stuck
            # Later paths are left to the solver, as the cost of a column grows with the number of events.
            if self.events == 64 or not go_on.any():
                return
            # -- the event
            self._keep(go_on)
            self._pivot(k[go_on])

    def _note_ends(self, end: Array) -> None:  # (B,)
        """Note where these paths ended."""
        at, inside, c, d = self.number[end], self.inside[end], self.c[end], self.d[end]
        self.ended[at] = True
        self.moved_at_end[at] = np.where(inside, self.x[end] - self.t.alpha, self.moved[end])
        self.moved_at_end[at, c] = d * self.p[end]
        self.beta_at_end[at] = np.where(inside, self.rate[end] / d[:, None], 0.0)

    def _pivot(self, k: Array) -> None:  # (B,)
        """Let index k of each path enter P by (13), or leave it by (14). Paths on which rounding forbids this are dropped."""
        t, b = self.t, np.arange(len(k))
        w, terms = self._column(k)
        pivot, leaving = w[b, k], self.inside[b, k]
        # Share of its terms below which a pivot is rounding: a column has been pivoted many times, with no A to
        # refine it with.
        allowed = np.where(leaving, (pivot > 0.0) & (self.count > 2), pivot > (1e3 * DEPENDENT_SHARE) * terms)
        if not allowed.all():
            self._keep(allowed)
            k, w, pivot, leaving, b = k[allowed], w[allowed], pivot[allowed], leaving[allowed], b[: int(allowed.sum())]
        up, u = self.rate[b, k] > 0.0, t.u[k]
        # leaving to E, if it has come to u; entering from E, with alpha = u, if its g has risen to 0
        self.moved[b, k] = np.where(leaving, np.where(up, u, 0.0) - t.alpha[k], self.moved[b, k])
        self.x[b, k] = np.where(leaving | ~up, 0.0, u)
        self.lower[b, k] = np.where(leaving & up, -np.inf, 0.0)
        self.upper[b, k] = np.where(leaving, np.where(up, 0.0, np.inf), u)
        self.inside[b, k] = ~leaving
        self.count += np.where(leaving, -1, 1)
        w[b, k] = 1.0
        part = self.rate[b, k] / pivot
        self.rate[b, k] = 0.0
        self.rate -= part[:, None] * w
        self._record(k, self.last[b, k], pivot, w)

    def _column(self, k: Array) -> tuple[Array, Array]:  # (B,) -> (B, N), (B,)
        """Return column k of each path's tableau, and the size of the terms of its entry k."""
        t, b, e = self.t, np.arange(len(k)), self.events
        last, numbers = self.last[b, k], np.arange(e)
        seen = last >= 0
        out, terms = t.T[k], t.size[k]
        if seen.any():  # the column as it was after its own last pivot
            own = self.T[b[seen], last[seen], last[seen]]
            out[seen], terms[seen] = own[:, None] * self.W[b[seen], last[seen]], np.abs(own)
        if e:
            keys, later = self.keys[:, :e], numbers > last[:, None]
            entries = np.where(later & (self.before[:, :e] <= last[:, None]), out[b[:, None], keys], 0.0)
            share = (self.T[:, :e, :e] @ entries[:, :, None])[:, :, 0]
            out -= (share[:, None] @ self.W[:, :e])[:, 0]
            terms += np.abs(share * self.W[b, :e, k]).sum(1)
            newest = later & (self.last[b[:, None], keys] == numbers)
            at, f = newest.nonzero()
            out[at, keys[at, f]] = -(self.U[:, :e, :e] @ share[:, :, None])[at, f, 0]
        return out, terms

    def _record(self, k: Array, before: Array, pivot: Array, w: Array) -> None:  # (B,), (B,), (B,), (B, N)
        """Append a pivot on k with w, w[k] = 1."""
        b, e = np.arange(len(k)), self.events
        if e == self.keys.shape[1]:  # make room for as many events again
            for name, axes in (("keys", 1), ("before", 1), ("W", 1), ("T", 2), ("U", 2)):
                wider = [(0, 0), (0, e), (0, e if axes == 2 else 0)]
                setattr(self, name, np.pad(getattr(self, name), wider[: getattr(self, name).ndim]))
        self.keys[:, e], self.before[:, e] = k, before
        if e:
            above = np.where(np.arange(e) >= before[:, None], self.W[b, :e, k], 0.0)
            self.T[:, e, :e] = (above[:, None] @ self.T[:, :e, :e])[:, 0] * (-1.0 / pivot)[:, None]
            self.U[:, :e, e] = w[b[:, None], self.keys[:, :e]]
        self.T[:, e, e], self.U[:, e, e] = 1.0 / pivot, 1.0
        self.W[:, e] = w
        self.last[b, k] = e
        self.events += 1


class Paths:
    """The paths on which samples c (B,) leave. No path changes the machine."""

    def __init__(self, solver: PathSolver, c: Array, stop_below: float):
        self.samples, self.rows, self.b = solver.samples, solver.rows, solver.margin.b
        self.tableau, self.stop_below = Tableau(solver), stop_below
        self.c = self.tableau.index[c]
        self.g, self.alpha = np.where(self.samples.side[c] == 0, 0.0, self.samples.g[c]), self.samples.alpha[c]
        self.result = np.full(len(c), np.nan)

    def run(self) -> Array:  # -> (B,)
        """Return g_c without c, below ``stop_below`` if the path ended early; NaN if the sample is left to the solver."""
        paths = np.arange(len(self.c))
        # Rounds in which paths are repeated with more tracked samples. One or two rounds are usual.
        for _ in range(4):
            found = []
            # 256 paths side by side are enough for array operations, and few enough for their arrays to stay in the cache.
            for first in range(0, len(paths), 256):
                if interrupt.arrived:
                    interrupt.hand_over()
                found.append(self._walk(paths[first : first + 256]))
            paths = paths[np.isnan(self.result[paths])]
            more = np.unique(np.concatenate(found)) if found else NO_POSITIONS
            if not len(more) or not len(paths):
                break
            self.tableau.track(more)
        return self.result

    def _walk(self, paths: Array) -> Array:  # (k,) -> (l,)
        """Set the results of these paths. Returns the positions of samples that the paths should have tracked."""
        t, c = self.tableau, self.c[paths]
        batch = RemovalPaths(t.start, t.m, c, self.alpha[paths], self.g[paths], self.stop_below)
        batch.follow()
        done, moved, beta = batch.ended, batch.moved_at_end, batch.beta_at_end
        out, found = self._ends(c[done], moved[done], beta[done])
        early = moved[done, c[done]] > (1e-12 - 1.0) * self.alpha[paths[done]]
        self.result[paths[done]] = np.where(early & (out >= self.stop_below), np.nan, out)
        return found

    def _ends(self, c: Array, moved: Array, beta: Array) -> tuple[Array, Array]:  # (B,), (B, N) twice -> (B,), (k,)
        """Return g_c at the ends of paths, and the positions of untracked samples that are on the wrong side there.

        Both follow from the moves of the coefficients. beta is beta_c at the end, zero outside P. The residuals r of (3) and
        g_S should be 0. Moving a by -R r makes them 0 and changes g_c by beta_c^T r. The result is NaN if r is not small, or
        if a tracked sample is on the wrong side by more than rounding and r.
        """
        s, t = self.samples, self.tableau
        B, b = len(c), self.b + moved[:, :1]
        margins = self._margins(c, moved)
        g = np.concatenate([moved[:, 1:] @ s.y[t.tracked, None], margins(t.tracked, np.float64)], 1)
        wrong, found = np.zeros(B, dtype=bool), [NO_POSITIONS]
        size, shift = (np.abs(moved) @ t.start.root).max(initial=0.0), np.abs(moved[:, 0]).max(initial=0.0)
        untracked = np.flatnonzero((t.index < 0) & (s.ids >= 0))
        for at in np.split(
            untracked, range(4096, len(untracked), 4096)
        ):  # which bounds the memory for their kernel values
            with np.errstate(over="ignore", invalid="ignore"):  # an overflow counts as not clear
                # The distance of 1.0 to the next float32: one for each term of g bounds its error in single
                # precision.
                clear = margins(at, np.float32).min(0, initial=np.inf) >= 2.0**-23 * t.N * (size * s.root[at] + shift)
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
        # Residual of g_S and (3) at the end of a path up to which one correction mends it; beyond, the solver takes
        # over.
        wrong |= ~(loose <= 1e-8)
        y = np.concatenate([[0.0], s.y[t.tracked]])
        unit = EPS * (np.abs(g + 1.0 - b * y) + np.abs(b) + 1.0)
        error = moved + t.start.alpha > 0.5 * t.start.u
        off = (np.where(error, g, -g) > MAX_ROUNDING_UNITS * unit + 16.0 * loose[:, None]) & outside
        off[np.arange(B), c] = False
        # If every margin vector is at a bound, b has an interval, and the solver uses its middle.
        a, u = moved + t.start.alpha, t.start.u
        wrong |= ~((np.minimum(a, u - a) > AT_BOUND_SHARE * u) & ~outside)[:, 1:].any(1)
        return np.where(wrong | off[:, 1:].any(1), np.nan, out), np.concatenate(found)

    def _margins(self, c: Array, moved: Array) -> Callable[[Array, type], Array]:  # (B,), (B, N); (k,) -> (B, k)
        """Return a function that computes g of samples in given positions at the ends of paths, in a given precision."""
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
