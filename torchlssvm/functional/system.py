"""From integer statistics to the normal equations, and their solution.

Everything is in grid units: features are the integers q, so with resolution r the matrix is A / r^2 = M + (rho / r^2) I and
the weights are w r. Nothing is multiplied through, and powers of two change no bit.

Free intercept: the system is that of features centred on their mean m / n. M - m m^T / n in floating point loses as many
digits as the mean is large against the spread (4.6e-8 seen), so the features are first shifted by the integer
c = round(m / n), in integers:

    M' = M - c m^T - m c^T + n c c^T = M - c m^T - s c^T,   s = m - n c,

exactly, and only the small rest M' - s s^T / n is left to floating point.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchlssvm.functional.gram import strip_views

PAD_EVERY = 64
PAD = 8
"""Factorizations of sizes that are multiples of 64 suffer from cache aliasing; eight unit rows cure it (1.3x faster)."""


class Sums(NamedTuple):
    """The statistics of one weighted group of samples: weight, packed M, m (J,), n; integers (or float64, no grid)."""

    weight: float | None
    packed: Tensor
    m: Tensor
    n: Tensor


class Factor(NamedTuple):
    """The Cholesky factor L of the system, padded to n x n with unit rows, row-major. info is zero on success."""

    L: Tensor
    J: int
    info: Tensor

    def solve(self, B: Tensor) -> Tensor:
        """A^-1 B. B: (J, m)."""
        padded = torch.nn.functional.pad(B, (0, 0, 0, self.L.shape[0] - self.J)) if self.L.shape[0] > self.J else B
        half = torch.linalg.solve_triangular(self.L, padded, upper=False)
        return torch.linalg.solve_triangular(self.L.mT, half, upper=True)[: self.J]

    def inverse(self) -> Tensor:
        """A^-1 (J, J)."""
        full = torch.cholesky_inverse(self.L)
        return full[: self.J, : self.J].contiguous() if self.L.shape[0] > self.J else full


def factor_(work: Tensor, J: int) -> Factor:
    """Cholesky of the padded system in ``work`` (n, n), lower triangle filled. ``work`` is not changed."""
    # work.mT is column-major with its upper triangle filled: LAPACK takes it as it is, and the factor comes back row-major.
    U, info = torch.linalg.cholesky_ex(work.mT, upper=True)
    return Factor(U.mT, J, info)


def workspace(J: int, like: Tensor) -> Tensor:
    """A zero (n, n) float64 matrix for a system of J unknowns, unit rows in the padding."""
    n = J + PAD if J >= PAD_EVERY and J % PAD_EVERY == 0 else J
    work = torch.zeros(n, n, dtype=torch.float64, device=like.device)
    work.diagonal()[J:].fill_(1.0)
    return work


class Centre(NamedTuple):
    """The mean of the features, as the integers c (J,) plus rest / n, and the total weight n."""

    c: Tensor
    rest: Tensor
    n: Tensor

    @property
    def mean(self) -> Tensor:
        """c + rest / n, float64 (J,)."""
        return self.c.to(torch.float64) + self.rest / self.n


def fill_system(work: Tensor, groups: list[Sums], J: int, ridge: float, centred: bool) -> Centre | None:
    """Write the lower triangle of sum_g weight_g M_g (centred if asked) + ridge I into work[:J, :J]; return the mean.

    work: (n, n) float64; ridge: in grid units.
    """
    weights = [1.0 if g.weight is None else g.weight for g in groups]
    n = torch.stack([w * g.n.to(torch.float64) for w, g in zip(weights, groups, strict=True)]).sum()
    c, rest = None, None
    if centred:
        total = torch.stack([w * g.m.to(torch.float64) for w, g in zip(weights, groups, strict=True)]).sum(0)
        c = (total / n).round().to(groups[0].m.dtype)  # any nearby integers would do, if the same for all groups
        # s = sum of weight * (m - n c): small, exact in integers for each group
        rest = torch.stack([w * (g.m - g.n * c).to(torch.float64) for w, g in zip(weights, groups, strict=True)]).sum(0)
    for i, (weight, group) in enumerate(zip(weights, groups, strict=True)):
        for a, b, strip in strip_views(group.packed, J):
            if c is not None:
                s = group.m - group.n * c
                strip = torch.addcmul(strip, c[a:b, None], group.m[None, :b], value=-1)
                strip.addcmul_(s[a:b, None], c[None, :b], value=-1)
            target = work[a:b, :b]
            if i == 0 and weight == 1.0:
                target.copy_(strip)
            elif i == 0:
                target.copy_(strip).mul_(weight)
            else:
                target.add_(strip.to(torch.float64), alpha=weight)
    if rest is not None:
        for a, b, _ in strip_views(groups[0].packed, J):
            work[a:b, :b].addcmul_((rest[a:b] / n)[:, None], rest[None, :b], value=-1)
    work.diagonal()[:J].add_(ridge)
    return None if c is None or rest is None else Centre(c, rest, n)


def clamped_factor(work: Tensor, J: int, floor: Tensor) -> tuple[Factor, Tensor]:
    """A factor of the system with its eigenvalues raised to ``floor``; also the smallest eigenvalue before.

    Positive semidefinite statistics give eigenvalues >= floor in exact arithmetic, so this undoes rounding, no more.
    """
    A = work[:J, :J].tril() + work[:J, :J].tril(-1).mT
    values, vectors = torch.linalg.eigh(A)
    root = vectors * values.clamp(min=floor).sqrt()
    _, R = torch.linalg.qr(root.mT)  # root root^T = R^T R
    L = (R * R.diagonal().sign()[:, None]).mT.contiguous()
    return Factor(L, J, torch.zeros((), dtype=torch.int32, device=work.device)), values[0]
