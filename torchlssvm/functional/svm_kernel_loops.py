"""Rows of Q for RBF as compiled loops over host arrays, from rows P = [x, |x|^2, 1] of the samples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from torchlssvm.functional.loops import compiled


@compiled("float64(float64[:, ::1], float64[::1], float64[:, ::1], int64, int64)")
def lift(x: Any, centre: Any, P: Any, start: int, stop: int) -> float:
    """Rows P_i = [z, |z|^2, 1] with z = x_i - centre; returns the largest |z|^2."""
    J, largest = x.shape[1], 0.0
    for i in range(start, stop):
        total = 0.0
        for d in range(J):
            z = x[i, d] - centre[d]
            P[i, d] = z
            total += z * z
        P[i, J], P[i, J + 1] = total, 1.0
        largest = max(largest, total)
    return largest


@compiled("float64(float64[:, ::1], int64, int64, float64)")
def kernel(P: Any, i: int, j: int, gamma: float) -> float:
    """K_ij = exp(-gamma |x_i - x_j|^2), P = [x, |x|^2, 1]."""
    J = P.shape[1] - 2
    x, z = P[i], P[j]
    inner = 0.0
    for d in range(J):
        inner += x[d] * z[d]
    return float(math.exp(gamma * min(0.0, 2.0 * inner - x[J] - z[J])))


@compiled("void(float64[:, ::1], int64, float64, float64[::1], int64[::1], float64[::1])")
def gaussian(P: Any, i: int, gamma: float, y: Any, at: Any, out: Any) -> None:
    """Q_ij = y_i y_j K_ij for j in ``at``, or for the first of all where that is empty."""
    for k in range(len(out)):
        j = at[k] if len(at) else k
        out[k] = y[i] * y[j] * kernel(P, i, j, gamma)


@compiled(
    "float64(float64[:, ::1], int64, float64, float64[::1], float64[::1], float64[::1], int64[::1], float64[::1], "
    "float64[::1], float64[:, ::1], int64[::1], float64[:, ::1], int64)"
)
def newcomer(
    P: Any,
    i: int,
    gamma: float,
    y: Any,  # (n,)
    sign: Any,  # (n,)
    alpha: Any,  # (n,)
    at: Any,  # (top,) the position of each slot
    used: Any,  # (top,)
    a: Any,  # (top,)
    QS: Any,  # (slots, n)
    held: Any,  # (rows,) the position of each row kept
    rows: Any,  # (rows, n)
    high: int,
) -> float:
    """g_i of a sample with alpha = 0; and if that is not negative, its column of QS and of the rows that are kept."""
    top = len(a)
    column = np.zeros(top)
    column[0] = y[i]
    g = y[i] * a[0] - 1.0
    for k in range(1, top):
        if used[k] != 0:
            column[k] = y[i] * y[at[k]] * kernel(P, i, at[k], gamma)
            g += column[k] * a[k]
    for j in range(len(y)):
        if sign[j] < 0:
            g += y[i] * y[j] * kernel(P, i, j, gamma) * alpha[j]
    if g >= 0:
        for k in range(top):
            QS[k, i] = column[k]
        for r in range(high):
            rows[r, i] = y[i] * y[held[r]] * kernel(P, i, held[r], gamma)
    return float(g)
