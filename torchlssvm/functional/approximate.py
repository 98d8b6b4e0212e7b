r"""Approximate removal: the error of the weights when the removed samples are known only roughly.

An exact removal needs the samples x_i that were added. Suppose that only noisy copies x_i + e_i are available, with targets y_i
and sample weights c_i, and that these copies are removed instead. Let A' be the matrix of the normal equations after the exact
removal, and W' the weights that solve them. A~ and W~ denote the matrix and the weights after the approximate removal, and f~
the scores of W~. The residuals of the copies are r_i = y_i - f~(x_i + e_i). With a free intercept, mu' and mu~ are the feature
means after the two removals; otherwise both are 0. Subtracting the two systems of normal equations gives the identity

    A' (W' - W~) = sum_i c_i ( e_i r_i^T - (x_i - mu') (e_i^T W~) )

**Bound.** If |e_i| <= delta for all i, the error is at most

    |W' - W~| <= delta / lambda(A') * sum_i c_i ( |r_i| + (|x_i + e_i - mu~| + delta + s) |W~| ),    s = delta sum_i c_i / n'

Here n' is the total weight of the remaining samples, and lambda(A') is the smallest eigenvalue of A'. It is at least rho, and
at least the smallest eigenvalue of A~ minus sum_i c_i (2 |x_i + e_i| + delta) delta.

**Estimate.** If the e_i are independent with standard deviation sigma in each feature, then to first order, with A~ in place
of A', the mean square error is

    sigma^2 sum_i c_i^2 ( |r_i|^2 |A^-1|_F^2 + |A^-1 (x_i - mu)|^2 |W|_F^2 - 2 tr( r_i (A^-1 (x_i - mu))^T A^-1 W ) )

Matrix norms are Frobenius norms. A penalized intercept counts as a constant feature without noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Approximation:
    """The sensitivity of a removal to errors in the removed samples.

    Attributes:
        samples: the number of samples removed.
        norm: |W~|, the norm of the weights. Divide an error by it to get a relative error.
    """

    samples: int
    norm: float
    _variance: float
    _residuals: float
    _distances: float
    _largest: float
    _weights: float
    _share: float
    _rho: float
    _smallest: float

    def estimate(self, sigma: float) -> float:
        """Return the expected (root mean square) error of W, to first order, for noise of deviation sigma in each feature."""
        return sigma * math.sqrt(max(0.0, self._variance))

    def bound(self, delta: float) -> float:
        """Return the largest possible error of W if each removed row is within Euclidean distance delta of the true row."""
        moved = delta * self._weights * (2 * self._largest + delta)
        smallest = max(self._rho, self._smallest - moved)
        reach = self._distances + self._weights * (delta + delta * self._share)
        return delta / smallest * (self._residuals + reach * self.norm)


def approximation(
    P: Tensor, rho: float, w: Tensor, b: Tensor, x: Tensor, y: Tensor, weights: Tensor,
    mean: Tensor | None, total: float | None,
) -> Approximation:  # fmt: skip
    """Compute the sensitivity of a removal from the system after the removal. The module's docstring defines the symbols.

    Args:
        P: rho times the inverse of the system, (D, D), where D is J + 1 with a penalized intercept, otherwise J.
        rho: the ridge penalty.
        w: the weights (J, K).
        b: the intercepts (K,).
        x: the removed rows (L, J).
        y: the targets of the removed rows (L, K).
        weights: the weights of the removed rows (L,).
        mean: the mean (J,) of the remaining samples if the intercept is free, otherwise None.
        total: the total weight n' of the remaining samples if the intercept is free, otherwise None.
    """
    J = w.shape[0]
    residuals = y - (x @ w + b)  # (L, K)
    if P.shape[0] > J:
        x = torch.nn.functional.pad(x, (0, 1), value=1.0)
    inverse = P / rho  # (D, D)
    centred = x if mean is None else x - mean
    reach = centred @ inverse  # (L, D): A^-1 (x_i - mu)
    r2 = (residuals * residuals).sum(1)  # (L,)
    cross = (residuals * (reach @ inverse[:, :J] @ w)).sum(1)
    square = r2 * inverse[:, :J].square().sum() + reach.square().sum(1) * w.square().sum() - 2 * cross
    norm_P = min(1.0, float(P.norm()), float(P.abs().sum(0).max()))
    return Approximation(
        samples=x.shape[0],
        norm=float(w.norm()),
        _variance=float((weights.square() * square).sum()),
        _residuals=float((weights * r2.sqrt()).sum()),
        _distances=float((weights * centred.norm(dim=1)).sum()),
        _largest=float(x.norm(dim=1).max()) if len(x) else 0.0,
        _weights=float(weights.sum()),
        _share=0.0 if total is None else float(weights.sum()) / total,
        _rho=rho,
        _smallest=rho / norm_P,
    )
