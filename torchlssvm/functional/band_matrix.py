r"""Reduction of a symmetric matrix to a band matrix, to solve (K + rho I) X = Y for many values of rho without eigenvalues.

Householder reflections first reduce K = Q B Q^T to a band matrix B. The reduction takes 4/3 n^3
operations, all in matrix products. (A reduction to tridiagonal form, as for eigenvalues, does half of them in slower
matrix-vector products.) B consists of small blocks, D_i on the diagonal and C_i below. For each value of rho, a block
elimination in O(n) runs from the first block to the last. With F_0 = D_0 + rho I,

    F_i = D_i + rho I - C F_{i-1}^-1 C^T,    F_i' = I + C F_{i-1}^-1 F_{i-1}' F_{i-1}^-1 C^T,
    tr (B + rho I)^-1 = sum_i tr F_i^-1 F_i'.

F_i' is the derivative of F_i in rho, and the trace is the derivative of log det (B + rho I) = sum log det F_i.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Reflection(NamedTuple):
    """The reflection I - V T V^T on the rows from ``start`` on. V: (rows, b); T: (b, b), upper triangular."""

    start: int
    V: Tensor
    T: Tensor


class Band(NamedTuple):
    """B = Q^T K Q as blocks D_i (b, b) and C_i (b, b) below them, Q^T Y in blocks (b, outputs), and the factors of Q."""

    diagonal: list[Tensor]
    below: list[Tensor]
    targets: list[Tensor]
    reflections: list[Reflection]

    def solve(self, rhos: Tensor) -> tuple[Tensor, Tensor]:
        """Return tr (B + rho I)^-1 (r,) and (B + rho I)^-1 Q^T Y (r, n, outputs) for each value of rho. rhos: (r,)."""
        eye = torch.eye(len(self.diagonal[0]), dtype=rhos.dtype, device=rhos.device)
        ridge, trace = rhos[:, None, None], torch.zeros_like(rhos)
        F, dF, u = (
            self.diagonal[0] + ridge * eye,
            eye.expand(len(rhos), *eye.shape),
            self.targets[0].expand(len(rhos), -1, -1),
        )
        inverses, parts = [], [u]
        for i in range(len(self.diagonal)):
            inverses.append(torch.cholesky_inverse(torch.linalg.cholesky(F)))
            trace += (inverses[i] * dF).sum((1, 2))
            if i + 1 < len(self.diagonal):
                D, C = self.diagonal[i + 1], self.below[i]
                eye = torch.eye(len(D), dtype=D.dtype, device=D.device)
                W = C @ inverses[i]  # (r, b, b)
                F, dF = D + ridge * eye - W @ C.mT, eye + W @ dF @ W.mT
                parts.append(self.targets[i + 1] - W @ parts[i])
        parts[-1] = inverses[-1] @ parts[-1]
        for i in reversed(range(len(self.below))):
            parts[i] = inverses[i] @ (parts[i] - self.below[i].mT @ parts[i + 1])
        return trace, torch.cat(parts, 1)

    def rotate_back(self, alpha: Tensor) -> Tensor:
        """Compute Q alpha in place. alpha: (n, outputs)."""
        for start, V, T in reversed(self.reflections):
            alpha[start:] -= V @ (T @ (V.mT @ alpha[start:]))
        return alpha


def reduce_to_band(K: Tensor, Y: Tensor, width: int = 64) -> Band:
    """Reduce K to a band matrix. K: (n, n), its lower triangle, overwritten; Y: (n, outputs), overwritten by Q^T Y.

    width: the number of rows and columns of a block. 64 is enough for fast products, and small enough for fast elimination.
    """
    n, diagonal, below, reflections = len(K), [], [], []
    # 512: the columns that one product computes, in the square on the diagonal and below it
    edges = [*range(0, n, 512), n]
    for c, e in pairwise(edges):
        K[c:e, c:e].copy_(K[c:e, c:e].tril() + K[c:e, c:e].tril(-1).mT)
    for a in range(0, n, width):
        start = min(a + width, n)
        diagonal.append(K[a:start, a:start])
        if start == n:
            break
        reflection, R = reflect(K[start:, a:start], start)
        below.append(R)
        reflections.append(reflection)
        V, T = reflection.V, reflection.T
        Y[start:] -= V @ (T.mT @ (V.mT @ Y[start:]))
        Vt = V.mT.contiguous()
        Pt = torch.zeros_like(
            Vt
        )  # V^T A, A the rest of K: products with few rows are faster than those with few columns
        strips = [(max(c, start), e) for c, e in pairwise(edges) if e > start]
        for c, e in strips:
            Pt[:, c - start : e - start].addmm_(Vt[:, c - start :], K[c:, c:e])
            Pt[:, e - start :].addmm_(Vt[:, c - start : e - start], K[e:, c:e].mT)
        P = Pt.mT @ T
        W = P - 0.5 * V @ (T.mT @ (V.mT @ P))
        left, right = torch.cat([V, W], 1), torch.cat([W, V], 1)
        for c, e in strips:  # A - V W^T - W V^T
            K[c:, c:e].addmm_(left[c - start :], right[c - start : e - start].mT, alpha=-1.0)
    return Band(diagonal, below, [Y[a : a + width] for a in range(0, n, width)], reflections)


def reflect(panel: Tensor, start: int) -> tuple[Reflection, Tensor]:
    """Q R = panel, with Q as one reflection of all columns; V is written over the panel. panel: (m, b). R: (min(m, b), b)."""
    factor, tau = torch.geqrf(panel)
    k = len(tau)
    R = factor[:k].triu()
    V = panel[:, :k].copy_(factor[:, :k].tril_(-1))
    V.diagonal().fill_(1.0)
    S = torch.eye(k, dtype=V.dtype, device=V.device) + tau[:, None] * (V.mT @ V).triu_(1)
    return Reflection(start, V, torch.linalg.solve_triangular(S, torch.diag(tau), upper=True)), R
