r"""Minimization of the squared hinge loss by active sets.

For one class against the rest, with labels y_i = +1 or -1, weights c_i > 0 and scores f(x) = w^T x + b, the objective is

    phi(w, b) = rho |w|^2 + sum_i c_i max(0, 1 - y_i f(x_i))^2.

Since y_i^2 = 1, a sample with a margin m_i = y_i f(x_i) < 1 costs (f(x_i) - y_i)^2, and a sample with m_i >= 1 costs nothing.
So phi is ridge regression on the active set A = {i : m_i < 1}. Each step of Newton's method takes the active set A of the
current point and solves

    w_A, b_A = argmin rho |w|^2 + sum_{i in A} c_i (f(x_i) - y_i)^2.

The method stops when A is the active set of w_A. Full steps can cycle. A step that does not lower phi is therefore shortened to
the minimum on its segment, along which phi is piecewise quadratic and convex.

**Proof of the active set.** A computed point differs from w_A by rounding, and the gradient on A bounds the difference. Use the
coordinates v = x / sqrt(rho), w' = sqrt(rho) w, centred on the weighted mean mu of the active samples if the intercept is free.
In these coordinates the matrix of the system is I + sum c v v^T, whose eigenvalues are at least 1. Let g' (centred) and g_b be
half the gradients in w' and b at the computed point, and n the sum of c over A. Then each margin m_i has an error of at most

    |m_i - m_i(w_A)| <= |v_i - mu| |g'| + |g_b| / n.

If every margin is farther than this from 1, then A is the active set of w_A, which proves that w_A is the minimum of phi.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

FLOAT64_EPS = torch.finfo(torch.float64).eps
"""Spacing of float64 at 1: twice the largest relative error of one operation."""


class Sweep(NamedTuple):
    """One pass over rows: scores (n, C), half gradients in w (J, C) and b (C,)."""

    scores: Tensor
    gradient: Tensor
    gradient_b: Tensor


def sweep(rows: Tensor, w: Tensor, b: Tensor, targets: Tensor, weight: Tensor) -> Sweep:
    """Compute the scores of rows for C classes and half the gradient of sum weight (score - target)^2, in one pass.

    rows: (n, J) integers; w: (J, C) in grid units; b: (C,); targets, weight: (n, C).
    """
    found = torch.empty(rows.shape[0], w.shape[1], dtype=torch.float64, device=rows.device)
    gradient, gradient_b = torch.zeros_like(w), torch.zeros_like(b)
    for part, block in float_blocks(rows):
        f = torch.addmm(b, block, w, out=found[part])
        error = (f - targets[part]).mul_(weight[part])
        gradient.addmm_(block.mT, error)
        gradient_b += error.sum(0)
    return Sweep(found, gradient, gradient_b)


def combinations(rows: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """Sums (J, C) of rows (n, J), each times its errors (n, C), and of the errors (C,)."""
    out = torch.zeros(rows.shape[1], errors.shape[1], dtype=torch.float64, device=rows.device)
    for part, block in float_blocks(rows):
        out.addmm_(block.mT, errors[part])
    return out, errors.sum(0)


def scores(rows: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Compute scores (n, C) of rows on the grid. rows: (n, J) integers; w: (J, C) in grid units; b: (C,)."""
    out = torch.empty(rows.shape[0], w.shape[1], dtype=torch.float64, device=rows.device)
    for part, block in float_blocks(rows):
        torch.addmm(b, block, w, out=out[part])
    return out


def float_blocks(rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows as float64, some at a time, with their places."""
    size = max(16, 2**18 // max(rows.shape[1], 1))  # 2 MB stay in the cache
    for a in range(0, rows.shape[0], size):
        part = slice(a, a + size)
        yield part, rows[part].to(torch.float64)


def loss(margins: Tensor, weight: Tensor) -> Tensor:
    """Sum c_i max(0, 1 - m_i)^2. margins: (n,); weight: (n,)."""
    return weight @ (1.0 - margins).clamp_(min=0.0).square_()


def lowest_on_segment(start: Tensor, stop: Tensor, weight: Tensor, slope: float, curvature: float) -> float:
    """Find the t in [0, 1] with the lowest phi, for margins (1 - t) start + t stop.

    start, stop: (n,) margins; weight: (n,); slope, curvature: of half the penalty, whose derivative is slope + t curvature.

    With xi_i(t) = 1 - m_i(t) and d_i = stop_i - start_i, half the derivative of phi is
    slope + t curvature - sum over xi_i(t) > 0 of c_i d_i xi_i(t). Since this function is piecewise linear and increasing, its
    zero is found by evaluating it, in increasing order, at the values of t where a sample changes sides.
    """
    step = stop - start
    begins, ends = start < 1.0, stop < 1.0
    crossing = torch.nonzero(begins != ends)[:, 0]
    place = (1.0 - start[crossing]) / step[crossing]
    order = place.argsort()
    crossing, place = crossing[order], place[order].clamp_(0.0, 1.0)
    # the sum is p - t q, with p = sum c d (1 - start) and q = sum c d^2 over the samples active at t
    p, q = weight * step * (1.0 - start), weight * step * step
    joins = torch.where(ends[crossing], 1.0, -1.0).to(p)
    P = torch.cat([p[begins].sum()[None], joins * p[crossing]]).cumsum(0)
    Q = torch.cat([q[begins].sum()[None], joins * q[crossing]]).cumsum(0)
    linear, rate = slope - P, curvature + Q  # half the derivative on piece j is linear_j + t rate_j
    last = torch.cat([place, place.new_ones(1)])
    rising = torch.nonzero(linear + last * rate >= 0)
    if not len(rising):
        return 1.0
    piece = int(rising[0, 0])
    if float(rate[piece]) <= 0:
        return float(last[piece])
    return min(1.0, max(0.0, float(-linear[piece] / rate[piece])))


def rounding_bound(norms: Tensor, J: int, size: float, b: float) -> Tensor:
    """Bound the error of each computed margin (n,). norms: (n,) of the rows; size: |w|, in the same units."""
    return (J + 4) * FLOAT64_EPS * (norms * size + abs(b))
