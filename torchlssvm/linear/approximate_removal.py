"""Removal of samples that are known only roughly, with an estimate of the error of the weights."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from torchlssvm.functional.approximate import Approximation, approximation
from torchlssvm.linear.compact_solver import CompactSolver
from torchlssvm.linear.normal_equations import class_weights
from torchlssvm.linear.solvers import SharedSolver, real_targets

if TYPE_CHECKING:
    from torchlssvm.linear.head import LSSVMHead

INEXACT_REMOVAL = "remove_approximate took out samples that may not be, bit for bit, those that were added"
"""Reason why a head can no longer be certified, and why its rows are no longer known."""


def remove_approximate(head: LSSVMHead, x: Any, y: Any, weight: Any, ids: Any) -> Approximation:
    """Unlearn samples that are only roughly known; see :meth:`torchlssvm.LSSVMHead.remove_approximate`."""
    if head.multiclass == "ovo":
        raise ValueError("remove_approximate works on one shared system: use multiclass='ovr'")
    if head.scale is not None:
        raise ValueError(
            "remove_approximate holds for features as they are: scale='std' moves with the samples removed"
        )
    batch = head.check(x, y, weight, ids)
    if len(batch) and batch.size >= head.n:
        raise ValueError(f"all {head.n} samples would be removed: there is nothing left to estimate, use remove")
    head.apply_changes([(batch, -1)], rough=True)
    w, b, P = head.solve(inverse=True)  # a removal that cannot be is found here, and rolled back
    grid = batch.choices.grid
    rows = batch.x.to(torch.float64) if grid is None else grid.snap(batch.x)  # (L, J)
    weights = torch.ones(len(batch), dtype=torch.float64, device=head.device) if batch.mult is None else batch.mult
    by_class = class_weights(head.class_weight, head.counts.to(torch.float64))
    if batch.labels is not None and by_class is not None:
        weights = weights * by_class[batch.labels]
    residuals = real_targets(batch, head.num_classes) - (rows @ w + b)
    assert isinstance(head.solver, SharedSolver | CompactSolver)
    solution = head.solver.solution
    free = head.intercept == "free"
    mean = solution.mu * math.sqrt(head.rho) if free else 0.0
    if head.intercept == "penalized":
        rows = torch.nn.functional.pad(rows, (0, 1), value=1.0)
    if len(batch):
        head.mark_uncertifiable(INEXACT_REMOVAL)
    return approximation(P, head.rho, w, rows, mean, residuals, weights, float(solution.n) if free else math.inf)
