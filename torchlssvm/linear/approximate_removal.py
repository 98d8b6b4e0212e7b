"""Removing samples that are only roughly known, with an account of what that costs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchlssvm.functional.approximate import Approximation, approximation
from torchlssvm.linear.normal_equations import class_weights
from torchlssvm.linear.solvers import code_labels

if TYPE_CHECKING:
    from torchlssvm.linear.head import LSSVMHead

REASON = "remove_approximate took out samples that may not be, bit for bit, those that were added"


def remove_approximate(head: LSSVMHead, x: Any, y: Any, weight: Any, ids: Any) -> Approximation:
    """See :meth:`torchlssvm.LSSVMHead.remove_approximate`."""
    if head.multiclass == "ovo":
        raise ValueError("remove_approximate works on one shared system: use multiclass='ovr'")
    batch = head._check(x, y, weight, ids)
    if len(batch) and batch.size >= head.n:
        raise ValueError(f"all {head.n} samples would be removed: there is nothing left to estimate, use remove")
    head._apply_changes([(batch, -1)], rough=True)
    w, b, P = head._current(inverse=True)  # a removal that cannot be is found here, and rolled back
    grid, target = batch.choices.grid, batch.choices.target_grid
    rows = batch.x.to(torch.float64) if grid is None else grid.snap(batch.x)  # (L, J)
    weights = torch.ones(len(batch), dtype=torch.float64, device=head.device) if batch.mult is None else batch.mult
    if batch.labels is not None:
        targets: Tensor = code_labels(batch.labels, head.num_classes)
        by_class = class_weights(head.class_weight, head.counts.to(torch.float64))
        weights = weights if by_class is None else weights * by_class[batch.labels]
    else:
        assert batch.targets is not None
        targets = batch.targets * (target.resolution if target else 1.0)
    residuals = targets - (rows @ w + b)
    solution = head._engine.solution
    free = head.intercept == "free"
    mean = solution.mu * math.sqrt(head.rho) if free else 0.0
    if head.intercept == "penalized":
        rows = torch.nn.functional.pad(rows, (0, 1), value=1.0)
    if len(batch):
        head._uncertifiable = REASON
    return approximation(P, head.rho, w, rows, mean, residuals, weights, float(solution.n) if free else math.inf)
