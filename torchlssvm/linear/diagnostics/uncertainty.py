"""Probabilities calibrated on leave-one-out scores, and the uncertainty of a score."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchlssvm.errors import NotFittedError
from torchlssvm.functional import checks
from torchlssvm.functional.calibration import least_squares
from torchlssvm.functional.spectrum import squared_error
from torchlssvm.functional.whitened import ROWS
from torchlssvm.linear import normal_equations as normal
from torchlssvm.linear.diagnostics.calibration import fit
from torchlssvm.linear.diagnostics.leave_one_out import leave_one_out
from torchlssvm.linear.diagnostics.whitened_problems import Problem, check_labels, check_samples, other_rows, scale_of

if TYPE_CHECKING:
    from torchlssvm.linear.base import HeadBase
    from torchlssvm.linear.judging import Judging


def calibrate(head: Judging, x: Any, y: Any, method: str | None, weight: Any, groups: Any) -> None:
    """See :meth:`torchlssvm.LSSVMHead.calibrate`."""
    samples = check_samples(head, x, y, weight)
    if not len(samples):
        raise ValueError("x is empty: a calibration is fitted on the samples that the head holds")
    if samples.labels is None:
        raise ValueError("probabilities need labels: this head holds float targets")
    made = fit(leave_one_out(head, x, y, weight, groups), samples.labels, samples.weight, method)
    head._remember_calibration(replace(made, grouped=groups is not None))


def calibrate_on(head: Judging, scores: Any, y: Any, method: str | None) -> None:
    """The same from leave-one-out scores (n, K) computed in batches."""
    scores = checks.features(scores, head.num_classes, head.device).to(torch.float64)
    labels = check_labels(head, y, len(scores), "y")
    head._remember_calibration(fit(scores, labels, torch.ones_like(scores[:, 0]), method))


def probabilities(head: Judging, scores: Tensor, calibrated: bool) -> Tensor:
    """Probabilities (B, K) of scores (B, K)."""
    kind = head._engine.choices.kind if head.statistics is None else head.statistics.kind
    if head.num_classes < 2 or kind == "values":
        raise ValueError("probabilities need labels: this head holds float targets")
    if not calibrated or "calibration" not in head._made:
        return least_squares(scores)
    calibration = head.calibration
    if calibration is None:
        raise NotFittedError(
            "the calibration was made for other samples than the head holds now, and they shaped it: call "
            "calibrate(x, y) again, or predict_proba(x, calibrated=False)"
        )
    return calibration(scores)


def leverage(head: HeadBase, x: Any, relative: bool) -> Tensor:
    """See :meth:`torchlssvm.LSSVMHead.leverage`."""
    head._fitted()
    head._current()
    problem = Problem(head)
    system = problem.whitened(None) if head.multiclass == "ovo" else problem.main(problem.class_weights())
    x = checks.features(x, head.in_features, head.device)
    parts = [system.leverages(system.centred(other_rows(head, part))) for part in x.split(ROWS)] if len(x) else []
    g = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device=head.device)
    return g * (head.n / degrees_of_freedom(system)) if relative else g


def degrees_of_freedom(system: Any) -> float:
    """tr(A^-1 (A - rho I)), + 1 for a free intercept: D - |F|^2 in the coordinates of the system, where P = F^T F."""
    host = checks.to_host(system.F.square().sum())
    return len(system.F) - (0.0 if host is None else host[0][0]) + (1.0 if system.n else 0.0)


def uncertainty(head: HeadBase, x: Any) -> Tensor:
    """See :meth:`torchlssvm.LSSVMHead.uncertainty`."""
    stats = head._need_statistics("the uncertainty of a score")
    if head.multiclass == "ovo":
        raise ValueError('uncertainty is that of a linear score: use multiclass="ovr", or leverage(x)')
    g = leverage(head, x, relative=False)
    problem = Problem(head)
    weights = problem.class_weights()
    m = normal.moments(stats, scale_of(head, stats), head.intercept, weights)
    w = head._current()[0]
    w = torch.cat([w, head._current()[1][None]]) if head.intercept == "penalized" else w
    rss = squared_error(m.G, m.rhs, m.T, w).clamp(min=0.0)
    left = max(1.0, float(head.n) - degrees_of_freedom(problem.main(weights)))
    return (g[:, None] * rss / left).sqrt()
