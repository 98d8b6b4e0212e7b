"""Solvers that turn statistics into weights: one shared system, or one system per pair of classes or per label.

A solver decides when to apply Theorem 1 and when to solve from statistics. It holds only caches, so everything that it returns
can be rebuilt from the statistics.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchlssvm.functional.threads import threads_for
from torchlssvm.functional.whitened import Whitened
from torchlssvm.linear import normal_equations as normal
from torchlssvm.linear.discriminant_rule import discriminant_weights, resolve_rule
from torchlssvm.linear.row_scale import RowScale
from torchlssvm.linear.solution import Solution, TooInaccurate
from torchlssvm.linear.standardization import Standardization, standardization
from torchlssvm.statistics import Statistics
from torchlssvm.statistics.batch import SampleBatch


@dataclass
class SolverOptions:
    """Options of a head that its solver needs."""

    rho: float
    intercept: str
    class_weight: str | Tensor | None
    rule: str = "least_squares"

    @property
    def follows_counts(self) -> bool:
        """True when class weights change with every sample, so that all of the system does."""
        return isinstance(self.class_weight, str)

    def of_label(self, label: int) -> SolverOptions:
        """Options for the two classes of one label: weights (K,) are those of the samples that have the label."""
        weight = self.class_weight
        if isinstance(weight, Tensor):
            weight = torch.stack([weight[label], torch.ones_like(weight[label])])
        return replace(self, class_weight=weight)


def code_labels(labels: Tensor, K: int) -> Tensor:
    """Targets (B, K): +1 for the label, -1 for the others."""
    return torch.full((len(labels), K), -1.0, dtype=torch.float64, device=labels.device).scatter_(
        1, labels[:, None], 1.0
    )


def real_targets(batch: SampleBatch, K: int) -> Tensor:
    """Targets (B, K) of a checked batch in real units: -1 and +1 for labels, or its float targets."""
    if batch.labels is not None:
        return code_labels(batch.labels, K)
    if batch.targets is None:  # no samples
        return torch.zeros(0, K, dtype=torch.float64, device=batch.x.device)
    grid = batch.choices.target_grid
    return batch.targets.clone() if grid is None else batch.targets * grid.resolution  # never the caller's memory


def weighted_rows(
    batch: SampleBatch, sign: int, rows: Tensor, y: Tensor, options: SolverOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (B, D), targets (B, K) and signed weights d (B,) of a checked batch, without samples of weight zero."""
    d = torch.full((rows.shape[0],), float(sign), dtype=torch.float64, device=rows.device)
    if isinstance(options.class_weight, Tensor) and batch.labels is not None:
        d = d * options.class_weight[batch.labels]
    if batch.mult is not None:
        d = d * batch.mult
        keep = d != 0
        rows, y, d = rows[keep], y[keep], d[keep]
    return rows, y, d


def real_weights(solution: Solution, options: SolverOptions, standard: Standardization | None) -> tuple[Tensor, Tensor]:
    """w (J, K) and b (K,) with scores x @ w + b. ``standard``: the solution is that of features standardised so."""
    scale = RowScale(1.0, options.rho, options.intercept, None if solution.empty else standard)
    return scale.weights(solution.w, solution.beta, solution.mu)


class SharedSolver:
    """All outputs share one matrix A (one-vs-rest, float targets)."""

    def __init__(self, stats: Statistics, options: SolverOptions):
        """Solve for statistics that may be empty."""
        self.stats, self.options = stats, options
        self._work: Tensor | None = None  # memory of the system, which holds the factor until the next solve reuses it
        self.reset()

    def _fresh(self) -> Solution:
        D = self.stats.in_features + (self.options.intercept == "penalized")
        centred = self.options.intercept == "free"
        # 1e-2: if a removal by Theorem 1 left less than this share of the system, two digits would be lost
        return Solution(D, self.stats.num_classes, centred, self.stats.device, least_pivot=1e-2)

    def reset(self) -> None:
        """Forget the cache, so that the next read solves from statistics."""
        self.solution = self._fresh()
        self.standard: Standardization | None = None  # of the last solve, where features are standardised
        if self._work is not None and (self._work.device != self.stats.device or self._work.shape[0] < self.solution.D):
            self._work = None
        self.stale = not self.stats.empty

    def release(self, rows: int) -> None:
        """Free the memory of a large system if a change of ``rows`` rows will need a new solve."""
        sums = self.stats.accumulator
        if sums is not None and sums.direct and not self.solution.update_pays(self.stats.in_features, rows):
            self._work = None
            self.reset()

    def changed(self, changes: list[tuple[SampleBatch, int]], rows: list[Tensor] | None) -> None:
        """Record a change of the statistics: queue its rows if Theorem 1 may be cheaper, otherwise solve at the next read."""
        s = self.solution
        new = sum(batch.x.shape[0] for batch, _ in changes)
        every = self.options.follows_counts or self.stats.scale is not None  # each sample changes all of the system
        every = every or any(batch.x.is_sparse for batch, _ in changes)  # many rows, or there would be dense ones
        if self.stale or every or not s.update_pays(self.stats.in_features, new):
            s.drop_pending()
            self.stale = True
            return
        plain = not isinstance(self.options.class_weight, Tensor)
        for i, (batch, sign) in enumerate(changes):
            scaled = self._scaled(batch, None if rows is None else rows[i])
            y = real_targets(batch, self.stats.num_classes)
            total = sign * batch.size if plain else None
            s.append(*weighted_rows(batch, sign, scaled, y, self.options), sign, total)

    def _scaled(self, batch: SampleBatch, rows: Tensor | None) -> Tensor:
        """Rows (B, D) of a batch in the solution's coordinates. rows: (B, J), on the grid, if already computed."""
        grid = batch.choices.grid
        if rows is None:
            rows = batch.x.to(torch.float64) if grid is None else grid.quantize(batch.x)
        step = 1.0 if grid is None else grid.resolution
        return RowScale(step, self.options.rho, self.options.intercept, self.standard).rows(rows)

    def set_rho(self, rho: float) -> None:
        """Change the regularization. The next read solves from statistics."""
        self.options.rho = rho
        self.reset()

    def relabelled(self, old: SampleBatch, new: SampleBatch, rows: Tensor | None) -> None:
        """Take in new labels. M does not change, only the right-hand side does."""
        if self.stale or self.solution.empty or not self.solution.updatable:
            self.solution.drop_pending()
            self.stale = True
            return
        K = self.stats.num_classes
        dy = real_targets(new, K) - real_targets(old, K)
        if old.mult is not None:
            dy = dy * old.mult[:, None]
        self.solution.shift_targets(self._scaled(old, rows), dy)

    def solve(self) -> None:
        """Solve from statistics, and forget what was pending."""
        weights = normal.class_weights(self.options.class_weight, self.stats.counts)
        standard = standardization(self.stats)
        units = normal.Units.of(self.stats.choices, self.options.rho)
        with threads_for(self.solution.D**3 / 3):
            base = normal.solve(self.stats, units, self.options.intercept, weights, work=self._work, standard=standard)
        self.standard, self._work = standard, base.factor.L
        self.solution.set_base(base.w, base.beta, base.mu, base.n, base.factor, base.units, share=base.share)
        self.stale = False

    def weights(self) -> tuple[Tensor, Tensor]:
        """w (J, K) and b (K,), up to date."""
        if self.stale:
            self.solve()
        try:
            if self.solution.pending:
                with threads_for(4.0 * self.solution.pending * self.solution.D**2):
                    self.solution.take_in()
        except TooInaccurate:
            self.solve()
        w, b = real_weights(self.solution, self.options, self.standard)
        if self.stats.empty or resolve_rule(self.options.rule, self.stats) != "lda":
            return w, b
        weights = normal.class_weights(self.options.class_weight, self.stats.counts)
        return discriminant_weights(self.stats, self.options.rho, weights, self.standard, w)

    def inverse(self) -> Tensor:
        """P (D, D), up to date."""
        self.weights()
        if not self.solution.updatable and not self.stats.empty:
            self.solve()
        with threads_for(self.solution.D**3):
            return self.solution.inverse()

    def whitened(self) -> Whitened | None:
        """The system as solved, whitened by the factor of the solve; None if that needs another solve."""
        return None if self.stale or self.solution.factored is None else self.solution.whitened()

    def __getstate__(self) -> dict[str, Any]:
        """State for pickling, without the workspace and the factor in it."""
        if self.solution.uses_factor:
            self.solution.forget_inverse()
        return self.__dict__ | {"_work": None}

    def drop_raw_samples(self) -> None:
        """Drop raw samples from the cache, keep the weights."""
        self.solution.take_in()
        if self.solution.deferred:
            self.solution.forget_inverse()

    def restore(self, state: dict[str, Tensor], P: Tensor) -> None:
        """Restore saved weights and P."""
        self.reset()
        if not self.stats.empty:
            self.solution.set_base(state["w"], state["beta"], state["mu"], float(state["n"]), P=P)
            self.standard = standardization(self.stats)
            self.stale = False

    def state(self) -> dict[str, Tensor]:
        """The weights in the solution's own coordinates."""
        self.inverse()
        s = self.solution
        return {"w": s.w, "beta": s.beta, "mu": s.mu, "n": torch.tensor(s.n, dtype=torch.float64, device=s.device)}


class PairwiseSolver:
    """One system per pair of classes (one-vs-one): class i is +1, class j > i is -1. Or one system per label, (i,)."""

    def __init__(self, stats: Statistics, options: SolverOptions):
        """Solve for statistics that are kept per class."""
        self.stats, self.options = stats, options
        self.reset()

    def reset(self) -> None:
        """Forget all pairs, so that the next read solves from statistics."""
        size = 1 if self.stats.targets == "multilabel" else 2
        self.pairs = list(itertools.combinations(range(self.stats.num_classes), size))
        self._w: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._P: dict[tuple[int, ...], Tensor] = {}

    def release(self, rows: int) -> None:
        """Do nothing, because pairs are solved one at a time."""

    def changed(self, changes: list[tuple[SampleBatch, int]], rows: list[Tensor] | None) -> None:
        """Mark every pair with a changed class for a solve at the next read; all pairs if features are standardised."""
        del rows
        if self.stats.scale is not None:
            self.reset()
            return
        touched: set[int] = set()
        for batch, _ in changes:
            known = batch.host_labels is not None
            touched |= set(batch.host_labels.tolist()) if known else set(range(self.stats.num_classes))  # type: ignore[union-attr]
        for pair in [p for p in self._w if not touched.isdisjoint(p)]:
            del self._w[pair]
            self._P.pop(pair, None)

    def relabelled(self, old: SampleBatch, new: SampleBatch, rows: Tensor | None) -> None:
        """Mark every pair with a changed class for a solve at the next read."""
        del rows
        self.changed([(old, -1), (new, 1)], None)

    def set_rho(self, rho: float) -> None:
        """Change the regularization. The next read solves all pairs again."""
        self.options.rho = rho
        self.reset()

    def _solve(self, pair: tuple[int, ...], standard: Standardization | None, inverse: bool) -> None:
        stats, options = self.stats, self.options
        first, second = pair if len(pair) == 2 else (0, 1)
        if len(pair) == 1:
            stats, options = stats.of_label(*pair), options.of_label(*pair)
        D = stats.in_features + (options.intercept == "penalized")
        units = normal.Units.of(stats.choices, options.rho)
        solution = Solution(D, 1, options.intercept == "free", stats.device)
        if stats.kind is not None and bool(stats.counts[[first, second]].any()):
            weights = normal.class_weights(options.class_weight, stats.counts, (first, second))
            base = normal.solve(stats, units, options.intercept, weights, (first, second), standard=standard)
            solution.set_base(base.w, base.beta, base.mu, base.n, base.factor, base.units)
        if inverse:
            self._P[pair] = solution.inverse()
        if pair not in self._w:
            w, b = real_weights(solution, options, standard)
            self._w[pair] = w[:, 0], b[0]

    def _solve_missing(self, inverse: bool) -> None:
        missing = [pair for pair in self.pairs if pair not in (self._P if inverse else self._w)]
        standard = standardization(self.stats) if missing else None
        with threads_for(self.stats.in_features**3):
            for pair in missing:
                self._solve(pair, standard, inverse)

    def weights(self) -> tuple[Tensor, Tensor]:
        """w (J, pairs) and b (pairs,)."""
        self._solve_missing(inverse=False)
        return torch.stack([self._w[p][0] for p in self.pairs], 1), torch.stack([self._w[p][1] for p in self.pairs])

    def inverse(self) -> Tensor:
        """P (pairs, D, D)."""
        self._solve_missing(inverse=True)
        return torch.stack([self._P[p] for p in self.pairs])

    def whitened(self) -> None:
        """None, because each pair has a system of its own."""

    def drop_raw_samples(self) -> None:
        """Do nothing, because no raw sample is kept."""

    def state(self) -> dict[str, Tensor]:
        """The weights per pair."""
        w, b = self.weights()
        return {"w": w, "b": b}

    def restore(self, state: dict[str, Tensor], P: Tensor) -> None:
        """Restore saved weights."""
        self.reset()
        if not self.stats.empty:
            self._w = {p: (state["w"][:, i].contiguous(), state["b"][i]) for i, p in enumerate(self.pairs)}
            self._P = {p: P[i] for i, p in enumerate(self.pairs)}


Solver: TypeAlias = SharedSolver | PairwiseSolver
"""Weights of a head, kept up to date with its samples."""


def make_solver(stats: Statistics, options: SolverOptions, multiclass: str) -> Solver:
    """Solver for a way of handling several classes."""
    by_label = weighted_labels(stats, options)
    return PairwiseSolver(stats, options) if by_label or multiclass == "ovo" else SharedSolver(stats, options)


def weighted_labels(stats: Statistics, options: SolverOptions) -> bool:
    """True if class weights give each of several labels a system of its own."""
    return stats.targets == "multilabel" and options.class_weight is not None
