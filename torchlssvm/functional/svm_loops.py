"""The steps of :mod:`torchlssvm.functional.svm_path` as compiled loops over host arrays: one pass over memory each.

Letters and slots are those of ``svm_path``. Buffers come whole; ``top`` says how many slots are in use, ``count`` how many
columns. A free slot is zero in R, A, used and beta.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torchlssvm.functional.loops import compiled
from torchlssvm.functional.svm_path import EPS, TINY

CAREFUL, END, MARGIN, ERROR, RESERVE = -1, 0, 1, 2, 3
"""What ends a step: rates that are 0 to rounding, or simultaneous events; nothing; a sample that comes to the margin; a margin
vector that comes to its upper bound, or to 0."""
ENDLESS = np.inf


@compiled("void(float64[:, ::1], int64, int64, float64[::1], float64[::1], float64[::1])")
def rates(Q: Any, top: int, count: int, beta: Any, force: Any, gamma: Any) -> None:
    """gamma = force + Q^T beta (12), Q (slots, columns) by rows: eight at a time, so that gamma is read less often."""
    for c in range(count):
        gamma[c] = force[c]
    k = 0
    while k + 8 <= top:
        b0, b1, b2, b3 = beta[k], beta[k + 1], beta[k + 2], beta[k + 3]
        b4, b5, b6, b7 = beta[k + 4], beta[k + 5], beta[k + 6], beta[k + 7]
        for c in range(count):
            low = b0 * Q[k, c] + b1 * Q[k + 1, c] + b2 * Q[k + 2, c] + b3 * Q[k + 3, c]
            high = b4 * Q[k + 4, c] + b5 * Q[k + 5, c] + b6 * Q[k + 6, c] + b7 * Q[k + 7, c]
            gamma[c] += low + high
        k += 8
    while k < top:
        for c in range(count):
            gamma[c] += beta[k] * Q[k, c]
        k += 1


@compiled("void(float64[:, ::1], int64, float64[::1], float64, float64[::1])")
def times(M: Any, top: int, v: Any, factor: float, out: Any) -> None:
    """out = factor M v for M (slots, slots)."""
    for i in range(top):
        row = M[i]
        inner = 0.0
        for j in range(top):
            inner += row[j] * v[j]
        out[i] = factor * inner


@compiled(
    "Tuple((int64, int64, float64))(float64[:, ::1], int64, int64, float64[::1], float64[::1], float64[::1], float64[::1], "
    "float64[::1], float64[::1], float64[::1], float64[::1], float64, float64, float64, float64[::1])"
)
def advance(
    Q: Any,  # (slots, columns)
    top: int,
    count: int,
    beta: Any,  # (top,)
    force: Any,  # (count,)
    slack: Any,  # (count,)
    sign: Any,  # (count,)
    a: Any,  # (top,)
    lower: Any,  # (top,)
    upper: Any,  # (top,)
    rise: Any,  # (top,) rates of the upper bounds; none: nothing rises
    most: float,
    noise: float,
    size: float,
    gamma: Any,  # (count,) out
) -> tuple[int, int, float]:
    """gamma (12), then the largest step (2.3), then that step of a and slack: (what ends it, its slot or column, its length).

    Nothing but gamma is written where the answer is CAREFUL.
    """
    rates(Q, top, count, beta, force, gamma)
    t, slot, total = ENDLESS, 0, 0.0
    if len(rise):
        largest = 0.0
        for k in range(top):
            largest = max(largest, max(abs(beta[k]), abs(rise[k])))
        floor = 32 * EPS * largest
        for k in range(top):
            total += abs(beta[k])
            if beta[k] - rise[k] > floor and max(0.0, upper[k] - a[k]) < t * (beta[k] - rise[k]):
                t, slot = max(0.0, upper[k] - a[k]) / (beta[k] - rise[k]), k
            if -beta[k] > floor and max(0.0, a[k] - lower[k]) < t * -beta[k]:
                t, slot = max(0.0, a[k] - lower[k]) / -beta[k], k
    else:
        for k in range(top):
            total += abs(beta[k])
            room = abs((upper[k] if beta[k] > 0 else lower[k]) - a[k])
            if room < t * abs(beta[k]):
                t, slot = room / abs(beta[k]), k
    quotient, column = 0.0, -1
    for c in range(count):
        q = gamma[c] * sign[c] / max(slack[c], 1e-200)
        if q < quotient:
            quotient, column = q, c
    u = ENDLESS
    if column >= 0:
        u = -1.0 / quotient
        if -gamma[column] * sign[column] <= noise * (total + size):
            return CAREFUL, column, 0.0
    first = min(t, u)
    if first <= TINY:
        return CAREFUL, column, 0.0
    step = min(first, most)
    for k in range(top):
        a[k] += step * beta[k]
    for c in range(count):
        slack[c] += step * (gamma[c] * sign[c])
    if first >= most:
        return END, -1, step
    if u <= t:
        return MARGIN, column, step
    up = abs(upper[slot] + step * rise[slot] - a[slot]) <= abs(a[slot]) if len(rise) else beta[slot] > 0
    return (ERROR if up else RESERVE), slot, step


@compiled(
    "float64(float64[:, ::1], int64, int64[::1], float64[::1], float64[::1], float64, float64[::1], float64[::1])"
)
def span(R: Any, top: int, at: Any, used: Any, row: Any, first: float, h: Any, beta: Any) -> float:
    """h = [y_i; Q_Si] from the row of Q, beta = -R h (10); returns h^T beta, which with Q_ii is gamma_i (12)."""
    for k in range(top):
        h[k] = row[at[k]] * used[k]
    h[0] = first
    times(R, top, h, -1.0, beta)
    inner = 0.0
    for k in range(top):
        inner += h[k] * beta[k]
    return inner


@compiled("float64(float64[:, ::1], float64[:, ::1], int64, float64[::1], float64[::1], float64[::1])")
def sensitivities(R: Any, A: Any, top: int, h: Any, beta: Any, residual: Any) -> float:
    """beta = -R h (10), refined once; returns the largest h + A beta before that, as a share of the largest h."""
    times(R, top, h, -1.0, beta)
    times(A, top, beta, 1.0, residual)
    off, size = 0.0, 1e-300
    for k in range(top):
        residual[k] += h[k]
        off, size = max(off, abs(residual[k])), max(size, abs(h[k]))
    step = np.empty(top)
    times(R, top, residual, -1.0, step)
    for k in range(top):
        beta[k] += step[k]
    return off / size


@compiled("void(float64[:, ::1], int64, float64[::1], float64)")
def add_outer(R: Any, top: int, v: Any, factor: float) -> None:
    """R += factor v v^T."""
    for i in range(top):
        row, share = R[i], factor * v[i]
        if share != 0.0:
            for j in range(top):
                row[j] += share * v[j]


@compiled(
    "void(float64[:, ::1], float64[:, ::1], float64[:, ::1], float64[:, ::1], int64, int64, int64, float64[::1], float64[::1], "
    "float64[::1], float64, int64[::1], float64[::1], float64)"
)
def grow(
    R: Any,  # (slots, slots)
    A: Any,  # (slots, slots)
    QS: Any,  # (slots, n)
    near: Any,  # (slots, columns)
    top: int,
    slot: int,
    i: int,
    row: Any,  # (n,)
    h: Any,  # (top,)
    v: Any,  # (top,) beta_i, with 1 in its slot
    gamma: float,
    positions: Any,  # (columns,)
    carried: Any,  # (top,) or nothing
    rate: float,
) -> None:
    """Sample i enters S: R by (13), its row and column of A, its row of QS and what of it is near; and beta of the drive."""
    for k in range(len(carried)):
        carried[k] -= v[k] * (rate / gamma)
    add_outer(R, top, v, 1.0 / gamma)
    for k in range(top):
        A[slot, k] = A[k, slot] = h[k]
    A[slot, slot] = row[i]
    for j in range(len(row)):
        QS[slot, j] = row[j]
    for c in range(len(positions)):
        near[slot, c] = row[positions[c]]


@compiled("void(float64[:, ::1], float64[:, ::1], int64, int64, float64[::1])")
def shrink(R: Any, A: Any, top: int, slot: int, beta: Any) -> None:
    """The margin vector in a slot leaves: R by (14), its row and column of A; and, of the drive, beta, if there is one."""
    v = R[slot, :top].copy()
    pivot = v[slot]
    add_outer(R, top, v, -1.0 / pivot)
    if len(beta):
        share = beta[slot] / pivot
        for k in range(top):
            beta[k] -= v[k] * share
        beta[slot] = 0.0
    for k in range(top):
        R[slot, k] = R[k, slot] = A[slot, k] = A[k, slot] = 0.0


@compiled(
    "float64(float64[:, ::1], float64[:, ::1], int64, float64[::1], float64[::1], float64[::1], float64[::1], float64[::1])"
)
def residual(QS: Any, A: Any, top: int, a: Any, used: Any, alpha: Any, sign: Any, out: Any) -> float:
    """What is left of (2) and (3) at the margin vectors, A a + [sum_E y alpha; Q_SE alpha_E - 1]; returns the largest."""
    error = np.nonzero((sign != 0) & (alpha > 0))[0]
    times(A, top, a, 1.0, out)
    largest = 0.0
    for k in range(top):
        inner = -1.0 if k else 0.0
        for e in error:
            inner += QS[k, e] * alpha[e]
        out[k] = (out[k] + inner) * used[k]
        largest = max(largest, abs(out[k]))
    return largest


@compiled("void(float64[:, ::1], int64, int64[::1], float64[:, ::1])")
def columns(QS: Any, top: int, at: Any, out: Any) -> None:
    """The columns of QS in these positions."""
    for k in range(top):
        for c in range(len(at)):
            out[k, c] = QS[k, at[c]]


@compiled(
    "boolean(float64[:, ::1], float64[:, ::1], float64[:, ::1], int64, float64[::1], float64[::1], float64[::1], float64[::1], "
    "int64[::1], float64[::1], float64[::1], float64, float64, float64, float64[::1])"
)
def newton(
    QS: Any,  # (slots, n)
    A: Any,  # (slots, slots)
    R: Any,  # (slots, slots)
    top: int,
    a: Any,  # (top,)
    lower: Any,  # (top,)
    upper: Any,  # (top,)
    used: Any,  # (top,)
    at: Any,  # (top,)
    alpha: Any,  # (n,)
    sign: Any,  # (n,)
    much: float,
    scale: float,
    near: float,
    delta: Any,  # (top,) out
) -> bool:
    """a -= R r with what is left of (2) and (3), r; and alpha of the margin vectors. False, and nothing, if r is much.

    Much: more than ``much`` in units of g, which are 1 or the largest alpha times ``scale``. Nor if a would leave its box by
    more than ``near`` of it.
    """
    r = np.empty(top)
    largest = residual(QS, A, top, a, used, alpha, sign, r)
    if largest > much * max(1.0, scale * alpha.max()):
        return False
    times(R, top, r, -1.0, delta)
    for k in range(top):
        z = a[k] + delta[k]
        if max(lower[k] - z, z - upper[k]) > near * upper[k]:
            return False
    for k in range(top):
        a[k] = min(max(a[k] + delta[k], lower[k]), upper[k])
        if k and used[k] != 0:
            alpha[at[k]] = a[k]
    return True


@compiled(
    "void(int64[::1], float64[::1], float64[::1], float64[::1], float64[::1], float64[::1], float64[::1], float64[::1])"
)
def look(at: Any, slack: Any, sign: Any, force: Any, near_slack: Any, near_sign: Any, near_force: Any, g: Any) -> None:
    """Slack, sign and force of the samples in these positions; and g of all, from slack and sign: 0 where sign is."""
    for c in range(len(at)):
        near_slack[c], near_sign[c], near_force[c] = slack[at[c]], sign[at[c]], force[at[c]]
    for j in range(len(g)):
        g[j] = slack[j] * sign[j] if sign[j] != 0 else 0.0


@compiled("void(float64[:, ::1], int64, float64[::1], float64[::1], float64[::1], float64[::1])")
def slacks(QS: Any, top: int, moved: Any, g: Any, sign: Any, slack: Any) -> None:
    """g + QS^T moved, and from it every slack, sign * g, infinite where sign is 0."""
    out = np.empty(len(g))
    rates(QS, top, len(g), moved, g, out)
    for j in range(len(g)):
        slack[j] = sign[j] * out[j] if sign[j] != 0 else ENDLESS
