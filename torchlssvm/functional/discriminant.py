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

The weights of the discriminant are therefore the least-squares weights times a K x K matrix. Adding, removing and merging
samples need no state beyond that of the least-squares head. The inverse exists: all eigenvalues of N M U are below 1, since
A exceeds M^T N M by at least rho I.

**Leaving samples out.** Remove samples x_i with weights t_i from class k, and let tau = sum t_i. With d_i = x_i - mu_k and
e = sum t_i d_i, the remaining class has the weight n_k - tau and the mean mu_k - e / (n_k - tau). Its scatter decreases by
sum t_i d_i d_i^T + e e^T / (n_k - tau). So B = S_w + rho I becomes B - E E^T, where E has one column for each removed sample
and one for each class. By the Woodbury identity,

    (B - E E^T)^-1 = B^-1 + B^-1 E (I - E^T B^-1 E)^-1 E^T B^-1.

A single sample gives a single column, sqrt(g) d with g = t n_k / (n_k - t). The mean of all samples moves by
m' = -sum t_i (x_i - m) / n' with n' = n - tau. Centring on the new mean adds the same number,
-m'^T B'^-1 x + m'^T B'^-1 m' / 2, to the scores of all classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


def discriminant(W: Tensor, M: Tensor, m: Tensor, counts: Tensor, trace: Tensor, rho: float) -> tuple[Tensor, Tensor]:
    """Compute the weights w (J, K) and b (K,) of the discriminant from the least-squares weights.

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
    V = torch.linalg.solve(eye - NG, U, left=False)  # (S_w + rho I)^-1 M^T
    n = counts.sum()
    w = V * (n * _inflation(rho * W.shape[0], trace))
    b = (counts / n).log() - m @ w - 0.5 * (M.mT * w).sum(0)
    return w, torch.where(present, b, torch.full_like(b, -1e30))


class WithinClass(NamedTuple):
    """The quantities from which leave-one-out scores of the discriminant are computed.

    Attributes:
        solve: the function from rows (R, J) to rows times B^-1.
        trace: trace of S_w.
        means: (K, J).
        counts: samples by class, or the sums of their weights (K,).
        rho: the ridge.
    """

    solve: Callable[[Tensor], Tensor]
    trace: Tensor
    means: Tensor
    counts: Tensor
    rho: float


def within_class(S: Tensor, means: Tensor, counts: Tensor, rho: float) -> WithinClass:
    """Factor S_w + rho I. S: S_w (J, J); means: (K, J); counts: (K,)."""
    B = S.clone()
    B.diagonal().add_(rho)
    L, failed = torch.linalg.cholesky_ex(B)
    if bool(failed):
        raise ValueError(
            f"rho = {rho:g} is too small for these features: the within-class scatter is singular in float64. Use a larger rho."
        )
    return WithinClass(lambda rows: torch.cholesky_solve(rows.mT, L).mT, S.trace(), means, counts, rho)


def leave_one_out(system: WithinClass, x: Tensor, y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Compute scores (R, K) of samples, each without itself, at a fixed rho, and their leverages (R,).

    x: (R, J), centred on the mean of all; y: labels (R,); t: weights (R,). If a class loses its only sample, its score is below
    all others.
    """
    means, counts = system.means, system.counts
    Bm, Bx = system.solve(means), system.solve(x)  # B^-1 mu_k (K, J), B^-1 x (R, J)
    n_k, own = counts[y], means[y]
    d, Bd = x - own, Bx - Bm[y]
    rest = n_k - t
    alone = rest <= 0
    rest = torch.where(alone, torch.ones_like(rest), rest)
    g = torch.where(alone, torch.zeros_like(t), t * n_k / rest)
    leverage = g * (d * Bd).sum(1)
    factor = (g / (1 - leverage))[:, None]  # of B^-1 d d^T B^-1
    xd = (Bd * x).sum(1, keepdim=True)
    along = Bd @ means.mT  # d^T B^-1 mu_k
    linear = x @ Bm.mT + factor * xd * along
    square = (means * Bm).sum(1) + factor * along.square()
    step = (t / rest)[:, None]
    moved, Bmoved = own - d * step, Bm[y] - Bd * step  # the mean of the sample's own class
    along = (Bd * moved).sum(1, keepdim=True)
    own_linear = (Bmoved * x).sum(1, keepdim=True) + factor * xd * along
    own_square = (Bmoved * moved).sum(1, keepdim=True) + factor * along.square()
    linear, square = linear.scatter(1, y[:, None], own_linear), square.scatter(1, y[:, None], own_square)
    left = counts.repeat(len(x), 1).scatter_add_(1, y[:, None], -t[:, None])
    left.scatter_(1, y[:, None], left.gather(1, y[:, None]).masked_fill(alone[:, None], 0.0))
    trace = system.trace - g * d.square().sum(1)
    share = t / left.sum(1)  # m' = -share x
    shift = (share + 0.5 * share.square()) * ((Bx * x).sum(1) + (factor * xd.square())[:, 0])
    return _scores(linear, square, left, trace, system.rho, x.shape[1], shift), leverage


def leave_group_out(system: WithinClass, x: Tensor, y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Compute scores (R, K) of the samples of one group by a head without the group, and their joint leverage, repeated (R,).

    x: (R, J), centred on the mean of all; y: labels (R,); t: weights (R,).
    """
    hot = torch.nn.functional.one_hot(y, len(system.counts)).to(x.dtype) * t[:, None]  # (R, K)
    d = x - system.means[y]
    left = system.counts - hot.sum(0)
    left = torch.where(left > 1e-12 * system.counts, left, torch.zeros_like(left))
    kept = torch.where(left > 0, left, torch.ones_like(left))
    e = hot.mT @ d  # (K, J)
    means = system.means - e / kept[:, None]
    touched = (hot.sum(0) > 0) & (left > 0)
    E = torch.cat([d * t.sqrt()[:, None], (e / kept.sqrt()[:, None])[touched]])
    BE = system.solve(E)
    G = E @ BE.mT
    leverage = torch.linalg.eigvalsh((G + G.mT) / 2)[-1:].expand(len(x))
    K = torch.eye(len(E), dtype=x.dtype, device=x.device) - G

    def solve(rows: Tensor) -> Tensor:
        more: Tensor = torch.linalg.solve(K, BE @ rows.mT).mT @ BE
        return system.solve(rows) + more

    mean = -(t @ x)[None] / left.sum()  # m' (1, J)
    Bm, Bmean = solve(means), solve(mean)
    shift = 0.5 * (mean * Bmean).sum() - (x @ Bmean.mT)[:, 0]
    trace = system.trace - E.square().sum()
    linear, square = x @ Bm.mT, (means * Bm).sum(1)
    return _scores(linear, square, left.expand(len(x), -1), trace, system.rho, x.shape[1], shift), leverage


def _scores(linear: Tensor, square: Tensor, left: Tensor, trace: Tensor, rho: float, J: int, shift: Tensor) -> Tensor:
    """Scores (R, K) from mu_k^T B^-1 x and mu_k^T B^-1 mu_k. left: weights of the classes (R, K); shift: (R,), of all."""
    n = left.sum(1)
    scale = n * _inflation(rho * J, trace)
    scores = scale[:, None] * (linear - 0.5 * square + shift[:, None]) + (left / n[:, None]).log()
    lowest = scores.masked_fill(left <= 0, torch.inf).amin(1, keepdim=True)
    return torch.where(left > 0, scores, lowest - 1.0)


def _inflation(ridge: Tensor | float, trace: Tensor) -> Tensor:
    """Return 1 / c = 1 + rho J / tr S_w, at most 1e6. If all samples equal their class means, the covariance has no scale."""
    return (1 + ridge / trace.clamp(min=torch.finfo(trace.dtype).tiny)).clamp(max=1e6)
