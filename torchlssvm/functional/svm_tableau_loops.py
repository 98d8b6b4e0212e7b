"""Paths of samples leaving an SVM, walked one after the other on a shared tableau: compiled loops over host arrays.

Letters and the tableau are those of :mod:`torchlssvm.functional.svm_tableau`. A path keeps the pivots (k, p, w) of its events,
and a column of its own tableau is the shared one with these applied.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torchlssvm.functional.loops import compiled
from torchlssvm.functional.svm_path import EPS

DONE, LEFT = -1, -2
"""A path has ended; a path is left to others. What is not negative is the column that a path needs and does not have."""
ENDLESS = np.inf


@compiled(
    "float64(float64[::1], float64, int64, int64, int64[::1], float64[::1], float64[:, ::1], int64, float64[::1], float64[::1])"
)
def column(
    base: Any,  # (N,)
    scale: float,
    start: int,
    j: int,
    keys: Any,  # (events,) k
    pivots: Any,  # (events,) p
    W: Any,  # (events, N) w
    events: int,
    share: Any,  # (events,) room for the shares
    out: Any,  # (N,)
) -> float:
    """Column j: scale base, with the pivots from ``start`` on applied; returns the terms of its entry j, added up by size."""
    N = len(base)
    size = 0.0
    for e in range(start, events):
        k = keys[e]
        value = scale * base[k]
        for f in range(start, e):
            value = (0.0 if keys[f] == k else value) - share[f] * W[f, k]
        share[e] = value / pivots[e]
        size += abs(share[e] * W[e, j])
    for i in range(N):
        out[i] = scale * base[i]
    e = start
    while e + 4 <= events:
        w0, w1, w2, w3 = W[e], W[e + 1], W[e + 2], W[e + 3]
        s0, s1, s2, s3 = share[e], share[e + 1], share[e + 2], share[e + 3]
        for i in range(N):
            out[i] -= (s0 * w0[i] + s1 * w1[i]) + (s2 * w2[i] + s3 * w3[i])
        e += 4
    while e < events:
        w, s = W[e], share[e]
        for i in range(N):
            out[i] -= s * w[i]
        e += 1
    for e in range(start, events):
        k = keys[e]
        value = 0.0
        for f in range(start, events):
            value = (0.0 if keys[f] == k else value) - share[f] * W[f, k]
        out[k] = value
    return size


@compiled(
    "Tuple((float64, int64))(float64[::1], float64[::1], float64[::1], float64[::1], float64[::1], float64, float64, float64)"
)
def first_event(
    rate: Any, x: Any, lower: Any, upper: Any, inside: Any, noise: float, d: float, most: float
) -> tuple[float, int]:
    """The largest step at which every x (N,) is still within its bounds, if that is below ``most``, and what comes to one."""
    N = len(rate)
    total, largest = 0.0, 0.0
    for i in range(N):
        part = inside[i] * abs(rate[i])
        total += part
        largest = max(largest, part)
    floor_in, floor_out = EPS * largest, noise * (total + abs(d))
    t, at = most, -1
    for i in range(N):
        r = rate[i]
        room = upper[i] - x[i] if r > 0 else x[i] - lower[i]
        r = abs(r)
        if room < t * r and r > (floor_in if inside[i] > 0 else floor_out):
            t, at = max(room, 0.0) / r, i
    return t, at


@compiled(
    "int64(float64[:, ::1], int64[::1], float64[::1], int64, float64[:, ::1], int64, float64, float64, float64, float64, "
    "float64, float64, float64[:, ::1], float64[:, ::1], float64[::1], float64[::1], int64[::1], float64[::1], float64[::1])"
)
def walk(
    T: Any,  # (rows, N)
    row: Any,  # (N,) row of each column, or -1
    size: Any,  # (rows,) the terms of u_k[k], added up by size
    m: int,
    start: Any,  # (5, N) x, its bounds, alpha, u
    c: int,
    alpha: float,
    g: float,
    stop_below: float,
    noise: float,
    sound: float,
    tie: float,
    state: Any,  # (5, N) room
    W: Any,  # (events, N) room
    pivots: Any,  # (events,) room
    share: Any,  # (events,) room
    keys: Any,  # (events,) room
    moved: Any,  # (N,) out: how far each coefficient has moved
    beta: Any,  # (N,) out: u_c[P] at the end
) -> int:
    """The path of c leaving: DONE, LEFT or the column it lacks."""
    N = T.shape[1]
    x, lower, upper, inside, rate = state[0], state[1], state[2], state[3], state[4]
    for i in range(N):
        x[i], lower[i], upper[i], moved[i], beta[i] = start[0, i], start[1, i], start[2, i], 0.0, 0.0
        inside[i] = 1.0 if i < m else 0.0
    p, d, count, events = 0.0, -alpha, m, 0
    lower[c], upper[c] = -ENDLESS, ENDLESS
    base, scale = T[row[c]], d
    if c < m:  # it leaves P, by (14), before it is driven
        if not base[c] > 0.0:
            return LEFT
        keys[0], pivots[0], scale = c, base[c], d / base[c]
        W[0] = base
        W[0, c] = 1.0
        base, events, count, inside[c] = W[0], 1, m - 1, 0.0
    for i in range(N):
        rate[i] = scale * base[i]
    while True:
        t, k = first_event(rate, x, lower, upper, inside, noise, d, 1.0 - p)
        if k >= 0 and t < tie:
            return LEFT
        g += t * rate[c]
        p += t
        for i in range(N):
            x[i] += t * rate[i]
        if k < 0 or g < stop_below:
            break
        if events == len(keys):
            return LEFT
        last = -1
        for e in range(events):
            if keys[e] == k:
                last = e
        w = W[events]
        if last >= 0:
            terms = 1.0 / abs(pivots[last])
            terms += column(W[last], 1.0 / pivots[last], last + 1, k, keys, pivots, W, events, share, w)
        elif row[k] >= 0:
            terms = size[row[k]] + column(T[row[k]], 1.0, 0, k, keys, pivots, W, events, share, w)
        else:
            return k
        pivot, up, u = w[k], rate[k] > 0.0, start[4, k]
        if inside[k] > 0.0:  # it leaves S, by (14): to E, if it has come to u
            if not (pivot > 0.0 and count > 2):  # b, k and one more at least
                return LEFT
            moved[k] = (u if up else 0.0) - start[3, k]
            x[k], lower[k], upper[k], inside[k] = 0.0, (-ENDLESS if up else 0.0), (0.0 if up else ENDLESS), 0.0
            count -= 1
        else:  # it enters S, by (13): from E, with alpha = u, if its g has risen to 0
            if not pivot > sound * terms:
                return LEFT
            x[k], lower[k], upper[k], inside[k] = (u if up else 0.0), 0.0, u, 1.0
            count += 1
        keys[events], pivots[events], w[k] = k, pivot, 1.0
        part = rate[k] / pivot
        rate[k] = 0.0
        for i in range(N):
            rate[i] -= part * w[i]
        events += 1
    for i in range(N):
        if inside[i] > 0.0:
            moved[i], beta[i] = x[i] - start[3, i], rate[i] / d
    moved[c] = d * p
    return DONE


@compiled(
    "void(float64[:, ::1], int64[::1], float64[::1], int64, float64[:, ::1], int64[::1], int64[::1], float64[::1], "
    "float64[::1], float64, float64, float64, float64, int64, float64[:, ::1], float64[:, ::1], int64[::1])"
)
def walk_all(
    T: Any,  # (rows, N), and as in walk
    row: Any,
    size: Any,
    m: int,
    start: Any,
    paths: Any,  # (k,) those to be walked
    c: Any,  # (B,)
    alpha: Any,  # (B,)
    g: Any,  # (B,)
    stop_below: float,
    noise: float,
    sound: float,
    tie: float,
    most: int,  # events of a path
    moved: Any,  # (B, N) out
    beta: Any,  # (B, N) out
    answer: Any,  # (B,) out: DONE, LEFT or the column that a path lacks
) -> None:
    """The paths of c leaving, one after the other."""
    N = T.shape[1]
    state, W, pivots, share = np.empty((5, N)), np.empty((most, N)), np.empty(most), np.empty(most)
    room = state, W, pivots, share, np.empty(most, np.int64)
    for b in paths:
        what = c[b], alpha[b], g[b], stop_below, noise, sound, tie
        answer[b] = walk(T, row, size, m, start, *what, *room, moved[b], beta[b])
