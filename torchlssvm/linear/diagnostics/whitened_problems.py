"""Least-squares problems of a head, one (one-vs-rest, float targets) or one for each pair, as diagnostics see them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from torchlssvm.functional import checks
from torchlssvm.functional.row_normalization import normalized
from torchlssvm.functional.spectrum import Spectrum, spectrum
from torchlssvm.functional.votes import votes
from torchlssvm.functional.whitened import Whitened, inverse_lower
from torchlssvm.linear import normal_equations as normal
from torchlssvm.linear.discriminant_rule import resolve_rule
from torchlssvm.linear.normal_equations import class_weights
from torchlssvm.linear.solvers import Solver, SolverOptions, code_labels, real_targets, scaled_rows
from torchlssvm.linear.standardization import Standardization, standardization
from torchlssvm.statistics import Statistics
from torchlssvm.statistics.batch import GridChoices, check_batch

WHOLE_SHARE = 1 - 1e-12
"""Share of the weight held above which samples count as all samples: float64 weights add up only to rounding."""


@dataclass(frozen=True)
class HeadView:
    """Read-only view of a fitted head for the diagnostics. The head must not change while the view is in use.

    Attributes:
        in_features, num_classes, multiclass, device: of the head.
        options: rho, intercept and class weights.
        statistics: None in the compact form.
        solver: the head's solver, up to date.
        w, b: weights (J, outputs) and intercepts (outputs,).
        n, counts: the number of samples, in all and by class (K,) float64.
        exact: True when samples are summed on a grid.
        choices: labels or values, and the grids in use.
        normalize: None, or how rows are normalized before the grid.
    """

    in_features: int
    num_classes: int
    multiclass: str
    device: torch.device
    options: SolverOptions
    statistics: Statistics
    solver: Solver
    w: Tensor
    b: Tensor
    n: int | float
    counts: Tensor
    exact: bool
    choices: GridChoices
    normalize: str | None = None

    @property
    def intercept(self) -> str:
        """Treatment of the constant: "free", "penalized" or "none"."""
        return self.options.intercept

    @property
    def units(self) -> normal.Units:
        """Units of features and targets, and rho."""
        return normal.Units.of(self.choices, self.options.rho)

    @cached_property
    def standard(self) -> Standardization | None:
        """Standardization of the samples held; None for features as they are."""
        stats = self.statistics
        return standardization(stats) if stats is not None and stats.scale else None

    @cached_property
    def system(self) -> Whitened:
        """The shared system, whitened: from the factor of the last solve if there is one, otherwise from a new solve."""
        return self.solver.whitened() or Problem(self).whitened(class_weights(self.options.class_weight, self.counts))

    @property
    def rule(self) -> str:
        """The rule in use: "least_squares" or "lda"."""
        return resolve_rule(self.options.rule, self.statistics)

    def require_least_squares(self, name: str) -> None:
        """ValueError unless the weights come from least squares."""
        if self.rule != "least_squares":
            raise ValueError(f"{name} is defined for rule='least_squares'; this head has rule={self.rule!r}")

    def scores(self, x: Tensor) -> Tensor:
        """Scores (B, K) as the head returns them. x: (B, J)."""
        scores = normalized(x.to(torch.float64), self.normalize) @ self.w + self.b
        return votes(scores, self.num_classes) if self.multiclass == "ovo" else scores


class Labelled(Protocol):
    """The part of a head, or of a view, that a check of labels needs."""

    @property
    def num_classes(self) -> int:
        """Number of classes."""

    @property
    def device(self) -> torch.device:
        """Device of the state."""


@dataclass(frozen=True)
class SampleChange:
    """Hypothetical changes of samples, one by one or in groups: their labels or targets before and after.

    Attributes:
        x: (B, J) rows as given; for a margin head in steps of its grid.
        old, new: labels (B,) or real targets (B, K) before and after; None for not held.
        weight: (B,) how often each was added.
        weighted: False if every sample was added once.
        members: rows of each change of several samples; None where each sample is a change.
        slots: (B,) places of the rows that a margin head holds; None where they are to come.
    """

    x: Tensor
    old: Tensor | None
    new: Tensor | None
    weight: Tensor
    weighted: bool = True
    members: list[Tensor] | None = None
    slots: Tensor | None = None

    def __len__(self) -> int:
        return int(self.x.shape[0])

    @property
    def labels(self) -> Tensor | None:
        """Labels (B,) as held, or as they come; None for float targets."""
        y = self.old if self.old is not None else self.new
        return y if y is not None and y.ndim == 1 else None

    @property
    def values(self) -> Tensor | None:
        """Float targets (B, K) as held, or as they come; None for labels."""
        y = self.old if self.old is not None else self.new
        return y if y is not None and y.ndim == 2 else None

    @property
    def count(self) -> int:
        """The number of changes."""
        return len(self) if self.members is None else len(self.members)

    def rows(self, i: int) -> Tensor:
        """Rows of a change."""
        return torch.tensor([i], device=self.x.device) if self.members is None else self.members[i]


def check_samples(view: HeadView, x: Any, y: Any, weight: Any = None) -> SampleChange:
    """Samples as the head would take them in; raises what ``add`` would."""
    batch = check_batch(
        x, y, None, None, J=view.in_features, K=view.num_classes, folds=0, device=view.device, exact=view.exact,
        choices=view.choices, wanted=view.choices, normalize=view.normalize,
    )  # fmt: skip
    if weight is None:
        times = torch.ones(batch.x.shape[0], dtype=torch.float64, device=view.device)
    else:
        given = checks.weights(weight, batch.x)
        assert given is not None
        times = given
        bad = ~(torch.isfinite(times) & (times > 0)) | (times != times.floor() if view.exact else times < 0)
        if bool(bad.any()):
            first = int(bad.nonzero()[0])
            kind = "an integer >= 1 (a multiplicity)" if view.exact else "a finite number > 0"
            raise ValueError(f"weight must be {kind} for each sample, got {times[first].item()!r} at index {first}")
    y = real_targets(batch, view.num_classes) if batch.labels is None else batch.labels
    return SampleChange(batch.x, y, None, times, weight is not None)


def check_labels(view: Labelled, y: Any, count: int, name: str) -> Tensor:
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
    if view.standard is None:
        return scaled_rows(q, unit, view.options)
    return scaled_rows(view.standard.rows(q * (unit / view.standard.resolution)), 1.0, view.options)


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


def other_rows(view: HeadView, x: Any) -> Tensor:
    """Rows (B, D) of samples that are not held, as ``forward`` takes them. x: (B, J)."""
    phi = checks.features(x, view.in_features, view.device).to(torch.float64)
    return system_rows(view, normalized(phi, view.normalize), 1.0)


class Problem:
    """One system: of all classes, or of two (``pair``: the first is +1)."""

    def __init__(self, view: HeadView, pair: tuple[int, int] | None = None):
        self.view, self.pair = view, pair
        self.counts = view.counts if pair is None else view.counts[list(pair)]

    @property
    def follows_counts(self) -> bool:
        """True when class weights depend on which samples are held."""
        return self.view.options.follows_counts

    @property
    def total(self) -> float:
        """The number of samples (their multiplicities) in this problem."""
        if self.pair is None:
            return float(self.view.n)
        return float(self.counts.sum())

    def local(self, labels: Tensor) -> Tensor:
        """Labels as numbers of this problem's classes, -1 for others. labels: (B,)."""
        if self.pair is None:
            return labels
        first, second = ((labels == c).to(torch.int64) for c in self.pair)
        return second + (first + second) - 1

    def targets(self, local: Tensor) -> Tensor:
        """Targets (B, K), or (B, 1) for a pair; rows of other classes are meaningless. local: (B,)."""
        if self.pair is None:
            return code_labels(local.clamp(min=0), self.view.num_classes)
        return (1.0 - 2.0 * local.clamp(min=0).to(torch.float64))[:, None]

    def class_weights(self, counts: Tensor | None = None) -> Tensor | None:
        """Weights by class, of this problem's classes, for given counts (K,) or those held."""
        option = self.view.options.class_weight
        if option is None or isinstance(option, Tensor):
            return option if option is None or self.pair is None else option[list(self.pair)]
        return class_weights(option, self.counts if counts is None else counts)

    def whitened(self, weights: Tensor | None) -> Whitened:
        """The system for these class weights, from a solve."""
        view, stats = self.view, self.view.statistics
        if self.pair is not None and self.total == 0:  # no sample of either class: its score is 0
            D = view.in_features + (view.intercept == "penalized")
            zero = torch.zeros(D, 1, dtype=torch.float64, device=view.device)
            eye = torch.eye(D, dtype=torch.float64, device=view.device)
            return Whitened(eye, zero[:, 0], zero, zero[0], 0.0)
        assert stats is not None  # the compact form has one system, which is whitened already
        base = normal.solve(
            stats, view.units, view.intercept, self.weights_of_all_classes(weights), self.pair, standard=view.standard
        )
        F = inverse_lower(base.factor.L[: base.w.shape[0], : base.w.shape[0]]).mul_(base.scale)
        return Whitened(F, base.mu, base.w, base.beta, base.n if view.intercept == "free" else 0.0)

    def weights_of_all_classes(self, weights: Tensor | None) -> Tensor | None:
        """Class weights of this problem as weights of all classes."""
        if self.pair is None or weights is None:
            return weights
        out = torch.zeros(self.view.num_classes, dtype=torch.float64, device=weights.device)
        out[list(self.pair)] = weights
        return out

    def kinds(
        self, old: Tensor | None, new: Tensor | None, weight: Tensor
    ) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """Class weights after a change of one sample from label ``old`` to ``new`` (local, -1: not held).

        Yields rows (an index, or None for all) and the class weights after the change. One kind, unless weights follow counts.
        """
        if not self.follows_counts:
            yield None, self.class_weights()
            return
        none = torch.full_like(weight, -1.0)
        table = torch.stack([none if y is None else y.to(torch.float64) for y in (old, new)] + [weight], 1)
        values, which = table.unique(dim=0, return_inverse=True)
        for i, (before, after, times) in enumerate(values.tolist()):
            counts = self.counts.clone()
            if before >= 0:
                counts[int(before)] -= times
            if after >= 0:
                counts[int(after)] += times
            if float(counts.sum()) > 0:
                yield (which == i).nonzero()[:, 0], self.class_weights(counts)

    def cases(
        self, old: Tensor | None, new: Tensor | None, weight: Tensor
    ) -> Iterator[tuple[Tensor | None, Whitened, Tensor | None]]:
        """As :meth:`kinds`, with the system in which the change is judged: samples as *before*, class weights as *after*."""
        for rows, weights in self.kinds(old, new, weight):
            yield rows, self.main() if rows is None else self.whitened(weights), weights

    def spectrum(self, weights: Tensor | None, stats: Statistics | None = None) -> Spectrum:
        """The eigendecomposition behind every rho, for these class weights. ``stats``: instead of the head's own.

        Features are standardised as those statistics have it, where the head solves so.
        """
        view = self.view
        mine = stats is None
        stats = stats or view.statistics
        standard = view.standard if mine or not stats.scale else standardization(stats)
        m = normal.moments(stats, view.units, view.intercept, self.weights_of_all_classes(weights), self.pair, standard)
        return spectrum(m.G, m.rhs, m.T, m.mu, m.beta, m.weight, self.total if mine else float(stats.n))

    def main(self) -> Whitened:
        """The system as it is."""
        return self.view.system if self.pair is None else self.whitened(self.class_weights())


def problems(view: HeadView) -> list[Problem]:
    """All problems of a head: one, or one for each pair of classes."""
    if view.multiclass == "ovo":
        return [Problem(view, pair) for pair in itertools.combinations(range(view.num_classes), 2)]
    return [Problem(view)]


def sample_weights(local: Tensor | None, weights: Tensor | None, times: Tensor) -> Tensor:
    """d (B,): multiplicity times class weight; 0 for samples of other classes. local: (B,), None for float targets."""
    if local is None:
        return times
    d = times if weights is None else times * weights[local.clamp(min=0)]
    return torch.where(local >= 0, d, torch.zeros_like(d))
