"""Linear discriminant analysis from sums: class means and a pooled within-class scatter with a ridge.

With n_k samples in class k, means mu_k and the within-class scatter S = sum_i x_i x_i^T - sum_k n_k mu_k mu_k^T (J, J), the
covariance is

    Sigma = c (S + rho I) / n,      c = tr S / (tr S + rho J),

so that the ridge leaves its trace as it is. The scores are log posteriors up to a constant that the classes share:

    f_k(x) = mu_k^T Sigma^-1 x - mu_k^T Sigma^-1 mu_k / 2 + log(pi_k),      pi_k = n_k / n unless given.

This is scikit-learn's ``LinearDiscriminantAnalysis(solver="lsqr", shrinkage=s)`` at s = rho J / (tr S + rho J) = 1 - c. Where
classes are many and features few, least squares masks classes that lie between others; the discriminant does not.

**Leave one out.** Without sample x of class k the scatter is S - g d d^T, d = x - mu_k, g = n_k / (n_k - 1), the mean
mu_k - d / (n_k - 1), and by Sherman and Morrison, with A = S + rho I and q = d^T A^-1 d,

    (A - g d d^T)^-1 = A^-1 + A^-1 d d^T A^-1 g / (1 - g q),

so the scores at x follow from A^-1 alone.
"""

from __future__ import annotations

import torch
from torch import Tensor


def discriminant(
    S: Tensor, means: Tensor, counts: Tensor, rho: float, priors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weights w (J, K) and b (K,) of the scores. S: (J, J); means: (K, J); counts: (K,); classes without samples get -inf."""
    n = counts.sum()
    A = S.clone()
    A.diagonal().add_(rho)
    trace = S.diagonal().sum()
    scale = n * (trace + rho * S.shape[0]) / trace  # Sigma^-1 = scale A^-1
    w = torch.linalg.solve(A, means.mT) * scale
    priors = counts / n if priors is None else priors
    b = -0.5 * (means.mT * w).sum(0) + priors.log()
    return w, torch.where(counts > 0, b, -torch.inf)


def leave_one_out(x: Tensor, y: Tensor, S: Tensor, means: Tensor, counts: Tensor, rho: float) -> Tensor:
    """Scores (B, K) of samples x (B, J) of classes y (B,), each without itself, at a fixed rho; empirical priors.

    The only sample of a class leaves a class without samples, whose score is then -inf.
    """
    J, K, n = S.shape[0], len(counts), counts.sum()
    A = S.clone()
    A.diagonal().add_(rho)
    U = torch.linalg.solve(A, torch.cat([means, x]).mT).mT
    Am, Ax = U[:K], U[K:]  # A^-1 mu_k (K, J), A^-1 x (B, J)
    nk, own = counts[y], means[y]
    d, Ad = x - own, Ax - Am[y]
    less = (nk - 1).clamp(min=1)
    g = torch.where(nk > 1, nk / less, 0.0)
    factor = (g / (1 - g * (d * Ad).sum(1)))[:, None]  # of A^-1 d d^T A^-1
    # All classes as they are: x^T A'^-1 mu_k and mu_k^T A'^-1 mu_k (B, K), A' = A - g d d^T.
    along = Ad @ means.mT
    linear = x @ Am.mT + factor * (Ad * x).sum(1, keepdim=True) * along
    square = (means * Am).sum(1) + factor * along.square()
    # The own class, with its mean moved.
    moved, Amoved = own - d / less[:, None], Am[y] - Ad / less[:, None]
    along = (Ad * moved).sum(1, keepdim=True)
    own_linear = (Amoved * x).sum(1, keepdim=True) + factor * (Ad * x).sum(1, keepdim=True) * along
    own_square = (Amoved * moved).sum(1, keepdim=True) + factor * along.square()
    linear, square = linear.scatter(1, y[:, None], own_linear), square.scatter(1, y[:, None], own_square)
    trace = S.diagonal().sum() - g * d.square().sum(1)
    scale = (n - 1) * (trace + rho * J) / trace
    left = counts.repeat(len(x), 1).scatter_add_(1, y[:, None], -torch.ones_like(nk)[:, None])
    scores = scale[:, None] * (linear - 0.5 * square) + (left / (n - 1)).log()
    return torch.where(left > 0, scores, -torch.inf)
