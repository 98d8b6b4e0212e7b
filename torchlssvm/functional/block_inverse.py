"""The inverse of a growing and shrinking matrix, by blocks (Duan et al., Lemma 1 and equations (8), (9)).

Q is symmetric and positive definite, U = Q^-1. Both updates of U are symmetric terms of low rank, so they are given as rows
Z (k, N) and a sign, U_new = U + sign Z^T Z; whoever keeps U may add them up later, many at once.

**Removing** k rows (9): with R = (U_11, U_12) the k rows of U and U_11 = L L^T,

    U_new = U - R^T U_11^-1 R = U - Z^T Z,      Z = L^-1 R.

The rows and columns removed come out as zero; the rest is U_keep - U_12^T U_11^-1 U_12.

**Adding** k rows, the same lemma read backwards: with Q_c (k, N) the new rows of Q against the old ones, B = Q_c U,
and the Schur complement S = Q_cc - B Q_c^T = L L^T,

    U_new = U + [-B, I]^T S^-1 [-B, I] = U + Z^T Z,      Z = L^-1 [-B, I].

For any h = U t that is wanted beside U (the solution!), h_new = h -+ Z^T (...) costs k passes over a vector, not over U:

    removing:  h_new = h - Z^T (L^-1 h_1),              h_1 (k, m) the removed rows of h
    adding:    h_new = h + Z^T (L^-1 (t_c - B t)),      t_c (k, m) the new rows of t
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Term(NamedTuple):
    """U changes by ``sign`` Z^T Z and h = U t by ``sign`` Z^T v; info is zero if the blocks were positive definite."""

    Z: Tensor  # (k, N)
    v: Tensor  # (k, m)
    sign: int
    info: Tensor


def removal(R: Tensor, slots: Tensor, h: Tensor) -> Term:
    """The term that takes rows out. R: (k, N) rows of U; slots: (k,) their places; h: (N, m) = U t."""
    W, info = _inverse_factor(R[:, slots])
    return Term(W @ R, W @ h[slots], -1, info)


def addition(B: Tensor, Qc: Tensor, Qcc: Tensor, slots: Tensor, t: Tensor) -> Term:
    """The term that takes rows in, at places where U is zero.

    B: (k, N) = Q_c U; Qc: (k, N) zero at the new places; Qcc: (k, k); slots: (k,) the new places; t: (N, m) new rows included.
    """
    W, info = _inverse_factor(Qcc - B @ Qc.mT)
    E = B.neg()
    E[torch.arange(len(slots), device=slots.device), slots] = 1.0
    Z = W @ E
    return Term(Z, Z @ t, 1, info)


def _inverse_factor(S: Tensor) -> tuple[Tensor, Tensor]:
    """L^-1 for S = L L^T (k, k), and LAPACK's info. A product with it is faster than a solve, and k is small."""
    if S.shape[0] == 1:
        return S.rsqrt(), (~(S > 0)).to(torch.int32)[0, 0]
    L, info = torch.linalg.cholesky_ex(0.5 * (S + S.mT))
    return torch.linalg.solve_triangular(L, torch.eye(len(S), dtype=S.dtype, device=S.device), upper=False), info
