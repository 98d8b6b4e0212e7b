r"""The tableau of an SVM: how everything answers to one coefficient, and what an event changes in that.

Let P be b and the margin vectors S, M = [[0, y^T], [y, Q]] over b and all samples, R = (M_PP)^-1 (7). *Column* k of the tableau
holds what a unit of k does, a in P being moved so that g_S = 0 and (3) still hold:

    k outside P: alpha_k grows by 1.   u_k[P] = beta_k = -R M_Pk (10),  u_k[i] = gamma_ik = M_ik + M_iP beta_k (12)
    k inside P:  g_k grows by 1.       u_k[P] = R_Pk,                   u_k[i] = M_iP R_Pk

An event exchanges the two for one k: (13) where it enters S, (14) where it leaves. Both are the same *pivot* on p = u_k[k]:

    w = u_k with w[k] = 1;    u_j <- u_j with u_j[k] = 0, minus w u_j[k] / p;    u_k <- w / p

So a path needs no matrix of its own. It keeps (k, p, w) of its events; a column of its tableau is a column of the one it
started from, pivoted as often as it has had events: a few times N numbers, where the inverse and (12) take a product with a
matrix each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchlssvm.functional.svm_path import EPS

ENDLESS = float("inf")


class Pivot(NamedTuple):
    """An event of each of B paths; inverse = 0 and w = 0 where a path has none."""

    k: Tensor  # (B,)
    inverse: Tensor  # (B,) 1 / p
    w: Tensor  # (B, N)


def inner(R: Tensor, M_PO: Tensor) -> Tensor:  # (m, m), (m, O) -> (m, O)
    """u_k[O] for k inside P, and -u_k[P] for k outside, by columns: R M_PO."""
    return R @ M_PO


def outer(M_KO: Tensor, M_PK: Tensor, X: Tensor) -> Tensor:  # (K, O), (m, K), (m, O) -> (K, O)
    """gamma_ik (12) for k in K, i in O, both outside P: M_KO - M_KP X with X = R M_PO.

    Example:
        >>> Q = torch.tensor([[2.0, 1.0], [1.0, 3.0]])  # P: the first sample alone; beta = -1/2
        >>> X = inner(torch.tensor([[0.5]]), Q[:1, 1:])
        >>> outer(Q[1:, 1:], Q[:1, 1:], X)
        tensor([[2.5000]])
    """
    return torch.addmm(M_KO, M_PK.T, X, alpha=-1.0)


def pivot_(u: Tensor, pivot: Pivot) -> Tensor:  # (B, N) -> (B,)
    """Other columns u_j after a pivot, in place; returns the shares u_j[k] / p that they have taken of w.

    Example:
        >>> u = torch.tensor([[3.0, 2.0]])
        >>> share = pivot_(u, Pivot(torch.tensor([1]), torch.tensor([0.25]), torch.tensor([[1.0, 1.0]])))
        >>> u, share
        (tensor([[ 2.5000, -0.5000]]), tensor([0.5000]))
    """
    key = pivot.k[:, None]
    value = u.gather(1, key)
    share = value * pivot.inverse[:, None]
    u.scatter_(1, key, value.masked_fill_(pivot.inverse[:, None] != 0, 0.0))
    u.addcmul_(share, pivot.w, value=-1.0)
    return share[:, 0]


def column_(u: Tensor, j: Tensor, size: Tensor, pivots: list[Pivot]) -> None:  # (B, N), (B,), (B,)
    """Columns u_j after all these pivots, in place, and the terms of u_j[j], added up by size."""
    own = torch.stack([pivot.k for pivot in pivots]) == j  # (events, B)
    for pivot, mine, some in zip(pivots, own, own.any(1).tolist(), strict=True):
        share = pivot_(u, pivot)
        size += (share * pivot.w.gather(1, j[:, None])[:, 0]).abs_()
        if some:
            rows = mine.nonzero()[:, 0]
            u[rows] = pivot.w[rows] * pivot.inverse[rows, None]
            size[rows] = pivot.inverse[rows].abs()


def first_event(
    rate: Tensor,  # (B, N)
    x: Tensor,  # (B, N)
    lower: Tensor,  # (B, N)
    upper: Tensor,  # (B, N)
    inside: Tensor,  # (B, N) bool: in P
    d: Tensor,  # (B,)
    noise: float,
) -> tuple[Tensor, Tensor]:
    """The largest step (B,) that keeps x within its bounds, infinite if none leaves them, and what comes to a bound first (B,).

    x is a inside P and g outside. Rates that are rounding have no events: up to 2^-52 of the largest inside; outside up to
    ``noise`` for each unit of the coefficients that move, as for a duplicate, or any sample in the span of S.

    Example:
        >>> one = torch.ones(1, 2)
        >>> first_event(torch.tensor([[1.0, -2.0]]), 0 * one, -one, one, one > 0, one[:, 0], 1e-16)
        (tensor([0.5000]), tensor([1]))
    """
    size = torch.where(inside, rate, 0.0).abs_()
    within, without = EPS * size.amax(1), noise * (size.sum(1) + d.abs())
    floor = torch.where(inside, within[:, None], without[:, None])
    t = torch.where(rate > 0, upper, lower).sub_(x).div_(rate).clamp_(min=0.0)
    first, k = t.masked_fill_(torch.abs(rate, out=size) <= floor, ENDLESS).min(1)
    return first, k
