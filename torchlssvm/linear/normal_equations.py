"""The normal equations of a head, assembled from its statistics with the right weights and targets."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchlssvm.errors import ConvergenceError, NumericalWarning
from torchlssvm.functional import checks
from torchlssvm.functional.system import Centre, Factor, GroupSums, clamped_factor, factor_, fill_system, workspace
from torchlssvm.linear.standardization import Standardization
from torchlssvm.statistics import Statistics
from torchlssvm.statistics.batch import GridChoices


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

    With a free intercept, the sums are centred on the means. Otherwise ``weight`` is 0 and the means are zero.
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
    units: Tensor | float
    share: float  # least share of a column's square that the columns before it do not explain; 0 if eigenvalues were raised


def class_weights(option: str | Tensor | None, counts: Tensor, labels: tuple[int, int] | None = None) -> Tensor | None:
    """Weights (K,) by class. "balanced": n / (K n_k) over the classes present; "complement": (n - n_k) / n.

    counts: (K,); labels: two classes that are weighted as if there were no others.
    """
    if option is None or isinstance(option, Tensor):
        return option
    if labels is not None:
        pair, counts = counts[list(labels)], torch.zeros_like(counts)
        counts[list(labels)] = pair
    n = counts.sum().to(torch.float64)
    if option == "complement":
        # With only one class every weight would be zero, although no class is rare.
        weights = (n - counts) / n
        return torch.where((weights * counts).sum() > 0, weights, torch.ones_like(weights))
    present = (counts > 0).sum()
    return torch.where(counts > 0, n / (present * torch.where(counts > 0, counts, 1)), torch.zeros_like(n))


def coded_sums(
    stats: Statistics, weights: Tensor | None, labels: tuple[int, int] | None, centre: Centre | None
) -> tuple[Tensor, Tensor]:
    """Sums of t (q - c) (K, J) and of the targets t (K,), in steps; weighted by class, in integers if unweighted."""
    V, side = stats.class_sums()
    if centre is not None:  # exact, before any weight
        V = V - (side if side.ndim == 1 else side[0])[:, None] * centre.c
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
    if weights is None:
        return [stats.sums([group for c in labels or [None] for group in stats.groups_of(c)])]
    values = weights.tolist()  # the weights scale whole matrices, as numbers
    present = [c for c in labels or range(stats.num_classes) if values[c] != 0]
    return [stats.sums(stats.groups_of(c), values[c]) for c in present]


Targets: TypeAlias = Callable[[Centre | None], tuple[Tensor, Tensor]]
"""Sums of t (q - c) (K, J) and of the targets t (K,) in steps, for the integers c near a mean; in integers up to there."""


class RidgeProblem(NamedTuple):
    """A ridge problem: which sums go in, and how.

    Attributes:
        groups: sums of q q^T, with their weights.
        targets: the sums for the right-hand side.
        J, units, intercept: features, units of features and targets with rho, and "free", "penalized" or "none".
        standard: the standardization of the features, whose unit is then 1.
        n: total weight of the samples, if it is known without a read from the device.
    """

    groups: list[GroupSums]
    targets: Targets
    J: int
    units: Units
    intercept: str
    standard: Standardization | None = None
    n: float | None = None

    @property
    def size(self) -> int:
        """D, which is J, or J + 1 with a penalized intercept, a constant feature."""
        return self.J + (self.intercept == "penalized")

    @property
    def feature(self) -> float:
        """Unit of the features as they are solved for."""
        return self.units.feature if self.standard is None else 1.0

    def write_matrix(self, work: Tensor, ridge: float, rho: float) -> Centre | None:
        """Write the matrix (n, n), with ``ridge`` in grid units, or with rho if features are standardised; return the mean."""
        J, D, standard = self.J, self.size, self.standard
        if standard is None:
            return fill_system(work, self.groups, J, ridge, self.intercept, rho)
        about = None if self.intercept == "free" else standard.centre
        centre = fill_system(work, self.groups, J, 0.0, self.intercept, 0.0, about)
        work[:J, :J].div_(standard.deviation).div_(standard.deviation[:, None])
        work[J:D, :J].div_(standard.deviation)
        work.diagonal()[:D].add_(rho)
        return centre

    def right_hand_side(self, centre: Centre | None) -> tuple[Tensor, Tensor]:
        """Sums of centred rows times targets (K, D), and of the targets (K,), float64."""
        rhs, y = (part.to(torch.float64) for part in self.targets(centre))
        if centre is not None:
            rhs = rhs - y[:, None] * (centre.rest / centre.n)
        if self.standard is not None:
            rhs = rhs / self.standard.deviation
        return (torch.cat([rhs, y[:, None]], 1) if self.size > self.J else rhs), y

    def means(self, centre: Centre | None, y: Tensor) -> tuple[Tensor, Tensor, float]:
        """The mean row (D,) and target (K,), and the total weight; zeros and 0 unless the intercept is free."""
        if centre is None or self.intercept != "free":
            return y.new_zeros(self.size), torch.zeros_like(y), 0.0
        mean = centre.mean * self.feature if self.standard is None else self.standard.rows(centre.mean)
        return mean, y / centre.n, float(centre.n) if self.n is None else self.n


def solve_problem(problem: RidgeProblem, work: Tensor | None = None) -> SolvedSystem:
    """Solve a ridge problem by one Cholesky factorization: w' = sqrt(rho) w, in the coordinates of :mod:`~.solution`.

    ``work`` is a :func:`~torchlssvm.functional.system.workspace`, which is overwritten by the factor. If rounding has removed
    the ridge, eigenvalues are raised to the ridge, and ``share`` is 0. Raises ConvergenceError if float64 cannot hold the
    system.
    """
    D, rho, ridge = problem.size, problem.units.rho, grid_ridge(problem.units.rho, problem.feature)
    work = workspace(D, problem.groups[0].packed.device) if work is None else work
    centre = problem.write_matrix(work, ridge, rho)
    rhs, y = problem.right_hand_side(centre)
    mean, beta, n = problem.means(centre, y)
    units: Tensor | float = math.sqrt(ridge)
    if D > problem.J:
        units = torch.full((D,), math.sqrt(ridge), dtype=torch.float64, device=rhs.device)
        units[problem.J] = math.sqrt(rho)
    squares = work.diagonal()[:D].clone()
    factor = factor_(work, D)
    (info,), (share,) = checks.to_host(factor.info, (factor.L.diagonal()[:D].square() / squares).amin())
    if info != 0:
        share = 0.0
        problem.write_matrix(work, ridge, rho)
        top, floor = float(work.diagonal()[:D].amax()), min(ridge, rho) if D > problem.J else ridge
        if not math.isfinite(top):
            raise ConvergenceError(
                f"the system cannot be solved in float64: its largest entry is {top:.1e} beside a ridge of {floor:.1e}, in "
                "grid units. Use class weights of a usual size. The samples are still held."
            )
        factor, _ = clamped_factor(work, D, work.new_tensor(floor))
    w = factor.solve(rhs).mT * (units[:, None] if isinstance(units, Tensor) else units)
    target = problem.units.target
    return SolvedSystem(w * target, beta * target, mean * (1.0 / math.sqrt(rho)), n or 1.0, factor, units, share)


def head_problem(
    stats: Statistics, units: Units, intercept: str, weights: Tensor | None, labels: tuple[int, int] | None,
    standard: Standardization | None,
) -> RidgeProblem:  # fmt: skip
    """The problem of a head. weights: (K,) by class; labels: only these two classes, one against the other."""
    return RidgeProblem(
        weighted_sums(stats, weights, labels), partial(coded_sums, stats, weights, labels), stats.in_features, units,
        intercept, standard, float(stats.n) if weights is None and labels is None else None,
    )  # fmt: skip


def solve(
    stats: Statistics, units: Units, intercept: str, weights: Tensor | None = None, labels: tuple[int, int] | None = None,
    work: Tensor | None = None, standard: Standardization | None = None,
) -> SolvedSystem:  # fmt: skip
    """Solve from statistics; arguments as for :func:`head_problem` and :func:`solve_problem`."""
    problem = head_problem(stats, units, intercept, weights, labels, standard)
    solved = solve_problem(problem, work)
    error = torch.finfo(torch.float64).eps / solved.share if solved.share else math.inf
    if error > 1e-9:
        warn_small_rho(units.rho, error)
    return solved


def warn_small_rho(rho: float, error: float) -> None:
    """Report the relative error of scores, infinite if the system is singular."""
    off = (
        f"off by {error:.0e} of their size"
        if math.isfinite(error)
        else "wrong: the system is singular to working precision"
    )
    warnings.warn(
        f"rho = {rho:.1e} is small for these features (fewer samples than features?): scores may be {off}. Use a larger rho, "
        "or KernelLSSVM(Linear()), which keeps the samples.",
        NumericalWarning,
        stacklevel=3,
    )


def moments(
    stats: Statistics, units: Units, intercept: str, weights: Tensor | None = None, labels: tuple[int, int] | None = None,
    standard: Standardization | None = None,
) -> Moments:  # fmt: skip
    """The normal equations themselves, in real units; arguments as for :func:`solve`, but rho plays no part."""
    problem = head_problem(stats, units, intercept, weights, labels, standard)
    J, D = problem.J, problem.size
    work = torch.empty(D, D, dtype=torch.float64, device=stats.device)
    centre = problem.write_matrix(work, 0.0, 0.0)
    rhs, y = problem.right_hand_side(centre)
    steps = torch.full((D,), problem.feature, dtype=torch.float64, device=work.device)
    steps[J:] = 1.0
    work.mul_(steps).mul_(steps[:, None])
    G = work.tril() + work.tril(-1).mT
    mu, beta, weight = problem.means(centre, y)
    T = _squares(stats, problem.targets(None)[1], weights, labels, intercept == "free") * units.target**2
    return Moments(G, (rhs * steps).mT * units.target, T, mu, beta * units.target, weight)


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


def grid_ridge(rho: float, step: float) -> float:
    """rho in grid units, rho / step^2. Raises ConvergenceError if float64 cannot hold it."""
    most = 1e300 * step**2  # up to 1e300, float64 holds the ridge plus sums of squares of up to 2^63
    if rho > most:
        raise ConvergenceError(
            f"rho = {rho:.1e} is too large for features in steps of {step:.1e}: in grid units it is beyond float64. Use a rho "
            f"of at most {most:.1e}. The samples are still held."
        )
    return rho / step**2
