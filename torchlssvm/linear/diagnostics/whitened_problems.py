"""The least-squares problems of a head for the diagnostics: one (one-vs-rest, float targets), or one for each pair."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchlssvm.errors import NumericalWarning
from torchlssvm.functional import checks
from torchlssvm.functional.row_normalization import normalized
from torchlssvm.functional.spectrum import LARGE_FEATURES, Spectrum, gcv_by_band, spectrum
from torchlssvm.functional.whitened import Whitened, inverse_lower, joint_change
from torchlssvm.linear import normal_equations as normal
from torchlssvm.linear.discriminant_rule import resolve_rule
from torchlssvm.linear.normal_equations import class_weights
from torchlssvm.linear.row_scale import RowScale
from torchlssvm.linear.solvers import Solver, SolverOptions, code_labels, real_targets, weighted_labels
from torchlssvm.linear.standardization import Standardization, standardization
from torchlssvm.statistics import Statistics
from torchlssvm.statistics.batch import GridChoices

if TYPE_CHECKING:
    from torchlssvm.linear.linear_head import LinearHead


WHOLE_SHARE = 1 - 1e-12
"""Share of the weight held above which samples count as all samples, since float64 weights add up only to rounding."""


@dataclass(frozen=True)
class HeadView:
    """Read-only view of a fitted head for the diagnostics. The head must not change while the view is in use.

    Attributes:
        multiclass: "ovr" or "ovo".
        options: rho, intercept and class weights.
        statistics: the sums of the current samples.
        solver: the head's solver, up to date.
        w, b: weights (J, outputs) and intercepts (outputs,).
    """

    multiclass: str
    options: SolverOptions
    statistics: Statistics
    solver: Solver
    w: Tensor
    b: Tensor

    @property
    def in_features(self) -> int:
        """J, the number of features."""
        return self.statistics.in_features

    @property
    def num_classes(self) -> int:
        """K, the number of classes or targets."""
        return self.statistics.num_classes

    @property
    def device(self) -> torch.device:
        """Device of the state."""
        return self.statistics.device

    @cached_property
    def n(self) -> float:
        """The number of samples (their total weight)."""
        return float(self.statistics.n)

    @cached_property
    def counts(self) -> Tensor:
        """Samples per class (K,), float64."""
        return self.statistics.counts.to(torch.float64)

    @property
    def intercept(self) -> str:
        """Treatment of the constant: "free", "penalized" or "none"."""
        return self.options.intercept

    @cached_property
    def choices(self) -> GridChoices:
        """Labels or values, and the grids in use."""
        stats = self.statistics
        return GridChoices(stats.kind, stats.grid, stats.target_grid if stats.kind == "values" else None)

    @property
    def units(self) -> normal.Units:
        """Units of features and targets, and rho."""
        return normal.Units.of(self.choices, self.options.rho)

    @cached_property
    def standard(self) -> Standardization | None:
        """Standardization of the current samples; None for features as they are."""
        return standardization(self.statistics)

    @cached_property
    def system(self) -> Whitened:
        """The shared system, whitened: from the factor of the last solve if there is one, otherwise from a new solve."""
        return self.solver.whitened() or Problem(self).solved(class_weights(self.options.class_weight, self.counts))

    @property
    def by_label(self) -> bool:
        """True if each label has a system of its own."""
        return weighted_labels(self.statistics, self.options)

    def of_label(self, label: int) -> HeadView:
        """One label as a pair of classes: samples with it (0) against those without it (1)."""
        mine = slice(label, label + 1)
        stats, options = self.statistics.of_label(label), self.options.of_label(label)
        return HeadView("ovo", options, stats, self.solver, self.w[:, mine], self.b[mine])

    def require_shared(self, name: str) -> None:
        """Raise ValueError if each label has a system of its own."""
        if self.by_label:
            raise ValueError(
                f'{name} does not support class_weight with targets="multilabel": set class_weight to None'
            )

    @property
    def rule(self) -> str:
        """The rule in use: "least_squares" or "lda"."""
        return resolve_rule(self.options.rule, self.statistics)

    def require_least_squares(self, name: str) -> None:
        """Raise ValueError unless the weights come from least squares."""
        if self.rule != "least_squares":
            raise ValueError(f"{name} is defined for rule='least_squares'; this head has rule={self.rule!r}")


@dataclass(frozen=True)
class SampleChange:
    """Hypothetical changes of samples, one by one or in groups: their labels or targets before and after.

    Attributes:
        x: (B, J) rows as given; for a margin head in steps of its grid.
        old, new: labels (B,) or real targets (B, K) before and after; None if the samples are not held then.
        weight: (B,) how often each was added.
        members: rows of each change of several samples; None if each sample is a change.
        slots: (B,) places of the rows that a margin head holds; None if the rows are not held yet.
        heaviest: the largest weight of a change, if it is known without a read from the device; otherwise None.
    """

    x: Tensor
    old: Tensor | None
    new: Tensor | None
    weight: Tensor
    members: list[Tensor] | None = None
    slots: Tensor | None = None
    heaviest: float | None = None

    def __len__(self) -> int:
        return int(self.x.shape[0])

    @property
    def y(self) -> Tensor:
        """Labels (B,) or targets (B, K) as held, or as they come."""
        y = self.new if self.old is None else self.old
        assert y is not None
        return y

    @property
    def count(self) -> int:
        """The number of changes."""
        return len(self) if self.members is None else len(self.members)

    def rows(self, i: int) -> Tensor:
        """Rows of a change."""
        return torch.tensor([i], device=self.x.device) if self.members is None else self.members[i]

    def batches(self, numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Changes of equally many samples: their numbers (b,) and their rows (b, L). numbers: those of the changes wanted."""
        if self.members is None:
            yield numbers, numbers[:, None]
            return
        sizes: dict[int, list[int]] = {}
        for i in numbers.tolist():
            sizes.setdefault(len(self.members[i]), []).append(i)
        for some in sizes.values():
            yield torch.tensor(some, device=self.x.device), torch.stack([self.members[i] for i in some])

    @cached_property
    def number(self) -> Tensor:
        """The number of the change that each row is part of (B,)."""
        out = torch.arange(len(self), device=self.x.device)
        for i, rows in enumerate(self.members or ()):
            out[rows] = i
        return out

    def summed(self, values: Tensor) -> Tensor:
        """Sums (changes,) over the samples of each change. values: (B,)."""
        return values.new_zeros(self.count).index_add_(0, self.number, values)

    def check_rest(self, held: float) -> None:
        """Raise ValueError if a change leaves no samples, since an empty model has no scores. held: their number before."""
        if self.new is not None or not len(self):
            return
        heaviest = float(self.summed(self.weight).max()) if self.heaviest is None else self.heaviest
        if heaviest >= held * WHOLE_SHARE:
            what = "the only sample" if self.members is None else "a group that is all there is"
            raise ValueError(f"the head holds {held:g} samples: leaving out {what} leaves nothing to learn from")


def check_groups(groups: Any, count: int, device: torch.device) -> list[Tensor] | None:
    """The rows of each group. groups: (B,) numbers, or a list of names; None stays None."""
    if groups is None:
        return None
    names = groups.tolist() if hasattr(groups, "tolist") else list(groups)
    if len(names) != count:
        raise ValueError(f"x and groups differ in length: {count} rows, {len(names)} groups")
    where: dict[Any, list[int]] = {}
    for i, name in enumerate(names):
        where.setdefault(name, []).append(i)
    return [torch.tensor(rows, device=device) for rows in where.values()]


def check_samples(
    view: HeadView | LinearHead, x: Any, y: Any, weight: Any = None, groups: Any = None, gridded: bool = False
) -> SampleChange:
    """Check samples to be left out, with the same errors as ``add``. gridded: they are already normalized and on the grid."""
    stats = view.statistics
    batch = stats.zero(folds=0).check(x, y, like=stats, gridded=gridded)
    times = checks.weights(weight, batch.x)
    members = check_groups(groups, len(batch.x), view.device)
    heaviest = None
    if times is None:
        times = torch.ones(len(batch.x), dtype=torch.float64, device=view.device)
        heaviest = float(max(map(len, members), default=0)) if members is not None else 1.0
    else:
        bad = ~(torch.isfinite(times) & (times > 0)) | (times != times.floor() if stats.exact else times < 0)
        if bool(bad.any()):
            first = int(bad.nonzero()[0])
            kind = "an integer >= 1 (a multiplicity)" if stats.exact else "a finite number > 0"
            raise ValueError(f"weight must be {kind} for each sample, got {times[first].item()!r} at index {first}")
    y = real_targets(batch, view.num_classes) if batch.labels is None else batch.labels
    return SampleChange(batch.x, y, None, times, members, heaviest=heaviest)


def check_changes(
    view: HeadView | LinearHead, x: Any, y: Any, what: str, y_new: Any, weight: Any, groups: Any, gridded: bool = False
) -> SampleChange:
    """Check samples to be removed, added or relabelled."""
    samples = check_samples(view, x, y, weight, groups, gridded)
    if what == "relabel":
        if samples.y.ndim == 1:
            return replace(samples, new=check_labels(view, y_new, len(samples), "y_new"))
        return replace(samples, new=check_samples(view, x, y_new).y)
    return samples if what == "remove" else replace(samples, old=None, new=samples.old)


def check_labels(view: HeadView | LinearHead, y: Any, count: int, name: str) -> Tensor:
    """Labels (B,) in range."""
    labels = checks.as_tensor(y, name, view.device)
    if labels.shape != (count,) or labels.dtype not in checks.INTEGER_DTYPES:
        raise ValueError(
            f"{name} must be integer labels of shape ({count},), got {tuple(labels.shape)}, {labels.dtype}"
        )
    low, high = torch.stack(torch.aminmax(labels)).tolist() if count else (0, 0)
    if not 0 <= low <= high < view.num_classes:
        raise ValueError(f"{name} holds the label {low if low < 0 else high}, outside 0..{view.num_classes - 1}")
    return labels.to(torch.int64)


def held_rows(view: HeadView, x: Tensor) -> Tensor:
    """Rows (B, D), as the head summed them: on its grid, standardised where it solves so. x: (B, J)."""
    grid = view.choices.grid
    q = x.to(torch.float64, copy=True) if grid is None else grid.quantize(x)
    return system_rows(view, q, grid.resolution if grid else 1.0)


def system_rows(view: HeadView, q: Tensor, unit: float) -> Tensor:
    """Rows (B, D) in the coordinates of the solution. q: (B, J) float64, features in units of ``unit``."""
    if view.standard is not None:
        q = q * (unit / view.standard.resolution)
    return RowScale(unit, view.options.rho, view.intercept, view.standard).rows(q)


def gridded(view: HeadView, x: Tensor) -> Tensor:
    """Features (B, J) on the head's grid, in real units, never the caller's memory. x: (B, J)."""
    grid = view.choices.grid
    return x.to(torch.float64, copy=True) if grid is None else grid.snap(x)


def real_rows(view: HeadView, x: Tensor) -> Tensor:
    """[phi (, 1)] (B, D) on the head's grid, standardised or in real units: what a :class:`Spectrum` is about. x: (B, J)."""
    phi = gridded(view, x)
    if view.standard is not None:
        phi = view.standard.rows(phi / view.standard.resolution)
    return torch.nn.functional.pad(phi, (0, 1), value=1.0) if view.intercept == "penalized" else phi


def other_features(view: HeadView, x: Any) -> Tensor:
    """Features (B, J) of samples that are not held, as ``forward`` multiplies them by w."""
    phi = checks.features(x, view.in_features, view.device).to(torch.float64)
    return normalized(phi, view.statistics.normalize)


class Move(NamedTuple):
    """Changes of a system: whitened rows U (b, L, D), T (b, L, K), scores f (b, L, K) before, change of weight delta (b, L)."""

    U: Tensor
    T: Tensor
    f: Tensor
    delta: Tensor

    @property
    def leverage(self) -> Tensor:
        """The largest eigenvalue (b,) of D^(1/2) G D^(1/2), D the weights that leave; or the trace, a bound, if that is low.

        For one sample that is removed, this is its leverage.
        """
        V = self.U * self.delta.clamp(max=0.0).neg().sqrt()[..., None]
        bound = V.square().sum((1, 2))
        if V.shape[1] > 1:
            high = (bound > 0.5).nonzero()[:, 0]
            V = V[high]
            bound[high] = torch.linalg.eigvalsh(V @ V.mT if V.shape[1] <= V.shape[2] else V.mT @ V)[:, -1]
        return bound


class Problem:
    """One system: of all classes, or of two (``pair``: the first is +1)."""

    def __init__(self, view: HeadView, pair: tuple[int, int] | None = None):
        self.view, self.pair = view, pair

    @property
    def total(self) -> float:
        """The number of samples (their multiplicities) in this problem."""
        return self.view.n if self.pair is None else float(self.view.counts[list(self.pair)].sum())

    def targets(self, y: Tensor) -> Tensor:
        """Targets (B, K) of labels (B,), or (B, 1) for a pair; rows of other classes are meaningless. Float targets stay."""
        if y.ndim == 2:
            return y
        if self.pair is None:
            return code_labels(y, self.view.num_classes)
        return torch.where(y == self.pair[0], 1.0, -1.0).to(torch.float64)[:, None]

    def sample_weights(self, y: Tensor | None, weights: Tensor | None, times: Tensor) -> Tensor:
        """d (B,): multiplicity times class weight; 0 for samples of other classes, and for None. y: as in a change."""
        if y is None or y.ndim == 2:
            return torch.zeros_like(times) if y is None else times
        d = times if weights is None else times * weights[y]
        return d if self.pair is None else d * ((y == self.pair[0]) | (y == self.pair[1]))

    def class_weights(self, counts: Tensor | None = None) -> Tensor | None:
        """Weights (K,) by class for given counts (K,) or those held; those of other classes are not used."""
        return class_weights(self.view.options.class_weight, self.view.counts if counts is None else counts, self.pair)

    def solved(self, weights: Tensor | None) -> Whitened:
        """The system of the current samples for these class weights, from a solve."""
        view = self.view
        base = normal.solve(view.statistics, view.units, view.intercept, weights, self.pair, standard=view.standard)
        F = inverse_lower(base.factor.L[: base.w.shape[0], : base.w.shape[0]]).mul_(base.units)
        return Whitened(F, base.mu, base.w, base.beta, base.n if view.intercept == "free" else 0.0, base.share)

    def whitened(self, weights: Tensor | None) -> Whitened:
        """As :meth:`solved`, but taken from the head's own solve if that is the same system."""
        shared = self.pair is None and not self.view.options.follows_counts
        return self.view.system if shared else self.solved(weights)

    def touched(self, change: SampleChange) -> Tensor:
        """Numbers of the changes that change samples of this problem."""
        old, new = (self.sample_weights(y, None, change.weight) for y in (change.old, change.new))
        return change.summed(old + new).nonzero()[:, 0]

    def stays(self, change: SampleChange) -> Tensor:
        """Mask (changes,) of the changes after which some of the present samples are still as they were."""
        return change.summed(self.sample_weights(change.old, None, change.weight)) < self.total * WHOLE_SHARE

    def blocks(self, change: SampleChange, some: Tensor) -> Iterator[tuple[Tensor | None, list[tuple[Tensor, Tensor]]]]:
        """Some changes by the class weights after them: these weights, and numbers (b,) and rows (b, L) of the changes.

        A change is judged in the system with the samples from *before* it and the class weights from *after* it. A change that
        removes all present samples has no such system and is omitted. some: the numbers of the changes.
        """
        if change.heaviest is None or change.heaviest >= self.total * WHOLE_SHARE:
            some = some[self.stays(change)[some]]
        if not len(some):
            return
        if not self.view.options.follows_counts:
            yield self.class_weights(), list(change.batches(some))
            return
        counts, kinds = counts_after(change, self.view.counts)[some].unique(dim=0, return_inverse=True)
        for i, after in enumerate(counts):
            yield self.class_weights(after), list(change.batches(some[kinds == i]))

    def moved(self, system: Whitened, change: SampleChange, rows: Tensor, weights: Tensor | None) -> Move:
        """The move of a system by changes of equally many samples. rows: (b, L); weights: by class, after the change."""
        flat, shape = rows.reshape(-1), (*rows.shape, -1)
        v, times = system.centred(held_rows(self.view, change.x[flat])), change.weight[flat]
        U, f = system.rows(v).view(shape), system.scores(v).view(shape)
        delta, c = torch.zeros_like(times), torch.zeros_like(f)
        for y, sign in ((change.old, -1.0), (change.new, 1.0)):
            if y is not None:
                d = sign * self.sample_weights(y[flat], weights, times)
                delta, c = delta + d, c + (d[:, None] * self.targets(y[flat])).view(shape)
        delta = delta.view(rows.shape)
        return Move(U, joint_change(U, delta, c, f), f, delta)

    def spectrum(self, weights: Tensor | None, stats: Statistics | None = None) -> Spectrum:
        """The eigendecomposition for every rho, with these class weights. ``stats``: used instead of the head's statistics.

        If the head solves for standardised features, the same statistics standardise them.
        """
        view = self.view
        mine = stats is None
        stats = stats or view.statistics
        standard = view.standard if mine else standardization(stats)
        m = normal.moments(stats, view.units, view.intercept, weights, self.pair, standard)
        return spectrum(m.G, m.rhs, m.T, m.mu, m.beta, m.weight, self.total if mine else float(stats.n))

    def gcv(self, rhos: Tensor) -> tuple[Tensor, Tensor]:
        """Generalized cross-validation (r,) and degrees of freedom (r,) for each value of rho. rhos: (r,)."""
        view, weights = self.view, self.class_weights()
        if LARGE_FEATURES <= view.in_features < self.total - 2:
            m = normal.moments(view.statistics, view.units, view.intercept, weights, self.pair, view.standard)
            found = gcv_by_band(m.G, m.rhs, m.T, m.weight, self.total, rhos)
            if found is not None:
                return found
        return self.spectrum(weights).gcv(rhos)


def check_leverages(change: SampleChange, leverage: Tensor, share: float) -> None:
    """Refuse samples or groups that cannot be held, and report lost digits. leverage: (changes,); share: of the system."""
    if not len(leverage):
        return
    top, at = torch.stack([value.to(leverage.dtype) for value in leverage.max(0)]).tolist()  # one read of the device
    error = torch.finfo(torch.float64).eps / max(share, 1e-300)
    # 1e-6: the leverage of current samples is at most 1 plus this rounding; other samples can exceed it
    if top > 1 + max(1e-6, 10 * error):
        what = "sample" if change.members is None else "the group of sample"
        raise ValueError(
            f"{what} {int(change.rows(int(at))[0])} has a leverage of {top:.4g} > 1: it is not among the current samples. "
            "Leave-one-out takes the samples, labels and weights that were added."
        )
    warn_lost_digits(error / max(1.0 - top, 1e-300))


def warn_lost_digits(error: float) -> None:
    """Report a relative error of scores without a sample, if it is large. The error is an estimate from the condition."""
    if error > 1e-6:
        warnings.warn(
            f"scores without a sample have lost digits: they may be off by {min(1.0, error):.0e} of their size, since a sample "
            "determines its own prediction, or the features nearly determine one another. A larger rho is advised.",
            NumericalWarning,
            stacklevel=2,
        )


def counts_after(change: SampleChange, counts: Tensor) -> Tensor:
    """Samples by class after each change (changes, K); float targets change no count. counts: (K,), before."""
    out = counts.to(torch.float64).repeat(change.count, 1)
    for y, sign in ((change.old, -1.0), (change.new, 1.0)):
        if y is not None and y.ndim == 1:
            out.index_put_((change.number, y), sign * change.weight, accumulate=True)
    return out


def problems(view: HeadView) -> list[Problem]:
    """All problems of a head: one, or one for each pair of classes."""
    if view.multiclass == "ovo":
        return [Problem(view, pair) for pair in itertools.combinations(range(view.num_classes), 2)]
    return [Problem(view)]
