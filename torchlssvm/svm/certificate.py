"""The certificate of a solution: box, sum y alpha = 0, and the Kuhn-Tucker conditions (2) to rounding, sample by sample."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchlssvm.svm.kernel_rows import KernelRows
from torchlssvm.svm.margin_set import MarginSet
from torchlssvm.svm.samples import Array, Samples
from torchlssvm.svm.steps import EPS

UNITS = 256.0
"""Units of rounding that g_i may be on the wrong side by. A unit is EPS (sum_j |Q_ij| alpha_j + |b| + 1): what one rounding of
every term makes. A sum of a thousand terms, in any order, stays within a hundred of them."""


class Certificate(NamedTuple):
    """The verdict on a solution."""

    wrong: Array  # (k,) positions whose g is on the wrong side by more than rounding
    feasible: bool  # 0 <= alpha <= u, and |sum y alpha| is rounding
    violation: float  # the largest violation of (2)

    @property
    def holds(self) -> bool:
        """Whether this is the solution."""
        return self.feasible and not len(self.wrong)


def certify(samples: Samples, rows: KernelRows, margin: MarginSet) -> Certificate:
    """Judge alpha, b and the sets by g, which must be up to date. Costs O(n), and kernel rows only where there is doubt."""
    s, b = samples, margin.b
    off = np.where(s.side == 0, np.abs(s.g), -s.side * s.g)
    off[(s.side == 0) & (s.u == 0)] = 0.0  # free positions, and samples about to leave
    # |Q_i: alpha| = |g_i + 1 - y_i b| is at most sum_j |Q_ij| alpha_j: what is within this bound needs no closer look
    wrong = np.flatnonzero(~(off <= UNITS * EPS * (np.abs(s.g + 1.0 - s.y * b) + (abs(b) + 1.0))))
    if len(wrong):
        wrong = wrong[~(off[wrong] <= UNITS * EPS * (rows.sums(wrong, s.alpha) + abs(b) + 1.0))]
    return Certificate(wrong, feasible(s), max(0.0, float(off.max(initial=0.0))))


def feasible(samples: Samples) -> bool:
    """Whether every coefficient is in its box, and sum y alpha = 0 to rounding."""
    s = samples
    inside = s.alpha.min(initial=0.0) >= 0.0 and bool((s.alpha <= s.u).all())
    return inside and bool(abs(s.y @ s.alpha) <= UNITS * EPS * s.alpha.sum())


def rounding_bound(samples: Samples, rows: KernelRows, margin: MarginSet) -> float:
    """The largest unit of rounding, EPS (sum_j |Q_ij| alpha_j + |b| + 1) over the samples i held."""
    s = samples
    held = np.flatnonzero(s.ids >= 0)
    return EPS * float(rows.sums(held, s.alpha).max(initial=0.0) + abs(margin.b) + 1.0)
