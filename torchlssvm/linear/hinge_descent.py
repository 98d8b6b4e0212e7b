"""Approximate weights of many squared-hinge problems at once, in a few passes over the rows they share.

The method takes Newton steps, and solves each step roughly by conjugate gradients, without forming its matrix, I + sum of c v
v^T over the active samples. The preconditioner is the matrix of all samples, which the problems share. The resulting weights
are good enough to compare values of rho, and to start a search for active sets.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torchlssvm.functional import squared_hinge as hinge
from torchlssvm.linear.active_sums import solve_sums
from torchlssvm.linear.row_scale import RowScale

if TYPE_CHECKING:
    from torchlssvm.linear.active_sets import ActiveSetSolver

LONGEST_STEP = 4.0
"""Largest multiple of a Newton step in the line search. If too many samples are active, the step itself is too short."""


class DescentPoint(NamedTuple):
    """Weights w' (D, C), with a row of intercepts below where the intercept is free, and margins (n, C)."""

    w: Tensor
    margins: Tensor


class HingeDescent:
    """C squared-hinge problems on the same rows.

    Args:
        solver: the sums over all rows, and class weights.
        q: (n, J), the rows, in the order of ``signs`` and ``weight``.
        scale: units, rho and the intercept.
        signs: (n, C), targets of -1 and +1.
        weight: (n, C), class weight times copies; 0 leaves a row out of a problem.
    """

    def __init__(self, solver: ActiveSetSolver, q: Tensor, scale: RowScale, signs: Tensor, weight: Tensor):
        self.q, self.scale, self.signs, self.weight = q, scale, signs, weight
        # 4: one sample in four is taken to be active; of ten classes a fifth to a third are. I + V^T V / 4 is the system of a
        # rho four times as large.
        wider = replace(scale, rho=scale.rho * 4)
        _, _, mu, n, self._factor, self._units, _ = solve_sums(solver.stats, wider, solver.class_weights(), 0)
        self._mu, self._active_weight = mu * (wider.root / scale.root), n / 4

    def start(self) -> DescentPoint:
        """The lowest point in the direction of ridge regression on all rows."""
        margins = torch.zeros_like(self.signs)
        step = self._precondition(self._gradient(self.signs * self.weight))
        point = DescentPoint(torch.zeros_like(step), margins)
        self._move(point, step, hinge.scores(self.q, *self._weights(step)) * self.signs)
        return point

    def lower(self, point: DescentPoint) -> None:
        """Make a Newton step, in place."""
        self._move(point, *self._newton_step(point, point.margins < 1.0))

    def _newton_step(self, point: DescentPoint, active: Tensor) -> tuple[Tensor, Tensor]:
        """A step to the minimum on the active sets (n, C), by conjugate gradients, and the change of the margins with it."""
        margins, D = point.margins, len(self._mu)
        weight, none = active * self.weight, torch.zeros_like(margins)
        left = self._gradient((1.0 - margins) * self.signs * weight)
        left[:D] -= point.w[:D]
        step, change = torch.zeros_like(point.w), torch.zeros_like(margins)
        ahead = self._precondition(left)
        direction, size = ahead, (left * ahead).sum(0)
        # 0.3: share of the gradient, in the norm of the preconditioner, at which conjugate gradients end a Newton step
        enough = 0.3**2 * size
        # 6: most passes over the rows for one Newton step
        for _ in range(6):
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

    def _move(self, point: DescentPoint, step: Tensor, change: Tensor) -> None:
        """Move each problem to the lowest point of its line search, in place. step: like w; change: (n, C) of the margins."""
        D = len(self._mu)
        for c in range(change.shape[1]):
            at, way = point.w[:D, c], LONGEST_STEP * step[:D, c]
            start, far = point.margins[:, c].contiguous(), LONGEST_STEP * change[:, c]
            if not bool(torch.isfinite(far).all()):
                continue
            t = hinge.lowest_on_segment(start, start + far, self.weight[:, c], float(at @ way), float(way @ way))
            point.w[:, c] += t * LONGEST_STEP * step[:, c]
            point.margins[:, c] += t * far

    def _weights(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (J, C) in grid units and intercepts (C,)."""
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
