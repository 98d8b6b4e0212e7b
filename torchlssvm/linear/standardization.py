"""Standardised features, derived from the statistics: z = (x - mean) / deviation of the current samples.

Mean and deviation are taken over all samples, without class weights and with n in the denominator. They are computed from the
sums at each solve, so after a removal they are exactly those of the remaining samples. A constant column keeps the scale 1. In
integers, with c the rounded mean and s = m - n c,

    n var = sum (q - c)^2 - s^2 / n,    sum (q - c)^2 = sum q^2 - c (m + s),

where the first term is exact and at least twice the second. So the variance is 0 for a constant column and for no other column.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from torchlssvm.functional.system import Centre
from torchlssvm.statistics import Statistics


class Standardization(NamedTuple):
    """Mean and deviation (J,) of the current samples, in steps of the grid, the size of a step, and sums of q^2 (J,)."""

    centre: Centre
    deviation: Tensor
    resolution: float
    squares: Tensor

    def rows(self, q: Tensor) -> Tensor:
        """Rows z (B, J). q: (B, J) float64, in steps."""
        return (q - self.centre.c - self.centre.rest / self.centre.n) / self.deviation

    def weights(self, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Weights w (J, K) and b (K,) for the original features, from the weights for standardised features."""
        w = w / (self.deviation * self.resolution)[:, None]
        return w, b - (self.centre.mean * self.resolution) @ w

    def exact_squares(self) -> list[Fraction]:
        """Squares of the deviations (J,) as fractions."""
        n, unit = int(self.centre.n), Fraction(1) / Fraction(self.resolution) ** 2
        spreads = [n * s - m * m for s, m in zip(self.squares.tolist(), self.exact_sums(), strict=True)]
        return [Fraction(v, n * n) if v else unit for v in spreads]

    def exact_sums(self) -> list[int]:
        """Sums of q (J,)."""
        n = int(self.centre.n)
        return [n * c + int(r) for c, r in zip(self.centre.c.tolist(), self.centre.rest.tolist(), strict=True)]


def standardization(stats: Statistics) -> Standardization | None:
    """Standardization of the current samples; None without samples, or if ``scale`` does not ask for it."""
    if stats.scale is None or stats.empty:
        return None
    V, moments = stats.class_sums()
    m, n = (V[0], moments[0, 0]) if moments.ndim == 2 else (V.sum(0), moments.sum())
    centre, squares = Centre.of(m, n), stats.diagonal()[stats.groups_of(None)].sum(0)
    about = (squares - centre.c * (m + (m - n * centre.c))).to(torch.float64)
    spread = about - centre.rest.square() / centre.n  # n var
    floor = torch.zeros_like(spread)
    if not stats.exact:  # sums of float64: what rounding makes of a constant column
        eps = torch.finfo(torch.float64).eps
        floor = squares * (16 * eps * max(1.0, float(stats.n)) ** 0.5)
    resolution = stats.grid.resolution if stats.grid else 1.0
    deviation = torch.where(spread > floor, (spread / centre.n).clamp(min=0.0).sqrt(), 1.0 / resolution)
    return Standardization(centre, deviation, resolution, squares)
