"""The least-squares problems of a head, one (one-vs-rest, float targets) or one for each pair, and how samples enter them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchlssvm.functional import checks
from torchlssvm.functional.spectrum import Spectrum, spectrum
from torchlssvm.functional.triangular import inverse_lower
from torchlssvm.functional.whitened import Whitened, from_inverse
from torchlssvm.linear import normal_equations as normal
from torchlssvm.linear.solvers import Pairwise, code_labels, scaled_rows
from torchlssvm.statistics import Statistics
from torchlssvm.statistics.batch import GridChoices, check_batch

if TYPE_CHECKING:
    from torchlssvm.linear.base import HeadBase


@dataclass(frozen=True)
class Samples:
    """Checked samples: x (B, J); labels (B,) or targets (B, K), real units; weight (B,), how often each was added."""

    x: Tensor
    labels: Tensor | None
    values: Tensor | None
    weight: Tensor

    def __len__(self) -> int:
        return int(self.x.shape[0])


def check_samples(head: HeadBase, x: Any, y: Any, weight: Any = None) -> Samples:
    """Samples as the head would take them in; raises what ``add`` would."""
    stats = head.statistics
    mine = head._engine.choices if stats is None else stats.choices
    wanted = GridChoices(None, head._grid, head._target_grid) if stats is None else stats.requested
    exact = head._grid is not None if stats is None else stats.exact
    batch = check_batch(
        x, y, None, None, J=head.in_features, K=head.num_classes, folds=0, device=head.device, exact=exact, choices=mine,
        wanted=wanted,
    )  # fmt: skip
    if weight is None:
        times = torch.ones(len(batch), dtype=torch.float64, device=head.device)
    else:
        given = checks.weights(weight, batch.x)
        assert given is not None
        times = given
        bad = ~(torch.isfinite(times) & (times > 0)) | (times != times.floor() if exact else times < 0)
        if not checks.is_fake(times) and bool(bad.any()):
            first = int(bad.nonzero()[0])
            kind = "an integer >= 1 (a multiplicity)" if exact else "a finite number > 0"
            raise ValueError(f"weight must be {kind} for each sample, got {times[first].item()!r} at index {first}")
    values = None
    if batch.labels is None:
        target = batch.choices.target_grid
        assert len(batch) == 0 or batch.targets is not None
        values = torch.zeros(0, head.num_classes, dtype=torch.float64, device=head.device)
        if batch.targets is not None:
            values = batch.targets * (target.resolution if target else 1.0)
    return Samples(batch.x, batch.labels, values, times)


def check_labels(head: HeadBase, y: Any, count: int, name: str) -> Tensor:
    """Labels (B,) in range."""
    labels = checks.as_tensor(y, name, head.device)
    if labels.shape != (count,) or labels.dtype not in checks.INTEGERS:
        raise ValueError(
            f"{name} must be integer labels of shape ({count},), got {tuple(labels.shape)}, {labels.dtype}"
        )
    host = checks.to_host(torch.stack(torch.aminmax(labels))) if count else None
    if host is not None and not 0 <= host[0][0] <= host[0][1] < head.num_classes:
        bad = host[0][0] if host[0][0] < 0 else host[0][1]
        raise ValueError(f"{name} holds the label {bad:g}, outside 0..{head.num_classes - 1}")
    return labels.to(torch.int64)


def held_rows(head: HeadBase, x: Tensor) -> Tensor:
    """Rows (B, D), as the head summed them: on its grid. x: (B, J)."""
    grid = head.grid
    q = x.to(torch.float64, copy=True) if grid is None else grid.quantize(x)
    return scaled_rows(q, grid.resolution if grid else 1.0, head._options)


def real_rows(head: HeadBase, x: Tensor) -> Tensor:
    """[phi (, 1)] (B, D) on the head's grid, in real units: what a :class:`Spectrum` is about. x: (B, J)."""
    grid = head.grid
    phi = x.to(torch.float64, copy=True) if grid is None else grid.snap(x)
    return torch.nn.functional.pad(phi, (0, 1), value=1.0) if head.intercept == "penalized" else phi


def other_rows(head: HeadBase, x: Any) -> Tensor:
    """Rows (B, D) of anything else, as ``forward`` takes it. x: (B, J)."""
    return scaled_rows(checks.features(x, head.in_features, head.device).to(torch.float64), 1.0, head._options)


class Problem:
    """One system: of all classes, or of two (``pair``: the first is +1)."""

    def __init__(self, head: HeadBase, pair: tuple[int, int] | None = None):
        """The head must not change while this is used."""
        self.head, self.pair = head, pair
        self.counts = head.counts.to(torch.float64)
        if pair is not None:
            self.counts = self.counts[list(pair)]

    @property
    def follows_counts(self) -> bool:
        """Whether class weights depend on which samples are held."""
        return self.head._options.follows_counts

    @property
    def total(self) -> float:
        """The number of samples (their multiplicities) in this problem."""
        if self.pair is None:
            return float(self.head.n)
        host = checks.to_host(self.counts.sum())
        return 1.0 if host is None else host[0][0]

    def local(self, labels: Tensor) -> Tensor:
        """Labels as numbers of this problem's classes, -1 for others. labels: (B,)."""
        if self.pair is None:
            return labels
        first, second = ((labels == c).to(torch.int64) for c in self.pair)
        return second + (first + second) - 1

    def targets(self, local: Tensor) -> Tensor:
        """Targets (B, K), or (B, 1) for a pair; rows of other classes are meaningless. local: (B,)."""
        if self.pair is None:
            return code_labels(local.clamp(min=0), self.head.num_classes)
        return (1.0 - 2.0 * local.clamp(min=0).to(torch.float64))[:, None]

    def class_weights(self, counts: Tensor | None = None) -> Tensor | None:
        """Weights by class, of this problem's classes, for given counts (K,) or those held."""
        option = self.head.class_weight
        if isinstance(option, Tensor):
            return option if self.pair is None else option[list(self.pair)]
        return normal.class_weights(option, self.counts if counts is None else counts)

    def whitened(self, weights: Tensor | None, stats: Statistics | None = None) -> Whitened:
        """The system for these class weights. ``stats``: instead of the head's own."""
        head, free = self.head, self.head.intercept == "free"
        if self.pair is not None and self.total == 0:  # no sample of either class: its score is 0
            D = head.in_features + (head.intercept == "penalized")
            zero = torch.zeros(D, 1, dtype=torch.float64, device=head.device)
            eye = torch.eye(D, dtype=torch.float64, device=head.device)
            return Whitened(eye, zero[:, 0], zero, zero[0], 0.0)
        stats = stats or head.statistics
        if stats is None:
            s = head._engine.solution
            return Whitened(from_inverse(s.inverse()), s.mu, s.w, s.beta, s.n if free else 0.0)
        base = normal.solve(stats, scale_of(head, stats), head.intercept, self.everywhere(weights), self.pair)
        D = base.w.shape[0]
        return Whitened(
            inverse_lower(base.factor.L[:D, :D]).mul_(base.scale), base.mu, base.w, base.beta, base.n if free else 0.0
        )

    def everywhere(self, weights: Tensor | None) -> Tensor | None:
        """Class weights of this problem as weights of all classes."""
        if self.pair is None or weights is None:
            return weights
        out = torch.zeros(self.head.num_classes, dtype=torch.float64, device=weights.device)
        out[list(self.pair)] = weights
        return out

    def kinds(
        self, old: Tensor | None, new: Tensor | None, weight: Tensor
    ) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """Which class weights a change of one sample from label ``old`` to ``new`` (local, -1: not held) leads to.

        Yields rows (an index, or None for all) and the class weights after the change. One kind, unless weights follow counts.
        """
        if not self.follows_counts or checks.is_fake(weight):
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
        """The same with the system in which the change is judged: samples as *before*, class weights as *after*."""
        for rows, weights in self.kinds(old, new, weight):
            yield rows, self.main(weights) if rows is None else self.whitened(weights), weights

    def spectrum(self, weights: Tensor | None, stats: Statistics | None = None) -> Spectrum:
        """The eigendecomposition behind every rho, for these class weights. ``stats``: instead of the head's own."""
        head = self.head
        stats = stats or head.statistics
        if stats is None:
            return self._compact_spectrum()
        m = normal.moments(stats, scale_of(head, stats), head.intercept, self.everywhere(weights), self.pair)
        total = self.total if stats is head.statistics else float(stats.n)
        return spectrum(m.G, m.rhs, m.T, m.mu, m.beta, m.weight, total)

    def _compact_spectrum(self) -> Spectrum:
        """From P = rho A^-1: its eigenvalues are rho / (s + rho). T is not known."""
        s, rho, root = self.head._engine.solution, self.head.rho, root_rho(self.head)
        p, Q = torch.linalg.eigh(s.inverse())
        eigenvalues = (rho / p.clamp(min=torch.finfo(p.dtype).tiny) - rho).clamp(min=0.0)
        R = (eigenvalues + rho)[:, None] * (Q.mT @ s.w) / root
        unknown = torch.full_like(s.beta, math.nan)
        weight = s.n if self.head.intercept == "free" else 0.0
        return Spectrum(eigenvalues, Q, R, unknown, s.mu * root, s.beta, weight, self.total)

    def main(self, weights: Tensor | None) -> Whitened:
        """The system as it is; remembered until the head changes."""
        kept = self.head._whitened
        if self.pair is not None:
            return self.whitened(weights)
        if kept is None or kept[0] != self.head._version:
            kept = (self.head._version, self.whitened(weights))
            self.head._whitened = kept
        system: Whitened = kept[1]
        return system


def scale_of(head: HeadBase, stats: Statistics) -> normal.Scale:
    """Units of features and targets, and rho."""
    target = stats.target_grid if stats.kind == "values" else None
    grid = stats.grid
    return normal.Scale(grid.resolution if grid else 1.0, target.resolution if target else 1.0, head.rho)


def problems(head: HeadBase) -> list[Problem]:
    """All problems of a fitted head, after pending removals have been verified."""
    head._fitted()
    head._current()
    if isinstance(head._engine, Pairwise):
        return [Problem(head, pair) for pair in head._engine.pairs]
    return [Problem(head)]


def sample_weights(local: Tensor | None, weights: Tensor | None, times: Tensor) -> Tensor:
    """d (B,): multiplicity times class weight; 0 for samples of other classes. local: (B,), None for float targets."""
    if local is None:
        return times
    d = times if weights is None else times * weights[local.clamp(min=0)]
    return torch.where(local >= 0, d, torch.zeros_like(d))


def root_rho(head: HeadBase) -> float:
    """What rows are divided by."""
    return math.sqrt(head.rho)
