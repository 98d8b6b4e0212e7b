"""The rule "gcv": rho chosen from the statistics alone, out of candidates that do not depend on the build or thread count.

Candidates are powers of two in a window around the mean eigenvalue, so that a rounding error in the eigenvalue can only move
the ends of the window. For the same reason, errors that differ only by rounding count as equal, and among equal errors the
largest rho is chosen.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchlssvm.linear import normal_equations as normal
from torchlssvm.linear.diagnostics.rho_selection import rho_path
from torchlssvm.linear.diagnostics.whitened_problems import HeadView
from torchlssvm.statistics import Statistics

LEAST_SAMPLES = 10
"""Fewest samples for choosing rho. With fewer samples, or only one class, the expected error cannot be estimated."""

LOWEST_POWER, HIGHEST_POWER = -20, 10
"""Window of the candidates, in powers of two times the mean eigenvalue: from 1e-6 to 1e3, where nothing is learned. With fewer
samples than features, the lower end is 1e-6 times the largest sum of squares of a feature instead, because a smaller rho could
not be solved to nine digits."""

TIE_TOLERANCE = 1e-7
"""Errors within this share of the least count as equal. It is far above rounding (1e-12), and far below one sample's effect."""


def candidates(view: HeadView) -> Tensor:
    """Powers of two (r,) around the mean eigenvalue of the features."""
    stats = view.statistics
    diagonal = normal.moments(stats, view.units, view.intercept, standard=view.standard).G.diagonal()
    mean, largest = torch.stack([diagonal.mean(), diagonal.amax()]).tolist()
    if not (mean > 0 and math.isfinite(mean)):
        mean = largest = 0.5
    exponent = math.frexp(mean)[1]
    lowest = math.frexp(largest)[1] if stats.n <= stats.in_features else exponent
    powers = range(lowest + LOWEST_POWER, exponent + HIGHEST_POWER + 1)
    return torch.tensor([2.0**k for k in powers], dtype=torch.float64, device=view.device)


def is_choosable(stats: Statistics) -> bool:
    """True if there are enough samples, of at least two classes, to choose rho."""
    if stats.n < LEAST_SAMPLES or stats.kind == "values":
        return stats.n >= LEAST_SAMPLES
    return int((stats.counts > 0).sum()) >= 2


def choose(view: HeadView) -> float | None:
    """Return the largest candidate with the least error, up to rounding; None if no error can be computed."""
    path = rho_path(view, candidates(view), "gcv")
    finite = path.errors.isfinite()
    if not bool(finite.any()):
        return None
    least = path.errors[finite].amin()
    return float(path.rhos[finite & (path.errors <= least * (1.0 + TIE_TOLERANCE))].amax())


def excess(view: HeadView, rho: float) -> float:
    """Relative excess of the error of a rho over the least error of all candidates; infinite if rho is not a candidate."""
    path = rho_path(view, candidates(view), "gcv")
    mine = path.errors[path.rhos == rho]
    least = float(path.errors[path.errors.isfinite()].amin())
    if not len(mine):
        return math.inf
    return 0.0 if float(mine[0]) <= least else float(mine[0]) / least - 1.0 if least > 0 else math.inf
