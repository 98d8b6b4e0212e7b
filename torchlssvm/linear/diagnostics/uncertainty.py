"""Probabilities calibrated on leave-one-out scores, and the uncertainty of a score."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchlssvm.functional import checks
from torchlssvm.functional.spectrum import squared_error
from torchlssvm.functional.whitened import WHITENED_ROWS
from torchlssvm.linear import normal_equations as normal
from torchlssvm.linear.diagnostics.calibration import fit
from torchlssvm.linear.diagnostics.whitened_problems import (
    Problem,
    check_labels,
    other_features,
    system_rows,
)
from torchlssvm.linear.locking import exclusive

if TYPE_CHECKING:
    from torchlssvm.linear.head import LSSVMHead
    from torchlssvm.linear.linear_head import LinearHead


def calibrate_on(
    head: LinearHead, scores: Any, y: Any, method: str | None = None, *, weight: Any = None, grouped: bool = False
) -> None:
    """Calibrate a head as its ``calibrate`` does, on leave-one-out scores (n, K) that you computed in batches.

    y, weight: as added. ``grouped``: True if they are leave-group-out scores.
    """
    if not len(scores):
        raise ValueError("x is empty: a calibration is fitted on the samples that the head holds")
    with head._lock:
        scores = checks.features(scores, head.num_classes, head.device).to(torch.float64)
        if head.targets == "multilabel":
            labels = checks.targets(y, scores, head.num_classes, head.targets)[0]
        else:
            labels = check_labels(head, y, len(scores), "y")
        times = torch.ones_like(scores[:, 0]) if weight is None else checks.weights(weight, scores)
        assert times is not None
        # Fractions are shares of a sample, not a smaller number of samples: a fit takes the total weight for that number.
        times = times * ((times > 0).sum() / times.sum()).clamp(min=1.0)
        made = fit(scores, labels, times, method)
        head._choices.record_calibration(replace(made, grouped=grouped))


@exclusive
def leverage(head: LSSVMHead, /, x: Any, relative: bool = False) -> Tensor:
    """Return the leverage (B,) of inputs x (B, J), which measures how far they are from the current samples.

    The leverage is g = 1/n + (x - mu)^T A^-1 (x - mu). ``relative`` divides it by its mean over the current samples, so that a
    value of 10 means ten times as far away as an average sample.
    """
    view = head._view()
    shared = view.multiclass == "ovr" and not view.by_label
    system = view.system if shared else Problem(view).solved(None)
    parts = checks.features(x, view.in_features, view.device).split(WHITENED_ROWS)
    rows = (system_rows(view, other_features(view, part), 1.0) for part in parts)
    g = torch.cat([system.leverages(system.centred(part)) for part in rows])
    return g * (view.n / degrees_of_freedom(system)) if relative else g


def degrees_of_freedom(system: Any) -> float:
    """tr(A^-1 (A - rho I)), + 1 for a free intercept: D - |F|^2 in the coordinates of the system, where P = F^T F."""
    return len(system.F) - float(system.F.square().sum()) + (1.0 if system.n else 0.0)


@exclusive
def uncertainty(head: LSSVMHead, /, x: Any) -> Tensor:
    """Return the standard error of each score (B, K): sigma_k sqrt(g), sigma_k^2 = rss_k / (n - dof). x: (B, J)."""
    view = head._view()
    view.require_least_squares("uncertainty")
    view.require_shared("uncertainty")
    if view.multiclass == "ovo":
        raise ValueError('uncertainty is defined for linear scores only: use multiclass="ovr", or leverage')
    g, units, weights = leverage(head, x), view.units, Problem(view).class_weights()
    m = normal.moments(view.statistics, units, view.intercept, weights, standard=view.standard)
    w = torch.cat([view.w, view.b[None]]) if view.intercept == "penalized" else view.w
    if view.standard is not None:
        w = view.system.w / view.options.rho**0.5  # of standardised features
    rss = squared_error(m.G, m.rhs, m.T, w).clamp(min=0.0)
    left = max(1.0, float(view.n) - degrees_of_freedom(view.system))
    return (g[:, None] * rss / left).sqrt()
