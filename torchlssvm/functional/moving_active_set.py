r"""The change of a squared-hinge solution when samples come or go: small systems on products, with the active set moving.

The solution of one class is ridge regression on its active set, with the matrix A. In the whitened coordinates of
:mod:`torchlssvm.functional.whitened`, g(z, i) = u_z . u_i, samples i in a set I that change their weights by delta move every
score to

    f'(z) = f(z) + G_zI T,       T = (I + Delta G_II)^-1 Delta (y_I - f_I).

A sample that leaves the active set changes its weight by -c, one that joins by +c: both are members of I as well, beside the
samples that are removed (-c) or added (+c). Newton's method is then: solve for I, find the samples on the wrong side, change
I. One inverse serves all changes; a round costs a system of the size of I.

Samples far from their margin need no check: by the inequality of Cauchy and Schwarz no score moves by more than
sqrt(g(z, z)) sqrt(T^T G_II T), so that with *reach* |1 - m_z| / sqrt(g(z, z)) only samples of a reach below sqrt(T^T G_II T)
can change sides. After a change that goes further than the near samples, all others have to be checked.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MARGIN_TOLERANCE = 1e-11
"""Distance of a margin from 1 within which float64 cannot tell the side: a change that ends there is left to a search."""

LEAST_FREE_SHARE = 1e-8
"""Least share 1 - c g of an active sample's score that other samples determine: below it half of the digits are lost."""

LEAST_ACTIVE_PIVOT = 1e-4
"""Least share of the system on an active set that an update may leave: the rest keeps the rounding of the whole, four digits
of it lost. Below this share the system is solved from sums instead."""

REACH_ROUNDING_FACTOR = 1.0 + 1e-9
"""Factor on a computed reach that covers its rounding, relative 1e-15 for each of up to 1e6 terms."""


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


class ActiveSetChange(NamedTuple):
    """Samples that come (delta > 0) or go (delta < 0) together: whitened rows U (s, D); f, y and delta (s,).

    Of those that go each was active; those that come change sides like any other.
    """

    U: Tensor
    f: Tensor
    y: Tensor
    delta: Tensor


class ActiveSetStep(NamedTuple):
    """A step p (D,) in whitened coordinates, f'(z) = f(z) + u_z . p; samples of a reach up to ``size`` may change sides."""

    p: Tensor
    size: float


def solve_change(
    near: NearSamples, change: ActiveSetChange, left: Tensor, side: Tensor | None = None
) -> ActiveSetStep | None:
    """Step of a change after which all near samples are on their sides; None if the active set does not converge.

    left: (c,) weights of the near samples without those that go; side: (s, c) products with them, if known.
    """
    s, fixed = len(change.f), change.delta < 0
    side = change.U @ near.U.mT if side is None else side
    corner = change.U @ change.U.mT
    on = fixed | (change.y * change.f < 1.0)
    flipped = torch.zeros_like(near.active)
    # 12: Newton rounds for one change; two or three are usual, and a change that needs more is left to a solver with a line
    # search
    for _ in range(12):
        S = torch.nonzero(flipped)[:, 0]
        rows, border = near.G[S], side[:, S]
        delta = torch.cat([change.delta * on, torch.where(near.active[S], -left[S], left[S])])
        y, f = torch.cat([change.y, near.y[S]]), torch.cat([change.f, near.f[S]])
        G = torch.cat([torch.cat([corner, border], 1), torch.cat([border.mT, rows[:, S]], 1)])
        T = _solve(G, delta, delta * (y - f))
        if T is None:
            return None
        margins = near.y * (near.f + T[:s] @ side + T[s:] @ rows)
        own = change.y * (change.f + (G @ T)[:s])
        turned = ((margins < 1.0) != near.active) & (left > 0)
        came = fixed | (own < 1.0)
        if torch.equal(turned, flipped) and torch.equal(came, on):
            if bool((_undecided(margins) & (left > 0)).any()) or bool((_undecided(own) & ~fixed).any()):
                return None
            size = float((T @ (G @ T)).clamp(min=0.0).sqrt()) * REACH_ROUNDING_FACTOR
            return ActiveSetStep(T[:s] @ change.U + T[s:] @ near.U[S], size)
        flipped, on = turned, came
    return None


def solve_removals(
    near: NearSamples, change: ActiveSetChange, place: Tensor, left: Tensor
) -> list[ActiveSetStep | None]:
    """Steps of removals of one sample each.

    place: (B,) index of each among the near samples, -1 for none; left: (B,) its weight that stays.
    """
    g = change.U.square().sum(1)
    pivot = 1.0 + change.delta * g
    T = change.delta * (change.y - change.f) / pivot
    G = change.U @ near.U.mT  # (B, c)
    margins = torch.addcmul(near.f, G, T[:, None]).mul_(near.y)
    turned = ((margins < 1.0) != near.active) | _undecided(margins)
    mine = torch.nonzero((place >= 0) & (left <= 0))[:, 0]
    turned[mine, place[mine]] = False
    plain = ((pivot > LEAST_ACTIVE_PIVOT) & ~turned.any(1)).tolist()
    sizes = (T.abs() * g.sqrt() * REACH_ROUNDING_FACTOR).tolist()
    out: list[ActiveSetStep | None] = []
    for i, (done, size) in enumerate(zip(plain, sizes, strict=True)):
        if done:
            out.append(ActiveSetStep(T[i] * change.U[i], size))
            continue
        weight = near.weight
        if place[i] >= 0:
            weight = weight.clone()
            weight[place[i]] = left[i]
        out.append(solve_change(near, ActiveSetChange(*(part[i : i + 1] for part in change)), weight, G[i : i + 1]))
    return out


def _undecided(margins: Tensor) -> Tensor:
    """True for margins whose side float64 cannot tell."""
    return (margins - 1.0).abs() <= MARGIN_TOLERANCE


def _solve(G: Tensor, delta: Tensor, right: Tensor) -> Tensor | None:
    """(I + Delta G)^-1 right; None where too much cancels."""
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
