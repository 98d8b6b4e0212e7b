"""The four usual kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from torchlssvm.functional import checks
from torchlssvm.kernels.base import Kernel

FAR_SQUARES = 8.0
"""Limit of gamma |x - centre|^2. Beyond it, distances from a product of rows are not accurate enough for a Gaussian."""
NEGLIGIBLE_SQUARE = 45.0
"""gamma |x - z|^2 beyond which a Gaussian is below 1e-19."""
PAIRS_PER_BLOCK = 2**15
"""Pairs of rows whose differences are computed at a time."""


class Linear(Kernel):
    """k(x, z) = x . z."""

    def floats(self, J: int) -> int:
        """One product for each pair."""
        return 1

    def gram(self, x1: Tensor, x2: Tensor) -> Tensor:
        """The products x1 x2^T (n1, n2)."""
        return x1 @ x2.mT

    def diag(self, x: Tensor) -> Tensor:
        """Squared norms |x_i|^2 (n,)."""
        return x.square().sum(1)


class RBF(Kernel):
    """The Gaussian kernel k(x, z) = exp(-|x - z|^2 / (2 sigma^2)) = exp(-gamma |x - z|^2). Pass either sigma or gamma.

    The squared distance is computed as |x|^2 + |z|^2 - 2 x . z, after a centre has been subtracted from both rows. The centre
    is the mean of those rows z that are no further than average from the mean of all z, so that neither an offset that all
    rows share nor a single row far from the others costs accuracy. If two rows are far from the centre but near each other,
    their distance is computed from their difference instead, except in an exported or compiled program.
    """

    options = ("gamma",)

    def __init__(self, sigma: float | None = None, *, gamma: float | None = None):
        super().__init__()
        if (sigma is None) == (gamma is None):
            raise ValueError(f"give either sigma or gamma, got sigma={sigma!r}, gamma={gamma!r}")
        self.gamma = checks.positive(gamma, "gamma") if sigma is None else 0.5 / checks.positive(sigma, "sigma") ** 2

    @property
    def sigma(self) -> float:
        """The width sigma, where gamma = 1 / (2 sigma^2)."""
        return float((0.5 / self.gamma) ** 0.5)

    def gram(self, x1: Tensor, x2: Tensor) -> Tensor:
        """exp(-gamma |x1_i - x2_j|^2)."""
        return torch.exp(-self.gamma * square_distances(x1, x2, self.gamma))

    def diag(self, x: Tensor) -> Tensor:
        """Ones (n,): k(x, x) = 1."""
        return x.new_ones(len(x))


class Laplacian(Kernel):
    """The Laplacian kernel k(x, z) = exp(-gamma |x - z|_1) = exp(-|x - z|_1 / sigma). Pass either gamma or sigma."""

    options = ("gamma",)

    def __init__(self, sigma: float | None = None, *, gamma: float | None = None):
        super().__init__()
        if (sigma is None) == (gamma is None):
            raise ValueError(f"give either sigma or gamma, got sigma={sigma!r}, gamma={gamma!r}")
        self.gamma = checks.positive(gamma, "gamma") if sigma is None else 1.0 / checks.positive(sigma, "sigma")

    def floats(self, J: int) -> int:
        """Each pair's difference, and its absolute value, are written out."""
        return 2 * J + 2

    def gram(self, x1: Tensor, x2: Tensor) -> Tensor:
        """exp(-gamma sum_j |x1_ij - x2_kj|)."""
        return torch.exp(-self.gamma * (x1[:, None, :] - x2[None, :, :]).abs().sum(-1))

    def diag(self, x: Tensor) -> Tensor:
        """Ones (n,): k(x, x) = 1."""
        return x.new_ones(len(x))


class Polynomial(Kernel):
    """k(x, z) = (gamma x . z + coef0)^degree, with a whole degree >= 1 and coef0 >= 0."""

    options = ("degree", "gamma", "coef0")

    def __init__(self, degree: int = 3, *, gamma: float = 1.0, coef0: float = 1.0):
        super().__init__()
        if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
            raise ValueError(f"degree must be a whole number >= 1, got {degree!r}")
        if isinstance(coef0, bool) or not isinstance(coef0, int | float) or not 0 <= coef0 < float("inf"):
            raise ValueError(f"coef0 must be a finite number >= 0, got {coef0!r}: the kernel is indefinite below")
        self.degree, self.gamma, self.coef0 = degree, checks.positive(gamma, "gamma"), float(coef0)

    def gram(self, x1: Tensor, x2: Tensor) -> Tensor:
        """(gamma x1 x2^T + coef0)^degree."""
        return (self.gamma * (x1 @ x2.mT) + self.coef0) ** self.degree


def square_distances(x1: Tensor, x2: Tensor, gamma: float | None = None) -> Tensor:
    """Compute |x1_i - x2_j|^2 >= 0 (n1, n2) by one matrix product. x1: (n1, J), x2: (n2, J).

    Pass gamma if the distances are for a Gaussian. Distances for which the product is too inaccurate are then computed from
    differences, so that the Gaussian is accurate to about 1e-15.
    """
    distance = (x2 - x2.mean(0)).abs().sum(1)
    near = (distance <= 1.000001 * distance.mean()).to(x2.dtype)  # the mean of equal numbers may be rounded below them
    centre = (near @ x2) / near.sum()
    p, q = x1 - centre, x2 - centre
    own, other = p.square().sum(1)[:, None], q.square().sum(1)[None, :]
    squares = (torch.addmm(other, p, q.mT, alpha=-2.0) + own).clamp(min=0.0)
    traced = torch.compiler.is_compiling() or checks.is_fake(squares) or is_functorch_wrapped_tensor(squares)
    if gamma is None or traced or squares.numel() == 0:
        return squares
    least = FAR_SQUARES / gamma
    far = own > least, other > least
    if not bool(far[0].any() & far[1].any()):  # of two that are near each other both are far
        return squares
    i, j = ((far[0] & far[1]) & (squares < NEGLIGIBLE_SQUARE / gamma + 1e-9 * own)).nonzero(as_tuple=True)
    for part in range(0, len(i), PAIRS_PER_BLOCK):
        some = i[part : part + PAIRS_PER_BLOCK], j[part : part + PAIRS_PER_BLOCK]
        squares = squares.index_put(some, (x1[some[0]] - x2[some[1]]).square().sum(1))
    return squares
