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

**Many values of rho** need one reduction to a band matrix (:mod:`torchlssvm.functional.band_matrix`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchlssvm.functional.band_matrix import Band, reduce_to_band


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

    The factor does not exist if rows are linearly dependent and rho is below their rounding errors. In that case, the function
    uses the alpha that has no component in the directions q in which K is zero up to rounding. This does not affect w, because
    X^T q is zero for these directions.
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


def gcv_path(system: DualSystem, rhos: Tensor) -> tuple[Tensor, Tensor, Band]:
    """Return GCV (r,), up to a constant factor, Q^T alpha (r, n, outputs) for each value of rho, and the band. rhos: (r,)."""
    c = system.shift()
    band = reduce_to_band(system.K, system.Y)
    trace, alphas = band.solve(rhos)
    rss = rhos.square() * alphas.square().sum(1).mean(1)
    left = system.copies + rhos * (trace - 1.0 / (rhos + c))
    return rss / left.square(), alphas, band
