"""The inverse of a matrix that gains and loses rows, updated by blocks (Duan et al., Lemma 1 and equations (8), (9)).

Adding or removing k rows and columns of a symmetric positive definite matrix Q (N, N) changes its inverse U = Q^-1 by a
symmetric term of rank k. The functions here return this term as rows Z (k, N) and a sign, such that U_new = U + sign Z^T Z. To
save time, you can stack the rows of several terms and apply all of them with one matrix product.

**Removing** k rows (9): let R = (U_11, U_12) be the k rows of U, and let L be the Cholesky factor of U_11 = L L^T. Then

    U_new = U - R^T U_11^-1 R = U - Z^T Z,      Z = L^-1 R.

The removed rows and columns become zero. The remaining entries are U_keep - U_12^T U_11^-1 U_12.

**Adding** k rows applies the same lemma in reverse. Let Q_c (k, N) hold the entries of Q between the new rows and the old ones,
and Q_cc (k, k) those among the new rows. With B = Q_c U and the Schur complement S = Q_cc - B Q_c^T = L L^T,

    U_new = U + [-B, I]^T S^-1 [-B, I] = U + Z^T Z,      Z = L^-1 [-B, I].

A product h = U t (N, m), such as the solution of a linear system, is updated from Z alone, without reading U:

    removing:  h_new = h - Z^T (L^-1 h_1),              h_1 (k, m) the removed rows of h
    adding:    h_new = h + Z^T (L^-1 (t_c - B t)),      t_c (k, m) the new rows of t

**Share.** Both updates subtract nearly equal numbers when rows of Q are nearly dependent: an addition in the diagonal of the
Schur complement, and a removal in the diagonal of U. The *share* is the smallest fraction of a diagonal entry that is left
after the subtraction. Rounding errors of U grow by the factor 1 / share. For a removal, the removed block alone gives a lower
bound. Let u = U_1j for a remaining row j, so that U_jj,new / U_jj = 1 - u^T U_11^-1 u / U_jj. The matrix U_11 - u u^T / U_jj is
the block of the inverse without row j, which is at least Q_11^-1. The ratio is therefore at least the smallest eigenvalue of
U_11^-1 Q_11^-1, and hence at least 1 / trace(Q_11 U_11).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, constant_pad_nd

from torchlssvm.functional.whitened import inverse_lower


class Term(NamedTuple):
    """A change of U by ``sign`` Z^T Z and of h = U t by ``sign`` Z^T v.

    The module's docstring defines ``share``, which is zero, negative or NaN if the block is not positive definite.
    """

    Z: Tensor  # (k, N)
    v: Tensor  # (k, m)
    sign: int
    share: Tensor


def principal_part(Q: Tensor, at: slice | Tensor) -> Tensor:
    """Return rows and columns ``at`` of a square matrix, in that order. A slice gives a view."""
    if isinstance(at, slice):
        return Q[at, at]
    if Q.device.type == "cpu":
        places = at.numpy()  # a third of the time of torch's, for small ones
        return torch.from_numpy(Q.numpy().take(places, 0).take(places, 1))
    return Q.index_select(0, at).index_select(1, at)


def removal(R: Tensor, slots: slice | Tensor, h: Tensor, Q: Tensor) -> Term:
    """Compute the term that removes rows.

    R: (k, N) rows of U; slots: (k,) their places; h: (N, m) = U t; Q: (k, k) the block of Q that is removed.
    """
    U = R[:, slots]
    W, info = _inverse_factor(U)
    share = (U * Q).sum().reciprocal()
    return Term(W @ R, W @ h[slots], -1, share if info is None else torch.where(info == 0, share, 0.0))


def addition(B: Tensor, Qc: Tensor, Qcc: Tensor, slots: slice | Tensor, t: Tensor, tc: Tensor, N: int) -> Term:
    """Compute the term that adds rows at places where U is zero.

    Shapes: B = Q_c U and Qc are (k, M) with M <= N, where Qc is zero at the new places; Qcc is (k, k); slots are the new
    places (k,), below N. t (M, m) and tc (k, m) are the right-hand sides of the old and the new rows.
    """
    W, info = _inverse_factor(torch.addmm(Qcc, B, Qc.mT, alpha=-1.0))
    Z = constant_pad_nd(W.neg() @ B, (0, N - B.shape[1]))
    Z[:, slots] = W
    # The diagonal of S^-1 = W^T W against that of Q_cc.
    share = (W.square().sum(0).max() * Qcc.diagonal().max()).reciprocal()
    v = W @ torch.addmm(tc, B, t, alpha=-1.0)
    return Term(Z, v, 1, share if info is None else torch.where(info == 0, share, 0.0))


def _inverse_factor(S: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return L^-1 for S = L L^T (k, k), and LAPACK's info (None for k = 1, where a NaN root shows a failure)."""
    if S.shape[0] == 1:
        return S.rsqrt(), None
    L, info = torch.linalg.cholesky_ex(S)
    return inverse_lower(L), info
