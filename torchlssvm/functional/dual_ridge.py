r"""Ridge regression with fewer samples than features, solved in the space of the samples.

With G = X X^T (n, n), centred for a free intercept, K = H G H, H = I - 1 1^T / n, and centred targets Y,

    alpha = (K + rho I)^-1 Y,    w = X^T alpha,    b = mean(y) - mean(x) w,

since alpha sums to zero. With K = Q diag(s) Q^T and R = Q^T Y, and without the direction 1 that the centring has taken,

    rss(rho) = sum_i (rho / (s_i + rho))^2 R_i^2,    n - dof = sum_i rho / (s_i + rho),    gcv = n rss / (n - dof)^2.

Leaving out sample i: y_i - f(x_i) = rho alpha_i / (rho A_ii - 1/n), A = (K + rho I)^-1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def centred(G: Tensor) -> Tensor:
    """H G H, in place. G: (n, n), symmetric."""
    mean = G.mean(0)
    return G.sub_(mean[:, None]).sub_(mean[None, :] - mean.mean())


def solve(K: Tensor, Y: Tensor, rho: float) -> Tensor:
    """alpha = (K + rho I)^-1 Y (n, outputs). K: (n, n), overwritten; Y: (n, outputs)."""
    K.diagonal().add_(rho)
    return torch.cholesky_solve(Y, torch.linalg.cholesky(K))


def gcv_errors(s: Tensor, R: Tensor, rhos: Tensor, free: bool) -> Tensor:
    """Generalized cross-validation (r,), the mean over outputs. s: (n,) ascending; R: (n, outputs); rhos: (r,)."""
    if free:  # the direction that centring has taken: its eigenvalue is the least one, zero
        s, R = s[1:], R[1:]
    shrink = rhos[:, None] / (s + rhos[:, None])  # (r, n)
    rss = shrink.square() @ R.square().mean(1)
    return rss * len(s) / shrink.sum(1).square()


def left_out(K: Tensor, Y: Tensor, rho: float, free: bool) -> Tensor:
    """Leave-one-out residuals (n, outputs). K: (n, n); Y: (n, outputs), centred if K is."""
    A = torch.cholesky_inverse(torch.linalg.cholesky(K + rho * torch.eye(len(K), dtype=K.dtype)))
    return rho * (A @ Y) / (rho * A.diagonal() - (1.0 / len(K) if free else 0.0))[:, None]
