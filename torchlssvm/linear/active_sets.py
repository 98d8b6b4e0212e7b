"""``ActiveSetSolver``: weights of a margin head, one squared-hinge problem for each class against the rest.

Active sets, margins and weights are caches that are computed from the rows of the head. A change of samples affects only the
classes in which a changed sample is active, so the next read updates only these classes, by Newton's method. After a small
change, Theorem 1 updates the inverse of the class by the changed rows, and only margins near 1 are computed. After a larger
change, a step solves from integer sums over the active set, and a line search shortens the step.

The search ends with a proof ( :mod:`torchlssvm.functional.squared_hinge`), in which exact integers decide the margins that
float64 cannot distinguish from 1. An active set therefore does not depend on the way it was found. After
:meth:`~ActiveSetSolver.restart`, every bit of the weights depends on the active sets alone.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchlssvm.errors import ConvergenceError
from torchlssvm.functional import cost
from torchlssvm.functional import squared_hinge as hinge
from torchlssvm.functional.whitened import Whitened
from torchlssvm.linear.active_sums import change_sums, row_weights, solve_active
from torchlssvm.linear.exact_refinement import BOUND_ROUNDING_FACTOR, ExactRefinement
from torchlssvm.linear.grid_rows import GridRows, RowChange
from torchlssvm.linear.hinge_descent import LONGEST_STEP, HingeDescent
from torchlssvm.linear.normal_equations import class_weights
from torchlssvm.linear.row_scale import RowScale
from torchlssvm.linear.solution import Solution, TooInaccurate
from torchlssvm.linear.solvers import SolverOptions
from torchlssvm.linear.standardization import Standardization, standardization
from torchlssvm.statistics import Statistics

MAX_NEWTON_ROUNDS = 1000
"""Newton rounds of one class before giving up. 7 to 9 are usual; class weights that differ 1e20-fold need hundreds."""


class Proof(NamedTuple):
    """A bound: margins differ from those at the minimum by at most (length + reach) size + size_b, plus rounding."""

    reach: float
    size: float
    size_b: float


@dataclass
class ClassState:
    """The solution of one class.

    Attributes:
        solution: weights and inverse for the active set; None if the next change solves from sums.
        fitted: True once weights and active set are known. It stays False for a class with samples of one sign only.
        touched: True when samples have changed that are, or may be, active.
        proof: the proof for the weights in use; None until it is needed.
    """

    solution: Solution | None = None
    fitted: bool = False
    touched: bool = True
    proof: Proof | None = None


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
        active: (n,), the current active set.
        solution: the solution on this set; None if the next step solves from sums.
        scale: units, with the current rho of the search.
        position: the lowest point so far; None before the first line search.
        sums: sums over the set, once they were formed.
        sound: False if float64 lacked the digits to solve from sums.
        proving: True once the objective has stopped falling. From then on only the proof changes the set.
        proofs: number of proofs that have changed the set.
    """

    label: int
    active: Tensor
    solution: Solution | None
    scale: RowScale
    position: Position | None = None
    sums: Statistics | None = None
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
        self.reset()

    def reset(self) -> None:
        """Forget all caches, so that the next read starts from the rows."""
        K, J, n, like = self.stats.num_classes, self.rows.in_features, self.rows.n, self.rows.norms
        self.states = [ClassState() for _ in range(K)]
        self.w, self.b = like.new_zeros(J, K), like.new_zeros(K)
        self._at_w, self._at_b = torch.zeros_like(self.w), torch.zeros_like(self.b)  # the weights that margins are of
        self._active = torch.zeros(K, n, dtype=torch.bool, device=like.device)
        self._margins = like.new_zeros(K, n)
        self._fresh = torch.ones(n, dtype=torch.bool, device=like.device)  # rows that came after the last read
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
        """Change the regularization. The next search starts from the present active sets."""
        self.options.rho = rho
        self.restart()

    def add_classes(self, k: int) -> None:
        """Make room for k more classes. The other classes do not change."""
        if self.options.follows_counts:
            self.reset()
            return
        self.states += [ClassState() for _ in range(k)]
        for name, dim in (("_active", 0), ("_margins", 0), ("w", 1), ("b", 0), ("_at_w", 1), ("_at_b", 0)):
            old = getattr(self, name)
            shape = list(old.shape)
            shape[dim] = k
            setattr(self, name, torch.cat([old, old.new_zeros(shape)], dim))
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
        """Put rows on the pending list of a class's solution; None if new sums are cheaper.

        slots: (c,) places; copies: (c,), negative for rows that leave.
        """
        rows, J = self.rows, self.rows.in_features
        if solution is None or not solution.updatable:
            return None
        new = solution.pending + len(slots)
        if cost.solve_is_cheaper(J, new, solution.columns + new, inverse=False):
            return None
        if solution.deferred + new > J // 8:
            solution.inverse()  # takes the deferred terms in
        weights, y = self.class_weights(), self.signs(k, slots)[:, None]
        weight = copies if weights is None else weights[rows.labels[slots]] * copies
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
            standard = self._held or standardization(self.stats)
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

        Raises ConvergenceError if a search does not converge. Later reads raise it immediately, until samples or options change
        or you call ``restart``.
        """
        if self._current:
            return self.w, self.b
        if self._failure is not None:
            raise ConvergenceError(self._failure)
        if self.rows.n == 0:
            self.reset()
        else:
            try:
                self._bring_up_to_date()
            except ConvergenceError as error:
                self.reset()
                self._failure = str(error)
                raise
        self._current = True
        return self.w, self.b

    def drop_unfinished(self) -> None:
        """Forget all caches after an interruption, unless a search is known to fail."""
        if self._failure is None:
            self.reset()

    def _bring_up_to_date(self) -> None:
        self.w, self.b = self.w.clone(), self.b.clone()  # weights that were returned earlier must not change
        todo = [k for k in range(len(self.states)) if self._needs_search(k)]
        self._fresh = torch.zeros_like(self._fresh)
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
        return self._margins_at(k, self.w[:, k], self.b[k]).clone()

    def _margins_at(self, k: int, w: Tensor, b: Tensor) -> Tensor:
        """Margins (n,) by weights w (J,) and b (), which are cached."""
        if not torch.equal(self._at_w[:, k], w) or not torch.equal(self._at_b[k], b):
            self._margins[k] = self._margins_of(k, w, b)
            self._at_w[:, k], self._at_b[k] = w, b
        return self._margins[k]

    def _margins_of(self, k: int, w: Tensor, b: Tensor, slots: Tensor | None = None) -> Tensor:
        """Margins (n,), or of the rows at ``slots`` (m,), by weights w (J,) and b ()."""
        q = self.rows.q if slots is None else self.rows.q[slots]
        return hinge.scores(q, (w * self.scale.step)[:, None], b[None])[:, 0] * self.signs(k, slots)

    def _margins_near(self, k: int, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Margins (n,) by weights, of which only those near 1 are computed, and bounds (n,) on the drift of the others.

        If the weights and intercept differ from the cached ones by d and d_b, no margin has moved by more than
        |q_i| |d| + |d_b|.
        """
        rows, at_w, at_b = self.rows, self._at_w[:, k], self._at_b[k]
        length, shift = float((w - at_w).norm()) * self.scale.step, abs(float(b - at_b))
        rounding = self._rounding(w, b) + self._rounding(at_w, at_b)
        drift = (rows.norms * length + shift) * BOUND_ROUNDING_FACTOR + 4 * rounding
        near = torch.nonzero((self._margins[k] - 1.0).abs() <= drift)[:, 0]
        # 8: if more than one in eight samples is near its margin, all margins are computed, after which few are near
        if len(near) * 8 > rows.n:
            return self._margins_at(k, w, b), torch.zeros_like(drift)
        margins = self._margins[k].clone()
        margins[near], drift[near] = self._margins_of(k, w, b, near), 0.0
        return margins, drift

    def whitened(self, k: int) -> Whitened:
        """The system of a class on its active set, whitened, up to date."""
        self.weights()
        state = self.states[k]
        if state.solution is None or state.solution.factored is None:
            state.solution = self._solved(k, self._sums(self._active[k]), self._active[k], self.scale)[0]
        return state.solution.whitened()

    def signs(self, k: int, slots: Tensor | None = None) -> Tensor:
        """+1 for the rows of a class and -1 for the others (n,), or at ``slots`` (m,)."""
        labels = self.rows.labels if slots is None else self.rows.labels[slots]
        return torch.where(labels == k, 1.0, -1.0).to(torch.float64)

    def restarted(self, options: SolverOptions) -> ActiveSetSolver:
        """A solver of the same rows that starts from the active sets of this one, with sums over them."""
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

    def class_weights(self) -> Tensor | None:
        """Weights by class (K,) for the current samples; None for ones."""
        return class_weights(self.options.class_weight, self.stats.counts)

    def row_weights(self, slots: Tensor | slice = slice(None)) -> Tensor:
        """Class weight times copies of each row (n,), or of the rows at ``slots`` (m,)."""
        return row_weights(self.rows, self.class_weights(), slots)

    def _needs_search(self, k: int) -> bool:
        """Put new rows on their sides of the margin. Returns True if the active set of a class must be found again."""
        state, weights = self.states[k], self.class_weights()
        counts = (self.stats.counts if weights is None else self.stats.counts * (weights > 0)).tolist()
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
        """Bounds (n,) on the errors of margins by the weights in use."""
        state, w, b = self.states[k], self.w[:, k], self.b[k]
        if state.proof is None:  # the weights come from a file
            slots = torch.nonzero(self._active[k])[:, 0]
            weight = self.row_weights(slots)
            mu = weight @ self.scale.rows(self.rows.q[slots]) / weight.sum()
            state.proof = self._proof(k, mu, self._active[k] & ~self._fresh, w, b)
        return self._bounds(state.proof, w, b)

    # -- the search ----------------------------------------------------------------------------------------------------

    def _cold_starts(self, labels: list[int]) -> dict[int, Position]:
        """Positions to start from for classes without a solution: on the way to ridge regression on all rows."""
        out: dict[int, Position] = {}
        if not labels:
            return out
        rows, weight = self.rows, self.row_weights()
        # 2**21: margins (16 MB) of the classes that share passes over the rows
        size = max(1, 2**21 // rows.n)
        for a in range(0, len(labels), size):
            part = labels[a : a + size]
            signs = torch.stack([self.signs(k) for k in part], 1)
            point = HingeDescent(self, rows.q, self.scale, signs, weight[:, None].expand_as(signs)).start()
            for c, k in enumerate(part):
                out[k] = self._at(point.w[: self.scale.width(rows.in_features), c].clone(), point.margins[:, c].clone())
        return out

    def _search(self, k: int, start: Position | None) -> None:
        """Find and prove the active set of a class by Newton's method, from a position or from where the class is."""
        if start is not None:
            s = Search(k, start.margins < 1.0, None, self.scale, start)
        else:
            s = Search(k, self._active[k].clone(), self.states[k].solution, self.scale)
        for rounds in range(MAX_NEWTON_ROUNDS):
            self._solve(s)
            assert s.solution is not None
            w, b = (part[..., 0] for part in s.scale.weights(s.solution.w, s.solution.beta, s.solution.mu))
            # 4: full Newton steps after a small change; then come steps with a line search, which needs all margins
            if rounds < 4 and s.sums is None and not s.proofs:
                margins, drift = self._margins_near(k, w, b)
                if not torch.equal(margins < 1.0, s.active):
                    self._change_set(s, margins < 1.0)
                    continue
            else:
                margins = self._margins_at(k, w, b)
                drift = torch.zeros_like(margins)
                # 20: rounds after which the search goes down a ladder of rho: at a small rho, nearly separable samples make
                # it take short steps. 1e6: the first rho of the ladder, where the problem is close to plain ridge regression.
                if rounds == 20 and not s.proving:
                    self._change_rho(s, self.options.rho * 1e6)
                    continue
                if self._advance(s, margins):
                    continue
            if self._prove(s, w, b, margins, drift):
                return
        raise ConvergenceError(
            f"the active set of class {k} was not found in {MAX_NEWTON_ROUNDS} rounds: use a larger rho, or scale the "
            "features. The samples are still held."
        )

    def _position(self, k: int) -> Position:
        """Where a class is."""
        scale, w, b = self.scale, self.w[:, k], self.b[k]
        if scale.standard is not None and scale.intercept == "none":  # another mean, another intercept
            b = -(scale.standard.centre.mean * scale.step) @ w
        return self._at(scale.point(w, b), self._margins_of(k, w, b))

    def _at(self, w: Tensor, margins: Tensor) -> Position:
        """A position. w: (D,), w'; margins: (n,)."""
        return Position(w, margins, float(w @ w + hinge.loss(margins, self.row_weights())))

    def _solve(self, s: Search) -> None:
        """Bring the solution of a search to its active set."""
        if s.solution is not None:
            try:
                s.solution.take_in()
                return
            except TooInaccurate:
                s.solution = None
        s.sums = s.sums or self._sums(s.active)
        s.solution, s.sound = self._solved(s.label, s.sums, s.active, s.scale)
        if s.sums.n == 0 and s.scale.intercept == "free":
            s.solution.beta += float(self.b[s.label])

    def _sums(self, active: Tensor) -> Statistics:
        """Sums over an active set (n,)."""
        most = 2 * int(active.sum()) > self.rows.n
        sums = self.stats.copy() if most else self.stats.zero()
        if not most:
            sums.decide("labels", self.stats.grid)
        change_sums(sums, self.rows, torch.nonzero(active != most)[:, 0], -1 if most else 1)
        return sums

    def _solved(
        self, k: int, sums: Statistics, active: Tensor, scale: RowScale, by_rows: bool = False
    ) -> tuple[Solution, bool]:
        """The solution of a class on an active set (n,), of which these are the sums."""
        return solve_active(sums, self.rows, scale, self.class_weights(), k, active, by_rows)

    def _advance(self, s: Search, margins: Tensor) -> bool:
        """Move to the lowest point in the direction of the solution. Returns False if the objective has stopped falling.

        margins: (n,), the margins of the solution.
        """
        assert s.solution is not None
        if s.proving:
            return False
        target = s.solution.w[:, 0]
        if not torch.equal(margins < 1.0, s.active):
            here = s.position or self._position(s.label)
            step, far = target - here.w, torch.lerp(here.margins, margins, LONGEST_STEP)
            slope, curvature = LONGEST_STEP * float(here.w @ step), LONGEST_STEP**2 * float(step @ step)
            t = LONGEST_STEP * hinge.lowest_on_segment(here.margins, far, self.row_weights(), slope, curvature)
            there = self._at(here.w + t * step, torch.lerp(here.margins, margins, t))
            # 1e-13: least relative decrease of the objective, a thousand roundings
            falls = there.value < here.value * (1.0 - 1e-13)
            s.position = there if falls else here
            if falls or not torch.equal(here.margins < 1.0, s.active):  # else the set is that of the position
                self._change_set(s, s.position.margins < 1.0)
                return True
        if s.scale.rho > self.options.rho:  # a rung of the ladder needs no proof
            s.position = self._at(target.clone(), margins.clone())
            # 100: each rung of the ladder divides rho by this
            self._change_rho(s, max(self.options.rho, s.scale.rho / 100))
            return True
        s.proving = True
        return False

    def _change_rho(self, s: Search, rho: float) -> None:
        """Go on from the present position with another rho."""
        here = s.position or self._position(s.label)
        s.position = self._at(here.w * math.sqrt(rho / s.scale.rho), here.margins)
        s.sums = s.sums or self._sums(s.active)
        s.scale, s.solution = replace(s.scale, rho=rho), None

    def _prove(self, s: Search, w: Tensor, b: Tensor, margins: Tensor, drift: Tensor) -> bool:
        """Adopt weights w (J,) and b () if the active set is proven to be theirs; otherwise change the set and return False.

        margins: (n,), each with an error of at most its drift (n,) plus rounding.
        """
        assert s.solution is not None
        k, wanted = s.label, margins < 1.0
        proof = self._proof(k, s.solution.mu, s.active, w, b)
        bounds = self._bounds(proof, w, b)
        # 1e-5: largest bound at which updated weights are used; beyond it, updates have lost digits, and sums are solved
        if s.sums is None and float(bounds.max()) > 1e-5:
            s.solution = None
            return False
        near = torch.nonzero(~((margins - 1.0).abs() > drift + bounds))[:, 0]
        if (len(near) or not s.sound) and bool(s.active.any()):
            exact = self._refined(s)
            wanted[near] = exact.sides(near)
            if not s.sound:
                w, b = exact.weights()
        differs = torch.nonzero(wanted != s.active)[:, 0]
        if not len(differs):
            self._active[k], self.w[:, k], self.b[k] = s.active, w, b
            self.states[k] = ClassState(s.solution, True, False, proof)
            return True
        s.proofs += 1
        # 8: proofs after which all samples change sides at once; then one at a time, which cannot cycle (Murty's rule: the
        # first one, in an order that does not depend on the history)
        if s.proofs > 8:
            first = differs[self.rows.saved_order(differs)[0]]
            wanted = s.active.clone()
            wanted[first] = ~wanted[first]
        self._change_set(s, wanted)
        return False

    def _refined(self, s: Search) -> ExactRefinement:
        """The solution of a search, exact."""
        out = ExactRefinement(self.rows, self.class_weights(), self.scale, s.label, s.active)
        assert s.solution is not None
        try:
            out.refine(s.solution)
        except ConvergenceError:  # the solution has lost its digits in sums or updates
            s.sums = s.sums or self._sums(s.active)
            s.solution, _ = self._solved(s.label, s.sums, s.active, self.scale, by_rows=True)
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
                s.sums = self._sums(wanted)
            else:
                change_sums(s.sums, self.rows, joins, 1)
                change_sums(s.sums, self.rows, leaves, -1)
        s.active = wanted

    # -- bounds --------------------------------------------------------------------------------------------------------

    def _rounding(self, w: Tensor, b: Tensor) -> Tensor:
        """Bounds on the rounding of the margins computed with weights (n,)."""
        J, lengths, scale = self.rows.in_features, self.lengths, self.scale
        if scale.offset is not None:  # b holds the product of w with the mean, rounded too
            lengths = lengths + 2 * scale.offset.norm()
        return hinge.rounding_bound(lengths, J, float(scale.point(w, b)[:J].norm()), float(b))

    def _bounds(self, proof: Proof, w: Tensor, b: Tensor) -> Tensor:
        """Bounds (n,) on how far margins computed with weights are from those of the minimum, rounding included."""
        bounds = (self.lengths + proof.reach) * proof.size + proof.size_b + self._rounding(w, b)
        return bounds * BOUND_ROUNDING_FACTOR

    def _proof(self, k: int, mu: Tensor, active: Tensor, w: Tensor, b: Tensor) -> Proof:
        """The proof by |g'| and |g_b| / n of :mod:`torchlssvm.functional.squared_hinge`, rounding included.

        mu: (D,), the mean of the active rows, for a free intercept; active: (n,).
        """
        rows, J, scale, eps = self.rows, self.rows.in_features, self.scale, hinge.FLOAT64_EPS
        slots, point = torch.nonzero(active)[:, 0], scale.point(w, b)
        weight, signs = self.row_weights(slots), self.signs(k, slots)[:, None]
        found = hinge.sweep(rows.q[slots], (w * scale.step)[:, None], b[None], signs, weight[:, None])
        g = scale.centred(found.gradient, found.gradient_b)[:, 0] + point[:J]
        g_b, total = float(found.gradient_b[0]), float(weight.sum())
        part = self._rounding(w, b)[slots] + (len(slots) + 8) * eps * (found.scores - signs)[:, 0].abs()
        rounding_b = float(weight @ part) + 4 * eps * abs(g_b)
        rounding = float(weight @ (self.lengths[slots] * part)) + 16 * eps * float(point[:J].norm())
        if scale.offset is not None:
            rounding += float(scale.offset.norm()) * rounding_b
        size, size_b = float(g.norm()) + rounding, 0.0
        if scale.intercept == "penalized":
            size += abs(g_b / scale.root + float(point[J])) + rounding_b / scale.root + 16 * eps * abs(float(point[J]))
        elif scale.intercept == "free" and total:
            size = float((g - mu * g_b).norm()) + rounding + float(mu.norm()) * rounding_b
            size_b = (abs(g_b) + rounding_b) / total
        return Proof(scale.reach(mu), size, size_b)

    # -- parts, for files and copies -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Weights w (J, K), b (K,) and active sets (K, n), in the order in which the rows are saved, for a file."""
        w, b = self.weights()
        return {"w": w, "b": b, "active": self._active[:, self.rows.saved_order()]}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore a saved :meth:`state` of the rows. Matrices are computed again when samples change."""
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
        counts = self.stats.counts.tolist()
        for state_, count in zip(self.states, counts, strict=True):
            state_.fitted, state_.touched = 0 < count < sum(counts), False
        self._current = True
