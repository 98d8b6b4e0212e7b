r"""The regularization path: one eigendecomposition gives the solutions for any number of values of rho.

The n samples x_i have weights d_i and targets y_i. If the intercept is free, rows and targets are centred on their weighted
means. Let D = diag(d), G = X^T D X = Q diag(s) Q^T, R = Q^T X^T D Y and T = sum d |y|^2. For every rho > 0, the weights, the
degrees of freedom, the residual sum of squares and the generalized cross-validation error are

    w(rho)   = Q diag(1 / (s + rho)) R
    dof(rho) = sum_j s_j / (s_j + rho)  (+ 1 for a free intercept), the trace of the hat matrix
    rss(rho) = T - sum_j R_j^2 (s_j + 2 rho) / (s_j + rho)^2
    gcv(rho) = (rss / n) / (1 - dof / n)^2                               (Golub, Heath, Wahba 1979)

The error of one value of rho takes a number of operations proportional to the number of features. With far fewer samples than
features, only the eigenvectors in the span of the samples are computed, because the other eigenvalues are zero. If the features
are available, V = X Q also gives the scores f_i and leverages h_i of all samples, and from these the leave-one-out errors:

    f_i(rho) = sum_j V_ij R_j / (s_j + rho),    h_i(rho) = d_i (1/n_d + sum_j V_ij^2 / (s_j + rho)),    n_d = sum d.

For many values rho_r, these are matrix products with the matrix 1 / (s_j + rho_r). The singular values of this Cauchy matrix
decay exponentially, because it is smooth in both indices. A few dozen singular vectors therefore represent it to 12 digits, and
V is multiplied by these instead of one column for each value of rho.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torchlssvm.functional.band_matrix import reduce_to_band

LARGE_FEATURES = 1024
"""Features from which an eigendecomposition of all of G is avoided where possible. Below, it takes a fifth of a second."""

SCORED_ROWS = 256
"""Number of rows whose scores for all values of rho are in memory at a time, small enough to fit into the cache."""


class Spectrum(NamedTuple):
    """s (D,) ascending, Q (D, D), R (D, K), T (K,), the means mu (D,) and beta (K,), n_d (0 if not centred), n samples.

    With few samples, eigenvectors with eigenvalue zero may be missing in s, Q and R, where they contribute nothing.
    """

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

    def rounding(self, rhos: Tensor, new: bool = False) -> Tensor:
        """Estimate the relative rounding error of scores (r,), by the condition of G + rho I. rhos: (r,).

        ``new``: of samples that are not in G. The scores of others do not depend on directions outside the range of G.
        """
        eps = torch.finfo(self.s.dtype).eps
        low = self.s if new else self.s[self.s > eps * len(self.s) * self.s[-1]]
        return eps * (self.s[-1] + rhos) / (low[:1].sum() + rhos)

    def dof(self, rhos: Tensor) -> Tensor:
        """Compute the effective degrees of freedom (r,). rhos: (r,)."""
        own = (self.s + rhos[:, None]).reciprocal_() @ self.s
        return own + 1.0 if self.weight else own

    def gcv(self, rhos: Tensor) -> tuple[Tensor, Tensor]:
        """Compute generalized cross-validation (r,), the mean over all outputs, and degrees of freedom (r,). rhos: (r,).

        The computation takes three products of a (r, D) matrix with a vector, for any number of values and outputs. Let
        g = 1 / (s + rho), let q be the mean over outputs of R^2 / s, and let all sums run over the nonzero s. Then

            rss = (T - sum q) + rho^2 sum g^2 q,    n - dof = (n - rank - 1) + rho sum g.

        These forms stay accurate with as few samples as features, where the first terms are zero and nothing cancels.
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
    s, Q = eigenpairs(G, int(n))
    return rotated(s, Q, rhs, T, mu, beta, weight, n)


def eigenpairs(G: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Eigenvalues (d,) ascending and eigenvectors (D, d) of a matrix without negative eigenvalues. rank: what it should have.

    If the rank is low, products with random vectors span the range of G, so d is little more than the rank. The trace shows
    whether this has worked.
    """
    d = rank + 8  # 8: more vectors than needed, so that none is too small in a direction of the range
    if len(G) >= LARGE_FEATURES and 2 * d < len(G):
        probes = torch.randn(len(G), d, dtype=G.dtype, generator=torch.Generator().manual_seed(0))
        Q = torch.linalg.qr(G @ probes.to(G.device)).Q
        B, total = Q.mT @ G @ Q, G.trace()
        # 1e-12: with 10,000 features 1e-8 of the mean eigenvalue, a hundredth of the smallest rho that is tried
        if bool(total - B.trace() <= 1e-12 * total):
            s, U = torch.linalg.eigh(B)
            return s, Q @ U
    s, Q = torch.linalg.eigh(G)
    return s, Q


def gcv_by_band(
    G: Tensor, rhs: Tensor, T: Tensor, weight: float, n: float, rhos: Tensor
) -> tuple[Tensor, Tensor] | None:
    """GCV and degrees of freedom (r,) as :meth:`Spectrum.gcv` returns them, in 4/3 D^3 operations without eigenvalues.

    There must be more samples than features. Returns None if digits would be lost, because rho is tiny, because the features
    explain the targets almost completely, or because hardly any degrees of freedom are left. G and rhs are overwritten.
    """
    D = len(G)
    if bool(rhos.amin() < 1e-9 * G.diagonal().mean()):
        return None
    band = reduce_to_band(G, rhs)
    trace, W = band.solve(rhos)  # W: (r, D, K)
    fit, size = (W * torch.cat(band.targets)).sum(1).mean(1), W.square().sum(1).mean(1)
    rss, left = T.mean() - fit - rhos * size, n - D - bool(weight) + rhos * trace
    if bool(rss.amin() < 1e-6 * T.mean()) or bool(left.amin() < 0.01 * n):
        return None
    return n * rss / left.square(), n - left


def rotated(
    s: Tensor, Q: Tensor, rhs: Tensor, T: Tensor, mu: Tensor, beta: Tensor, weight: float, n: float
) -> Spectrum:
    """Return the spectrum if G = Q diag(s) Q^T is known. The arguments are those of :func:`spectrum`."""
    return Spectrum(s.clamp(min=0.0), Q, Q.mT @ rhs, T, mu, beta, weight, n)


class ReciprocalFactors(NamedTuple):
    """The matrix 1 / (s_j + rho_r) (D, r) as a product left (D, q) @ right (q, r). q is the numerical rank, or r."""

    left: Tensor
    right: Tensor


def cauchy(s: Tensor, rhos: Tensor) -> ReciprocalFactors:
    """Factor 1 / (s_j + rho_r), with an error of rounding relative to each row's largest entry. s: (D,); rhos: (r,)."""
    row = s + rhos.amin()
    scaled = row[:, None] / (s[:, None] + rhos)  # in (0, 1]
    U, sigma, Vt = torch.linalg.svd(scaled, full_matrices=False)
    # 1e-12: singular values below this share of the largest are dropped
    keep = int((sigma > 1e-12 * sigma[:1]).sum())
    if keep >= len(rhos):
        eye = torch.eye(len(rhos), dtype=s.dtype, device=s.device)
        return ReciprocalFactors(1.0 / (s[:, None] + rhos), eye)
    return ReciprocalFactors(U[:, :keep] / row[:, None], sigma[:keep, None] * Vt[:keep])


class ProjectedResiduals(NamedTuple):
    """Maps V (B, d) to the residuals for all values of rho: V @ narrow and y - beta, side by side, times right.

    V has no columns for the first ``null`` eigenvectors, because every sample is orthogonal to them.
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
    """Prepare the computation of residuals for many values of rho. rhos: (r,)."""
    # The squares of V_ij over all samples i sum to s_j. If s_j is far below every rho (a constant feature), drop column j.
    s, null = spectrum.s, int((spectrum.s[:-1] <= 1e-14 * rhos.amin()).sum())
    values = cauchy(s[null:], rhos)
    narrow = (spectrum.R[null:, :, None] * values.left[:, None, :]).reshape(len(s) - null, -1)
    right = torch.cat([-values.right, torch.ones_like(values.right[:1])])
    return ProjectedResiduals(narrow, values.left, right, spectrum.beta, null)


def path_residuals(
    spectrum: Spectrum, projected: ProjectedResiduals, v: Tensor, y: Tensor, d: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield residuals (b, K, r) of the full model and 1 - h (b, r), whose quotient is the leave-one-out residual.

    v: (B, D), overwritten; y: (B, K) targets; d: (B,) weights in the system. Each item covers a slice of the rows.
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
