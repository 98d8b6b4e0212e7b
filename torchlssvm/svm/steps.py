r"""Numeric steps of the incremental SVM: NumPy code, compiled where numba is installed.

Letters are those of Cauwenberghs and Poggio. Slot 0 belongs to b, the others to margin vectors; S is the set of margin vectors,
a = [b; alpha_S], A = [[0, y_S^T], [y_S, Q_SS]] and R = A^-1 (7). When coefficients outside S move at rates d,

    beta = -R [sum y d; Q_S: d]            the rates of a that keep g_S = 0 and sum y alpha = 0                     (10)
    gamma_i = Q_i: d + Q_iS beta_S + y_i beta_0    the rate of g_i                                                  (12)
    i enters S:  R <- R + v v^T / gamma_i, v = [beta_i; 1], beta_i for a unit of alpha_i alone                      (13)
    k leaves S:  R <- R - R_:k R_k: / R_kk                                                                          (14)

R is stored as R + V^T diag(f) V, with a row of V for each pending event: adding sixteen of them to R in one product costs
little more than adding one. A free slot is zero in R, V, A, QS, a and ``used``. All compiled functions that call each other are
in this file, because numba's cache compares the time of one file only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from torchlssvm.svm.compiled import compiled
from torchlssvm.svm.samples import Array, Vectors

EPS = 2.220446049250313e-16
"""The distance of 1.0 to the next float64."""
RATE_ROUNDING_UNITS = 32.0
"""Rounding errors of its terms below which the rate of a g counts as zero: a sum of rounded products is off by several."""
DEPENDENT_SHARE = 1e-12
"""Share of its terms below which gamma_i is a difference of equal numbers: sample i lies in the span of S and cannot enter it.
It is four digits above rounding, which a badly conditioned A costs."""
TABLEAU_DEPENDENT_SHARE = 1e3 * DEPENDENT_SHARE
"""The same share for a column of a leave-one-out tableau, which has been pivoted many times and has no A to refine it with."""
RECOMPUTED_GAMMA_SHARE = 1e-6
"""Share of its terms below which gamma_i has lost six digits: it is computed a second time, with a refined beta."""
MAX_R_RESIDUAL = 1e-6
"""Relative residual of R above which it is inverted again. Below it, one step of refinement leaves 1e-12."""
EVENTS_PER_REFINEMENT = 8
"""Events after which beta is computed again and refined; in between it is updated by (13) and (14), which costs less."""
SIMULTANEOUS_STEP = 1e-14
"""Length of a step, in a walk from p = 0 to 1, up to which events are simultaneous: p is rounded by about as much."""
MAX_SIMULTANEOUS_EVENTS = 60
"""Simultaneous events in a row that count as a cycle. Ties of real data, such as copies of a sample, are shorter."""
MAX_PENDING_EVENTS = 16
"""Events not yet added to R. One product with sixteen columns costs little more than a product with one."""
MAX_ROUNDING_UNITS = 256.0
"""Units of rounding by which g_i may be on the wrong side. A unit is EPS (sum_j |Q_ij| alpha_j + |b| + 1): the effect of one
rounding of every term. A sum of a thousand terms, in any order, stays within a hundred units."""
MAX_REST_ROUNDING_UNITS = 64.0
"""Units of rounding that ``rest`` of a sample may have gathered before it is computed from the kernel again: a quarter of
MAX_ROUNDING_UNITS."""
CLEAR_SIDE_FACTOR = 16.0
"""Where g_i is on its side by this multiple of its gathered rounding, the side is certain: that multiple of
MAX_REST_ROUNDING_UNITS may gather then."""
AT_BOUND_SHARE = 1e-13
"""Distance to a bound, as a share of u, at which a coefficient counts as being there if all others do."""
CLIPPED_SHARE = 1e-9
"""Share of u by which a Newton step may leave the box and be clipped; more than that means wrong sets."""
ROWS_PER_UPDATE = 64
"""Rows of R updated at a time, so that the product stays in the processor's cache."""

WALK_ENDED = 0  # p = 1
NEEDS_ROW = 1  # a row of Q that is not in the cache
NEEDS_SLOT = 2  # no slot is free
NEEDS_COLUMN = 3  # no column of W is free
NEEDS_MARGIN_VECTOR = 4  # S is empty and the drive is not balanced
NEEDS_NEW_R = 5  # rounding errors have gathered in R
ENTERING_IS_DEPENDENT = 6  # the sample that enters lies in the span of S
EVENTS_CYCLE = 7  # simultaneous events repeat themselves
WALK_PAUSED = 8  # as many events as were asked for are done
"""The reason for which :func:`walk` returns; plain integers, for numba."""
NO_EVENT, TO_MARGIN, TO_ERROR, TO_RESERVE = range(4)
"""The last event of a walk: none, or a sample went to S, E or R."""


class Margin(NamedTuple):
    """Arrays of the margin set."""

    R: Array  # (slots, slots) without the pending events
    V: Array  # (MAX_PENDING_EVENTS, slots) pending events
    f: Array  # (MAX_PENDING_EVENTS,) their factors
    pending: Array  # (1,) int64 number of pending events
    A: Array  # (slots, slots)
    QS: Array  # (slots, capacity) rows of Q; row 0 is y
    W: Array  # (slots, watched) the columns of QS that are watched
    at: Array  # (slots,) int64 position of each slot
    used: Array  # (slots,) 1.0, or 0.0 where the slot is free
    a: Array  # (slots,)
    lower: Array  # (slots,)
    upper: Array  # (slots,)


class Watch(NamedTuple):
    """The samples that a walk watches: all, or those outside S that are near the margin."""

    at: Array  # (watched,) int64 positions
    column_of: Array  # (capacity,) int64 column of each position, or -1
    slack: Array  # (watched,) side * g
    sign: Array  # (watched,) side; 0 where the column is free, or the sample in S
    root: Array  # (watched,)
    count: Array  # (1,) int64 number of columns in use


class Drive(NamedTuple):
    """The quantities that move from p = 0 to 1, at constant rates."""

    d: Array  # (capacity,) rates of coefficients outside S
    rise: Array  # (capacity,) rates of upper bounds, or (0,) if they do not move
    force: Array  # (capacity,) Q d
    size: float  # sum (d_j sqrt(K_jj))^2 at the start: roundings of force are in proportion to it


@compiled
def apply_pending(m: Margin) -> None:
    """Add the pending events to R, and leave none."""
    k = m.pending[0]
    if k == 0:
        return
    V = m.V[:k]
    for first in range(0, len(m.a), ROWS_PER_UPDATE):
        stop = min(len(m.a), first + ROWS_PER_UPDATE)
        left = np.empty((stop - first, k))
        for e in range(k):
            left[:, e] = m.f[e] * V[e, first:stop]
        m.R[first:stop] += left @ V
    m.pending[0] = 0


@compiled
def add_to_R(m: Margin, v: Array, factor: float) -> None:
    """R += factor v v^T."""
    if m.pending[0] == MAX_PENDING_EVENTS:
        apply_pending(m)
    k = m.pending[0]
    m.V[k] = v
    m.f[k] = factor
    m.pending[0] = k + 1


@compiled
def times_R(m: Margin, top: int, h: Array) -> Array:
    """Return R h (slots,)."""
    out = np.zeros(len(h))
    out[:top] = m.R[:top] @ h
    k = m.pending[0]
    if k > 0:
        out += (m.f[:k] * (m.V[:k] @ h)) @ m.V[:k]
    return out


@compiled
def row_of_R(m: Margin, slot: int) -> Array:
    """Return row ``slot`` of R (slots,)."""
    out = m.R[slot].copy()
    k = m.pending[0]
    if k > 0:
        out += (m.f[:k] * m.V[:k, slot].copy()) @ m.V[:k]
    return out


@compiled
def free_slot(used: Array, top: int) -> int:
    """Return the first free slot below ``top``, or ``top`` itself, which may be beyond the last slot."""
    for k in range(1, top):
        if used[k] == 0.0:
            return k
    return top


@compiled
def beta_and_gamma(m: Margin, top: int, row: Array, y: float, i: int) -> tuple[Array, float, float]:
    """beta_i = -R h (10), gamma_i = Q_ii + h^T beta_i (12), h = [y_i; Q_Si], and the size of the terms of gamma_i."""
    h = row[m.at] * m.used
    h[0] = y
    beta = -times_R(m, top, h)
    terms = np.abs(h * beta).sum() + abs(row[i])
    gamma = row[i] + (h * beta).sum()
    if gamma < RECOMPUTED_GAMMA_SHARE * terms:
        beta -= times_R(m, top, h + m.A @ beta)
        terms = np.abs(h * beta).sum() + abs(row[i])
        gamma = row[i] + (h * beta).sum()
    return beta, gamma, terms


@compiled
def enter(
    m: Margin, top: int, watched: Array, row: Array, y: float, u: float, alpha: float, i: int, v: Array, gamma: float
) -> int:
    """Make sample i, with this row of Q, a margin vector by (13); returns its slot. There must be a free one.

    v (slots,): beta_i, whose entry for the new slot is set to 1. gamma: gamma_i. watched: the positions of the columns of W.
    """
    slot = free_slot(m.used, top)
    if m.used[1:top].sum() == 0.0:  # the first margin vector
        m.pending[0] = 0
        m.R[0, 0], m.R[0, slot], m.R[slot, 0] = -row[i], y, y
    else:
        v[slot] = 1.0
        add_to_R(m, v, 1.0 / gamma)
    h = row[m.at] * m.used
    h[0], h[slot] = y, row[i]
    m.A[slot] = h
    m.A[:, slot] = h
    m.QS[slot] = row
    m.W[slot] = row[watched]
    m.at[slot], m.used[slot], m.a[slot], m.lower[slot], m.upper[slot] = i, 1.0, alpha, 0.0, u
    return slot


@compiled
def leave(m: Margin, top: int, slot: int, R_k: Array) -> None:
    """Take the margin vector in this slot out of S, by (14). R_k (slots,): its row of R."""
    if m.used[1:top].sum() == 1.0:
        m.R[:] = 0.0
        m.pending[0] = 0
    else:
        add_to_R(m, R_k, -1.0 / R_k[slot])
    m.R[slot] = 0.0
    m.R[:, slot] = 0.0
    m.V[:, slot] = 0.0
    m.A[slot] = 0.0
    m.A[:, slot] = 0.0
    m.QS[slot] = 0.0
    m.W[slot] = 0.0
    m.at[slot], m.used[slot], m.a[slot], m.lower[slot], m.upper[slot] = 0, 0.0, 0.0, -np.inf, np.inf


@compiled
def cache_row(cache: Any, i: int, row: Array) -> None:  # RowCache
    """Put a row of Q into the cache, in place of the oldest, unless it is there."""
    if cache.row_of[i] >= 0:
        return
    k = cache.clock[0]
    if cache.held[k] >= 0:
        cache.row_of[cache.held[k]] = -1
    cache.rows[k] = row
    cache.held[k], cache.row_of[i], cache.clock[0] = i, k, (k + 1) % len(cache.held)
    cache.clock[1] = max(cache.clock[1], k + 1)


@compiled
def add_to(x: Array, factor: float, v: Array) -> None:
    """x += factor v."""
    x += factor * v


@compiled
def move_driven(s: Vectors, drive: Drive, t: float) -> float:
    """Move alpha and rest along the drive by a step t; returns the increase of the roundings of rest, see :func:`walk`."""
    if t > 0.0:
        add_to(s.alpha, t, drive.d)
        add_to(s.rest, t, drive.force)
    return t * t * drive.size


@compiled
def compute_beta(m: Margin, top: int, h: Array, beta: Array, refined: bool) -> float:
    """Compute beta = -R h; if ``refined``, correct it once and return the relative residual that it had before."""
    beta[:] = -times_R(m, top, h)
    if not refined:
        return 0.0
    r = h + m.A @ beta
    beta -= times_R(m, top, r)
    return float(np.abs(r).max() / max(np.abs(h).max(), 1e-300))


@compiled
def walk(
    m: Margin,
    top: int,  # slots in use lie below
    s: Vectors,
    w: Watch,
    drive: Drive,
    cache: Any,  # RowCache
    p: float,
    max_events: int,
    i: int,  # a sample that enters S first, or -1
) -> tuple[int, int, int, float, int, int, float]:
    """Follow the path from p towards 1, and return (reason, sample concerned, last event, p, top, events, roundings).

    Between events every rate is constant. An event is a margin vector that comes to a bound, or a watched sample whose g comes
    to 0. alpha, side, rest and u of the samples are kept up to date; g is not. roundings is the sum of (c sqrt(K_jj))^2 over
    all c Q_j: that were added to rest: rest_i has gathered rounding errors of about EPS sqrt(K_ii) times the root of it.
    """
    rising = len(drive.rise) > 0
    rise = np.zeros(len(m.a))
    beta = np.zeros(len(m.a))
    beta_known, since_refined = False, EVENTS_PER_REFINEMENT if i < 0 else 0
    stalled, events, event, rate_in = 0, 0, NO_EVENT, 0.0
    balance, drive_size = (s.y * drive.d).sum(), (np.abs(drive.d) * s.root).sum()
    force, balanced_within = drive.force[w.at], SIMULTANEOUS_STEP * np.abs(drive.d).sum()
    root = s.root[m.at] * m.used
    root[0] = 0.0
    count = m.used[1:top].sum()
    behind, roundings = 0.0, 0.0  # behind: length of the steps that alpha and rest have not made yet
    while True:
        if i >= 0:  # sample i comes to the margin
            if cache.row_of[i] < 0:
                code = NEEDS_ROW
                break
            if free_slot(m.used, top) == len(m.a):
                code = NEEDS_SLOT
                break
            row = cache.rows[cache.row_of[i]]
            if drive.d[i] != 0.0:
                roundings += move_driven(s, drive, behind)
                behind = 0.0
            v, gamma_i, terms = beta_and_gamma(m, top, row, s.y[i], i)
            if count > 0 and not gamma_i > DEPENDENT_SHARE * terms:
                code = ENTERING_IS_DEPENDENT
                break
            slot = enter(m, top, w.at, row, s.y[i], s.u[i], s.alpha[i], i, v, gamma_i)
            top, root[slot] = max(top, slot + 1), s.root[i]
            if s.alpha[i] != 0.0:
                add_to(s.rest, -s.alpha[i], row)
                roundings += (s.alpha[i] * s.root[i]) ** 2
            if drive.d[i] != 0.0:
                add_to(drive.force, -drive.d[i], row)
                drive.d[i] = 0.0
                balance, force, beta_known = (s.y * drive.d).sum(), drive.force[w.at], False
            elif beta_known and count > 0:
                add_to(beta, -rate_in / gamma_i, v)
            else:
                beta_known = False
            count += 1
            s.side[i] = 0.0
            w.sign[w.column_of[i]] = 0.0
            events, since_refined, event = events + 1, since_refined + 1, TO_MARGIN
            if not rising and not drive.d.any():  # all that moved are margin vectors now
                code, p = WALK_ENDED, 1.0
                break
            if events >= max_events:
                code = WALK_PAUSED
                break
            i = -1
        if count == 0 and abs(balance) > balanced_within:
            code = NEEDS_MARGIN_VECTOR
            break
        if rising:
            rise = drive.rise[m.at] * m.used
            rise[0] = 0.0
        if not beta_known or since_refined >= EVENTS_PER_REFINEMENT:
            h = drive.force[m.at] * m.used
            h[0] = balance
            if count > 0 and compute_beta(m, top, h, beta, since_refined >= EVENTS_PER_REFINEMENT) > MAX_R_RESIDUAL:
                code = NEEDS_NEW_R
                break
            if count == 0:
                beta[:] = 0.0
            beta_known, since_refined = True, (0 if since_refined >= EVENTS_PER_REFINEMENT else since_refined)
        gamma = force + beta[:top] @ m.W[:top]
        # the first margin vector at a bound
        speed = np.abs(beta)
        floor = RATE_ROUNDING_UNITS * EPS * max(speed[1:].max(), np.abs(rise).max())
        up = beta - rise
        t_up = np.where(up > floor, np.maximum(m.upper - m.a, 0.0) / up, np.inf)
        t_down = np.where(-beta > floor, np.maximum(m.a - m.lower, 0.0) / -beta, np.inf)
        first_up, first_down = t_up.argmin(), t_down.argmin()
        # the first sample at the margin
        rate = gamma * w.sign
        total = (speed * root).sum() + drive_size
        t_in = np.where(
            rate < -RATE_ROUNDING_UNITS * EPS * (w.root * total + speed[0]), np.maximum(w.slack, 0.0) / -rate, np.inf
        )
        first_in = t_in.argmin()
        t = min(min(t_up[first_up], t_down[first_down]), min(t_in[first_in], 1.0 - p))
        stalled = stalled + 1 if t <= SIMULTANEOUS_STEP else 0
        if stalled > MAX_SIMULTANEOUS_EVENTS:
            code = EVENTS_CYCLE
            break
        add_to(m.a, t, beta)
        add_to(w.slack, t, rate)
        behind += t
        if rising:
            add_to(s.u, t, drive.rise)
            add_to(m.upper, t, rise)
        if t >= 1.0 - p:
            code, p = WALK_ENDED, 1.0
            break
        p += t
        if t_in[first_in] <= t:
            i, rate_in = w.at[first_in], gamma[first_in]
            continue
        to_error = t_up[first_up] <= t
        slot = int(first_up if to_error else first_down)
        j, R_k = m.at[slot], row_of_R(m, slot)
        pivot = R_k[slot]
        if count > 1 and not pivot > 0.0:  # 1 / R_kk is a squared distance: only rounding makes it anything else
            code = NEEDS_NEW_R
            break
        if w.column_of[j] < 0:  # it is watched from now on
            c = w.count[0]
            if c == len(w.at):
                code = NEEDS_COLUMN
                break
            m.W[:, c] = m.QS[:, j]
            w.at[c], w.column_of[j], w.root[c], force[c] = j, c, s.root[j], drive.force[j]
            w.count[0] = c + 1
        s.alpha[j] = s.u[j] if to_error else 0.0
        s.side[j] = -1.0 if to_error else 1.0
        w.sign[w.column_of[j]], w.slack[w.column_of[j]] = s.side[j], 0.0
        cache_row(cache, j, m.QS[slot])
        if to_error:
            add_to(s.rest, s.u[j], m.QS[slot])
            roundings += (s.u[j] * s.root[j]) ** 2
            if rising and drive.rise[j] != 0.0:
                roundings += move_driven(s, drive, behind)
                behind, drive.d[j] = 0.0, drive.rise[j]
                add_to(drive.force, drive.rise[j], m.QS[slot])
                balance, force, beta_known = (s.y * drive.d).sum(), drive.force[w.at], False
        if beta_known and count > 1:
            add_to(beta, -beta[slot] / pivot, R_k)
            beta[slot] = 0.0
        else:
            beta_known = False
        leave(m, top, slot, R_k)
        count, root[slot] = count - 1, 0.0
        while top > 1 and m.used[top - 1] == 0.0:
            top -= 1
        events, since_refined, event = events + 1, since_refined + 1, TO_ERROR if to_error else TO_RESERVE
        if events >= max_events:
            code, i = WALK_PAUSED, j
            break
    roundings += move_driven(s, drive, behind)
    return code, i, event, p, top, events, roundings


# -- the end of an operation -----------------------------------------------------------------------------------------


@compiled
def compute_g(m: Margin, top: int, s: Vectors) -> None:
    """Compute every g from rest and the margin vectors: g = rest + Q_:S alpha_S + y b - 1."""
    s.g[:] = m.a[:top] @ m.QS[:top] + s.rest - np.abs(s.y)


@compiled
def newton_step(m: Margin, top: int, s: Vectors) -> bool:
    """Take a Newton step on S with the residuals of (2) and (3), if it stays in the box; write alpha and every g.

    Returns True if any margin vector is inside its box by more than AT_BOUND_SHARE of it. There must be a margin vector.
    """
    slots = np.flatnonzero(m.used)[1:]
    at = m.at[slots]
    s.alpha[at] = m.a[slots]
    r = m.A @ m.a + m.used * (s.rest[m.at] - 1.0)
    r[0] = (s.y * s.alpha).sum()
    a = m.a - times_R(m, top, r)
    within = np.minimum(np.maximum(a, m.lower), m.upper)
    if (np.abs(a - within)[1:] <= CLIPPED_SHARE * m.upper[1:]).all():
        m.a[:] = within
    m.a[:] = np.minimum(np.maximum(m.a, m.lower), m.upper)
    inner = m.a[slots]
    s.alpha[at] = inner
    compute_g(m, top, s)
    return bool((np.minimum(inner, m.upper[slots] - inner) > AT_BOUND_SHARE * m.upper[slots]).any())


@compiled
def least_rounding_unit(s: Vectors, b: float) -> Array:
    """Return a lower bound (capacity,) of sum_j |Q_ij| alpha_j + |b| + 1, from signed sums of its terms: g and rest."""
    return np.maximum(np.abs(s.g + 1.0 - s.y * b), np.abs(s.rest)) + (abs(b) + 1.0)


@compiled
def add_rest_rounding(s: Vectors, b: float, variance: Array, before: Array, events: float, roundings: float) -> Array:
    """Add to ``variance`` (capacity,) that of the rounding errors of rest, in units of EPS^2, since it was ``before``.

    Each event rounds rest_i once, and the product that is added to it once. Errors add up like the square root of their number.
    Coefficients that were large at some time have left large errors. Returns the positions in which the errors could change the
    side of g, which must be up to date.
    """
    variance += events * (s.rest * s.rest + before * before) + roundings * s.root * s.root
    unit = MAX_REST_ROUNDING_UNITS * least_rounding_unit(s, b)
    unit *= np.where(s.side * s.g > CLEAR_SIDE_FACTOR * EPS * np.sqrt(variance), CLEAR_SIDE_FACTOR, 1.0)
    return np.flatnonzero(~(variance <= unit * unit))


@compiled
def find_violations(s: Vectors, b: float) -> tuple[Array, bool, float]:
    """Return the positions that may be on the wrong side by more than rounding, if alpha is feasible, the largest violation."""
    off = np.where(
        s.side == 0.0, np.where(s.u == 0.0, 0.0, np.abs(s.g)), -s.side * s.g
    )  # u = 0: free, or about to leave
    doubtful = np.flatnonzero(~(off <= MAX_ROUNDING_UNITS * EPS * least_rounding_unit(s, b)))
    inside = bool(((s.alpha >= 0.0) & (s.alpha <= s.u)).all())
    feasible = inside and abs((s.y * s.alpha).sum()) <= MAX_ROUNDING_UNITS * EPS * s.alpha.sum()
    return doubtful, feasible, max(0.0, off.max())


# -- paths of samples leaving, on a shared tableau: see leave_one_out.py ------------------------------------------------


class PathStart(NamedTuple):
    """The state in which all paths start; index 0 is b, then S, then the other samples tracked."""

    T: Array  # (N, N) columns of the tableau, as rows
    size: Array  # (N,) the size of the terms of u_k[k]
    x: Array  # (N,) a inside P, g outside
    lower: Array  # (N,) of x
    upper: Array  # (N,) of x
    alpha: Array  # (N,)
    u: Array  # (N,)
    root: Array  # (N,) sqrt(K_ii), 0 for b


class Pivots(NamedTuple):
    """The events of a path so far; rows beyond them are zero in T and U, and undefined in the others."""

    keys: Array  # (max_events,) int64, the index that entered or left P
    before: Array  # (max_events,) int64, the last event with the same key, or -1
    W: Array  # (max_events, N)
    T: Array  # (max_events, max_events) inverse of the lower triangle that gives the share of each pivot in a column
    U: Array  # (max_events, max_events) U[e, f] = W[f, keys[e]], f >= e


@compiled
def record_pivot(v: Pivots, events: int, k: int, before: int, pivot: float, w: Array) -> None:
    """Append the pivot on k with w, w[k] = 1; before: the last event with the same key, or -1."""
    first = max(before, 0)
    v.keys[events], v.before[events] = k, before
    if events > 0:
        above = v.W[:events, k].copy()
        above[:first] = 0.0
        v.T[events] = (above @ v.T[:events]) * (-1.0 / pivot)
        v.U[:events, events] = w[v.keys[:events]]
    v.T[events, events], v.U[events, events] = 1.0 / pivot, 1.0
    v.W[events] = w


@compiled
def pivoted_column(base: Array, scale: float, start: int, events: int, j: int, v: Pivots) -> tuple[Array, float]:
    """Return column j, which is scale * base with the pivots from ``start`` on applied, and the size of the terms of entry j.

    Pivot e subtracts share_e W_e; share_e = (entry keys[e] after the pivots before e) / p_e. A pivot sets its own entry to 0
    first, so that earlier values do not count there.
    """
    out = scale * base
    if start == events:
        return out, 0.0
    keys = v.keys[start:events]
    share = np.zeros(len(v.keys))
    share[start:events] = np.where(v.before[start:events] < start, out[keys], 0.0)
    share[:events] = v.T[:events] @ share
    W = v.W[start:events]
    out -= share[start:events] @ W
    out[keys] = -(v.U[:events] @ share)[start:events]
    return out, np.abs(share[start:events] * W[:, j]).sum()


@compiled
def removal_path(
    t: PathStart,
    m: int,
    c: int,
    alpha: float,
    g: float,
    stop_below: float,
    max_events: int,
    W: Array,
    moved: Array,
    beta: Array,
) -> bool:
    """Follow the path on which sample c leaves, and tell whether it has been followed to its end.

    m: the size of P; moved (N,): receives how far each coefficient has moved; beta (N,): receives u_c[P] at the end;
    W (max_events, N): working memory.
    """
    N = len(t.x)
    keys, before, last = np.empty(max_events, np.int64), np.empty(max_events, np.int64), np.full(N, -1)
    v = Pivots(keys, before, W, np.zeros((max_events, max_events)), np.zeros((max_events, max_events)))
    x, lower, upper, inside = t.x.copy(), t.lower.copy(), t.upper.copy(), np.zeros(N)
    inside[:m] = 1.0
    moved[:] = 0.0
    beta[:] = 0.0
    p, d, count, events = 0.0, -alpha, m, 0
    lower[c], upper[c] = -np.inf, np.inf
    rate = d * t.T[c]
    if c < m:  # it leaves P, by (14), before it is driven
        pivot = t.T[c, c]
        if not pivot > 0.0:
            return False
        w = t.T[c].copy()
        w[c] = 1.0
        record_pivot(v, 0, c, -1, pivot, w)
        rate = (d / pivot) * w
        events, count, inside[c], last[c] = 1, m - 1, 0.0, 0
    while True:
        speed = np.abs(rate)
        inner = inside * speed
        noise = RATE_ROUNDING_UNITS * EPS * ((inner @ t.root + abs(d) * t.root[c]) * t.root + inner[0])
        floor = np.where(inside > 0.0, EPS * inner[1:].max(), noise)
        floor[0] = np.inf
        room = np.abs(np.where(rate > 0.0, upper, lower) - x)
        steps_to = np.where(speed > floor, room / speed, np.inf)
        k = int(steps_to.argmin())
        step = min(steps_to[k], 1.0 - p)
        if step < SIMULTANEOUS_STEP and p + step < 1.0:
            return False
        g += step * rate[c]
        p += step
        x += step * rate
        if p >= 1.0 or g < stop_below:
            break
        if events == max_events:
            return False
        e = last[k]
        if e >= 0:
            w, terms = pivoted_column(W[e], v.T[e, e], e + 1, events, k, v)
            terms += abs(v.T[e, e])
        else:
            w, terms = pivoted_column(t.T[k], 1.0, 0, events, k, v)
            terms += t.size[k]
        pivot, up, u = w[k], rate[k] > 0.0, t.u[k]
        if inside[k] > 0.0:  # it leaves S, by (14): to E, if it has come to u
            if not (pivot > 0.0 and count > 2):  # b, k and one more at least
                return False
            moved[k] = (u if up else 0.0) - t.alpha[k]
            x[k], lower[k], upper[k], inside[k] = 0.0, (-np.inf if up else 0.0), (0.0 if up else np.inf), 0.0
            count -= 1
        else:  # it enters S, by (13): from E, with alpha = u, if its g has risen to 0
            if not pivot > TABLEAU_DEPENDENT_SHARE * terms:
                return False
            x[k], lower[k], upper[k], inside[k] = (u if up else 0.0), 0.0, u, 1.0
            count += 1
        w[k] = 1.0
        record_pivot(v, events, k, e, pivot, w)
        part = rate[k] / pivot
        rate[k] = 0.0
        rate -= part * w
        last[k] = events
        events += 1
    moved[:] = np.where(inside > 0.0, x - t.alpha, moved)
    beta[:] = np.where(inside > 0.0, rate / d, 0.0)
    moved[c] = d * p
    return True


@compiled
def removal_paths(
    t: PathStart, m: int, c: Array, alpha: Array, g: Array, stop_below: float, max_events: int, moved: Array, beta: Array,
    ended: Array,
) -> None:  # fmt: skip
    """Follow the paths of samples c (B,) leaving, one after the other; see :func:`removal_path`."""
    W = np.empty((max_events, len(t.x)))
    for b in range(len(c)):
        ended[b] = removal_path(t, m, c[b], alpha[b], g[b], stop_below, max_events, W, moved[b], beta[b])
