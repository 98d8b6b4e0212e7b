r"""The regularization path: one eigendecomposition, then any number of rho values.

For samples x_i with weights d_i and targets y_i, centred on their weighted means when the intercept is free, let
G = X^T D X = Q diag(s) Q^T and R = Q^T X^T D Y. For every rho > 0, with n samples, T = sum d |y|^2,

    w(rho)   = Q diag(1 / (s + rho)) R
    dof(rho) = sum_j s_j / (s_j + rho)  (+ 1 for a free intercept), the trace of the hat matrix
    rss(rho) = T - sum_j R_j^2 (s_j + 2 rho) / (s_j + rho)^2
    gcv(rho) = (rss / n) / (1 - dof / n)^2                               (Golub, Heath, Wahba 1979)

at a cost of D K for each value. With the features at hand, V = X Q gives leave-one-out errors for all values,

    f_i(rho) = sum_j V_ij R_j / (s_j + rho),    h_i(rho) = d_i (1/n_d + sum_j V_ij^2 / (s_j + rho)),    n_d = sum d,

that is, products with the matrix 1 / (s_j + rho_r). It is a Cauchy matrix, smooth in both indices: its numerical rank is a
few dozen for any number of values, so its singular vectors above rounding, not the values, are what is multiplied by V.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Spectrum(NamedTuple):
    """s (D,) ascending, Q (D, D), R (D, K), T (K,), the means mu (D,) and beta (K,), n_d (0 if not centred), n samples."""

    s: Tensor
    Q: Tensor
    R: Tensor
    T: Tensor
    mu: Tensor
    beta: Tensor
    weight: float
    n: float

    def weights(self, rho: float) -> tuple[Tensor, Tensor]:
        """w (D, K) and b (K,) of one value."""
        w = self.Q @ (self.R / (self.s + rho)[:, None])
        return w, self.beta - self.mu @ w

    def dof(self, rhos: Tensor) -> Tensor:
        """Effective degrees of freedom (r,). rhos: (r,)."""
        own = (self.s / (self.s + rhos[:, None])).sum(1)
        return own + 1.0 if self.weight else own

    def rss(self, rhos: Tensor) -> Tensor:
        """Weighted residual sums of squares (r, K). rhos: (r,)."""
        shrunk = (self.s + 2 * rhos[:, None]) / (self.s + rhos[:, None]).square()
        return (self.T - shrunk @ self.R.square()).clamp(min=0.0)

    def gcv(self, rhos: Tensor) -> Tensor:
        """Generalized cross-validation (r, K): an estimate of the squared leave-one-out error. rhos: (r,)."""
        left = 1.0 - self.dof(rhos) / self.n
        return self.rss(rhos) / self.n / left.square()[:, None]


def spectrum(G: Tensor, rhs: Tensor, T: Tensor, mu: Tensor, beta: Tensor, weight: float, n: float) -> Spectrum:
    """Decompose. G: (D, D) without the ridge; rhs: (D, K) = X^T D Y; the rest as in :class:`Spectrum`."""
    s, Q = torch.linalg.eigh(G)
    return Spectrum(s.clamp(min=0.0), Q, Q.mT @ rhs, T, mu, beta, weight, n)


class Values(NamedTuple):
    """1 / (s_j + rho_r) (D, r) as a product left (D, q) @ right (q, r), q the numerical rank or r itself."""

    left: Tensor
    right: Tensor


def cauchy(s: Tensor, rhos: Tensor) -> Values:
    """Factor 1 / (s_j + rho_r), with an error of rounding relative to each row's largest entry. s: (D,); rhos: (r,)."""
    row = s + rhos.amin()
    scaled = row[:, None] / (s[:, None] + rhos)  # in (0, 1]
    U, sigma, Vt = torch.linalg.svd(scaled, full_matrices=False)
    keep = int((sigma > 1e-16 * sigma[:1]).sum())
    if keep >= len(rhos):
        eye = torch.eye(len(rhos), dtype=s.dtype, device=s.device)
        return Values(1.0 / (s[:, None] + rhos), eye)
    return Values(U[:, :keep] / row[:, None], sigma[:keep, None] * Vt[:keep])


def path_scores(spectrum: Spectrum, values: Values, v: Tensor) -> tuple[Tensor, Tensor]:
    """Scores (B, K, r) and leverages per unit of weight (B, r), for all values. v: (B, D), overwritten."""
    V = (v.sub_(spectrum.mu) if spectrum.weight else v) @ spectrum.Q  # (B, D)
    K, q = spectrum.R.shape[1], values.left.shape[1]
    narrow = (spectrum.R[:, :, None] * values.left[:, None, :]).reshape(-1, K * q)  # (D, K q)
    scores = (V @ narrow).view(-1, K, q) @ values.right + spectrum.beta[:, None]
    leverage = (V.square_() @ values.left) @ values.right
    return scores, leverage + 1.0 / spectrum.weight if spectrum.weight else leverage


def squared_error(M: Tensor, V: Tensor, T: Tensor, w: Tensor) -> Tensor:
    """sum |y - w^T x|^2 (K,) from statistics: T - 2 w^T V + w^T M w. M: (D, D); V: (D, K); T: (K,); w: (D, K)."""
    return T - 2 * (w * V).sum(0) + (w * (M @ w)).sum(0)


def default_values(s: Tensor, D: int, count: int = 100) -> Tensor:
    """Values from 1e-8 to 1e3 times the mean eigenvalue, evenly in the logarithm. s: (D,)."""
    mean = float(s.sum()) / D
    return (mean or 1.0) * torch.logspace(-8, 3, count, dtype=torch.float64, device=s.device)
