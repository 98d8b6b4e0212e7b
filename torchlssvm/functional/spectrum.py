r"""The regularization path: one eigendecomposition, then any number of rho values.

Take samples x_i with weights d_i and targets y_i, centred on their weighted means if the intercept is free. Let
G = X^T D X = Q diag(s) Q^T and R = Q^T X^T D Y. For every rho > 0, with n samples and T = sum d |y|^2,

    w(rho)   = Q diag(1 / (s + rho)) R
    dof(rho) = sum_j s_j / (s_j + rho)  (+ 1 for a free intercept), the trace of the hat matrix
    rss(rho) = T - sum_j R_j^2 (s_j + 2 rho) / (s_j + rho)^2
    gcv(rho) = (rss / n) / (1 - dof / n)^2                               (Golub, Heath, Wahba 1979)

Each value of rho costs D operations. If the features are available, V = X Q gives leave-one-out errors for all values,

    f_i(rho) = sum_j V_ij R_j / (s_j + rho),    h_i(rho) = d_i (1/n_d + sum_j V_ij^2 / (s_j + rho)),    n_d = sum d,

which are products with the matrix 1 / (s_j + rho_r). This Cauchy matrix is smooth in both indices, so its singular values fall
exponentially. It is therefore enough to multiply V by a few dozen singular vectors instead of all values (to 12 digits).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

SCORED_ROWS = 256
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
        """Compute the effective degrees of freedom (r,). rhos: (r,)."""
        own = (self.s + rhos[:, None]).reciprocal_() @ self.s
        return own + 1.0 if self.weight else own

    def gcv(self, rhos: Tensor) -> tuple[Tensor, Tensor]:
        """Compute generalized cross-validation (r,), the mean over all outputs, and degrees of freedom (r,). rhos: (r,).

        This takes three products of a (r, D) matrix with a vector, for any number of values and outputs. With
        g = 1 / (s + rho), q the mean over outputs of R^2 / s, and sums over the nonzero s,

            rss = (T - sum q) + rho^2 sum g^2 q,    n - dof = (n - rank - 1) + rho sum g.

        Neither expression cancels if there are as few samples as features: the first terms are zero, the others accurate.
        """
        eps = torch.finfo(self.s.dtype).eps * len(self.s)
        live = (self.s > eps * self.s[-1]).to(self.s.dtype)  # (D,)
        q = self.R.square().mean(1).mul_(live).div_(self.s.clamp(min=torch.finfo(self.s.dtype).tiny))
        T, spare = self.T.mean(), self.n - live.sum() - (1.0 if self.weight else 0.0)
        least = T - q.sum()  # what least squares leaves
        least = torch.where(least <= torch.where(spare < 0.5, 1e-6, eps) * T, torch.zeros_like(least), least)
        g = (self.s + rhos[:, None]).reciprocal_()  # (r, D)
        dof, left = g @ self.s, (g @ live).mul_(rhos).add_(spare)
        rss = (g.square_() @ q).mul_(rhos).mul_(rhos).add_(least)
        return rss.mul_(self.n).div_(left.square_()), dof + 1.0 if self.weight else dof


def spectrum(G: Tensor, rhs: Tensor, T: Tensor, mu: Tensor, beta: Tensor, weight: float, n: float) -> Spectrum:
    """Decompose G. G: (D, D) without the ridge; rhs: (D, K) = X^T D Y; the rest as in :class:`Spectrum`."""
    s, Q = torch.linalg.eigh(G)
    return rotated(s, Q, rhs, T, mu, beta, weight, n)


def rotated(
    s: Tensor, Q: Tensor, rhs: Tensor, T: Tensor, mu: Tensor, beta: Tensor, weight: float, n: float
) -> Spectrum:
    """Return the spectrum if G = Q diag(s) Q^T is known. The arguments are those of :func:`spectrum`."""
    return Spectrum(s.clamp(min=0.0), Q, Q.mT @ rhs, T, mu, beta, weight, n)


class ReciprocalFactors(NamedTuple):
    """1 / (s_j + rho_r) (D, r) as a product left (D, q) @ right (q, r), q the numerical rank or r itself."""

    left: Tensor
    right: Tensor


def cauchy(s: Tensor, rhos: Tensor) -> ReciprocalFactors:
    """Factor 1 / (s_j + rho_r), with an error of rounding relative to each row's largest entry. s: (D,); rhos: (r,)."""
    row = s + rhos.amin()
    scaled = row[:, None] / (s[:, None] + rhos)  # in (0, 1]
    U, sigma, Vt = torch.linalg.svd(scaled, full_matrices=False)
    # 1e-12: singular values of the matrix of values below this share of the largest are left out
    keep = int((sigma > 1e-12 * sigma[:1]).sum())
    if keep >= len(rhos):
        eye = torch.eye(len(rhos), dtype=s.dtype, device=s.device)
        return ReciprocalFactors(1.0 / (s[:, None] + rhos), eye)
    return ReciprocalFactors(U[:, :keep] / row[:, None], sigma[:keep, None] * Vt[:keep])


class ProjectedResiduals(NamedTuple):
    """Maps V (B, d) to the residuals of all values: V @ narrow and y - beta, side by side, times right.

    V leaves out the first ``null`` eigenvectors, which are orthogonal to every sample.
    """

    narrow: Tensor  # (d, K q)
    left: Tensor  # (d, q)
    right: Tensor  # (q + 1, r)
    beta: Tensor  # (K,)
    null: int

    def residuals(self, V: Tensor, y: Tensor) -> Tensor:
        """y - f (B, K, r). V: (B, d); y: (B, K)."""
        K, q = len(self.beta), self.left.shape[1]
        S = torch.empty(len(V), K, q + 1, dtype=V.dtype, device=V.device)
        S[:, :, :q] = (V @ self.narrow).view(len(V), K, q)
        S[:, :, q] = y - self.beta
        return S @ self.right

    def leverages(self, V: Tensor) -> Tensor:
        """sum_j V_ij^2 / (s_j + rho) (B, r). V: (B, d), overwritten."""
        return V.square_() @ self.left @ -self.right[:-1]


def project(spectrum: Spectrum, rhos: Tensor) -> ProjectedResiduals:
    """Prepare for residuals at many values. rhos: (r,)."""
    # The squares of V_ij over all samples i sum to s_j: far below every rho, they are negligible (a constant feature).
    s, null = spectrum.s, int((spectrum.s[:-1] <= 1e-14 * rhos.amin()).sum())
    values = cauchy(s[null:], rhos)
    narrow = (spectrum.R[null:, :, None] * values.left[:, None, :]).reshape(len(s) - null, -1)
    right = torch.cat([-values.right, torch.ones_like(values.right[:1])])
    return ProjectedResiduals(narrow, values.left, right, spectrum.beta, null)


def path_residuals(
    spectrum: Spectrum, projected: ProjectedResiduals, v: Tensor, y: Tensor, d: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield residuals (b, K, r) of the whole model and 1 - h (b, r) for all values. Quotient: the leave-one-out residual.

    v: (B, D), overwritten; y: (B, K) targets; d: (B,) weights in the system. Each item covers some rows (a slice).
    """
    V = (v.sub_(spectrum.mu) if spectrum.weight else v) @ spectrum.Q[:, projected.null :]  # (B, d)
    extra = 1.0 / spectrum.weight if spectrum.weight else 0.0
    for start in range(0, len(V), SCORED_ROWS):
        rows = slice(start, start + SCORED_ROWS)
        residual = projected.residuals(V[rows], y[rows])
        h = projected.leverages(V[rows]).add_(extra).mul_(d[rows][:, None])
        yield rows, residual, (1.0 - h).clamp_(min=torch.finfo(v.dtype).eps)


def squared_error(M: Tensor, V: Tensor, T: Tensor, w: Tensor) -> Tensor:
    """sum |y - w^T x|^2 (K,) from statistics: T - 2 w^T V + w^T M w. M: (D, D); V: (D, K); T: (K,); w: (D, K)."""
    return T - 2 * (w * V).sum(0) + (w * (M @ w)).sum(0)


def default_values(s: Tensor, D: int) -> Tensor:
    """Return values of rho from 1e-8 to 1e3 times the mean eigenvalue, evenly in the logarithm. s: (D,)."""
    mean = float(s.sum()) / D
    # 100: values of rho on a path: nine for each decade of 1e-8 to 1e3
    return (mean or 1.0) * torch.logspace(-8, 3, 100, dtype=torch.float64, device=s.device)
