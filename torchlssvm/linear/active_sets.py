"""``ActiveSetSolver``: weights of a margin head, one squared-hinge problem for each class against the rest.

The rows held are the truth. Active sets, margins and weights are caches. A change of samples touches only the classes in which
a changed sample is active, and the next read brings those up to date, in three ways from cheap to sure:

- *update*: the inverse of the class takes the changed rows in by Theorem 1, and only margins near 1 are computed;
- *search*: Newton's method with a line search, on exact integer sums over the active set;
- *refinement*: exact integers decide the margins that float64 cannot tell from 1.

Update and search end in the same proof (:mod:`torchlssvm.functional.squared_hinge`), so an active set does not depend on the
way it was found. After :meth:`~ActiveSetSolver.restart` the weights follow from the active sets alone, to the bit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchlssvm.errors import ConvergenceError
from torchlssvm.functional import cost
from torchlssvm.functional import squared_hinge as hinge
from torchlssvm.functional.whitened import Whitened
from torchlssvm.linear.active_sums import ActiveSums, WeightGroups
from torchlssvm.linear.exact_refinement import BOUND_ROUNDING_FACTOR, ExactRefinement
from torchlssvm.linear.grid_rows import GridRows, RowChange
from torchlssvm.linear.hinge_descent import LONGEST_STEP, HingeDescent
from torchlssvm.linear.normal_equations import LARGEST_FLOAT_CENTRED_SUM, class_weights
from torchlssvm.linear.row_scale import RowScale
from torchlssvm.linear.solution import Solution, TooInaccurate
from torchlssvm.linear.solvers import SolverOptions
from torchlssvm.linear.standardization import Standardization, standardization
from torchlssvm.statistics import Statistics

MAX_NEWTON_ROUNDS = 1000
"""Newton rounds of one class before giving up; 7 to 9 are usual, hundreds where class weights differ by twenty decades."""

LEAST_RELATIVE_DECREASE = 1e-13
"""Least relative decrease of the objective by a step, a thousand roundings; after a smaller one the active set is proven."""

LARGEST_MARGIN_ERROR = 1e-5
"""Largest bound on the error of a margin held at which updated weights are used; beyond it they are solved from sums."""


@dataclass
class ClassState:
    """The solution of one class.

    Attributes:
        solution: weights and inverse for the active set; None where the next change solves from sums.
        fitted: True once weights and active set are known; False too for a class with samples of one sign only.
        touched: True when samples have changed that are, or may be, active.
        error: bound on the error of the margins of the rows that were proven; None where it is computed when it is needed.
    """

    solution: Solution | None = None
    fitted: bool = False
    touched: bool = True
    error: float | None = None


@dataclass
class Position:
    """A point of the search: weights w' (D,), margins (n,) and the objective."""

    w: Tensor
    margins: Tensor
    value: float


@dataclass
class Search:
    """The search for the active set of one class.

    Attributes:
        active: (n,), the set that the solution is of.
        solution: the solution on it; None where it is solved from sums next.
        sums: sums over the set, once they were formed.
        position: the lowest point so far.
        scale: units, with the rho that the search is at.
        sound: False where float64 lacked the digits to solve from sums.
        proving: True once the objective has stopped falling: the proof alone changes the set from then on.
        proofs: proofs that have changed the set.
    """

    label: int
    active: Tensor
    solution: Solution | None
    position: Position
    scale: RowScale
    sums: ActiveSums | None = None
    sound: bool = True
    proving: bool = False
    proofs: int = 0


class ActiveSetSolver:
    """Weights, active sets and margins of all classes, kept up to date with the rows.

    Attributes:
        options: rho, intercept and class weights.
        states: the solution of each class.
    """

    def __init__(self, rows: GridRows, stats: Statistics, options: SolverOptions):
        self.rows, self.stats, self.options = rows, stats, options
        self._held: Standardization | None = None
        self._busy = False  # set while caches are computed
        self.reset()

    def reset(self) -> None:
        """Forget all caches: the next read starts from the rows."""
        K, J, n, like = self.stats.num_classes, self.rows.in_features, self.rows.n, self.rows.norms
        self.states = [ClassState() for _ in range(K)]
        self.w, self.b = like.new_zeros(J, K), like.new_zeros(K)
        self._at_w, self._at_b = torch.zeros_like(self.w), torch.zeros_like(self.b)  # the weights that margins are of
        self._active = torch.zeros(K, n, dtype=torch.bool, device=like.device)
        self._margins = like.new_zeros(K, n)
        self._fresh = torch.ones(n, dtype=torch.bool, device=like.device)  # rows that came after the last read
        self._groups: WeightGroups | None = None
        self._forget_units()

    def restart(self) -> None:
        """Solve every class from sums at the next read, starting from the active sets known."""
        for state in self.states:
            state.solution, state.touched = None, True
        self._forget_units()

    def _forget_units(self) -> None:
        self._current = False
        self._failure: str | None = None
        self._scale: RowScale | None = None
        self._lengths: Tensor | None = None

    def set_rho(self, rho: float) -> None:
        """Change the regularization; the active sets are where the next search starts."""
        self.options.rho = rho
        self.restart()

    def add_classes(self, k: int) -> None:
        """Make room for k more classes; the others are left alone."""
        if self.options.follows_counts or self._groups is None:
            self.reset()
            return
        self.states += [ClassState() for _ in range(k)]
        for name, dim in (("_active", 0), ("_margins", 0), ("w", 1), ("b", 0), ("_at_w", 1), ("_at_b", 0)):
            old = getattr(self, name)
            shape = list(old.shape)
            shape[dim] = k
            setattr(self, name, torch.cat([old, old.new_zeros(shape)], dim))
        self._groups = WeightGroups(self._groups.values, self._groups.of_class + (0,) * k)
        self._forget_units()

    # -- changes -------------------------------------------------------------------------------------------------------

    def change(self, change: RowChange) -> None:
        """Make a planned change of the rows, and note which classes it touches."""
        if (
            self.options.follows_counts or self.stats.scale is not None
        ):  # each sample affects the problem of every class
            self.restart()
        for k, state in enumerate(self.states):
            mine = self._active[k, change.slots] & ~self._fresh[change.slots]
            if bool(mine.any()):
                state.touched = True
                state.solution = self._queue(state.solution, k, change.slots[mine], change.copies[mine])
        places, sources = self.rows.apply(change)
        self._forget_units()
        added, n = len(change.q), self.rows.n
        for name in ("_active", "_margins", "_fresh"):
            cache = getattr(self, name)
            cache[..., places] = cache[..., sources]
            new = torch.full((*cache.shape[:-1], added), name == "_fresh", dtype=cache.dtype, device=cache.device)
            setattr(self, name, torch.cat([cache[..., : n - added], new], -1))

    def _queue(self, solution: Solution | None, k: int, slots: Tensor, copies: Tensor) -> Solution | None:
        """Put rows on the pending list of a class's solution; None where new sums are cheaper.

        slots: (c,) places; copies: (c,), negative for what leaves.
        """
        rows, groups, J = self.rows, self._groups, self.rows.in_features
        if solution is None or groups is None or J < cost.SMALLEST_UPDATED_SYSTEM:
            return None
        new = solution.pending + len(slots)
        if not solution.updatable or new > J // 6 or solution.columns + new > cost.COLUMNS_BETWEEN_SOLVES * J:
            return None
        if solution.deferred + new > J // 8:
            solution.inverse()  # takes the deferred terms in
        weight, y = groups.by_row(rows.labels[slots]) * copies, self.signs(k, slots)[:, None]
        for sign in (1, -1):
            part = weight * sign > 0
            if bool(part.any()):
                solution.append(self.scale.rows(rows.q[slots[part]]), y[part], weight[part], sign)
        return solution

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def scale(self) -> RowScale:
        """Units of the rows, rho and the intercept."""
        if self._scale is None:
            grid = self.stats.grid
            standard = self._held or (standardization(self.stats) if self.stats.scale and self.rows.n else None)
            step = 1.0 if grid is None else grid.resolution
            self._scale = RowScale(step, self.options.rho, self.options.intercept, standard)
        return self._scale

    @property
    def lengths(self) -> Tensor:
        """Lengths of the rows in the coordinates of ``scale`` (n,), without the mean of standardised ones."""
        if self._lengths is None:
            self._lengths = self.scale.lengths(self.rows.q, self.rows.norms)
        return self._lengths

    def weights(self) -> tuple[Tensor, Tensor]:
        """w (J, K) and b (K,), up to date.

        ConvergenceError if a search does not converge. Later reads raise it at once, until samples or options change or you
        call ``restart``.
        """
        if self._current and not self._busy:
            return self.w, self.b
        if self._failure is not None:
            raise ConvergenceError(self._failure)
        with self._computing():
            if self.rows.n == 0:
                self.reset()
            else:
                self._bring_up_to_date()
        self._current = True
        return self.w, self.b

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Compute caches: after an interruption or a failure they are computed from the rows."""
        if self._busy:
            self.reset()
        self._busy = True
        try:
            yield
        except ConvergenceError as error:
            self.reset()
            self._failure, self._busy = str(error), False
            raise
        self._busy = False

    def _bring_up_to_date(self) -> None:
        if self._groups is not None and self._groups != self.groups:
            self.restart()
        self._groups = self.groups
        self.w, self.b = self.w.clone(), self.b.clone()  # those handed out stay as they are
        todo = [k for k in range(len(self.states)) if self._needs_search(k)]
        self._fresh = torch.zeros_like(self._fresh)
        todo = [k for k in todo if not self._update(k)]
        starts = self._cold_starts([k for k in todo if not self.states[k].fitted])
        for k in todo:
            self._search(k, starts.pop(k, None))

    def active(self, k: int) -> Tensor:
        """The active set of a class (n,), up to date, in the order of the rows."""
        self.weights()
        return self._active[k].clone()

    def margins(self, k: int) -> Tensor:
        """Margins of all rows for a class (n,), up to date."""
        self.weights()
        return self._margins_now(k).clone()

    def _margins_now(self, k: int) -> Tensor:
        """Margins (n,) by the weights in use; the cached ones may belong to earlier weights."""
        if not torch.equal(self._at_w[:, k], self.w[:, k]) or not torch.equal(self._at_b[k], self.b[k]):
            self._margins[k] = self._margins_of(k, self.w[:, k], self.b[k])
            self._at_w[:, k], self._at_b[k] = self.w[:, k], self.b[k]
        return self._margins[k]

    def _margins_of(self, k: int, w: Tensor, b: Tensor, slots: Tensor | None = None) -> Tensor:
        """Margins (n,), or of the rows at ``slots`` (m,), by weights w (J,) and b ()."""
        q = self.rows.q if slots is None else self.rows.q[slots]
        return hinge.scores(q, (w * self.scale.step)[:, None], b[None])[:, 0] * self.signs(k, slots)

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
                sums = self._sums(k, self._active[k])
                state.solution = sums.solve(self.scale, self.small, self._active[k])[0]
            return state.solution.whitened()

    def signs(self, k: int, slots: Tensor | None = None) -> Tensor:
        """+1 for the rows of a class and -1 for the others (n,), or at ``slots`` (m,)."""
        labels = self.rows.labels if slots is None else self.rows.labels[slots]
        return torch.where(labels == k, 1.0, -1.0).to(torch.float64)

    def with_class_weights(self, weights: Tensor) -> ActiveSetSolver:
        """A solver of the same rows with other class weights (K,), which starts from the active sets of this one."""
        return self._restarted(replace(self.options, class_weight=weights))

    def solved_anew(self) -> Tensor:
        """w (J, K) from the sums over the active sets: what ``restart`` and a read give."""
        return self._restarted(self.options).weights()[0]

    def _restarted(self, options: SolverOptions) -> ActiveSetSolver:
        """A solver of the same rows that starts from the active sets of this one."""
        self.weights()
        out = copy.copy(self)
        out.options = options
        out.states = [replace(state) for state in self.states]
        for name in ("w", "b", "_at_w", "_at_b", "_active", "_margins"):
            setattr(out, name, getattr(self, name).clone())
        out.restart()
        return out

    def freeze_scale(self) -> None:
        """Keep the present standardization through all later changes, for what-if questions on a copy."""
        self._held = self.scale.standard

    @property
    def groups(self) -> WeightGroups:
        """Class weights for the samples held."""
        return WeightGroups.of(class_weights(self.options.class_weight, self.stats.counts), len(self.states))

    def row_weights(self) -> Tensor:
        """Class weight times copies of each row (n,)."""
        return self.groups.by_row(self.rows.labels) * self.rows.copies

    @property
    def small(self) -> bool:
        """True if float64 centres the sums over any of the rows in exact integer arithmetic."""
        return float((self.rows.copies * self.rows.peaks.square()).sum()) < LARGEST_FLOAT_CENTRED_SUM

    def _needs_search(self, k: int) -> bool:
        """Place the rows that are new; True if the active set of a class has to be found again."""
        values, state = self.groups, self.states[k]
        counts = [
            int(n) if values.values[g] else 0 for n, g in zip(self.stats.counts.tolist(), values.of_class, strict=True)
        ]
        if counts[k] in (0, sum(counts)):
            constant = 1.0 if counts[k] else -1.0
            self.states[k] = ClassState()
            self.w[:, k] = self._at_w[:, k] = 0.0
            self.b[k] = self._at_b[k] = constant
            self._active[k], self._margins[k] = False, 1.0
            return False
        if not state.fitted:
            return True
        slots = torch.nonzero(self._fresh)[:, 0]
        if len(slots):
            margins = self._margins_of(k, self.w[:, k], self.b[k], slots)
            self._margins[k, slots] = self._margins_of(k, self._at_w[:, k], self._at_b[k], slots)
            joins = self._active[k, slots] = margins < 1.0
            far = (margins - 1.0).abs() > self._errors(k)[slots]
            state.touched |= bool((joins | ~far).any())
            slots = slots[joins]
            if len(slots):
                state.solution = self._queue(state.solution, k, slots, self.rows.copies[slots])
            if state.solution is not None and bool(far.all()) and state.solution.pending_cancels():
                state.solution.drop_pending()  # samples were relabelled between other classes
                state.touched = False
        return state.touched

    def _errors(self, k: int) -> Tensor:
        """Bounds (n,) on the errors of margins by the weights in use, also of rows that came since the last proof."""
        rows, known, state = self.rows, ~self._fresh, self.states[k]
        if state.error is None:  # the weights come from a file
            slots = torch.nonzero(self._active[k])[:, 0]
            weight = self.row_weights()[slots]
            mu = weight @ self.scale.rows(rows.q[slots]) / weight.sum()
            state.error = float(self._bound(k, self.scale, mu, self._active[k], self.w[:, k], self.b[k])[known].amax())
        longest = self.lengths[known].amax() if bool(known.any()) else self.lengths.new_zeros(())
        return state.error * (self.lengths / longest).clamp(min=1.0)  # errors grow with the lengths of the rows at most

    # -- small changes -------------------------------------------------------------------------------------------------

    def _update(self, k: int) -> bool:
        """Bring a class up to date after a small change, and prove its active set; False where a search has to be made.

        Margins are kept from the last search. With the weights moved since by d and d_b, none moved by more than its *drift*
        |q_i| |d| + |d_b|: only samples that close to 1 are computed. The active set is proven when each of these is further
        from 1 than its error bound, and each of the others than drift and bound together.
        """
        state, rows, scale = self.states[k], self.rows, self.scale
        if not state.fitted or state.solution is None or scale.standard is not None:
            return False
        active, kept = self._active[k].clone(), (self._margins[k] - 1.0).abs()
        old_error = self._rounding(scale, self._at_w[:, k], self._at_b[k])
        # 4: full Newton steps in which only margins near 1 are computed; then a search with a line search
        for _ in range(4):
            solution = state.solution
            if solution is None:
                return False
            try:
                solution.take_in()
            except TooInaccurate:
                state.solution = None
                return False
            w, b = (part[..., 0] for part in scale.weights(solution.w, solution.beta, solution.mu))
            error = self._rounding(scale, w, b)
            length, shift = float((w - self._at_w[:, k]).norm()) * scale.step, abs(float(b - self._at_b[k]))
            drift = (rows.norms * length + shift) * BOUND_ROUNDING_FACTOR + 4 * (error + old_error)
            turned = (self._margins[k] < 1.0) != active  # by an earlier pass of this loop
            near = torch.nonzero((kept <= drift) | turned)[:, 0]
            # 8: where more than one in eight samples is near its margin, all margins are computed, after which few are near
            if len(near) * 8 > rows.n:
                self._margins[k] = self._margins_of(k, w, b)
                self._at_w[:, k], self._at_b[k] = w, b
                kept, old_error, drift = (self._margins[k] - 1.0).abs(), error, 4 * error
                near = torch.nonzero((kept <= drift) | ((self._margins[k] < 1.0) != active))[:, 0]
            margins = self._margins_of(k, w, b, near)
            turns = near[(margins < 1.0) != active[near]]
            if not len(turns):
                bound = self._bound(k, scale, solution.mu, active, w, b)
                far = (self._margins[k] - 1.0).abs() > drift + bound
                far[near] = (margins - 1.0).abs() > bound[near]
                if not bool(far.all()) or float(bound.max()) > LARGEST_MARGIN_ERROR:
                    return False
                state.touched, state.error = False, float(bound.max())
                self.w[:, k], self.b[k] = w, b
                return True
            active[turns] = ~active[turns]
            copies = torch.where(active[turns], rows.copies[turns], -rows.copies[turns])
            state.solution = self._queue(solution, k, turns, copies)
            self._active[k] = active
        return False

    # -- the search ----------------------------------------------------------------------------------------------------

    def _cold_starts(self, labels: list[int]) -> dict[int, Position]:
        """Positions to start from for classes without a solution: on the way to ridge regression on all rows."""
        out: dict[int, Position] = {}
        if not labels:
            return out
        rows, weight = self.rows, self.row_weights()
        total = ActiveSums.of_all(rows, self.groups, labels[0], self.stats)
        # 2**21: margins (16 MB) of the classes that share passes over the rows
        size = max(1, 2**21 // rows.n)
        for a in range(0, len(labels), size):
            part = labels[a : a + size]
            signs = torch.stack([self.signs(k) for k in part], 1)
            point = HingeDescent(total, self.scale, signs, weight[:, None].expand_as(signs), self.small).start()
            for c, k in enumerate(part):
                w, margins = point.w[: self.scale.width(rows.in_features), c].clone(), point.margins[:, c].clone()
                out[k] = Position(w, margins, float(w @ w + hinge.loss(margins, weight)))
        return out

    def _search(self, k: int, start: Position | None) -> None:
        """Find and prove the active set of a class by Newton's method, from a position or from where the class is."""
        weight = self.row_weights()
        if start is not None:
            s = Search(k, start.margins < 1.0, None, start, self.scale)
        else:
            s = Search(k, self._active[k].clone(), self.states[k].solution, self._position(k, weight), self.scale)
        for rounds in range(MAX_NEWTON_ROUNDS):
            self._solve(s)
            assert s.solution is not None
            w, b = (part[..., 0] for part in s.scale.weights(s.solution.w, s.solution.beta, s.solution.mu))
            margins = self._margins_of(k, w, b)
            # 20: rounds after which the search goes down a ladder of rho: at a small rho, nearly separable samples make it
            # take short steps. 1e6: the first rho of the ladder, where the problem is close to plain ridge regression.
            if rounds == 20 and not s.proving:
                s.sums = s.sums or self._sums(k, s.active)
                self._change_rho(s, self.options.rho * 1e6, weight)
            elif not self._advance(s, margins, weight):
                bound = self._bound(k, s.scale, s.solution.mu, s.active, w, b)
                exact = self._prove(s, w, b, margins, bound)
                if exact is not None:
                    self._at_w[:, k], self._at_b[k], self._margins[k], self._active[k] = w, b, margins, s.active
                    self.w[:, k], self.b[k] = exact
                    self.states[k] = ClassState(s.solution, True, False, float(bound.max()))
                    return
        raise ConvergenceError(
            f"the active set of class {k} was not found in {MAX_NEWTON_ROUNDS} rounds: use a larger rho, or scale the "
            "features. The samples are still held."
        )

    def _position(self, k: int, weight: Tensor) -> Position:
        """Where a class is."""
        scale, w, b = self.scale, self.w[:, k], self.b[k]
        margins = self._margins_now(k).clone()
        if scale.standard is not None and scale.intercept == "none":  # another mean, another intercept
            margins = self._margins_of(k, w, -(scale.standard.centre.mean * scale.step) @ w)
        point = scale.point(w, b)
        return Position(point, margins, float(point @ point + hinge.loss(margins, weight)))

    def _solve(self, s: Search) -> None:
        """Bring the solution of a search to its active set."""
        if s.solution is not None:
            try:
                s.solution.take_in()
                return
            except TooInaccurate:
                s.solution = None
        s.sums = s.sums or self._sums(s.label, s.active)
        s.solution, s.sound = s.sums.solve(s.scale, self.small, s.active)
        if s.sums.empty and s.scale.intercept == "free":
            s.solution.beta += float(self.b[s.label])

    def _sums(self, k: int, active: Tensor) -> ActiveSums:
        """Sums over the active set of a class (n,)."""
        if 2 * int(active.sum()) > self.rows.n:
            sums = ActiveSums.of_all(self.rows, self.groups, k, self.stats)
            sums.change(torch.nonzero(~active)[:, 0], -1)
        else:
            sums = ActiveSums(self.rows, self.groups, k)
            sums.change(torch.nonzero(active)[:, 0], 1)
        return sums

    def _change_rho(self, s: Search, rho: float, weight: Tensor) -> None:
        """Go on from the present position with another rho."""
        w, margins = s.position.w * math.sqrt(rho / s.scale.rho), s.position.margins
        s.position = Position(w, margins, float(w @ w + hinge.loss(margins, weight)))
        s.scale, s.solution = replace(s.scale, rho=rho), None

    def _advance(self, s: Search, margins: Tensor, weight: Tensor) -> bool:
        """Go on to the next set of a search; False where the objective has stopped falling and the set is to be proven."""
        assert s.solution is not None
        here, target, wanted = s.position, s.solution.w[:, 0], margins < 1.0
        there = Position(target.clone(), margins, float(target @ target + hinge.loss(margins, weight)))
        if not s.proving and not torch.equal(wanted, s.active) and not _stopped_falling(here.value, there.value):
            step = target - here.w
            stop = torch.lerp(here.margins, margins, LONGEST_STEP)
            slope, curvature = float(here.w @ step), float(step @ step)
            t = LONGEST_STEP * hinge.lowest_on_segment(
                here.margins, stop, weight, LONGEST_STEP * slope, LONGEST_STEP**2 * curvature
            )
            mixed, at = torch.lerp(here.margins, margins, t), torch.lerp(here.w, target, t)
            between = Position(at, mixed, float(at @ at + hinge.loss(mixed, weight)))
            best = there if there.value <= between.value else between
            if best.value < here.value and not _stopped_falling(here.value, best.value):
                s.position = best
                self._change_set(s, best.margins < 1.0)
                return True
            if not torch.equal(here.margins < 1.0, s.active):  # the set was not that of the position: no Newton step
                self._change_set(s, here.margins < 1.0)
                return True
        if s.scale.rho > self.options.rho:  # a rung of the ladder needs no proof
            s.position = there
            # 100: each rung of the ladder divides rho by this
            self._change_rho(s, max(self.options.rho, s.scale.rho / 100), weight)
            return True
        s.proving = True
        return False

    def _prove(self, s: Search, w: Tensor, b: Tensor, margins: Tensor, bound: Tensor) -> tuple[Tensor, Tensor] | None:
        """The weights w (J,) and b () if the active set is proven to be theirs; else None, and the set is changed."""
        wanted = margins < 1.0
        if s.sums is None and float(bound.max()) > LARGEST_MARGIN_ERROR:
            s.solution = None  # updates have cost it digits: it is solved from sums
            return None
        near = torch.nonzero(~((margins - 1.0).abs() > bound))[:, 0]
        if (len(near) or not s.sound) and bool(s.active.any()):
            exact = self._refined(s)
            wanted[near] = exact.sides(near)
            if not s.sound:
                w, b = exact.weights()
        differs = torch.nonzero(wanted != s.active)[:, 0]
        if not len(differs):
            return w, b
        s.proofs += 1
        # 8: proofs after which all samples change sides at once; then one at a time, which cannot cycle (Murty's rule: the
        # first one, in an order that does not depend on the history)
        if s.proofs > 8:
            first = differs[self.rows.saved_order(differs)[0]]
            wanted = s.active.clone()
            wanted[first] = ~wanted[first]
        self._change_set(s, wanted)
        return None

    def _refined(self, s: Search) -> ExactRefinement:
        """The solution of a search, exact."""
        out = ExactRefinement(self.rows, self.groups, s.scale, s.label, s.active)
        assert s.solution is not None
        try:
            out.refine(s.solution)
        except ConvergenceError:  # sums, or updates, have cost the solution its digits
            s.sums = s.sums or self._sums(s.label, s.active)
            s.solution, _ = s.sums.solve(s.scale, self.small, s.active, by_rows=True)
            out.refine(s.solution)
        return out

    def _change_set(self, s: Search, wanted: Tensor) -> None:
        """Change the active set of a search: queue the rows that change sides, or change its sums."""
        joins, leaves = (torch.nonzero((wanted != s.active) & side)[:, 0] for side in (wanted, s.active))
        if s.sums is None:
            slots = torch.cat([joins, leaves])
            copies = torch.cat([self.rows.copies[joins], -self.rows.copies[leaves]])
            s.solution = self._queue(s.solution, s.label, slots, copies)
        else:
            s.solution = None
            if len(joins) + len(leaves) > int(wanted.sum()):  # new sums are cheaper
                s.sums = self._sums(s.label, wanted)
            else:
                s.sums.change(joins, 1)
                s.sums.change(leaves, -1)
        s.active = wanted

    # -- bounds --------------------------------------------------------------------------------------------------------

    def _rounding(self, scale: RowScale, w: Tensor, b: Tensor) -> Tensor:
        """Bounds on the rounding of the margins computed with weights (n,)."""
        J, lengths = self.rows.in_features, self.lengths
        if scale.offset is not None:  # b holds the product of w with the mean, rounded too
            lengths = lengths + 2 * scale.offset.norm()
        return hinge.rounding_bound(lengths, J, float(scale.point(w, b)[:J].norm()), float(b))

    def _bound(self, k: int, scale: RowScale, mu: Tensor, active: Tensor, w: Tensor, b: Tensor) -> Tensor:
        """Bounds (n,) on how far computed margins are from those of the minimum on an active set, all rounding included.

        By |g'| and |g_b| / n of :mod:`torchlssvm.functional.squared_hinge`: (|v| + reach) |g'| + |g_b| / n.
        mu: (D,), the mean of the active rows, of a free intercept.
        """
        rows, J, eps = self.rows, self.rows.in_features, hinge.FLOAT64_EPS
        slots, lengths, error, point = (
            torch.nonzero(active)[:, 0],
            self.lengths,
            self._rounding(scale, w, b),
            scale.point(w, b),
        )
        weight, signs = self.groups.by_row(rows.labels[slots]) * rows.copies[slots], self.signs(k, slots)[:, None]
        found = hinge.sweep(rows.q[slots], (w * scale.step)[:, None], b[None], signs, weight[:, None])
        g = scale.centred(found.gradient, found.gradient_b)[:, 0] + point[:J]
        g_b, total = float(found.gradient_b[0]), float(weight.sum())
        part = error[slots] + (len(slots) + 8) * eps * (found.scores - signs)[:, 0].abs()
        rounding_b = float(weight @ part) + 4 * eps * abs(g_b)
        rounding = float(weight @ (lengths[slots] * part)) + 16 * eps * float(point[:J].norm())
        if scale.offset is not None:
            rounding += float(scale.offset.norm()) * rounding_b
        size, size_b = float(g.norm()) + rounding, 0.0
        if scale.intercept == "penalized":
            size += abs(g_b / scale.root + float(point[J])) + rounding_b / scale.root + 16 * eps * abs(float(point[J]))
        elif scale.intercept == "free" and total:
            size = float((g - mu * g_b).norm()) + rounding + float(mu.norm()) * rounding_b
            size_b = (abs(g_b) + rounding_b) / total
        return ((lengths + scale.reach(mu)) * size + size_b + error) * BOUND_ROUNDING_FACTOR

    # -- parts, for files and copies -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Weights w (J, K), b (K,) and active sets (K, n), in the order in which the rows are saved, for a file."""
        w, b = self.weights()
        return {"w": w, "b": b, "active": self._active[:, self.rows.saved_order()]}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore a saved :meth:`state` of the rows held; matrices are computed again when samples change."""
        self.reset()
        if self.rows.n == 0:
            return
        like, order = self.w, self.rows.saved_order()
        w, b = (state[name].to(like.device, like.dtype, copy=True) for name in ("w", "b"))
        shapes = tuple(tuple(v.shape) for v in (w, b, state["active"]))
        if shapes != tuple(tuple(v.shape) for v in (self.w, self.b, self._active)) or not bool(w.isfinite().all()):
            raise ValueError(f"the saved weights have shapes {shapes}, or are not finite")
        self._active[:, order] = state["active"].to(like.device, torch.bool)
        self.w, self.b, self._at_w = w, b, torch.full_like(w, math.nan)  # margins are computed when they are needed
        self._fresh[:] = False
        self._groups = self.groups
        counts = self.stats.counts.tolist()
        for state_, count in zip(self.states, counts, strict=True):
            state_.fitted, state_.touched = 0 < count < sum(counts), False
        self._current = True


def _stopped_falling(before: float, after: float) -> bool:
    """True when the objective has stopped changing as far as float64 can tell."""
    return abs(before - after) <= LEAST_RELATIVE_DECREASE * abs(before)
