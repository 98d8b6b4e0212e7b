"""The normal equations of a head, from its statistics: which sums go in, with which weights and targets."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchlssvm.errors import ConvergenceError, NumericalWarning
from torchlssvm.functional.system import Centre, Factor, GroupSums, clamped_factor, factor_, fill_system, workspace
from torchlssvm.linear.solution import NotPositiveDefinite
from torchlssvm.linear.standardization import Standardization
from torchlssvm.statistics import Statistics
from torchlssvm.statistics.batch import GridChoices

LARGEST_RIDGE = 1e300
"""Largest ridge in grid units: sums of squares of up to 2^63 beside it stay within float64."""

EIGENVALUE_ROUNDING = 1e-11
"""Rounding of an eigenvalue, for each dimension, relative to the largest entry: one further below zero is none."""


class Units(NamedTuple):
    """Units: features in ``feature`` per step, targets in ``target`` per step, rho as given."""

    feature: float
    target: float
    rho: float

    @classmethod
    def of(cls, choices: GridChoices, rho: float) -> Units:
        """Units of features and targets on these grids; 1 without one."""
        grid, target = choices.grid, choices.target_grid
        return cls(grid.resolution if grid else 1.0, target.resolution if target else 1.0, rho)


class Moments(NamedTuple):
    """Weighted sums in real units: G (D, D) without ridge, rhs (D, K), T (K,), means mu (D,) and beta (K,), weight.

    Centred on the means when the intercept is free; ``weight`` is 0 and the means are zero otherwise.
    """

    G: Tensor
    rhs: Tensor
    T: Tensor
    mu: Tensor
    beta: Tensor
    weight: float


class SolvedSystem(NamedTuple):
    """A solved system, in the coordinates of :mod:`torchlssvm.linear.solution`."""

    w: Tensor
    beta: Tensor
    mu: Tensor
    n: float
    factor: Factor
    scale: Tensor | float


def class_weights(option: str | Tensor | None, counts: Tensor) -> Tensor | None:
    """Weights (K,) by class. "balanced": n / (K n_k) over the classes present; "complement": (n - n_k) / n."""
    if option is None or isinstance(option, Tensor):
        return option
    n = counts.sum().to(torch.float64)
    if option == "complement":
        # With one class alone every weight would be zero: nothing is rare then.
        weights = (n - counts) / n
        return torch.where((weights * counts).sum() > 0, weights, torch.ones_like(weights))
    present = (counts > 0).sum()
    return torch.where(counts > 0, n / (present * counts.clamp(min=1)), torch.zeros_like(n))


def coded_sums(stats: Statistics, weights: Tensor | None, labels: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    """Sums of targets times features (K, J), and of targets (K,), in steps; weighted by class, in integers if unweighted."""
    V, side = stats.class_sums()
    if side.ndim == 2:
        return V[1:], side[0, 1:]
    both = torch.cat([V, side[:, None]], 1)
    if weights is not None:
        both = both.to(torch.float64) * weights[:, None]
    # target +1 for the class, -1 for all others, or for the other one of a pair
    sums = both - (both.sum(0) - both) if labels is None else (both[labels[0]] - both[labels[1]])[None]
    return sums[:, :-1], sums[:, -1]


def weighted_sums(stats: Statistics, weights: Tensor | None, labels: tuple[int, int] | None) -> list[GroupSums]:
    """The sums that make up a system, with their weights."""
    if labels is None and weights is None:
        return [stats.sums()]
    if weights is not None:
        values = weights.tolist()  # the weights scale whole matrices, as numbers
        return [stats.sums(c, values[c]) for c in labels or range(stats.num_classes) if values[c] != 0]
    a, b = (stats.sums(c) for c in labels or ())
    return [GroupSums(None, a.packed + b.packed, a.m + b.m, a.n + b.n)]


def write_constant(work: Tensor, groups: list[GroupSums], J: int, rho: float, about: Centre | None = None) -> None:
    """The row of a constant feature, with rho on its diagonal; ``about``: beside features centred there. work: (n, n)."""
    one = [1.0 if g.weight is None else g.weight for g in groups]
    n = torch.stack([w * g.n.to(torch.float64) for w, g in zip(one, groups, strict=True)]).sum()
    sums = [g.m if about is None else g.m - g.n * about.c for g in groups]
    row = torch.stack([w * m.to(torch.float64) for w, m in zip(one, sums, strict=True)]).sum(0)
    work[J, :J] = row if about is None else row - n * (about.rest / about.n)
    work[J, J] = n + rho


def write_system(
    work: Tensor, groups: list[GroupSums], J: int, ridge: float, rho: float, intercept: str, small: bool,
    standard: Standardization | None,
) -> Centre | None:  # fmt: skip
    """Write the system of features, with ``ridge`` in grid units, or of those standardised so, with rho; return the mean.

    work: (n, n); ``small``: see :func:`~torchlssvm.functional.system.fill_system`.
    """
    penalized, centred, plain = intercept == "penalized", intercept == "free", standard is None
    about = None if standard is None or centred else standard.centre
    centre = fill_system(work, groups, J, ridge if plain else 0.0, centred, small, about)
    if penalized:
        write_constant(work, groups, J, rho if plain else 0.0, about)
    if standard is not None:
        D = J + penalized
        divide(work[:J, :J], work[J:D, :J], standard.deviation)
        work.diagonal()[:D].add_(rho)
    return centre


def solve(
    stats: Statistics, scale: Units, intercept: str, weights: Tensor | None = None, labels: tuple[int, int] | None = None,
    doubtful: bool = False, work: Tensor | None = None, standard: Standardization | None = None,
) -> SolvedSystem:  # fmt: skip
    """Solve from statistics. weights: (K,) by class; labels: only these two classes, one against the other.

    ``doubtful`` says that rows were removed which may not have been held: NotPositiveDefinite then shows it. ``work`` is a
    :func:`~torchlssvm.functional.system.workspace` to use; it becomes the factor. ``standard``: the system is that of
    features standardised so, whose unit is 1.
    """
    J, root = stats.in_features, math.sqrt(scale.rho)
    groups = weighted_sums(stats, weights, labels)
    penalized, centred = intercept == "penalized", intercept == "free"
    D = J + penalized
    if work is None:
        work = workspace(D, stats.device)
    feature = scale.feature if standard is None else 1.0
    ridge = grid_ridge(scale.rho, feature)
    small = not stats.exact or stats.largest_square() < 2**50
    fill = partial(write_system, work, groups, J, ridge, scale.rho, intercept, small, standard)
    centre = fill()
    Y, y = coded_sums(stats, weights, labels)
    rhs = Y.to(torch.float64) if centre is None else _centred_targets(Y, y, centre, exact=weights is None)
    if standard is not None:
        rhs = rhs / standard.deviation
    if centre is not None and centred:
        mean = centre.mean if standard is None else standard.rows(centre.mean)
        mu, beta, n = mean * (feature / root), y.to(torch.float64) / centre.n, _total(stats, weights, labels, centre)
    else:
        n = 1.0
        mu, beta = (
            torch.zeros(D, dtype=torch.float64, device=rhs.device),
            torch.zeros(len(y), dtype=torch.float64, device=rhs.device),
        )
    units: Tensor | float = math.sqrt(ridge)
    if penalized:
        rhs = torch.cat([rhs, y.to(torch.float64)[:, None]], 1)
        units = torch.full((D,), math.sqrt(ridge), dtype=torch.float64, device=rhs.device)
        units[J] = root
    factor = factor_(work, D)
    if int(factor.info) != 0:
        fill()
        factor = repaired_factor(work, D, min(ridge, scale.rho) if penalized else ridge, doubtful)
    w = factor.solve(rhs).mT * (units[:, None] if isinstance(units, Tensor) else units)
    return SolvedSystem(w * scale.target, beta * scale.target, mu, n, factor, units)


def moments(
    stats: Statistics,
    scale: Units,
    intercept: str,
    weights: Tensor | None = None,
    labels: tuple[int, int] | None = None,
    standard: Standardization | None = None,
) -> Moments:
    """The normal equations themselves; arguments as for :func:`solve`, but rho plays no part."""
    J, penalized, centred = stats.in_features, intercept == "penalized", intercept == "free"
    D, groups = J + penalized, weighted_sums(stats, weights, labels)
    work = torch.empty(D, D, dtype=torch.float64, device=stats.device)
    small = not stats.exact or stats.largest_square() < 2**50
    about = None if standard is None or centred else standard.centre
    centre = fill_system(work, groups, J, 0.0, centred, small, about)
    Y, y = coded_sums(stats, weights, labels)
    rhs = Y.to(torch.float64) if centre is None else _centred_targets(Y, y, centre, exact=weights is None)
    units = torch.full((D,), scale.feature, dtype=torch.float64, device=work.device)
    if standard is not None:
        units[:J] = 1.0 / standard.deviation
    if penalized:
        write_constant(work, groups, J, 0.0, about)
        rhs, units[J] = torch.cat([rhs, y.to(torch.float64)[:, None]], 1), 1.0
    work.mul_(units).mul_(units[:, None])
    G = work.tril() + work.tril(-1).mT
    beta, mu = y.to(torch.float64).new_zeros(len(y), dtype=torch.float64), torch.zeros_like(units)
    if centre is not None and centred:
        mu = centre.mean * scale.feature if standard is None else standard.rows(centre.mean)
        beta = y.to(torch.float64) / centre.n * scale.target
    weight = _total(stats, weights, labels, centre) if centre is not None and centred else 0.0
    T = _squares(stats, y, weights, labels, centred) * scale.target**2
    return Moments(G, (rhs * units).mT * scale.target, T, mu, beta, weight)


def divide(matrix: Tensor, below: Tensor, deviation: Tensor) -> None:
    """Divide rows and columns of a matrix (J, J), and the columns of the rows below it (r, J), by deviations (J,)."""
    matrix.div_(deviation).div_(deviation[:, None])
    below.div_(deviation)


def _squares(
    stats: Statistics, y: Tensor, weights: Tensor | None, labels: tuple[int, int] | None, centred: bool
) -> Tensor:
    """Sums of squared targets (K,) in steps, about their mean if centred; without cancellation on a grid."""
    _, side = stats.class_sums()
    if side.ndim == 1:  # labels: n+ samples at +1, n- at -1, so 4 n+ n- / n about the mean
        counts = side.to(torch.float64) * (1.0 if weights is None else weights)
        total = counts.sum() if labels is None else counts[list(labels)].sum()
        plus = counts if labels is None else counts[labels[0]][None]
        return 4 * plus * (total - plus) / total if centred else total.expand(len(plus)).clone()
    squares = side.diagonal()[1:]
    if not centred:
        return squares.to(torch.float64)
    if not stats.exact:
        return squares - y * y / side[0, 0]
    n = int(side[0, 0])
    exact = [(n * q - t * t) / n for q, t in zip(squares.tolist(), y.tolist(), strict=True)]  # Python's integers
    return torch.tensor(exact, dtype=torch.float64, device=side.device)


def _centred_targets(Y: Tensor, y: Tensor, centre: Centre, exact: bool) -> Tensor:
    """Sum (q - mean) t: the integer part of the mean is taken off in integers."""
    shifted = Y - y[:, None] * (centre.c if exact else centre.c.to(torch.float64))
    return shifted.to(torch.float64) - y.to(torch.float64)[:, None] * (centre.rest / centre.n)


def _total(stats: Statistics, weights: Tensor | None, labels: tuple[int, int] | None, centre: Centre) -> float:
    """Total weight of the samples in a system; known on the host where it is that of all samples, unweighted."""
    if weights is None and labels is None:
        return float(stats.n)
    return float(centre.n)


def check_finite(work: Tensor, D: int, floor: float) -> Tensor:
    """The largest entry of a system (); ConvergenceError where float64 cannot hold it. work: (n, n); floor: the ridge."""
    top = work.diagonal()[:D].amax()
    if not bool(top.isfinite()):
        raise ConvergenceError(
            f"the system cannot be solved in float64: its largest entry is {float(top):.1e} beside a ridge of {floor:.1e}, in "
            "grid units. Use class weights of a usual size. The samples are held all the same."
        )
    return top


def grid_ridge(rho: float, step: float) -> float:
    """rho in grid units, rho / step^2; ConvergenceError where float64 cannot hold it."""
    if rho > LARGEST_RIDGE * step**2:
        raise ConvergenceError(
            f"rho = {rho:.1e} is too large for features in steps of {step:.1e}: in grid units it is beyond float64. Use a rho "
            f"of at most {LARGEST_RIDGE * step**2:.1e}. The samples are held all the same."
        )
    return rho / step**2


def repaired_factor(work: Tensor, D: int, floor: float, doubtful: bool) -> Factor:
    """Factor after Cholesky failed: raise eigenvalues to the ridge and warn if it is rounding, else NotPositiveDefinite.

    ConvergenceError for a system that float64 cannot hold.
    """
    top = check_finite(work, D, floor)
    factor, lowest = clamped_factor(work, D, torch.full_like(top, floor))
    if doubtful and bool(lowest < -EIGENVALUE_ROUNDING * D * top):
        raise NotPositiveDefinite
    warnings.warn(
        f"the system is singular to working precision (smallest eigenvalue {float(lowest):.1e} beside {float(top):.1e}, "
        f"ridge {floor:.1e}, in grid units): eigenvalues were raised to the ridge. A larger rho is advised.",
        NumericalWarning,
        stacklevel=2,
    )
    return factor
