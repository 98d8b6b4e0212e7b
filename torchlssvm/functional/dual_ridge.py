r"""Ridge regression with fewer samples than features, solved in the space of the samples.

There are n distinct samples with weights d (n,), and N samples if copies are counted. X are their features, Y their targets,
and G = X X^T (n, n). With a free intercept, rows and targets are centred on their weighted means and then scaled by the square
root of their weight. Let D = diag(d) and H = I - 1 d^T / sum d. The system matrix is K = D^1/2 H G H^T D^1/2, and the solution
is

    alpha = (K + rho I)^-1 Y,    w = X^T D^1/2 alpha,    b = mean(y) - mean(x) w.

**The null direction.** Since rows and targets are centred, K u = 0 and u^T Y = 0 for u = d^1/2 / |d^1/2|. So alpha also equals
(K + rho I + c u u^T)^-1 Y for any c. If c is the mean eigenvalue, this system is well conditioned in the direction u even for a
small rho. Its inverse A differs from (K + rho I)^-1 by (1 / (rho + c) - 1 / rho) u u^T. Without an intercept there is no such
direction: u is zero, and the terms with 1 / (rho + c) below vanish.

**Leaving out** sample i: y_i - f(x_i) = alpha_i / (d_i^1/2 (A_ii - u_i^2 / (rho + c))), where f is fitted without sample i.

**Generalized cross-validation** (GCV) is n rss / left^2, where rss = rho^2 |alpha|^2 is the residual sum of squares and
left = N - n + rho (tr A - 1 / (rho + c)) the residual degrees of freedom. This form loses no digits to cancellation.

**Many values of rho.** Householder reflections first reduce K = Q B Q^T to a band matrix B. The reduction takes 4/3 n^3
operations, all in matrix products. (A reduction to tridiagonal form, as for eigenvalues, does half of them in slower
matrix-vector products.) B consists of small blocks, D_i on the diagonal and C_i below. For each value of rho, a block
elimination in O(n) runs from the first block to the last. With F_0 = D_0 + rho I,

    F_i = D_i + rho I - C F_{i-1}^-1 C^T,    F_i' = I + C F_{i-1}^-1 F_{i-1}' F_{i-1}^-1 C^T,
    tr (B + rho I)^-1 = sum_i tr F_i^-1 F_i'.

F_i' is the derivative of F_i in rho, and the trace is the derivative of log det (B + rho I) = sum log det F_i.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class DualSystem(NamedTuple):
    """The weighted, centred system of n samples. Solving it overwrites its fields."""

    K: Tensor  # (n, n), the lower triangle
    Y: Tensor  # (n, outputs)
    u: Tensor  # (n,) the direction that centring removes; zeros without an intercept
    root: Tensor  # (n,) d^1/2
    copies: float  # N - n

    def shift(self) -> float:
        """Make K u = c u by adding c u u^T. Returns c, or infinity without an intercept, where u is zero."""
        if not bool(self.u.any()):
            return math.inf
        c = float(self.K.diagonal().mean()) or 1.0
        self.K.addr_(self.u, self.u, alpha=c)
        return c


def centred(G: Tensor, d: Tensor) -> Tensor:
    """H G H^T, in place. G: (n, n), symmetric; d: (n,) weights."""
    mean = G @ (d / d.sum())
    return G.sub_(mean[:, None]).sub_(mean[None, :] - mean @ (d / d.sum()))


def solve(system: DualSystem, rho: float) -> tuple[Tensor, bool]:
    """Return alpha (n, outputs), and True if K + rho I has a Cholesky factor.

    The factor does not exist if rows are linearly dependent and rho is below their rounding errors. In that case, alpha has no
    component in the directions q in which K is zero up to rounding. Since X^T q is zero, these directions do not affect w.
    """
    K, Y = system.K, system.Y
    system.shift()
    K.diagonal().add_(rho)
    L, info = torch.linalg.cholesky_ex(K)
    if not int(info):
        return torch.cholesky_solve(Y, L), True
    s, Q = torch.linalg.eigh(K)
    live = s > torch.finfo(s.dtype).eps * len(s) * s[-1]
    return Q @ (torch.where(live, 1.0 / s, 0.0)[:, None] * (Q.mT @ Y)), False


def left_out(system: DualSystem, rho: float) -> Tensor:
    """Return leave-one-out residuals (n, outputs). Raises LinAlgError if rho is below the rounding errors of dependent rows."""
    c = system.shift()
    system.K.diagonal().add_(rho)
    A = torch.cholesky_inverse(torch.linalg.cholesky(system.K))
    left = A.diagonal() - system.u.square() / (rho + c)
    return A @ system.Y / (system.root * left)[:, None]


def left_out_errors(system: DualSystem, rhos: Tensor) -> Tensor:
    """Return squared leave-one-out errors (r, n), averaged over outputs, from one eigendecomposition. rhos: (r,)."""
    c = system.shift()
    s, Q = torch.linalg.eigh(system.K)
    s, Z, squares, out = s.clamp(min=0.0), Q.mT @ system.Y, Q.square(), []
    for rho in rhos.tolist():
        g = (s + rho).reciprocal()
        left = squares @ g - system.u.square() / (rho + c)
        out.append((Q @ (g[:, None] * Z) / (system.root * left)[:, None]).square().mean(1))
    return torch.stack(out)


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

    def path(self, rhos: Tensor, copies: float, c: float) -> tuple[Tensor, Tensor]:
        """Return GCV (r,), up to a constant factor, and Q^T alpha (r, n, outputs) for each value of rho. rhos: (r,)."""
        eye = torch.eye(len(self.diagonal[0]), dtype=rhos.dtype)
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
                eye = torch.eye(len(D), dtype=D.dtype)
                W = C @ inverses[i]  # (r, b, b)
                F, dF = D + ridge * eye - W @ C.mT, eye + W @ dF @ W.mT
                parts.append(self.targets[i + 1] - W @ parts[i])
        parts[-1] = inverses[-1] @ parts[-1]
        for i in reversed(range(len(self.below))):
            parts[i] = inverses[i] @ (parts[i] - self.below[i].mT @ parts[i + 1])
        alphas = torch.cat(parts, 1)
        rss = rhos.square() * alphas.square().sum(1).mean(1)
        left = copies + rhos * (trace - 1.0 / (rhos + c))
        return rss / left.square(), alphas

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
    S = torch.eye(k, dtype=V.dtype) + tau[:, None] * (V.mT @ V).triu_(1)
    return Reflection(start, V, torch.linalg.solve_triangular(S, torch.diag(tau), upper=True)), R
