"""Linear discriminant analysis, computed from the solution of a least-squares head and a K x K matrix.

There are J features and K classes. Class k has n_k samples with the mean mu_k. Let N = diag(n_k), n = sum n_k and m the mean of
all samples. Row k of M (K, J) is mu_k - m. The within-class scatter is the total scatter minus the scatter of the class means,
S_w = S_t - M^T N M. The covariance is regularized by a ridge rho and scaled so that its trace does not change:

    Sigma = c (S_w + rho I) / n,      c = tr S_w / (tr S_w + rho J).

The scores are the log posterior probabilities up to a constant that all classes share:

    f_k(x) = M_k Sigma^-1 (x - m) - M_k Sigma^-1 M_k^T / 2 + log(n_k / n).

This is scikit-learn's ``LinearDiscriminantAnalysis(solver="lsqr", shrinkage=s)`` with s = 1 - c. With class weights, n_k is the
sum of the weights of class k, and n_k / n is the prior of the class. "balanced" weights therefore give equal priors.

**From least squares.** With targets +1 and -1 and a free intercept, least squares has the weights W = 2 A^-1 M^T N, where
A = S_t + rho I. So U = A^-1 M^T = W N^-1 / 2 is known, S_w + rho I = A - M^T N M, and by the Woodbury identity

    (S_w + rho I)^-1 M^T = U (I - N M U)^-1.

The weights of the discriminant are therefore the least-squares weights times a K x K matrix, so adding, removing and merging
samples need no state beyond that of the least-squares head. The inverse exists: all eigenvalues of N M U are below 1, since A
exceeds M^T N M by at least rho I.

**Leaving samples out.** Remove samples x_i with weights t_i. A class k with the weight tau_k among them keeps the weight
n_k - tau_k. With d_i = x_i - mu_k and e_k = sum t_i d_i, its mean becomes mu_k - e_k / (n_k - tau_k), and its scatter decreases
by sum t_i d_i d_i^T + e_k e_k^T / (n_k - tau_k). So B = S_w + rho I becomes B - D^T M D with the rows d_i in D, and

    M = diag(t) + sum_k t_k t_k^T / (n_k - tau_k),      (B - D^T M D)^-1 = B^-1 + B^-1 D^T (I - M G)^-1 M D B^-1,

where t_k holds the weights of class k, zero elsewhere, and G = D B^-1 D^T. The mean of all samples moves by
m' = -sum t_i (x_i - m) / n' with n' = n - tau. Centring on the new mean adds the same number,
-m'^T B'^-1 x + m'^T B'^-1 m' / 2, to the scores of all classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


def discriminant(
    W: Tensor, M: Tensor, m: Tensor, counts: Tensor, trace: Tensor, rho: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the weights w (J, K) and b (K,) of the discriminant from the least-squares weights, and a bound of their error.

    Args:
        W: least-squares weights (J, K) for targets +1 and -1 and a free intercept.
        M: class means minus m (K, J); rows of classes without samples are not used.
        m: mean of all samples (J,).
        counts: samples by class, or the sums of their weights (K,).
        trace: trace of the within-class scatter S_w.
        rho: the ridge.

    A class without samples gets zero weights and b = -1e30, a score below all others, but finite, so that it can be calibrated.
    """
    present = counts > 0
    n_k = torch.where(present, counts, torch.ones_like(counts))
    M = torch.where(present[:, None], M, torch.zeros_like(M))
    U = torch.where(present, W / (2 * n_k), torch.zeros_like(W))  # A^-1 M^T (J, K)
    NG = counts[:, None] * (M @ U)  # (K, K)
    eye = torch.eye(len(counts), dtype=W.dtype, device=W.device)
    inverse = torch.linalg.inv(eye - NG)
    V = U @ inverse  # (S_w + rho I)^-1 M^T
    error = torch.finfo(W.dtype).eps * (eye - NG).abs().sum(0).amax() * inverse.abs().sum(0).amax()
    n = counts.sum()
    w = V * (n * _inflation(rho * W.shape[0], trace))
    b = (counts / n).log() - m @ w - 0.5 * (M.mT * w).sum(0)
    return w, torch.where(present, b, torch.full_like(b, -1e30)), error


class WithinClass(NamedTuple):
    """The quantities from which leave-one-out scores of the discriminant are computed.

    Attributes:
        solve: the function from rows (R, J) to rows times B^-1.
        trace: trace of S_w.
        means: (K, J).
        counts: samples by class, or the sums of their weights (K,).
        rho: the ridge.
        share: as in :class:`~torchlssvm.functional.whitened.Whitened`.
    """

    solve: Callable[[Tensor], Tensor]
    trace: Tensor
    means: Tensor
    counts: Tensor
    rho: float
    share: float


def within_class(S: Tensor, means: Tensor, counts: Tensor, rho: float) -> WithinClass:
    """Factor S_w + rho I. S: S_w (J, J); means: (K, J); counts: (K,)."""
    B = S.clone()
    B.diagonal().add_(rho)
    L, failed = torch.linalg.cholesky_ex(B)
    if bool(failed):
        raise ValueError(
            f"rho = {rho:g} is too small for these features: the within-class scatter is singular in float64. Use a larger rho."
        )
    share = float((L.diagonal() / L.norm(dim=1)).square().amin())
    return WithinClass(lambda rows: torch.cholesky_solve(rows.mT, L).mT, S.trace(), means, counts, rho, share)


def leave_out(system: WithinClass, x: Tensor, y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Compute scores (b, L, K) of groups of L samples, each group by a head without it, and their joint leverages (b,).

    x: (b, L, J), centred on the mean of all; y: labels (b, L); t: weights (b, L); at a fixed rho. If a class loses all of its
    samples, its score is below all others. Where the ridge inflates the scores, it takes as many digits as a leverage near 1,
    and is counted as one.
    """
    means, counts = system.means, system.counts
    hot = torch.nn.functional.one_hot(y, len(counts)).to(x.dtype) * t[..., None]  # (b, L, K)
    left = counts - hot.sum(1)
    left = torch.where(left > 1e-12 * counts, left, torch.zeros_like(left))  # (b, K)
    share = hot / torch.where(left > 0, left, torch.ones_like(left))[:, None]
    share = share * (left > 0)[:, None]  # mu_k' = mu_k - share_k^T d
    d = x - means[y]
    M = torch.diag_embed(t) + share @ hot.mT
    Bm, Bd = system.solve(means), system.solve(d.flatten(0, 1)).view_as(d)
    G, A, xd = d @ Bd.mT, Bd @ means.mT, x @ Bd.mT  # d^T B^-1 d, d^T B^-1 mu, x^T B^-1 d
    values, vectors = torch.linalg.eigh(M)
    root = vectors * values.clamp(min=0.0).sqrt()[:, None]
    inner = root.mT @ G @ root
    leverage = torch.linalg.eigvalsh((inner + inner.mT) / 2)[:, -1]
    Q = torch.linalg.solve(torch.eye(G.shape[1], dtype=G.dtype, device=G.device) - M @ G, M)
    xQ, GQ = xd @ Q, G @ Q
    xx = x @ (Bd + Bm[y]).mT + xQ @ xd.mT  # from here on with the inverse without the group
    linear = x @ Bm.mT + xQ @ A - (xd + xQ @ G) @ share
    own = (share * (2 * (A + GQ @ A) - (G + GQ @ G) @ share)).sum(1)
    square = (means * Bm).sum(1) + (A * (Q @ A)).sum(1) - own
    n = left.sum(1)
    mean = (t / n[:, None])[..., None]  # m' = -mean^T x
    shift = xx @ mean + 0.5 * mean.mT @ xx @ mean
    trace = system.trace - (M * (d @ d.mT)).sum((1, 2))
    inflation = _inflation(system.rho * x.shape[2], trace)
    leverage = 1.0 - (1.0 - leverage) / inflation
    scores = (n * inflation)[:, None, None] * (linear - 0.5 * square[:, None] + shift) + (left / n[:, None]).log()[
        :, None
    ]
    gone = (left <= 0)[:, None]
    lowest = scores.masked_fill(gone, torch.inf).amin(2, keepdim=True)
    return torch.where(gone, lowest - 1.0, scores), leverage


def _inflation(ridge: Tensor | float, trace: Tensor) -> Tensor:
    """Return 1 / c = 1 + rho J / tr S_w, at most 1e6. If all samples equal their class means, the covariance has no scale."""
    return (1 + ridge / trace.clamp(min=torch.finfo(trace.dtype).tiny)).clamp(max=1e6)
