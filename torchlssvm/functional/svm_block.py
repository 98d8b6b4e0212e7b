r"""Many margin vectors at a time: the block forms of (13) and (14) of :mod:`~torchlssvm.functional.svm_path`, same letters.

With columns H = [y_c; Q_Sc] for k samples c that are to enter, and V = -R H,

    Gamma = Q_cc + H^T V                                                                                          (12)
    R <- [[R + V G V^T, V G], [G V^T, G]],  G = Gamma^-1                                                           (13)
    R <- R - R_:l R_ll^-1 R_l:                                                                                     (14)

Gamma is the Gram matrix of what is left of the k samples outside the span of S, so it is positive semidefinite, and its
Cholesky factor shows which of them lie in the span of S and of those before: copies of margin vectors, or all beyond d + 1 of a
linear kernel in d dimensions. They are left out.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

PANEL = 48  # columns that are factored one at a time, before the product that takes them to the rest


def schur(R: Tensor, H: Tensor, Q: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # (m, m), (m, k), (k, k)
    """V (m, k) and Gamma (k, k) of (12), and (k,) the size of the terms that each Gamma_jj is the difference of.

    Example:
        >>> R = torch.tensor([[-2.0, 1.0], [1.0, 0.0]], dtype=torch.float64)  # S is one sample with Q_ii = 2
        >>> H = torch.tensor([[1.0], [0.5]], dtype=torch.float64)
        >>> V, Gamma, size = schur(R, H, torch.tensor([[1.0]], dtype=torch.float64))
        >>> V.tolist(), Gamma.tolist(), size.tolist()
        ([[1.5], [-1.0]], [[2.0]], [3.0])
    """
    V = torch.mm(R, H).neg_()
    return V, torch.addmm(Q, H.T, V), Q.diagonal().abs() + (H * V).abs().sum(0)


def independent(Gamma: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:  # (k, k), (k,) -> (r,), (r, r)
    """The columns that are not in the span of those before them (a pivot above ``floor``), and their Cholesky factor.

    Example:
        >>> Gamma = torch.tensor([[4.0, 4.0, 2.0], [4.0, 4.0, 2.0], [2.0, 2.0, 2.0]], dtype=torch.float64)
        >>> kept, L = independent(Gamma, torch.full((3,), 1e-10, dtype=torch.float64))
        >>> kept.tolist(), L.tolist()
        ([0, 2], [[2.0, 0.0], [1.0, 1.0]])
    """
    k = len(Gamma)
    L, info = torch.linalg.cholesky_ex(Gamma)
    if not int(info) and bool((L.diagonal().square() > floor).all()):
        return torch.arange(k, device=Gamma.device), L
    kept: list[int] = []
    L, least = torch.zeros_like(Gamma), floor.tolist()
    for start in range(0, k, PANEL):
        stop, r = min(k, start + PANEL), len(kept)
        P = (
            (Gamma[start:, start:stop] - L[start:, :r] @ L[start:stop, :r].T).cpu().numpy()
        )  # a column is a small matter
        columns = np.zeros((stop - start, k - start))
        for j in range(stop - start):
            pivot = float(P[j, j])
            if pivot > least[start + j]:
                column = columns[len(kept) - r, j:]
                np.divide(P[j:, j], pivot**0.5, out=column)
                P[j:, j + 1 :] -= column[:, None] * column[1 : stop - start - j]
                kept.append(start + j)
        L[start:, r : len(kept)] = torch.from_numpy(columns[: len(kept) - r].T).to(L.device)
    at = torch.tensor(kept, dtype=torch.int64, device=Gamma.device)
    return at, L[at, : len(kept)]


def grow_(R: Tensor, V: Tensor, L: Tensor, slots: Tensor) -> Tensor:  # (m, m), (m, k), (k, k), (k,) -> (m, m)
    """(13) in place, for k samples at once: they enter free slots, in which V is zero. L: the Cholesky factor of Gamma."""
    G = torch.cholesky_inverse(L)
    VG = torch.mm(V, G)
    R.addmm_(VG, V.T)
    R.index_copy_(1, slots, VG)
    VG.index_copy_(0, slots, G)
    return R.index_copy_(0, slots, VG.T)


def shrink_(R: Tensor, slots: Tensor) -> bool:  # (m, m), (l,)
    """(14) in place, for l margin vectors at once, whose slots are free again. False if rounding forbids it."""
    columns = R.index_select(1, slots)
    L, info = torch.linalg.cholesky_ex(columns.index_select(0, slots))
    if int(info):
        return False
    W = torch.linalg.solve_triangular(L, columns.T, upper=False)  # (l, m)
    R.addmm_(W.T, W, alpha=-1.0).index_fill_(1, slots, 0.0).index_fill_(0, slots, 0.0)
    return True


def inverse(Q: Tensor, y: Tensor, share: float) -> tuple[Tensor, Tensor]:  # (k, k), (k,) -> (r,), (r + 1, r + 1)
    """The samples that are not in the span of those before them, to ``share`` of their terms, and R for them, from nothing.

    The first one is S = {0}, R = [[-Q_00, y_0], [y_0, 0]]; the others enter it in one block, by (13). Terms of very different
    size cost the fewest digits when Q_00 is the smallest.

    Example:
        >>> y = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
        >>> X = y * torch.tensor([2.0, 2.0, -1.0], dtype=torch.float64)  # on a line, the first two the same
        >>> kept, R = inverse(torch.outer(X, X), y, 1e-12)
        >>> kept.tolist(), [[round(v, 6) for v in row] for row in R.tolist()]
        ([0, 2], [[0.0, 0.333333, -0.666667], [0.333333, 0.111111, 0.111111], [-0.666667, 0.111111, 0.111111]])
    """
    k = len(Q)
    q, y_0 = Q[0, 0], y[0]
    R = Q.new_zeros(2, 2)
    R[0, 0], R[0, 1], R[1, 0] = -q, y_0, y_0
    first = torch.zeros(1, dtype=torch.int64, device=Q.device)
    if k == 1:
        return first, R
    V, Gamma, size = schur(R, torch.stack([y[1:], Q[0, 1:]]), Q[1:, 1:])
    kept, L = independent(Gamma, share * size)
    V, G = V[:, kept], torch.cholesky_inverse(L)
    VG = V @ G
    out = Q.new_empty(len(kept) + 2, len(kept) + 2)
    out[:2, :2] = torch.addmm(R, VG, V.T)
    out[:2, 2:], out[2:, :2], out[2:, 2:] = VG, VG.T, G
    return torch.cat([first, kept + 1]), out
