"""Events of a walk one after the other, compiled: whatever is not plain is left to the caller.

Plain is: R is steady, the sample that enters is far from the span of S and not driven itself, a slot is free for it and its row
of Q at hand, the margin vector that leaves is not the last one and far from the span of the others, and there is no tie.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torchlssvm.functional.loops import compiled
from torchlssvm.functional.svm_kernel_loops import gaussian
from torchlssvm.functional.svm_loops import (
    CAREFUL,
    END,
    ENDLESS,
    ERROR,
    MARGIN,
    advance,
    grow,
    sensitivities,
    shrink,
    span,
    times,
)
from torchlssvm.functional.svm_path import FAR

STOP, UNSTEADY = 4, 5
"""The log is full; R is not steady. Other codes are those of ``svm_loops``."""
NUMBERS = ("p", "residual", "size", "balance", "noise", "steady", "mild", "kernel")
COUNTS = ("top", "inside", "age", "refine", "carried", "events", "spare")
"""What the two arrays hold: where the walk is and its limits; slots and margin vectors, the age of beta, whether there is one,
events and rows of the cache that have been used."""


@compiled(
    "Tuple((int64, int64, float64))(float64[:, ::1], float64[:, ::1], float64[:, ::1], float64[:, ::1], float64[::1], "
    "float64[::1], float64[::1], float64[::1], int64[::1], float64[::1], float64[::1], float64[::1], int64[::1], int64[::1], "
    "float64[::1], float64[::1], float64[::1], float64[::1], float64[::1], float64[::1], float64[::1], float64[::1], "
    "float64[::1], float64[:, ::1], int64[::1], int64[::1], int64[::1], float64[:, ::1], float64[::1], int64[::1], "
    "int64[:, ::1])"
)
def run(
    R: Any,  # (slots, slots)
    A: Any,  # (slots, slots)
    QS: Any,  # (slots, n or more)
    Q: Any,  # (slots, columns or more)
    a: Any,  # (slots,)
    lower: Any,  # (slots,)
    upper: Any,  # (slots,)
    used: Any,  # (slots,)
    at: Any,  # (slots,) positions
    slack: Any,  # (columns,)
    sign: Any,  # (columns,)
    force: Any,  # (columns,)
    positions: Any,  # (columns,)
    place: Any,  # (n or more,) columns
    y: Any,  # (n,)
    u: Any,  # (n,)
    alpha: Any,  # (n,)
    d: Any,  # (n,) rates of the coefficients that are driven
    whole: Any,  # (n,) force on all
    g: Any,  # (n,) without the share of the margin vectors since ``start``
    start: Any,  # (slots,) a when the walk began, or a margin vector entered
    beta: Any,  # (slots,) in and out
    gamma: Any,  # (columns,) out
    rows: Any,  # (rows, n or more) the cache
    held: Any,  # (rows,) the position of each
    cached: Any,  # (n or more,) the row of each position, or -1
    spare: Any,  # (k,) rows that are free
    P: Any,  # (n or more, J + 2) for kernel rows, or nothing
    numbers: Any,  # in and out
    counts: Any,  # in and out
    log: Any,  # (most, 4) out: what, position, slot, row of the cache, of every event
) -> tuple[int, int, float]:
    """Walk as long as events are plain. Returns what ends the last step, its column or slot, and its length, as ``advance``."""
    n, count, slots = len(y), len(slack), len(a)
    h, v, rest, own, none = np.zeros(slots), np.zeros(slots), np.empty(slots), np.empty(n), np.empty(0)
    everybody = np.empty(0, np.int64)
    while True:
        top = counts[0]
        if counts[5] == len(log):
            return STOP, -1, 0.0
        refined = counts[2] >= counts[3] or not numbers[1] < numbers[5]
        if refined or counts[4] == 0:
            for k in range(top):
                h[k] = whole[at[k]] * used[k]
            h[0] = numbers[3]
            if refined:
                numbers[1] = sensitivities(R, A, top, h, beta, rest)
                if not numbers[1] < numbers[5]:
                    return UNSTEADY, -1, 0.0
            else:
                times(R, top, h, -1.0, beta)
        counts[2], counts[4] = 0 if refined else counts[2] + 1, 1
        most, noise, size = 1.0 - numbers[0], numbers[4], numbers[2]
        code, i, t = advance(Q, top, count, beta, force, slack, sign, a, lower, upper, none, most, noise, size, gamma)
        numbers[0] += t
        if code in (CAREFUL, END):
            return code, i, t
        if code == MARGIN:
            j = positions[i]
            slot = 1
            while slot < top and used[slot] != 0:
                slot += 1
            if d[j] != 0 or slot == slots or (cached[j] < 0 and not len(P)):
                return code, i, t
            if cached[j] >= 0:
                row = rows[cached[j], :n]
            else:
                gaussian(P, j, numbers[7], y, everybody, own)
                row = own
            inner = span(R, top, at, used, row, y[j], h, v)
            if not row[j] + inner > FAR * row[j]:
                return code, i, t
            if slot == top:
                top, beta[slot], h[slot] = top + 1, 0.0, 0.0
                counts[0] = top
            v[slot] = 1.0
            at[slot], used[slot], a[slot], lower[slot], upper[slot] = j, 1.0, alpha[j], 0.0, u[j]
            part = row[j] + inner
            grow(R, A, QS, Q, top, slot, j, row, h[:top], v[:top], part, positions, beta[:top], gamma[i])
            sign[i], slack[i], start[slot] = 0.0, ENDLESS, a[slot]
            counts[1] += 1
            log[counts[5], 3] = -1
        else:
            slot = i
            j = at[slot]
            distance = R[slot, slot] * A[slot, slot]  # Q_jj / gamma_j
            if counts[1] < 2 or not 0 < distance < numbers[6]:
                return code, i, t
            alpha[j] = u[j] if code == ERROR else 0.0
            by = alpha[j] - start[slot]
            for k in range(n):
                g[k] += by * QS[slot, k]
            log[counts[5], 3] = -1
            if cached[j] < 0 and counts[6] < len(spare):
                r = spare[counts[6]]
                counts[6] += 1
                for k in range(n):
                    rows[r, k] = QS[slot, k]
                held[r], cached[j], log[counts[5], 3] = j, r, r
            shrink(R, A, top, slot, beta[:top])
            at[slot], used[slot], a[slot], start[slot] = 0, 0.0, 0.0, 0.0
            lower[slot], upper[slot] = -ENDLESS, ENDLESS
            c = place[j]
            slack[c], sign[c] = 0.0, (-1.0 if code == ERROR else 1.0)
            counts[1] -= 1
        log[counts[5], 0], log[counts[5], 1], log[counts[5], 2] = code, j, slot
        counts[5] += 1
