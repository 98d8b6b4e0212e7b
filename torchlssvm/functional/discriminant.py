"""Linear discriminant analysis from the solution of a least-squares head: the same sums, another K x K matrix.

Class k has n_k samples with mean mu_k; N = diag(n_k), n = sum n_k, m is the mean of all samples, and row k of M (K, J) is
mu_k - m. The within-class scatter is the total scatter without that of the means, S_w = S_t - M^T N M. The discriminant uses

    Sigma = c (S_w + rho I) / n,      c = tr S_w / (tr S_w + rho J),

so that the ridge does not change the trace, and its scores are log posteriors up to a constant that the classes share:

    f_k(x) = M_k Sigma^-1 (x - m) - M_k Sigma^-1 M_k^T / 2 + log(n_k / n).

This is scikit-learn's ``LinearDiscriminantAnalysis(solver="lsqr", shrinkage=s)`` with s = 1 - c. If samples have class weights,
n_k is the sum of the weights of class k, and n_k / n is its prior: "balanced" weights give equal priors.

**From least squares.** With targets +1 and -1 and a free intercept, least squares has the weights W = 2 A^-1 M^T N, where
A = S_t + rho I. So U = A^-1 M^T = W N^-1 / 2 is known, S_w + rho I = A - M^T N M, and by the Woodbury identity

    (S_w + rho I)^-1 M^T = U (I - N M U)^-1.

The discriminant's weights are those of least squares times a K x K matrix. Adding, removing and merging need nothing new.
All eigenvalues of N M U are below 1, since A exceeds M^T N M by at least rho I.

**Leave one out.** Without sample x of class k the within-class scatter is S_w - g d d^T with d = x - mu_k, g = n_k / (n_k - 1),
and the mean of class k is mu_k - d / (n_k - 1). By Sherman and Morrison, with B = S_w + rho I and q = d^T B^-1 d,

    (B - g d d^T)^-1 = B^-1 + B^-1 d d^T B^-1 g / (1 - g q),

so all scores without the sample follow from B^-1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def discriminant(W: Tensor, M: Tensor, m: Tensor, counts: Tensor, trace: Tensor, rho: float) -> tuple[Tensor, Tensor]:
    """Weights w (J, K) and b (K,) of the discriminant, from those of least squares.

    Args:
        W: least-squares weights (J, K) for targets +1 and -1 and a free intercept.
        M: class means minus m (K, J); rows of classes without samples are not used.
        m: mean of all samples (J,).
        counts: samples by class, or the sums of their weights (K,).
        trace: trace of the within-class scatter S_w.
        rho: the ridge.

    A class without samples gets zero weights and b = -inf.
    """
    present = counts > 0
    n_k = torch.where(present, counts, torch.ones_like(counts))
    M = torch.where(present[:, None], M, torch.zeros_like(M))
    U = torch.where(present, W / (2 * n_k), torch.zeros_like(W))  # A^-1 M^T (J, K)
    NG = counts[:, None] * (M @ U)  # (K, K)
    eye = torch.eye(len(counts), dtype=W.dtype, device=W.device)
    V = torch.linalg.solve(eye - NG, U, left=False)  # (S_w + rho I)^-1 M^T
    n = counts.sum()
    w = V * (n * (1 + rho * W.shape[0] / trace))
    b = (counts / n).log() - m @ w - 0.5 * (M.mT * w).sum(0)
    return w, torch.where(present, b, torch.full_like(b, -torch.inf))


def leave_one_out(x: Tensor, y: Tensor, S: Tensor, means: Tensor, counts: Tensor, rho: float) -> Tensor:
    """Scores (B, K) of samples x (B, J) of classes y (B,), each without itself, at a fixed rho.

    S is the within-class scatter (J, J), means are (K, J), counts (K,). If a sample is the only one of its class, that class
    is empty without it and scores -inf.
    """
    J, K, n = S.shape[0], len(counts), counts.sum()
    B = S.clone()
    B.diagonal().add_(rho)
    solved = torch.cholesky_solve(torch.cat([means, x]).mT, torch.linalg.cholesky(B)).mT
    Bm, Bx = solved[:K], solved[K:]  # B^-1 mu_k (K, J), B^-1 x (B, J)
    n_k, own = counts[y], means[y]
    d, Bd = x - own, Bx - Bm[y]
    less = (n_k - 1).clamp(min=1)
    g = torch.where(n_k > 1, n_k / less, torch.zeros_like(n_k))
    factor = (g / (1 - g * (d * Bd).sum(1)))[:, None]  # of B^-1 d d^T B^-1
    xd = (Bd * x).sum(1, keepdim=True)
    along = Bd @ means.mT  # d^T B^-1 mu_k
    linear = x @ Bm.mT + factor * xd * along
    square = (means * Bm).sum(1) + factor * along.square()
    moved, Bmoved = own - d / less[:, None], Bm[y] - Bd / less[:, None]  # the mean of the sample's own class
    along = (Bd * moved).sum(1, keepdim=True)
    own_linear = (Bmoved * x).sum(1, keepdim=True) + factor * xd * along
    own_square = (Bmoved * moved).sum(1, keepdim=True) + factor * along.square()
    linear, square = linear.scatter(1, y[:, None], own_linear), square.scatter(1, y[:, None], own_square)
    trace = S.diagonal().sum() - g * d.square().sum(1)
    scale = (n - 1) * (1 + rho * J / trace)
    left = counts.repeat(len(x), 1).scatter_add_(1, y[:, None], -torch.ones_like(n_k)[:, None])
    scores = scale[:, None] * (linear - 0.5 * square) + (left / (n - 1)).log()
    return torch.where(left > 0, scores, torch.full_like(scores, -torch.inf))
