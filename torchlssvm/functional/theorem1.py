"""Theorem 1 of Lee et al., joint adding and removing, in its symmetric form.

Let A = rho I + sum phi phi^T be the matrix of the normal equations, and w the weights. The L samples that change are the
columns of Phi (J, L), with targets y and signed multiplicities d (L,), positive for additions and negative for removals. The
new matrix is A + Phi diag(d) Phi^T, and

    T      = diag(1/d) + Phi^T A^-1 Phi                       (L, L)
    w_new  = w - A^-1 Phi T^-1 (Phi^T w - y)
    A_new^-1 = A^-1 - A^-1 Phi T^-1 Phi^T A^-1.

These are equations (5) and (6) of the paper with P = I - C = rho A^-1, where S = rho I + Phi_c'^T P Phi_c = rho T diag(d).
Unlike S, T is symmetric. By Haynsworth's inertia additivity, the new matrix is positive definite if and only if T has as many
positive and negative eigenvalues as diag(d). T is factored by blocks, with the additions first:

    T = [[T_aa, T_ar], [T_ra, T_rr]],  T_aa = La La^T,  H = La^-1 T_ar,  H^T H - T_rr = Lr Lr^T.

T_aa is always positive definite. The second Cholesky factorization exists exactly if T has the required signs of eigenvalues,
so its failure detects an impossible removal. For any X (L, m), with B_a = La^-1 X_a and B_r = Lr^-1 (H^T B_a - X_r),

    X^T T^-1 Y = B_a(X)^T B_a(Y) - B_r(X)^T B_r(Y),

which has one symmetric term for each sign. With Z = B(Phi^T A^-1) and r = Phi^T w - y, the updates become

    A_new^-1 = A^-1 - Z_a^T Z_a + Z_r^T Z_r,      w_new = w - Z_a^T B_a(r) + Z_r^T B_r(r).

A free (unpenalized) intercept is one more coordinate. It does not complicate the update: if the features are centred on the
mean mu of the n samples in A, the matrix is diag(A, n), and T becomes T + (1/n) 1 1^T.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchlssvm.functional.whitened import inverse_lower


class FactoredChange(NamedTuple):
    """T factored by blocks: Wa = La^-1 (a, a), H (a, r), Wr = Lr^-1 (r, r), inverted because products are faster than solves.

    ``info`` is zero if the new matrix is positive definite. ``pivot`` is the smallest squared pivot of the removals relative
    to 1/|d|, which is about one minus the leverage of the removed samples. Rounding errors grow by the factor 1 / ``pivot``.
    """

    Wa: Tensor
    H: Tensor
    Wr: Tensor
    info: Tensor
    pivot: Tensor


def factor_change(G: Tensor, d: Tensor, adds: int) -> FactoredChange:
    """Factor T = diag(1/d) + G.

    G: (L, L) = Phi^T A^-1 Phi, plus 1/n for a free intercept; d: (L,), the first ``adds`` entries positive, the others
    negative.
    """
    if d.shape[0] == 1:  # Corollaries 1 and 2: T is a number, and must have the sign of d
        T, none = G + d.reciprocal(), G[:0, :0]
        if adds:
            return FactoredChange(T.rsqrt(), G[:, :0], none, (T <= 0)[0, 0], d[0])
        return FactoredChange(none, G[:0], T.neg().rsqrt(), (T >= 0)[0, 0], T[0, 0] * d[0])
    T = G + torch.diag(d.reciprocal())
    Wa, info_a, _ = _inverse_factor(T[:adds, :adds])
    H = Wa @ T[:adds, adds:]
    Wr, info_r, diagonal = _inverse_factor(H.mT @ H - T[adds:, adds:])
    pivot = torch.cat([diagonal.square() * -d[adds:], torch.ones_like(d[:1])]).amin()
    return FactoredChange(Wa, H, Wr, info_a.abs() + info_r.abs(), pivot)


def _inverse_factor(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """L^-1 for A = L L^T, the factorization's info, and the diagonal of L."""
    L, info = torch.linalg.cholesky_ex(A)
    return inverse_lower(L), info, L.diagonal()


def halves(change: FactoredChange, X: Tensor) -> tuple[Tensor, Tensor]:
    """Return B_a (a, m), B_r (r, m) with X^T T^-1 Y = B_a(X)^T B_a(Y) - B_r(X)^T B_r(Y). X: (L, m), additions first."""
    adds = change.Wa.shape[0]
    if adds == 0:  # the sign of B_r cancels in every product
        return X[:0], change.Wr @ X
    Ba = change.Wa @ X[:adds]
    return Ba, change.Wr @ (change.H.mT @ Ba - X[adds:]) if adds < X.shape[0] else X[adds:]
