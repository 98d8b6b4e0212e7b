r"""The regularization path: one eigendecomposition, then any number of rho values.

For samples x_i with weights d_i and targets y_i, centred on their weighted means when the intercept is free, let
G = X^T D X = Q diag(s) Q^T and R = Q^T X^T D Y. For every rho > 0, with n samples, T = sum d |y|^2,

    w(rho)   = Q diag(1 / (s + rho)) R
    dof(rho) = sum_j s_j / (s_j + rho)  (+ 1 for a free intercept), the trace of the hat matrix
    rss(rho) = T - sum_j R_j^2 (s_j + 2 rho) / (s_j + rho)^2
    gcv(rho) = (rss / n) / (1 - dof / n)^2                               (Golub, Heath, Wahba 1979)

at a cost of D K for each value. With the features at hand, V = X Q gives leave-one-out errors for all values,

    f_i(rho) = sum_j V_ij R_j / (s_j + rho),    h_i(rho) = d_i (1/n_d + sum_j V_ij^2 / (s_j + rho)),    n_d = sum d,

that is, products with the matrix 1 / (s_j + rho_r). It is a Cauchy matrix, smooth in both indices: its singular values fall
exponentially, so a few dozen singular vectors, and not all values, are what is multiplied by V (to 12 digits).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torchlssvm.functional import checks

NOISE = 1e-12
"""Singular values of the matrix of values below this share of the largest are left out."""

BLOCK = 256
"""Rows whose scores for all values are held at a time: small enough to stay in the cache."""


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

    def weights(self, rho: Tensor | float) -> tuple[Tensor, Tensor]:
        """w (D, K) and b (K,) of one value."""
        w = self.Q @ (self.R / (self.s + rho)[:, None])
        return w, self.beta - self.mu @ w

    def dof(self, rhos: Tensor) -> Tensor:
        """Effective degrees of freedom (r,). rhos: (r,)."""
        own = (self.s + rhos[:, None]).reciprocal_() @ self.s
        return own + 1.0 if self.weight else own

    def rss(self, rhos: Tensor) -> Tensor:
        """Weighted residual sums of squares (r, K). rhos: (r,)."""
        g, squares = (self.s + rhos[:, None]).reciprocal_(), self.R.square()
        # (s + 2 rho) / (s + rho)^2 = g + rho g^2
        return (self.T - g @ squares - rhos[:, None] * (g.square_() @ squares)).clamp_(min=0.0)

    def gcv(self, rhos: Tensor) -> Tensor:
        """Generalized cross-validation (r, K): an estimate of the squared leave-one-out error. rhos: (r,)."""
        g, squares = (self.s + rhos[:, None]).reciprocal_(), self.R.square()
        left = 1.0 - (g @ self.s + (1.0 if self.weight else 0.0)) / self.n
        rss = (self.T - g @ squares - rhos[:, None] * (g.square_() @ squares)).clamp_(min=0.0)
        return rss / (self.n * left.square_())[:, None]


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
    host = checks.to_host((sigma > NOISE * sigma[:1]).sum())
    keep = len(rhos) if host is None else int(host[0][0])
    if keep >= len(rhos):
        eye = torch.eye(len(rhos), dtype=s.dtype, device=s.device)
        return Values(1.0 / (s[:, None] + rhos), eye)
    return Values(U[:, :keep] / row[:, None], sigma[:keep, None] * Vt[:keep])


class Projected(NamedTuple):
    """From V (B, D) to residuals of all values: V @ narrow (D, K' q), joined by y - beta, times right (q + 1, r)."""

    narrow: Tensor
    left: Tensor  # (D, q)
    right: Tensor  # (q + 1, r)
    beta: Tensor  # (K,)
    whole: bool

    def residuals(self, V: Tensor, y: Tensor) -> Tensor:
        """y - f (B, K, r). V: (B, D); y: (B, K)."""
        q = self.left.shape[1]
        K = self.beta.shape[0] - (not self.whole)
        S = torch.empty(len(V), self.beta.shape[0], q + 1, dtype=V.dtype, device=V.device)
        S[:, :K, :q] = (V @ self.narrow).view(len(V), K, q)
        S[:, :, q] = y - self.beta
        if not self.whole:  # the last output's score is a constant minus the others'
            S[:, K, :q] = -S[:, :K, :q].sum(1)
        return S @ self.right


def project(spectrum: Spectrum, rhos: Tensor) -> Projected:
    """Prepare for residuals at many values. rhos: (r,)."""
    values, R = cauchy(spectrum.s, rhos), spectrum.R
    # Targets -1/+1 of one class against the rest sum to a constant, so with a free intercept the columns of R sum to zero.
    host = checks.to_host(R.sum(1).abs().amax() > 1e-13 * R.abs().amax())
    whole = R.shape[1] < 2 or host is None or bool(host[0][0])
    R = R if whole else R[:, :-1]
    narrow = (R[:, :, None] * values.left[:, None, :]).reshape(len(R), -1)
    right = torch.cat([-values.right, torch.ones_like(values.right[:1])])
    return Projected(narrow, values.left, right, spectrum.beta, whole)


def path_residuals(
    spectrum: Spectrum, projected: Projected, v: Tensor, y: Tensor, d: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Residuals (b, K, r) of the whole model and 1 - h (b, r) for all values; their quotient is the leave-one-out residual.

    v: (B, D), overwritten; y: (B, K) targets; d: (B,) weights in the system. Yields some rows (a slice) at a time.
    """
    V = (v.sub_(spectrum.mu) if spectrum.weight else v) @ spectrum.Q  # (B, D)
    extra = 1.0 / spectrum.weight if spectrum.weight else 0.0
    for start in range(0, len(V), BLOCK):
        rows = slice(start, start + BLOCK)
        residual = projected.residuals(V[rows], y[rows])
        h = (V[rows].square_() @ projected.left @ -projected.right[:-1]).add_(extra).mul_(d[rows][:, None])
        yield rows, residual, (1.0 - h).clamp_(min=torch.finfo(v.dtype).eps)


def squared_error(M: Tensor, V: Tensor, T: Tensor, w: Tensor) -> Tensor:
    """sum |y - w^T x|^2 (K,) from statistics: T - 2 w^T V + w^T M w. M: (D, D); V: (D, K); T: (K,); w: (D, K)."""
    return T - 2 * (w * V).sum(0) + (w * (M @ w)).sum(0)


def default_values(s: Tensor, D: int, count: int = 100) -> Tensor:
    """Values from 1e-8 to 1e3 times the mean eigenvalue, evenly in the logarithm. s: (D,)."""
    host = checks.to_host(s.sum())
    mean = 1.0 if host is None else host[0][0] / D
    return (mean or 1.0) * torch.logspace(-8, 3, count, dtype=torch.float64, device=s.device)
