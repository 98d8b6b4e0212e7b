"""``rule="lda"``: the linear discriminant of a head's samples, from the statistics that the head keeps anyway.

Within-class scatter and class means are in the sums, so adding, removing, merging and the digest stay as they are; only the
solve differs. See :mod:`torchlssvm.functional.discriminant`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchlssvm.functional import discriminant
from torchlssvm.functional.discriminant import WithinClass
from torchlssvm.linear import normal_equations as normal
from torchlssvm.linear.standardization import Standardization
from torchlssvm.statistics import Statistics

RULES = ("least_squares", "lda", "auto")

COLUMNS_PER_CLASS = 100
"""Features per class up to which ``rule="auto"`` takes the discriminant. Measured with rho by GCV, accuracy of the discriminant
minus that of least squares in points: Banking77 (5 features per class) +2.2, digits (6) +1.3, CIFAR-100 (13) +1.0, MNIST
pixels (78) +1.6, CIFAR-10 (128) -0.2."""


def resolve_rule(rule: str, stats: Statistics) -> str:
    """The rule in use: ``"auto"`` is ``"lda"`` for labels of three or more classes and at most 100 features per class."""
    if rule != "auto":
        return rule
    K, J = stats.num_classes, stats.in_features
    few = K >= 3 and J <= COLUMNS_PER_CLASS * K
    return "lda" if few and stats.kind != "values" else "least_squares"


class ClassMeans(NamedTuple):
    """Class means and the diagonal of the within-class scatter, in real units or, where asked for, standardised.

    Attributes:
        M: class means minus the mean of all (K, J).
        m: the mean of all (J,).
        counts: samples by class times their class weight (K,).
        diagonal: of S_w (J,).
    """

    M: Tensor
    m: Tensor
    counts: Tensor
    diagonal: Tensor


def class_means(stats: Statistics, weights: Tensor | None) -> ClassMeans:
    """Class means of the samples held, in real units. weights: (K,) by class, for statistics per class.

    All sums are taken about the integer c nearest to the mean, so that nothing cancels.
    """
    V, n = stats.class_sums()  # (K, J), (K,), in steps
    c = (V.sum(0).to(torch.float64) / n.sum().to(torch.float64)).round().to(V.dtype)
    s = (V - n[:, None] * c).to(torch.float64)  # sums of q - c by class
    per_class = weights if weights is not None else torch.ones_like(n, dtype=torch.float64)
    count = n.to(torch.float64)
    held = count > (0.0 if stats.exact else 1e-9 * float(count.sum()))  # float sums of an emptied class may not be zero
    counts = torch.where(held, per_class * count, torch.zeros_like(count))
    offset = torch.where(
        held[:, None], s / torch.where(held, count, torch.ones_like(count))[:, None], torch.zeros_like(s)
    )
    mean = counts @ offset / counts.sum()
    if weights is None:
        squares = (stats.diagonal().sum(0) - c * (2 * V.sum(0) - n.sum() * c)).to(torch.float64)
    else:
        by_class = stats.diagonal().view(-1, len(n), V.shape[1]).sum(0)  # folds are added up
        squares = weights @ (by_class - c * (2 * V - n[:, None] * c)).to(torch.float64)
    diagonal = squares - (counts[:, None] * offset.square()).sum(0)
    unit = stats.grid.resolution if stats.grid else 1.0
    return ClassMeans((offset - mean) * unit, (c + mean) * unit, counts, diagonal.clamp(min=0.0) * unit**2)


def discriminant_weights(
    stats: Statistics, rho: float, weights: Tensor | None, standard: Standardization | None, W: Tensor
) -> tuple[Tensor, Tensor]:
    """w (J, K) and b (K,) of the discriminant, from the weights W (J, K) of least squares for features as they come."""
    means = class_means(stats, weights)
    diagonal = means.diagonal
    if standard is not None:
        diagonal = diagonal / (standard.deviation * standard.resolution).square()
    return discriminant.discriminant(W, means.M, means.m, means.counts, diagonal.sum(), rho)


def within_class(
    stats: Statistics, units: normal.Units, weights: Tensor | None, standard: Standardization | None
) -> tuple[WithinClass, Tensor]:
    """The system from which samples are left out, and the mean (J,) on which its rows are centred."""
    moments = normal.moments(stats, units, "free", weights, standard=standard)
    means = class_means(stats, weights)
    M = means.M if standard is None else means.M / (standard.deviation * standard.resolution)
    S = moments.G - (M.mT * means.counts) @ M
    return discriminant.within_class(S, M, means.counts, units.rho), moments.mu
