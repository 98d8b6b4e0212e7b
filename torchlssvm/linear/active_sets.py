"""``ActiveSetSolver``: weights of a margin head, one squared-hinge problem for each class against the rest.

The rows held are the truth. Active sets, margins and weights are caches: a change of samples touches only the classes in which
a changed sample is active, and they are brought up to date at the next read, by rank-k updates (Theorem 1) where those are
cheaper than sums formed anew. Every active set ends in a proof (:mod:`torchlssvm.functional.squared_hinge`), so it does not
depend on the way it was found.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchlssvm.errors import ConvergenceError
from torchlssvm.functional import cost
from torchlssvm.functional import squared_hinge as hinge
from torchlssvm.functional.whitened import Whitened
from torchlssvm.linear.active_sums import ActiveSums, WeightGroups
from torchlssvm.linear.exact_refinement import BOUND_ROUNDING_FACTOR, ExactRefinement
from torchlssvm.linear.grid_rows import GridRows, RowChange
from torchlssvm.linear.hinge_descent import LONGEST_STEP, MAX_DESCENT_STEPS, HingeDescent
from torchlssvm.linear.normal_equations import LARGEST_FLOAT_CENTRED_SUM, class_weights
from torchlssvm.linear.row_scale import RowScale
from torchlssvm.linear.solution import NotPositiveDefinite, Solution, TooInaccurate
from torchlssvm.linear.solvers import SolverOptions
from torchlssvm.linear.standardization import Standardization, standardization
from torchlssvm.statistics import Statistics

MAX_NEWTON_ROUNDS = 1000
"""Newton rounds of one class before giving up; 7 to 9 are usual, hundreds where class weights differ by twenty decades."""

CLASSES_AT_ONCE = 8
"""Classes solved side by side: they share one pass over the rows, and each needs a matrix while it is solved."""

LEAST_RELATIVE_DECREASE = 1e-13
"""Least relative decrease of the objective by a step, a thousand roundings; after a smaller one the active set is proven."""

LARGEST_UNREFINED_ERROR = 1e-5
"""Largest bound on the error of a margin at which weights stay as they are; beyond it they are refined, even if the active set
is proven."""

CLOSE_CALL_FACTOR = 2.0
"""Within this factor of a bound the order in which rows are summed could decide: they are summed in the saved order then."""


class Slack(NamedTuple):
    """How far computed weights can be from the minimum on their active set A, by the gradient there.

    In the coordinates of :class:`~torchlssvm.linear.row_scale.RowScale`, |w' - w'_A| <= ``gradient``, and the intercept is off
    by ``intercept`` at most. So the margin of a row of length |v|, whose mean has at most the length ``centre``, is off by

        (|v| + centre) gradient + intercept,

    besides the rounding of the margin itself.
    """

    gradient: float = 0.0
    intercept: float = 0.0
    centre: float = 0.0

    def bound(self, lengths: Tensor) -> Tensor:
        """Bound on the errors of margins (n,). lengths: (n,), of rows v."""
        return (lengths + self.centre) * self.gradient + self.intercept


NO_SLACK = Slack()


@dataclass
class ClassState:
    """The solution of one class.

    Attributes:
        solution: weights and inverse for the active set; None where it has to be made anew from sums.
        fitted: True once weights, active set and margins are known.
        constant: the score of a class with samples of one sign only; None otherwise.
        touched: True when samples have changed that are, or may be, active.
        slack: of the last proof.
        rounds: Newton rounds of the last solve.
    """

    solution: Solution | None = None
    fitted: bool = False
    constant: float | None = None
    touched: bool = True
    slack: Slack = NO_SLACK
    rounds: int = 0


@dataclass
class Position:
    """A point of the search: weights w' (D,), margins (n,) and the objective."""

    w: Tensor
    margins: Tensor
    value: float


@dataclass
class Search:
    """The search for the active set of one class."""

    label: int
    active: Tensor  # (n,), the set that the system is of
    solution: Solution | None
    sums: ActiveSums | None
    position: Position
    scale: RowScale
    proving: bool = False  # sides are decided by proof from here on
    rounds: int = 0
    exact: int = 0
    ties: Tensor | None = None  # (n,), rows whose margin is 1
    refined: tuple[Tensor, Tensor] | None = None  # w (J,) and b () of the last proof, where float64 alone did not do

    def weights(self) -> tuple[Tensor, Tensor]:
        """w (J, 1) and b (1,) of the solution on the active set."""
        assert self.solution is not None
        return self.scale.weights(self.solution.w, self.solution.beta, self.solution.mu)


class ActiveSetSolver:
    """Weights, active sets and margins of all classes, kept up to date with the rows.

    Attributes:
        options: rho, intercept and class weights.
        stamp: counts the times that the weights of one state were computed another way.
        states: the solution of each class.
    """

    def __init__(self, rows: GridRows, stats: Statistics, options: SolverOptions):
        self.rows, self.stats, self.options = rows, stats, options
        self.stamp = 0
        self._held: Standardization | None = None
        self._busy = False  # set while caches are computed
        self.reset()

    def reset(self) -> None:
        """Forget all caches: the next read starts from the rows."""
        K, device = self.stats.num_classes, self.rows.device
        self.states = [ClassState() for _ in range(K)]
        self.w = torch.zeros(self.rows.in_features, K, dtype=torch.float64, device=device)
        self.b = torch.zeros(K, dtype=torch.float64, device=device)
        self._active = torch.zeros(K, self.rows.n, dtype=torch.bool, device=device)
        self._margins = torch.zeros(K, self.rows.n, dtype=torch.float64, device=device)
        self._fresh = torch.ones(K, self.rows.n, dtype=torch.bool, device=device)
        self._ties = torch.zeros(K, self.rows.n, dtype=torch.bool, device=device)
        self._at_w, self._at_b = torch.zeros_like(self.w), torch.zeros_like(self.b)  # the weights that margins are of
        self._groups: WeightGroups | None = None
        self._scale: RowScale | None = None  # made when it is needed
        self._current = False
        self.stamp += 1

    def restart(self) -> None:
        """Solve every class anew from sums at the next read, starting from the active sets known."""
        for state in self.states:
            state.solution, state.touched = None, True
        self._current, self._scale = False, None
        self.stamp += 1

    def set_rho(self, rho: float) -> None:
        """Change the regularization; the active sets are where the next search starts."""
        self.options.rho = rho
        self.restart()

    def add_classes(self, k: int) -> None:
        """Make room for k more classes; the others are left alone."""
        device, n = self.rows.device, self._active.shape[1]
        self.states += [ClassState() for _ in range(k)]
        self._set_caches(
            [torch.cat([c, torch.full((k, n), value, dtype=c.dtype, device=device)]) for c, value in self._caches()]
        )
        self.w = torch.cat([self.w, self.w.new_zeros(len(self.w), k)], 1)
        self.b = torch.cat([self.b, self.b.new_zeros(k)])
        self._at_w = torch.cat([self._at_w, self._at_w.new_zeros(len(self.w), k)], 1)
        self._at_b = torch.cat([self._at_b, self._at_b.new_zeros(k)])
        self._groups, self._current = None if self.options.follows_counts else self._groups, False
        if self._groups is not None:
            self._groups = WeightGroups(self._groups.values, self._groups.of_class + (0,) * k)
        self.stamp += 1

    # -- changes -------------------------------------------------------------------------------------------------------

    def change(self, change: RowChange) -> None:
        """Make a planned change of the rows, and note which classes it touches."""
        self._current = False
        if self._couples_classes:
            self.restart()
        for k, state in enumerate(self.states):
            self._queue_copies(k, state, change)
        moves = self.rows.apply(change)
        self._scale = None
        self._move_columns(moves, len(change.q))

    @property
    def _couples_classes(self) -> bool:
        """True when each sample affects the problem of every class: by class weights, or by the scale of the features."""
        return self.options.follows_counts or self.stats.scale is not None

    def _queue_copies(self, k: int, state: ClassState, change: RowChange) -> None:
        """Queue the rows active in class k whose number of copies changes."""
        mine = self._active[k, change.slots] & ~self._fresh[k, change.slots]
        if bool(mine.any()):
            state.touched = True
            state.solution = self._queue(state.solution, k, change.slots[mine], change.copies[mine])

    def _queue(self, solution: Solution | None, k: int, slots: Tensor, copies: Tensor) -> Solution | None:
        """Put rows on the pending list of a class's solution; None where sums formed anew are cheaper.

        slots: (c,) places; copies: (c,), negative for what leaves.
        """
        rows, groups, scale, J = self.rows, self._groups, self.scale, self.rows.in_features
        if solution is None or groups is None or J < cost.SMALLEST_UPDATED_SYSTEM:
            return None
        new = solution.pending + len(slots)
        if not solution.updatable or new > J // 6 or solution.columns + new > cost.COLUMNS_BETWEEN_SOLVES * J:
            return None
        if solution.deferred + new > J // 8:
            solution.inverse()  # takes the deferred terms in
        weight = groups.by_row(rows.labels[slots]) * copies
        y = self._signs(slots, [k])
        for sign in (1, -1):
            part = weight * sign > 0
            if bool(part.any()):
                solution.append(scale.rows(rows.q[slots[part]]), y[part], weight[part], sign)
        return solution

    def _move_columns(self, moves: tuple[Tensor, Tensor], added: int) -> None:
        """Move the columns of all caches to the new places of their rows."""
        K, n, columns = len(self.states), self.rows.n, []
        for cache, value in self._caches():
            cache[:, moves[0]] = cache[:, moves[1]]
            new = torch.full((K, added), value, dtype=cache.dtype, device=cache.device)
            columns.append(torch.cat([cache[:, : n - added], new], 1) if added else cache[:, :n])
        self._set_caches(columns)

    def _caches(self) -> list[tuple[Tensor, float]]:
        """Caches (K, n) with a column for each row, and their values for a row that is new."""
        return [(self._active, False), (self._margins, 0.0), (self._fresh, True), (self._ties, False)]

    def _set_caches(self, columns: list[Tensor]) -> None:
        self._active, self._margins, self._fresh, self._ties = columns

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def scale(self) -> RowScale:
        """Units of the rows, rho and the intercept."""
        if self._scale is None:
            grid = self.stats.grid
            step = 1.0 if grid is None else grid.resolution
            standard = self._held or (standardization(self.stats) if self.stats.scale and self.rows.n else None)
            self._scale = RowScale(step, self.options.rho, self.options.intercept, standard)
        return self._scale

    def weights(self) -> tuple[Tensor, Tensor]:
        """w (J, K) and b (K,), up to date; ConvergenceError if a search finds no end, with the caches dropped."""
        if self._current and not self._busy:
            return self.w, self.b
        with self._computing():
            if self.rows.n == 0:
                self.reset()
            else:
                self._search()
        self._current = True
        return self.w, self.b

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Compute caches: after an interruption they are begun again from the rows."""
        if self._busy:
            self.reset()
        self._busy = True
        try:
            yield
        except ConvergenceError:  # the classes concerned were reset
            self._busy = False
            raise
        self._busy = False

    def _search(self) -> None:
        """Bring all classes up to date."""
        self._use_weights(WeightGroups.of(self._class_weights(), len(self.states)))
        self.w, self.b = self.w.clone(), self.b.clone()  # those handed out stay as they are
        todo = [k for k, state in enumerate(self.states) if self._needs_search(k, state)]
        todo = [k for k in todo if not self._update_class(k)]
        starts = self._cold_starts([k for k in todo if not self.states[k].fitted])
        for a in range(0, len(todo), CLASSES_AT_ONCE):
            labels = todo[a : a + CLASSES_AT_ONCE]
            try:
                self._fit(labels, starts)
            except ConvergenceError:  # an unfinished search is discarded: the next read begins these classes again
                for k in labels:
                    self.states[k] = ClassState()
                    self._fresh[k] = True
                raise

    def active(self, k: int) -> Tensor:
        """The active set of a class (n,), up to date, in the order of the rows."""
        self.weights()
        return self._active[k].clone()

    def tie_counts(self) -> Tensor:
        """Distinct rows of each class whose margin is 1 (K,)."""
        self.weights()
        return self._ties.sum(1)

    def margins(self, k: int) -> Tensor:
        """Margins of all rows for a class (n,), up to date."""
        self.weights()
        return self._margins_now(k).clone()

    def _margins_now(self, k: int) -> Tensor:
        """Margins (n,) by the weights in use; the cached ones may belong to earlier weights."""
        if not torch.equal(self._at_w[:, k], self.w[:, k]) or not torch.equal(self._at_b[k], self.b[k]):
            found = hinge.scores(self.rows.q, self.w[:, k : k + 1] * self.scale.step, self.b[k : k + 1])
            self._margins[k] = found[:, 0] * self.signs(k)
            self._at_w[:, k], self._at_b[k] = self.w[:, k], self.b[k]
        return self._margins[k]

    def fitted(self, k: int) -> bool:
        """True for a class with samples of both signs and an active set that is not empty."""
        self.weights()
        return self.states[k].fitted and bool(self._active[k].any())

    def whitened(self, k: int) -> Whitened:
        """The system of a class on its active set, whitened, up to date."""
        self.weights()
        with self._computing():
            state = self.states[k]
            if state.solution is None or state.solution.factored is None:
                state.solution = self._sums(k, self._active[k]).solve(self.scale, self._small(), self._active[k])
            return state.solution.whitened()

    def signs(self, k: int) -> Tensor:
        """+1 for the rows of a class and -1 for the others (n,)."""
        return self._signs(None, [k])[:, 0]

    def with_class_weights(self, weights: Tensor) -> ActiveSetSolver:
        """A solver of the same rows with other class weights (K,), which starts from the active sets of this one."""
        return self._restarted(replace(self.options, class_weight=weights))

    def _restarted(self, options: SolverOptions) -> ActiveSetSolver:
        """A solver of the same rows that starts from the active sets of this one."""
        self.weights()
        out = copy.copy(self)
        out.options = options
        out.states = [replace(state) for state in self.states]
        out._set_caches([cache.clone() for cache, _ in self._caches()])
        out.w, out.b = self.w.clone(), self.b.clone()
        out._at_w, out._at_b = self._at_w.clone(), self._at_b.clone()
        out.restart()
        return out

    def freeze_scale(self) -> None:
        """Keep the present standardization through all later changes, for what-if questions on a copy."""
        self._held = self.scale.standard

    @property
    def groups(self) -> WeightGroups:
        """Class weights in use."""
        self.weights()
        assert self._groups is not None
        return self._groups

    def row_weights(self) -> Tensor:
        """Class weight times copies of each row (n,)."""
        self.weights()
        return self._row_weights()

    def _row_weights(self) -> Tensor:
        assert self._groups is not None
        return self._groups.by_row(self.rows.labels) * self.rows.copies

    def _class_weights(self) -> Tensor | None:
        return class_weights(self.options.class_weight, self.stats.counts)

    def _use_weights(self, groups: WeightGroups) -> None:
        if groups != self._groups:
            if self._groups is not None:
                self.restart()
            self._groups = groups

    def _signs(self, slots: Tensor | None, labels: list[int]) -> Tensor:
        """+1 where a row is of a class, -1 elsewhere (n, C)."""
        own = self.rows.labels if slots is None else self.rows.labels[slots]
        return torch.where(own[:, None] == torch.tensor(labels, device=own.device), 1.0, -1.0).to(torch.float64)

    def _needs_search(self, k: int, state: ClassState) -> bool:
        """Place the rows that are new to a class; True if its active set has to be searched for."""
        own, total = self._weighted_counts(k)
        if own in (0, total):
            constant = 1.0 if own else -1.0
            if state.constant != constant:
                self.states[k] = ClassState(constant=constant)
                self.w[:, k], self.b[k] = 0.0, constant
                self._at_w[:, k], self._at_b[k] = 0.0, constant
            self._active[k], self._fresh[k], self._ties[k] = False, False, False
            self._margins[k] = 1.0
            self.states[k].touched = False
            return False
        if state.constant is not None:
            state = self.states[k] = ClassState()
        if not state.fitted:
            return True
        slots = torch.nonzero(self._fresh[k])[:, 0]
        if len(slots):
            w = torch.stack([self.w[:, k], self._at_w[:, k]], 1) * self.scale.step
            found = hinge.scores(self.rows.q[slots], w, torch.stack([self.b[k], self._at_b[k]]))
            margins, kept = (found * self._signs(slots, [k])).unbind(1)
            close = (margins - 1.0).abs() <= self._bound(k, state, slots)
            joins = margins < 1.0
            self._margins[k, slots], self._active[k, slots], self._fresh[k] = kept, joins, False
            if bool((joins | close).any()):
                state.touched = True
            slots = slots[joins]
            if len(slots):
                state.solution = self._queue(state.solution, k, slots, self.rows.copies[slots])
        return state.touched

    def _weighted_counts(self, k: int) -> tuple[int, int]:
        """Number of samples with a weight, of a class and of all classes: a class that a change empties has none."""
        assert self._groups is not None
        values = self._groups.values
        counts = [
            int(n) if values[g] else 0 for n, g in zip(self.stats.counts.tolist(), self._groups.of_class, strict=True)
        ]
        return counts[k], sum(counts)

    def _bound(self, k: int, state: ClassState, slots: Tensor) -> Tensor:
        """Bound on the error of the margins of rows (n,) under the proven weights of a class."""
        scale, rows = self.scale, self.rows
        lengths = scale.lengths(rows.q[slots], rows.norms[slots])
        size = float(scale.point(self.w[:, k], self.b[k])[: rows.in_features].norm())
        computed = hinge.rounding_bound(lengths, rows.in_features, size, float(self.b[k]))
        return (state.slack.bound(lengths) + computed) * BOUND_ROUNDING_FACTOR

    # -- small changes -------------------------------------------------------------------------------------------------

    def _update_class(self, k: int) -> bool:
        """Bring a class up to date after a small change, and prove its active set; False where a search has to be made.

        Margins are kept from the last search. With the weights moved since by d and d_b, none moved by more than its *drift*
        |q_i - c| |d| + |c^T d + d_b|: only samples that close to 1 need a look. The active set is proven when each of these is
        further from 1 than its *bound*, by :class:`Slack` and rounding, and each of the others than drift and bound together.
        """
        state, rows, scale = self.states[k], self.rows, self.scale
        if not state.fitted or state.solution is None or scale.standard is not None:
            return False
        solution: Solution | None = state.solution
        assert self._groups is not None
        lengths, signs = scale.lengths(rows.q, rows.norms), self.signs(k)
        active, kept = self._active[k].clone(), (self._margins[k] - 1.0).abs()
        old_error = self._rounding(scale, self._at_w[:, k], self._at_b[k], lengths)
        # 4: full Newton steps after a change of samples, in which only margins near 1 are computed; then a search with a line
        # search
        for rounds in range(1, 5):
            if solution is None:
                return False
            try:
                solution.take_in()
            except (NotPositiveDefinite, TooInaccurate):
                state.solution = None
                return False
            w, b = (part[..., 0] for part in scale.weights(solution.w, solution.beta, solution.mu))
            move = (w - self._at_w[:, k]) * scale.step
            shift = abs(float(rows.centre @ move + (b - self._at_b[k])))
            error = self._rounding(scale, w, b, lengths)
            drift = (rows.spreads * float(move.norm()) + shift) * BOUND_ROUNDING_FACTOR + 4 * (error + old_error)
            near = torch.nonzero(kept <= drift)[:, 0]
            # 8: where more than one in so many samples is near its margin, all margins are computed anew, after which few are
            # near
            if len(near) * 8 > rows.n:
                self._margins[k] = hinge.scores(rows.q, (w * scale.step)[:, None], b[None])[:, 0] * signs
                self._at_w[:, k], self._at_b[k] = w, b
                kept, old_error, drift = (self._margins[k] - 1.0).abs(), error, 4 * error
                near = torch.nonzero((kept <= drift) | ((self._margins[k] < 1.0) != active))[:, 0]
            margins = hinge.scores(rows.q[near], (w * scale.step)[:, None], b[None])[:, 0] * signs[near]
            wanted = margins < 1.0
            turns = near[wanted != active[near]]
            if not len(turns):
                slack = self._slack(k, scale, solution, torch.nonzero(active)[:, 0], w, b, lengths, error)
                bound = (slack.bound(lengths) + error) * BOUND_ROUNDING_FACTOR
                far = (self._margins[k] - 1.0).abs() > drift + bound
                far[near] = (margins - 1.0).abs() > bound[near]
                if not bool(far.all()) or float(bound.max()) > LARGEST_UNREFINED_ERROR:
                    return False
                self.states[k] = ClassState(solution, True, None, False, slack, rounds)
                self.w[:, k], self.b[k], self._active[k], self._ties[k] = w, b, active, False
                return True
            active[turns] = ~active[turns]
            copies = torch.where(active[turns], rows.copies[turns], -rows.copies[turns])
            solution = state.solution = self._queue(solution, k, turns, copies)
            self._active[k] = active
        return False

    # -- the search ----------------------------------------------------------------------------------------------------

    def _fit(self, labels: list[int], starts: dict[int, Position]) -> None:
        """Find the active sets of some classes side by side. starts: where those without a solution begin."""
        rows, scale = self.rows, self.scale
        weight, small = self._row_weights(), self._small()
        lengths = scale.lengths(rows.q, rows.norms)
        searches = [self._start(k, starts.get(k), weight) for k in labels]
        while searches:
            for s in searches:
                self._solve(s, small)
                s.rounds += 1
                if s.rounds > MAX_NEWTON_ROUNDS:
                    raise ConvergenceError(
                        f"the active set of class {s.label} was not found in {MAX_NEWTON_ROUNDS} rounds: use a larger rho, or "
                        "scale the features. The samples are held all the same."
                    )
            pairs = [s.weights() for s in searches]
            w, b = torch.cat([p[0] for p in pairs], 1), torch.cat([p[1] for p in pairs])
            found = hinge.scores(rows.q, w * scale.step, b) * self._signs(None, [s.label for s in searches])
            left = []
            for c, s in enumerate(searches):
                margins = found[:, c].contiguous()
                if not self._advance(s, margins, weight):
                    long = lengths if s.scale is scale else lengths * (scale.root / s.scale.root)
                    error = self._rounding(s.scale, w[:, c], b[c], long)
                    assert s.solution is not None
                    slots = torch.nonzero(s.active)[:, 0]
                    slack = self._slack(s.label, s.scale, s.solution, slots, w[:, c], b[c], long, error)
                    if self._prove(s, margins, slack, long, error):
                        self._finish(s, w[:, c], b[c], margins, slack)
                        continue
                left.append(s)
                # 20: rounds after which a class goes down a ladder of rho instead: nearly separable samples take short steps
                # at a small rho
                if s.rounds == 20 and not s.proving:
                    s.sums = s.sums or self._sums(s.label, s.active)
                    # 1e6: the ladder's first rho, in units of the rho wanted; there the problem is close to plain ridge
                    # regression
                    self._change_rho(s, self.options.rho * 1e6, weight)
            searches = left

    def _small(self) -> bool:
        return float((self.rows.copies * self.rows.peaks.square()).sum()) < LARGEST_FLOAT_CENTRED_SUM

    def _cold_starts(self, labels: list[int]) -> dict[int, Position]:
        """Positions near their minimum for classes without a solution."""
        rows = self.rows
        out: dict[int, Position] = {}
        if not labels:
            return out
        weight, small = self._row_weights(), self._small()
        total = ActiveSums.of_all(rows, self._groups, labels[0], self.stats)  # type: ignore[arg-type]
        steps = MAX_DESCENT_STEPS if cost.descent_pays(rows.n, rows.in_features) else 0
        # 2**21: margins (16 MB) of the classes that are brought near their minimum side by side, in passes over the rows that
        # they share
        size = max(CLASSES_AT_ONCE, 2**21 // rows.n)
        for a in range(0, len(labels), size):
            part = labels[a : a + size]
            w, margins = HingeDescent(total, self.scale, self._signs(None, part), weight, small).lower(steps)
            for c, k in enumerate(part):
                mine = margins[:, c].contiguous()
                out[k] = Position(w[:, c].clone(), mine, float(w[:, c] @ w[:, c] + hinge.loss(mine, weight)))
        return out

    def _start(self, k: int, start: Position | None, weight: Tensor) -> Search:
        """Begin at a position given, or where a class is."""
        if start is not None:
            return Search(k, start.margins < 1.0, None, None, start, self.scale)
        rows, scale, margins = self.rows, self.scale, self._margins_now(k).clone()
        w = scale.point(self.w[:, k], self.b[k])
        if scale.standard is not None and scale.intercept == "none":  # another mean, another intercept
            b = -(scale.standard.centre.mean * scale.step) @ self.w[:, k : k + 1]
            margins = (hinge.scores(rows.q, self.w[:, k : k + 1] * scale.step, b) * self._signs(None, [k]))[:, 0]
        value = float(w @ w + hinge.loss(margins, weight))
        return Search(k, self._active[k].clone(), self.states[k].solution, None, Position(w, margins, value), scale)

    def _solve(self, s: Search, small: bool) -> None:
        """Bring the solution of a search to its active set."""
        if s.solution is not None:
            try:
                s.solution.take_in()
                return
            except (NotPositiveDefinite, TooInaccurate):  # all rows are held: it is rounding
                s.solution = None
        s.sums = s.sums or self._sums(s.label, s.active)
        s.solution = s.sums.solve(s.scale, small, s.active)
        if s.sums.empty and s.scale.intercept == "free":
            s.solution.beta += float(self.b[s.label])

    def _sums(self, k: int, active: Tensor) -> ActiveSums:
        """Sums over the active set of a class (n,), formed anew."""
        assert self._groups is not None
        if 2 * int(active.sum()) > self.rows.n:
            sums = ActiveSums.of_all(self.rows, self._groups, k, self.stats)
            sums.change(torch.nonzero(~active)[:, 0], -1)
        else:
            sums = ActiveSums(self.rows, self._groups, k)
            sums.change(torch.nonzero(active)[:, 0], 1)
        return sums

    def _change_rho(self, s: Search, rho: float, weight: Tensor) -> None:
        """Go on from the present position with another rho."""
        w = s.position.w * math.sqrt(rho / s.scale.rho)
        value = float(w @ w + hinge.loss(s.position.margins, weight))
        margins = s.position.margins
        s.position, s.scale, s.solution = Position(w, margins, value), replace(s.scale, rho=rho), None

    def _rounding(self, scale: RowScale, w: Tensor, b: Tensor, lengths: Tensor) -> Tensor:
        """Bounds on the rounding of the margins computed with weights (n,)."""
        J = self.rows.in_features
        if scale.offset is not None:  # b holds the product of w with the mean, rounded too
            lengths = lengths + 2 * scale.offset.norm()
        return hinge.rounding_bound(lengths, J, float(scale.point(w, b)[:J].norm()), float(b))

    def _slack(
        self, k: int, scale: RowScale, solution: Solution, slots: Tensor, w: Tensor, b: Tensor, lengths: Tensor, error: Tensor
    ) -> Slack:  # fmt: skip
        """Bounds from |g'| and |g_b| / n on the active set of a class, at ``slots``, the rounding of both included."""
        rows, J, point, centre = self.rows, self.rows.in_features, scale.point(w, b), self._centre(solution)
        assert self._groups is not None
        weight, signs = self._groups.by_row(rows.labels[slots]) * rows.copies[slots], self._signs(slots, [k])
        found = hinge.sweep(rows.q[slots], (w * scale.step)[:, None], b[None], signs, weight[:, None])
        gradient_b, ridge = float(found.gradient_b[0]), point[:J]
        part = error[slots] + (len(slots) + 8) * hinge.FLOAT64_EPS * (found.scores - signs)[:, 0].abs()
        rounding = float(weight @ (lengths[slots] * part))
        rounding_b = float(weight @ part) + 4 * hinge.FLOAT64_EPS * abs(gradient_b)
        rounding += 16 * hinge.FLOAT64_EPS * float(ridge.norm())
        if scale.offset is not None:
            rounding += float(scale.offset.norm()) * rounding_b
        g = scale.centred(found.gradient, found.gradient_b)[:, 0] + ridge
        if scale.intercept == "none":
            return Slack(float(g.norm()) + rounding, 0.0, centre)
        if scale.intercept == "penalized":
            constant = gradient_b / scale.root + float(point[J])
            rounding_b = rounding_b / scale.root + 16 * hinge.FLOAT64_EPS * abs(float(point[J]))
            return Slack(float(g.norm()) + abs(constant) + rounding + rounding_b, 0.0, centre)
        total = float(weight.sum())
        if total == 0:
            return Slack(float(ridge.norm()), 0.0, centre)
        centred = g - solution.mu * gradient_b
        rounding += float(solution.mu.norm()) * rounding_b
        return Slack(float(centred.norm()) + rounding, (abs(gradient_b) + rounding_b) / total, centre)

    def _advance(self, s: Search, margins: Tensor, weight: Tensor) -> bool:
        """Go on to the next set of a search; False where the objective falls no more and the set is to be proven."""
        solution = s.solution
        assert solution is not None
        target = solution.w[:, 0]
        wanted = margins < 1.0
        value = float(target @ target + hinge.loss(margins, weight))
        differs = wanted != s.active
        position = s.position
        if not s.proving and bool(differs.any()) and not _stopped_falling(position.value, value):
            step = target - position.w
            stop = torch.lerp(position.margins, margins, LONGEST_STEP)
            slope, curvature = float(position.w @ step), float(step @ step)
            t = LONGEST_STEP * hinge.lowest_on_segment(
                position.margins, stop, weight, LONGEST_STEP * slope, LONGEST_STEP**2 * curvature
            )
            mixed, at = torch.lerp(position.margins, margins, t), torch.lerp(position.w, target, t)
            between = float(at @ at + hinge.loss(mixed, weight))
            if between < min(position.value, value) and not _stopped_falling(position.value, between):
                s.position = Position(at, mixed, between)
                self._change_set(s, mixed < 1.0)
                return True
            if value < position.value:
                s.position = Position(target.clone(), margins, value)
                self._change_set(s, wanted)
                return True
            here = position.margins < 1.0
            if not torch.equal(here, s.active):  # the set was not that of the position: no Newton step
                self._change_set(s, here)
                return True
        if s.scale.rho > self.options.rho:  # a rung of the ladder needs no proof
            s.position = Position(target.clone(), margins, value)
            # 100.0: each rung of the ladder divides rho by this
            rho = max(self.options.rho, s.scale.rho / 100.0)
            self._change_rho(s, rho, weight)
            return True
        s.proving = True
        return False

    def _prove(self, s: Search, margins: Tensor, slack: Slack, lengths: Tensor, error: Tensor) -> bool:
        """Compare the margins of a solution with its active set; True if the set is proven, else the next set is queued."""
        solution, wanted = s.solution, margins < 1.0
        assert solution is not None
        bound = slack.bound(lengths) + error
        if _close_call(margins, bound):
            margins, slack = self._in_saved_order(s, lengths, error)
            bound, wanted = slack.bound(lengths) + error, margins < 1.0
        near = torch.nonzero(~((margins - 1.0).abs() > bound * BOUND_ROUNDING_FACTOR))[:, 0]
        if not len(near) and float(bound.max()) > LARGEST_UNREFINED_ERROR:
            near = bound.argmax()[None]
        s.ties = s.refined = None
        if len(near):
            proof = ExactRefinement(self.rows, self._groups, s.scale, s.label, s.active)  # type: ignore[arg-type]
            try:
                decision = proof.decide(solution, near)
            except ConvergenceError:  # sums, or changes taken in, have cost the solution its digits
                s.sums = s.sums or self._sums(s.label, s.active)
                s.solution = s.sums.solve(s.scale, self._small(), s.active, by_rows=True)
                decision = proof.decide(s.solution, near)
            wanted[near] = decision.active
            s.ties = torch.zeros_like(wanted)
            s.ties[near] = decision.ties
            s.refined = (decision.w, decision.b)
        differs = wanted != s.active
        if not bool(differs.any()):
            return True
        # Ties leave last: without them other samples may change sides again and again.
        if s.ties is not None and bool((differs & ~s.ties).any()):
            wanted = torch.where(s.ties, s.active, wanted)
            differs = wanted != s.active
        s.exact += 1
        # 8: rounds decided by exact margins in which all samples change sides at once; after them one at a time, which cannot
        # cycle
        if s.exact > 8:  # Murty's rule: the first one alone, in an order that does not depend on the history
            turns = torch.nonzero(differs)[:, 0]
            first = turns[self.rows.saved_order(turns)[0]]
            wanted = s.active.clone()
            wanted[first] = ~wanted[first]
        self._change_set(s, wanted)
        return False

    def _in_saved_order(self, s: Search, lengths: Tensor, error: Tensor) -> tuple[Tensor, Slack]:
        """Margins (n,) and slack of a solution, computed in an order of the rows that depends on them alone."""
        order, (w, b) = self.rows.saved_order(), s.weights()
        margins = torch.empty_like(error)
        margins[order] = hinge.scores(self.rows.q[order], w * self.scale.step, b)[:, 0] * self.signs(s.label)[order]
        assert s.solution is not None
        active = order[s.active[order]]
        return margins, self._slack(s.label, s.scale, s.solution, active, w[:, 0], b[0], lengths, error)

    def _change_set(self, s: Search, wanted: Tensor) -> None:
        """Change the active set of a search: queue the rows that change sides, or change its sums."""
        differs = wanted != s.active
        joins, leaves = (torch.nonzero(differs & side)[:, 0] for side in (wanted, s.active))
        if s.sums is not None:
            anew = len(joins) + len(leaves) > int(wanted.sum())
            s.solution = None
            if anew:
                s.sums = None
            else:
                s.sums.change(joins, 1)
                s.sums.change(leaves, -1)
        else:
            slots = torch.cat([joins, leaves])
            copies = torch.cat([self.rows.copies[joins], -self.rows.copies[leaves]])
            s.solution = self._queue(s.solution, s.label, slots, copies)
        s.active = wanted

    def _centre(self, solution: Solution) -> float:
        """Bound on the length by which a row v, less the mean, differs from its features alone."""
        scale = self.scale
        shift = 0.0 if scale.offset is None else float(scale.offset.norm())
        return shift + (1.0 / scale.root if scale.intercept == "penalized" else float(solution.mu.norm()))

    def _finish(self, s: Search, w: Tensor, b: Tensor, margins: Tensor, slack: Slack) -> None:
        k = s.label
        self.states[k] = ClassState(s.solution, True, None, False, slack, s.rounds)
        self.w[:, k], self.b[k] = s.refined or (w, b)
        self._active[k], self._margins[k], self._fresh[k] = s.active, margins, False
        self._at_w[:, k], self._at_b[k] = w, b  # margins are of the weights before a refinement
        self._ties[k] = False if s.ties is None else s.ties

    # -- parts, for files and copies -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Weights and proofs of all classes, for a file."""
        w, b = self.weights()
        proofs = [[*s.slack, float(s.rounds), float(s.fitted)] for s in self.states]
        return {"w": w, "b": b, "proofs": torch.tensor(proofs, dtype=torch.float64)}

    def sides_in_saved_order(self) -> Tensor:
        """1 for active samples, 2 for ties, 0 for the others (K, n), int8, in the order in which the rows are saved."""
        self.weights()
        sides = self._active.to(torch.int8) + 2 * self._ties.to(torch.int8)
        return sides[:, self.rows.saved_order()]

    def solved_anew(self) -> Tensor:
        """w (J, K) from the sums over the active sets: what ``restart`` and a read give."""
        return self._restarted(self.options).weights()[0]

    def restore(self, state: dict[str, Tensor], sides: Tensor) -> None:
        """Restore saved weights of the rows held; matrices are made anew when samples change. sides: (K, n)."""
        self.reset()
        if self.rows.n == 0:
            return
        device, K = self.rows.device, len(self.states)
        w, b = (state[name].to(device=device, dtype=torch.float64, copy=True) for name in ("w", "b"))
        if w.shape != self.w.shape or b.shape != self.b.shape or sides.shape != self._active.shape:
            raise ValueError(f"the saved weights have shapes {tuple(w.shape)}, {tuple(b.shape)}, {tuple(sides.shape)}")
        self.w, self.b, self._active, self._ties = w, b, sides.to(device) == 1, sides.to(device) == 2
        self._groups = WeightGroups.of(self._class_weights(), K)
        self._margins = (hinge.scores(self.rows.q, w * self.scale.step, b) * self._signs(None, list(range(K)))).mT
        self._margins, self._fresh = self._margins.contiguous(), torch.zeros_like(self._active)
        self._at_w, self._at_b = w.clone(), b.clone()
        counts = self.stats.counts.tolist()
        for k, (*slack, rounds, fitted) in enumerate(state["proofs"].tolist()):
            if fitted:
                self.states[k] = ClassState(None, True, None, False, Slack(*slack), int(rounds))
            else:
                self.states[k] = ClassState(constant=1.0 if counts[k] else -1.0, touched=False)
        self._current = True

    def copy_in_saved_order(self, rows: GridRows) -> ActiveSetSolver:
        """The same weights and active sets for a copy or a pickle: without matrices, and in the order of the rows as saved."""
        self.weights()
        out, order = copy.copy(self), self.rows.saved_order()
        out.rows, out._scale = rows, None
        out.states = [replace(state, solution=None) for state in self.states]
        out._set_caches([cache[:, order] for cache, _ in self._caches()])
        return out


def _close_call(margins: Tensor, bound: Tensor) -> bool:
    """True when rounding could decide whether weights are refined: a bound is near the largest, or near a margin's distance."""
    near_largest = float(bound.max()) / LARGEST_UNREFINED_ERROR
    ratio = (margins - 1.0).abs() / (bound * BOUND_ROUNDING_FACTOR)
    near = (ratio > 1.0 / CLOSE_CALL_FACTOR) & (ratio < CLOSE_CALL_FACTOR)
    return 1.0 / CLOSE_CALL_FACTOR < near_largest < CLOSE_CALL_FACTOR or bool(near.any())


def _stopped_falling(before: float, after: float) -> bool:
    """True when the objective has stopped falling as far as float64 can tell."""
    return before - after <= LEAST_RELATIVE_DECREASE * abs(before) and after - before <= LEAST_RELATIVE_DECREASE * abs(
        before
    )
