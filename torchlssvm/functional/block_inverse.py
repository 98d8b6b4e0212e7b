"""The inverse of a growing and shrinking matrix, by blocks (Duan et al., Lemma 1 and equations (8), (9)).

Q is symmetric and positive definite, U = Q^-1. Both updates of U are symmetric terms of low rank, so they are given as rows
Z (k, N) and a sign, U_new = U + sign Z^T Z, so that many of them can be added up in one matrix product.

**Removing** k rows (9): with R = (U_11, U_12) the k rows of U and U_11 = L L^T,

    U_new = U - R^T U_11^-1 R = U - Z^T Z,      Z = L^-1 R.

The rows and columns removed come out as zero; the rest is U_keep - U_12^T U_11^-1 U_12.

**Adding** k rows, the same lemma read backwards: with Q_c (k, N) the new rows of Q against the old ones, B = Q_c U,
and the Schur complement S = Q_cc - B Q_c^T = L L^T,

    U_new = U + [-B, I]^T S^-1 [-B, I] = U + Z^T Z,      Z = L^-1 [-B, I].

For any h = U t that is wanted beside U (the solution!), h_new = h -+ Z^T (...) costs k passes over a vector, not over U:

    removing:  h_new = h - Z^T (L^-1 h_1),              h_1 (k, m) the removed rows of h
    adding:    h_new = h + Z^T (L^-1 (t_c - B t)),      t_c (k, m) the new rows of t

**Share.** Rounding errors of U grow by the inverse of how much is left where the most cancels: of Q_cc in the Schur complement
when rows are added, of the diagonal of U when they are removed. For the second there is a bound that needs the removed block
alone. U_jj,new / U_jj = 1 - u^T U_11^-1 u / U_jj with u = U_1j, and since U_11 - u u^T / U_jj is the block without j, which is
at least Q_11^-1, the ratio is at least the smallest eigenvalue of U_11^-1 Q_11^-1, hence at least 1 / trace(Q_11 U_11).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, constant_pad_nd

from torchlssvm.functional.whitened import inverse_lower


class Term(NamedTuple):
    """A change of U by ``sign`` Z^T Z and of h = U t by ``sign`` Z^T v.

    ``L`` (k, k) is the factor of the block that was inverted. ``share`` (see above) is zero, negative or NaN if that block is
    not positive definite.
    """

    Z: Tensor  # (k, N)
    v: Tensor  # (k, m)
    sign: int
    L: Tensor  # (k, k)
    share: Tensor


def principal_part(Q: Tensor, at: slice | Tensor) -> Tensor:
    """Rows and columns ``at`` of a square matrix, in that order; a view for a slice."""
    if isinstance(at, slice):
        return Q[at, at]
    if Q.device.type == "cpu":
        places = at.numpy()  # a third of the time of torch's, for small ones
        return torch.from_numpy(Q.numpy().take(places, 0).take(places, 1))
    return Q.index_select(0, at).index_select(1, at)


def removal(R: Tensor, slots: slice | Tensor, h: Tensor, Q: Tensor) -> Term:
    """The term that takes rows out.

    R: (k, N) rows of U; slots: (k,) their places; h: (N, m) = U t; Q: (k, k) the block of Q that is removed.
    """
    U = R[:, slots]
    L, W, info = _factor(U)
    share = (U * Q).sum().reciprocal()
    return Term(W @ R, W @ h[slots], -1, L, share if info is None else torch.where(info == 0, share, 0.0))


def addition(B: Tensor, Qc: Tensor, Qcc: Tensor, slots: slice | Tensor, t: Tensor, tc: Tensor, N: int) -> Term:
    """The term that takes rows in, at places where U is zero.

    B: (k, M) = Q_c U, M <= N; Qc: (k, M) zero at the new places; Qcc: (k, k); slots: (k,) the new places, below N; t: (M, m)
    right-hand sides, tc: (k, m) those of the new rows.
    """
    L, W, info = _factor(torch.addmm(Qcc, B, Qc.mT, alpha=-1.0))
    Z = constant_pad_nd(W.neg() @ B, (0, N - B.shape[1]))
    Z[:, slots] = W
    # The diagonal of S^-1 = W^T W against that of Q_cc.
    share = (W.square().sum(0).max() * Qcc.diagonal().max()).reciprocal()
    v = W @ torch.addmm(tc, B, t, alpha=-1.0)
    return Term(Z, v, 1, L, share if info is None else torch.where(info == 0, share, 0.0))


def _factor(S: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """L and L^-1 for S = L L^T (k, k), and LAPACK's info (None for a number: its root tells). L^-1, since k is small."""
    if S.shape[0] == 1:
        L = S.sqrt()
        return L, L.reciprocal(), None
    L, info = torch.linalg.cholesky_ex(S)
    return L, inverse_lower(L), info
