"""Weights of a margin head to start a search for active sets from, for many classes in a few passes over the rows.

Newton steps on the squared hinge loss, each solved roughly by conjugate gradients: the matrix of a step, I + sum of c v v^T
over the active samples, is never formed, and that of all samples, which the classes share, preconditions it. A search from
here forms the exact sums over an active set about once instead of in every step. Nothing rests on the accuracy: the search
proves its active sets.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from torchlssvm.functional import squared_hinge as hinge
from torchlssvm.linear.active_sums import ActiveSums, solve_sums
from torchlssvm.linear.row_scale import RowScale

ACTIVE_SHARE = 0.25
"""Share of the samples taken to be active in the matrix that preconditions a step; of ten classes a fifth to a third are."""

LONGEST_STEP = 4.0
"""Largest multiple of a Newton step that the line search takes: with too many samples active the step itself is too short."""

MAX_DESCENT_STEPS = 6
"""Newton steps at most; three are usual."""


class HingeDescent:
    """The squared-hinge problems of C classes against the rest, as functions of the weights of all.

    Points are (D, C), with a row of intercepts below where the intercept is free.
    """

    def __init__(self, total: ActiveSums, scale: RowScale, signs: Tensor, weight: Tensor, small: bool):
        """total: sums over all rows; signs: (n, C) of -1 and +1; weight: (n,), class weight times copies."""
        self.q, self.scale, self.signs, self.weight = total.rows.q, scale, signs, weight
        wider = replace(scale, rho=scale.rho / ACTIVE_SHARE)  # I + V^T V / 4 is the system of a rho four times as large
        _, _, mu, n, self._factor, self._units, _ = solve_sums([total], wider, small)
        self._mu, self._active_weight = mu * (wider.root / scale.root), n * ACTIVE_SHARE

    def lower(self, steps: int) -> tuple[Tensor, Tensor]:
        """Start from ridge regression on all rows and make so many Newton steps at most: w' (D, C) and margins (n, C)."""
        margins = torch.zeros_like(self.signs)
        step = self._precondition(self._gradient(self.signs * self.weight[:, None]))
        point = torch.zeros_like(step)
        self._move(point, margins, step, hinge.scores(self.q, *self._weights(step)) * self.signs)
        for _ in range(steps):
            active = margins < 1.0
            self._move(point, margins, *self._newton_step(point, margins, active))
            # 4: steps end when at most J / 4 samples change sides: then an exact solve is the better step
            if int((active != (margins < 1.0)).sum(0).max()) * 4 <= self.q.shape[1]:
                break
        return point[: len(self._mu)], margins

    def _newton_step(self, point: Tensor, margins: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """A step to the minimum on the active sets (n, C), by conjugate gradients, and the change of the margins with it."""
        D, weight, none = len(self._mu), active * self.weight[:, None], torch.zeros_like(margins)
        left = self._gradient((1.0 - margins) * self.signs * weight)
        left[:D] -= point[:D]
        step, change = torch.zeros_like(point), torch.zeros_like(margins)
        ahead = self._precondition(left)
        direction, size = ahead, (left * ahead).sum(0)
        # 0.1: share of the gradient, in the norm of the preconditioner, at which conjugate gradients end a Newton step
        enough = 0.1**2 * size
        # 16: passes over the rows for one Newton step at most
        for _ in range(16):
            found = hinge.sweep(self.q, *self._weights(direction), none, weight)
            product = self._pulled_back(found.gradient, found.gradient_b)
            product[:D] += direction[:D]
            length = torch.where(size > enough, size / (direction * product).sum(0), 0.0)
            step += length * direction
            change += length * found.scores * self.signs
            left -= length * product
            ahead = self._precondition(left)
            before, size = size, (left * ahead).sum(0)
            if bool((size <= enough).all()):
                break
            direction = ahead + torch.where(before > 0, size / before, 0.0) * direction
        return step, change

    def _move(self, point: Tensor, margins: Tensor, step: Tensor, change: Tensor) -> None:
        """Move each class to the lowest point of its line search, in place. step: like point; change: (n, C) of the margins."""
        D = len(self._mu)
        for c in range(margins.shape[1]):
            at, way = point[:D, c], LONGEST_STEP * step[:D, c]
            start, far = margins[:, c].contiguous(), LONGEST_STEP * change[:, c]
            if not bool(torch.isfinite(far).all()):
                continue
            t = hinge.lowest_on_segment(start, start + far, self.weight, float(at @ way), float(way @ way))
            point[:, c] += t * LONGEST_STEP * step[:, c]
            margins[:, c] += t * far

    def _weights(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (J, C) in grid units and intercepts (C,) of a point."""
        D = len(self._mu)
        b = point[D] if len(point) > D else point.new_zeros(point.shape[1])
        w, b = self.scale.weights(point[:D], b, self._mu)
        return w * self.scale.step, b

    def _gradient(self, errors: Tensor) -> Tensor:
        """Sums of the rows, in the coordinates of a point, each times its errors (n, C)."""
        return self._pulled_back(*hinge.combinations(self.q, errors))

    def _pulled_back(self, gradient: Tensor, gradient_b: Tensor) -> Tensor:
        """The transpose of ``_weights``. gradient: (J, C); gradient_b: (C,)."""
        out = self.scale.centred(gradient, gradient_b)
        if self.scale.intercept == "penalized":
            return torch.cat([out, gradient_b[None] / self.scale.root])
        if self.scale.intercept == "free":
            return torch.cat([out - self._mu[:, None] * gradient_b, gradient_b[None]])
        return out

    def _precondition(self, gradient: Tensor) -> Tensor:
        """Gradients, like a point, times the inverse of the matrix of all rows scaled by the share of active ones."""
        D = len(self._mu)
        out = self._factor.solve(gradient[:D].mT, self._units).mT
        return out if len(gradient) == D else torch.cat([out, gradient[D:] / self._active_weight])
