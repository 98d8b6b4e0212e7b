r"""The change of a squared-hinge solution when a sample is removed, by small systems on a moving active set.

The solution of one class is ridge regression on its active set, the samples with a margin m below 1. Let A be the matrix of
that regression, f its scores, and u the whitened rows of :mod:`torchlssvm.functional.whitened`. Their dot products are
g(z, i) = u_z . u_i. If the samples i in a set I change their weights by delta_i, and Delta = diag(delta), the scores become

    f'(z) = f(z) + G_zI T,       T = (I + Delta G_II)^-1 Delta (y_I - f_I).

The set I contains all samples whose weight changes: the removed sample of weight c (by -c), the samples that leave the active
set (-c) and those that join it (+c). Each round of Newton's method solves for T, finds the samples that are now on the wrong
side of their margin, and updates I. All removals use the same inverse of A, so a round solves only a system of the size of I.

Samples far from their margin need no check. By the Cauchy-Schwarz inequality, the score of a sample z moves by at most
sqrt(g(z, z)) times the *size* of the step, sqrt(T^T G_II T). A sample can therefore change sides only if its *reach*, |1 -
m_z| / sqrt(g(z, z)), is below this size. For this reason, the rounds look only at *near* samples, those with the least reach,
and check the other samples only if the size exceeds their least reach.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LEAST_FREE_SHARE = torch.finfo(torch.float64).eps ** 0.5
"""Least share 1 - c g of an active sample's score that the other samples determine. With less, half of the digits are lost."""

LEAST_ACTIVE_PIVOT = 1e-4
"""Least share of the system on an active set that an update may leave. The rest has the rounding errors of the whole system, so
four digits are lost at this share. With less, the system is solved from sums instead."""


class NearSamples(NamedTuple):
    """Samples of one class that may change sides.

    Attributes:
        U: (c, D) whitened rows.
        G: (c, c) their products.
        f, y: (c,) scores, and -1 or +1.
        weight: (c,) class weight times copies.
        active: (c,) bool.
        reach: the least reach of all samples that are not among these.
    """

    U: Tensor
    G: Tensor
    f: Tensor
    y: Tensor
    weight: Tensor
    active: Tensor
    reach: float


class Removals(NamedTuple):
    """Active samples, each of which is removed alone.

    Attributes:
        U: (B, D) whitened rows.
        f, y, weight: (B,) as for :class:`NearSamples`; the weight is the weight that is removed.
        place: (B,) index of each sample among the near samples, or -1.
        left: (B,) the weight of each sample that remains (of its other copies).
    """

    U: Tensor
    f: Tensor
    y: Tensor
    weight: Tensor
    place: Tensor
    left: Tensor


class RemovalSteps(NamedTuple):
    """Steps p (B, D) in whitened coordinates, f'(z) = f(z) + u_z . p.

    Only samples with a reach up to ``size`` (B,) can change sides. ``found`` (B,) is False if the active set did not converge.
    """

    p: Tensor
    size: Tensor
    found: Tensor


def removal_steps(near: NearSamples, gone: Removals) -> RemovalSteps:
    """Steps of removals after which all near samples are on their sides."""
    g = gone.U.square().sum(1)
    pivot = 1.0 - gone.weight * g
    T = -gone.weight * (gone.y - gone.f) / pivot
    G = gone.U @ near.U.mT  # (B, c)
    margins = torch.addcmul(near.f, G, T[:, None]).mul_(near.y)
    turned = ((margins < 1.0) != near.active) | _undecided(margins)
    mine = torch.nonzero((gone.place >= 0) & (gone.left <= 0))[:, 0]
    turned[mine, gone.place[mine]] = False
    found = (pivot > LEAST_ACTIVE_PIVOT) & ~turned.any(1)
    p, size = T[:, None] * gone.U, T.abs() * g.sqrt()
    for i in torch.nonzero(~found)[:, 0].tolist():
        step = _moved(near, Removals(*(part[i] for part in gone)), G[i])
        if step is not None:
            (p[i], size[i]), found[i] = step, True
    # 1e-9: covers the rounding of the size, relative 1e-15 for each of up to 1e6 terms
    return RemovalSteps(p, size * (1.0 + 1e-9), found)


def _moved(near: NearSamples, gone: Removals, side: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the step (D,) and size of one removal, or None if the active set does not converge. side: (c,) products."""
    weight = near.weight
    if gone.place >= 0:
        weight = weight.clone()
        weight[gone.place] = gone.left
    flipped = torch.zeros_like(near.active)
    # 12: Newton rounds for one removal; two or three are usual, and one that needs more is left to a solver with a line search
    for _ in range(12):
        S = torch.nonzero(flipped)[:, 0]
        rows, border, own = near.G[S], side[S], (gone.U @ gone.U)[None]
        G = torch.cat([torch.cat([own, border])[None], torch.cat([border[:, None], rows[:, S]], 1)])
        delta = torch.cat([-gone.weight[None], torch.where(near.active[S], -weight[S], weight[S])])
        miss = torch.cat([(gone.y - gone.f)[None], near.y[S] - near.f[S]])
        T = _solve(G, delta, delta * miss)
        if T is None:
            return None
        margins = near.y * (near.f + T[0] * side + T[1:] @ rows)
        turned = ((margins < 1.0) != near.active) & (weight > 0)
        if torch.equal(turned, flipped):
            if bool((_undecided(margins) & (weight > 0)).any()):
                return None
            return T[0] * gone.U + T[1:] @ near.U[S], (T @ (G @ T)).clamp(min=0.0).sqrt()
        flipped = turned
    return None


def _undecided(margins: Tensor) -> Tensor:
    """Tell which margins are within 1e-11 of 1, where float64 cannot decide the side. Such removals need a line search."""
    return (margins - 1.0).abs() <= 1e-11


def _solve(G: Tensor, delta: Tensor, right: Tensor) -> Tensor | None:
    """Return (I + Delta G)^-1 right; None if too much cancels."""
    system = delta[:, None] * G
    system.diagonal().add_(1.0)
    LU, pivots, _ = torch.linalg.lu_factor_ex(system)
    diagonal = LU.diagonal().abs()
    if bool((delta * G.diagonal() > 1.0 / LEAST_FREE_SHARE).any()):  # a sample that joins would determine its own score
        return None
    if not float(diagonal.amin()) > LEAST_ACTIVE_PIVOT:
        return None
    out: Tensor = torch.linalg.lu_solve(LU, pivots, right[:, None])[:, 0]
    return out
