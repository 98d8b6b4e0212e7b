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


def pivoted(u: Tensor, j: Tensor, pivot: Pivot) -> tuple[Tensor, Tensor]:  # (B, N), (B,) -> (B, N), (B,)
    """Columns j after a pivot, and the size of what it has added to u_j[j]."""
    key = pivot.k[:, None]
    own = pivot.k == j
    value = u.gather(1, key)[:, 0]
    share = torch.where(own, -pivot.inverse, value * pivot.inverse)
    u = u.masked_fill(own[:, None], 0.0).scatter_(1, key, torch.where(pivot.inverse == 0, value, 0.0)[:, None])
    return u.addcmul_(share[:, None], pivot.w, value=-1.0), (share * pivot.w.gather(1, j[:, None])[:, 0]).abs_()


def column(u: Tensor, j: Tensor, size: Tensor, pivots: list[Pivot]) -> tuple[Tensor, Tensor]:  # (B, N), (B,), (B,)
    """Columns j (B, N) after all these pivots, from u before; and the terms of u_j[j], added up by size, from those before."""
    for pivot in pivots:
        size = torch.where(pivot.k == j, 0.0, size)
        u, more = pivoted(u, j, pivot)
        size = size + more
    return u, size


def first_event(
    rate: Tensor,  # (B, N)
    x: Tensor,  # (B, N)
    lower: Tensor,  # (B, N)
    upper: Tensor,  # (B, N)
    inside: Tensor,  # (B, N) bool: in P
    noise: Tensor,  # (B,)
) -> tuple[Tensor, Tensor]:
    """The largest step (B,) that keeps x within its bounds, infinite if none leaves them, and what comes to a bound first (B,).

    x is a inside P and g outside. Rates that are rounding have no events: up to 2^-52 of the largest inside; outside up to
    ``noise``, as for a duplicate, or any sample in the span of S.

    Example:
        >>> one = torch.ones(1, 2)
        >>> first_event(torch.tensor([[1.0, -2.0]]), 0 * one, -one, one, one > 0, torch.zeros(1))
        (tensor([0.5000]), tensor([1]))
    """
    size = rate.abs()
    largest = torch.where(inside, size, 0.0).amax(1, keepdim=True)
    floor = torch.where(inside, EPS * largest, noise[:, None])
    room = torch.where(rate > 0, upper - x, x - lower).clamp_(min=0.0)
    t, k = room.div_(size).masked_fill_(size <= floor, ENDLESS).min(1)
    return t, k
