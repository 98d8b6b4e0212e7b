r"""The change of a squared-hinge solution when samples come or go: small systems on products, with the active set moving.

The solution of one class is ridge regression on its active set, with the matrix A. In the whitened coordinates of
:mod:`torchlssvm.functional.whitened`, g(z, i) = u_z . u_i, samples i in a set I that change their weights by delta move every
score to

    f'(z) = f(z) + G_zI T,       T = (I + Delta G_II)^-1 Delta (y_I - f_I).

A sample that leaves the active set changes its weight by -c, one that joins by +c: both are members of I as well, beside the
samples that are removed (-c) or added (+c). Newton's method is then: solve for I, look who is on the wrong side, change I. One
inverse serves all changes; a round costs a system of the size of I.

Samples far from their margin need no look: by the inequality of Cauchy and Schwarz no score moves by more than
sqrt(g(z, z)) sqrt(T^T G_II T), so that with *reach* |1 - m_z| / sqrt(g(z, z)) only samples of a reach below sqrt(T^T G_II T)
can change sides. A change that goes further than the samples at hand is not decided here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_ROUNDS = 12
"""Rounds for one change; two or three are usual, and a change that needs more is left to a solver with a line search."""

ON_THE_MARGIN = 1e-11
"""Samples this close to their margin stay on their side: either side gives the same scores, to rounding."""

LEAST_PIVOT = 1e-9
"""Share of a system that may cancel: changes of nearly all that a solution rests on are left to a solver."""

SAFETY = 1.0 + 1e-9
"""Covers the rounding of a reach."""


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


class Change(NamedTuple):
    """Samples that come (delta > 0) or go (delta < 0) together: whitened rows U (s, D); f, y and delta (s,).

    Of those that go each was active; those that come change sides like any other.
    """

    U: Tensor
    f: Tensor
    y: Tensor
    delta: Tensor


def settle(near: NearSamples, change: Change, left: Tensor) -> Tensor | None:
    """The step p (D,) in whitened coordinates, f'(z) = f(z) + u_z . p; None where it is not decided here.

    left: (c,) weights of the samples at hand without those that go.
    """
    s, fixed = len(change.f), change.delta < 0
    corner, side = change.U @ change.U.mT, change.U @ near.U.mT  # (s, s), (s, c)
    on = fixed | (change.y * change.f < 1.0)
    flipped = torch.zeros_like(near.active)
    for _ in range(MAX_ROUNDS):
        S = torch.nonzero(flipped)[:, 0]
        delta = torch.cat([change.delta * on, torch.where(near.active[S], -left[S], left[S])])
        y, f = torch.cat([change.y, near.y[S]]), torch.cat([change.f, near.f[S]])
        G = torch.cat([torch.cat([corner, side[:, S]], 1), torch.cat([side[:, S].mT, near.G[S][:, S]], 1)])
        T = _solve(G, delta, delta * (y - f))
        if T is None:
            return None
        margins = near.y * (near.f + side.mT @ T[:s] + near.G[:, S] @ T[s:])
        sides = _sides(margins, near.active ^ flipped)
        own = change.y * (change.f + (G @ T)[:s])
        turned, came = (sides != near.active) & (left > 0), torch.where(fixed, on, _sides(own, on))
        if torch.equal(turned, flipped) and torch.equal(came, on):
            if float((T @ (G @ T)).clamp(min=0.0).sqrt()) * SAFETY >= near.reach:
                return None
            return change.U.mT @ T[:s] + near.U[S].mT @ T[s:]
        flipped, on = turned, came
    return None


def settle_removals(near: NearSamples, change: Change, place: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """Steps p (B, D) for samples that go one at a time, and which of them are decided (B,).

    place: (B,) of each among the samples at hand, -1 for none; left: (B,) its weight that stays.
    """
    g = change.U.square().sum(1)
    pivot = 1.0 + change.delta * g
    T = change.delta * (change.y - change.f) / pivot
    G = change.U @ near.U.mT  # (B, c)
    margins = torch.addcmul(near.f, G, T[:, None]).mul_(near.y)
    turned = _sides(margins, near.active) != near.active
    mine = torch.nonzero((place >= 0) & (left <= 0))[:, 0]
    turned[mine, place[mine]] = False
    plain = (pivot > LEAST_PIVOT) & ~turned.any(1) & (T.abs() * g.sqrt() * SAFETY < near.reach)
    steps, decided = T[:, None] * change.U, plain.clone()
    for i in torch.nonzero(~plain)[:, 0].tolist():
        weight = near.weight.clone()
        if place[i] >= 0:
            weight[place[i]] = left[i]
        step = settle(near, Change(*(part[i : i + 1] for part in change)), weight)
        if step is not None:
            steps[i], decided[i] = step, True
    return steps, decided


def _sides(margins: Tensor, now: Tensor) -> Tensor:
    """True for margins below 1; those on the margin stay as they are."""
    return torch.where((margins - 1.0).abs() <= ON_THE_MARGIN, now, margins < 1.0)


def _solve(G: Tensor, delta: Tensor, right: Tensor) -> Tensor | None:
    """(I + Delta G)^-1 right; None where too much cancels."""
    system = delta[:, None] * G
    system.diagonal().add_(1.0)
    LU, pivots, _ = torch.linalg.lu_factor_ex(system)
    diagonal = LU.diagonal().abs()
    if not float(diagonal.amin()) > LEAST_PIVOT * min(1.0, float(diagonal.amax())):
        return None
    out: Tensor = torch.linalg.lu_solve(LU, pivots, right[:, None])[:, 0]
    return out
