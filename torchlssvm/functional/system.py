"""The normal equations of a head, computed from integer statistics, and their solution.

The statistics of n samples are M = sum q q^T and m = sum q, where the features q are integers on a grid of resolution r. These
sums are never rescaled. Instead, the system is solved in grid units: its matrix is A / r^2 = M + (rho / r^2) I, and its
solution is w r. If r is a power of two, converting the solution to w changes no bit.

With a free intercept, the features are centred on their mean m / n. Computing M - m m^T / n in floating point loses more digits
the larger the mean is relative to the spread (errors of 4.6e-8 were seen). The features are therefore first shifted, in integer
arithmetic, by c = round(m / n):

    M' = M - c m^T - m c^T + n c c^T = M - c m^T - s c^T,   s = m - n c.

This shift is exact. Floating point computes only M' - s s^T / n, where s s^T / n is small.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchlssvm.functional.gram import strip_views, strips

PAD_EVERY, PAD_ROWS = 64, 8
"""Cache aliasing slows down factorizations whose size is a multiple of 64. Eight extra unit rows avoid it (1.3x faster)."""


class GroupSums(NamedTuple):
    """The statistics of one weighted group of samples: weight, packed M, m (J,) and n, as integers (float64 without a grid)."""

    weight: float | None
    packed: Tensor
    m: Tensor
    n: Tensor


class Factor(NamedTuple):
    """The Cholesky factor L of the system, padded to n x n with unit rows, row-major. info is zero on success."""

    L: Tensor
    J: int
    info: Tensor

    @property
    def padded(self) -> bool:
        """True if unit rows follow the rows of the system in L."""
        return self.L.shape[0] > self.J

    def solve(self, rows: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        """scale A^-1 scale v for each of the rows v. rows: (B, J); scale: scalar or (J,)."""
        padded = rows.new_empty(rows.shape[0], self.L.shape[0])
        torch.mul(rows, scale, out=padded[:, : self.J])
        padded[:, self.J :].zero_()
        X = padded.mT  # column-major, solved in place
        torch.linalg.solve_triangular(self.L, X, upper=False, out=X)
        torch.linalg.solve_triangular(self.L.mT, X, upper=True, out=X)
        return padded[:, : self.J] * scale

    def inverse(self) -> Tensor:
        """The inverse A^-1 (J, J)."""
        full = torch.cholesky_inverse(self.L)
        return full[: self.J, : self.J].contiguous() if self.L.shape[0] > self.J else full


def factor_(work: Tensor, J: int) -> Factor:
    """Factor the padded system in ``work`` (n, n), lower triangle filled, by Cholesky in place: ``work`` becomes the factor."""
    # work.mT is column-major with its upper triangle filled. LAPACK accepts it without a copy and returns a row-major factor.
    info = torch.empty((), dtype=torch.int32, device=work.device)
    torch.linalg.cholesky_ex(work.mT, upper=True, out=(work.mT, info))
    return Factor(work, J, info)


def workspace(J: int, device: torch.device) -> Tensor:
    """An (n, n) float64 matrix for a system of J unknowns, to be filled by :func:`fill_system`."""
    n = J + PAD_ROWS if J >= PAD_EVERY and J % PAD_EVERY == 0 else J
    return torch.empty(n, n, dtype=torch.float64, device=device)


class Centre(NamedTuple):
    """The mean of the features, as the integers c (J,) plus rest / n, and the total weight n."""

    c: Tensor
    rest: Tensor
    n: Tensor

    @classmethod
    def of(cls, m: Tensor, n: Tensor) -> Centre:
        """The centre of samples with the sum m (J,) and the number n, integers on a grid: exact."""
        weight = n.to(torch.float64)
        c = (m.to(torch.float64) / weight).round().to(m.dtype)
        return cls(c, (m - n * c).to(torch.float64), weight)

    @property
    def mean(self) -> Tensor:
        """c + rest / n, float64 (J,)."""
        return self.c.to(torch.float64) + self.rest / self.n


def fill_system(
    work: Tensor, groups: list[GroupSums], J: int, ridge: float, intercept: str, rho: float, about: Centre | None = None
) -> Centre | None:
    """Write the lower triangle of sum_g weight_g M_g + ridge I into work[:J, :J], and return the mean if it is centred there.

    With a free intercept, the matrix is centred. A penalized intercept is a constant feature in row J, whose ridge is rho.
    work: (n, n) float64; ridge: in grid units; about: a mean c + r to centre on instead of the mean of the groups. With
    s = sum weight (m - n c), the centred matrix is M' - r s^T - (s - n r) r^T.
    """
    weights = [1.0 if g.weight is None else g.weight for g in groups]
    n = torch.stack([w * g.n.to(torch.float64) for w, g in zip(weights, groups, strict=True)]).sum()
    total = torch.stack([w * g.m.to(torch.float64) for w, g in zip(weights, groups, strict=True)]).sum(0)
    c, rest = None, None
    if intercept == "free" or about is not None:
        # any nearby integers would do, if they are the same for all groups
        c = (total / n).round().to(groups[0].m.dtype) if about is None else about.c
        # s = sum of weight * (m - n c): small, exact in integers for each group
        rest = torch.stack([w * (g.m - g.n * c).to(torch.float64) for w, g in zip(weights, groups, strict=True)]).sum(0)
    scratch = groups[0].packed.new_empty(max((b - a) * b for a, b, _ in strips(J)))
    for i, (weight, group) in enumerate(zip(weights, groups, strict=True)):
        if c is not None:
            s = group.m - group.n * c
        for a, b, strip in strip_views(group.packed, J):
            target = work[a:b, :b]
            if c is not None:
                part = scratch[: (b - a) * b].view(b - a, b)
                part.copy_(strip).addcmul_(c[a:b, None], group.m[None, :b], value=-1)
                strip = part.addcmul_(s[a:b, None], c[None, :b], value=-1)
            if i == 0:
                target.copy_(strip)
                if weight != 1.0:
                    target.mul_(weight)
            else:
                target.add_(strip.to(torch.float64), alpha=weight)
    if rest is not None:
        r = rest / n if about is None else about.rest / about.n
        for a, b, _ in strips(J, product=True):
            work[a:b, :b].addcmul_(r[a:b, None], rest[None, :b], value=-1)
            if about is not None:
                work[a:b, :b].addcmul_((rest - n * r)[a:b, None], r[None, :b], value=-1)
    work.diagonal()[:J].add_(ridge)
    if work.shape[0] > J:
        work[J:].zero_()
        work.diagonal()[J:].fill_(1.0)
    if intercept == "penalized":
        work[J, :J] = total if rest is None else rest - n * r
        work[J, J] = n + rho
    return about if c is None or rest is None or about is not None else Centre(c, rest, n)


def clamped_factor(work: Tensor, J: int, floor: Tensor) -> tuple[Factor, Tensor]:
    """Factor the system after raising its eigenvalues to at least ``floor``, and return its smallest eigenvalue as well.

    In exact arithmetic, the eigenvalues of positive semidefinite statistics are at least floor, so only rounding is corrected.
    """
    A = work[:J, :J].tril() + work[:J, :J].tril(-1).mT
    values, vectors = torch.linalg.eigh(A)
    root = vectors * values.clamp(min=floor).sqrt()
    _, R = torch.linalg.qr(root.mT)  # root root^T = R^T R
    L = (R * R.diagonal().sign()[:, None]).mT.contiguous()
    return Factor(L, J, torch.zeros((), dtype=torch.int32, device=work.device)), values[0]
