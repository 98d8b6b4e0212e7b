"""The solver of the incremental SVM: it chooses a method for each operation and certifies the result, or solves robustly."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from torchlssvm.errors import ConvergenceError, NumericalWarning
from torchlssvm.functional.modes import all_or_nothing
from torchlssvm.functional.svm_path import AT_BOUND_SHARE, EPS, MAX_ROUNDING_UNITS
from torchlssvm.kernels import Kernel
from torchlssvm.kernels.gram_rows import GramRows, index_of
from torchlssvm.svm.active_set import FINAL_NEWTON_STEPS, ActiveSet
from torchlssvm.svm.kernel_rows import KernelRows
from torchlssvm.svm.margin_set import MarginSet
from torchlssvm.svm.path import Path, PathEvent
from torchlssvm.svm.pivoting import pivot
from torchlssvm.svm.samples import NO_POSITIONS, VECTOR_NAMES, Array, Batch, Samples
from torchlssvm.svm.warm_start import MAX_SAMPLES_WHOLE_MATRIX, approximate_optimum, balanced

MIN_SAMPLES_PIVOTED = 32
"""From this many new samples on the wrong side, block pivoting is faster than one walk for all of them."""
MAX_REST_ROUNDING_UNITS = MAX_ROUNDING_UNITS / 4
"""Units of rounding that ``rest`` of a sample may have gathered before it is computed from the kernel again."""
CLEAR_SIDE_FACTOR = 16.0
"""If g_i is on its side by this multiple of its gathered rounding, ``rest`` may gather that multiple of the units above."""


class OptimalityCheck(NamedTuple):
    """The result of a check of alpha, b and the sets."""

    wrong: Array  # (k,) positions whose g is on the wrong side by more than rounding
    feasible: bool  # 0 <= alpha <= u, and |sum y alpha| is rounding
    violation: float  # the largest violation of (2)

    @property
    def holds(self) -> bool:
        """True if this is the solution."""
        return self.feasible and not len(self.wrong)


class Snapshot(NamedTuple):
    """The state before an operation. :meth:`PathSolver.restore` restores it bit for bit."""

    vectors: Array  # (9, capacity)
    ids: Array  # (capacity,) int64
    margin: Array  # (s,) positions
    a: Array  # (s,) their coefficients
    b: float
    counters: tuple[int, float, int, str]  # events, roundings, counted events, last method


class PathSolver:
    """The content of one machine. Every operation ends certified, or changes nothing."""

    def __init__(self, kernel: Kernel | None, device: torch.device, cache_bytes: int):
        self.samples = Samples()
        self.rows = KernelRows(self.samples, GramRows(kernel, device, cache_bytes))
        self.margin = MarginSet(self.samples)
        self.path = Path(self.samples, self.rows, self.margin)
        self.next_id = 0
        self.report: Callable[[float], None] | None = None  # called with the share of a fit that is done
        self.last_method = ""  # of the last operation: "path", "joint", "pivot", "solve" or "fallback"
        self._counted_events = 0  # those whose rounding errors are in samples.rounding
        self._rest_before = np.zeros(0)  # (capacity,) rest at the start of the operation

    # -- adding and removing -------------------------------------------------------------------------------------------

    def begin_change(
        self, batch: Batch | None, ids: list[int], leaving: Array, method: str = "auto"
    ) -> Callable[[], None]:
        """Solve with new samples under these ids and without the samples in positions ``leaving``, which the caller erases.

        Returns a function that undoes the change. Call it only before the leaving samples are erased.
        """
        new = self.place(batch, ids) if batch is not None and ids else NO_POSITIONS
        if not len(new) and not len(leaving):
            return lambda: None
        if len(new) == 1 and not len(leaving) and len(self.margin):
            with all_or_nothing(self, functools.partial(self.erase, new)):
                wrong = self._prepare_new(new)
            self.last_method = "path"
            if not len(wrong):
                return functools.partial(self.erase, new)
            with self.snapshotted(new) as before:
                self._finish_walk(self.path.walk(wrong, NO_POSITIONS))
        else:
            with self.snapshotted(new) as before:
                self.solve_change(new, leaving, method)
        return functools.partial(self.restore, before)

    def place(self, batch: Batch, ids: list[int]) -> Array:  # -> (B,)
        """Give new samples positions, with their rows and labels, and alpha = 0."""
        s = self.samples
        order = s.order() if self.rows.gram.kernel is None else NO_POSITIONS
        if s.grow(len(ids)):
            self.margin.fit_capacity()
        new = s.place(ids, batch.y, batch.weight, batch.u)
        with all_or_nothing(s, functools.partial(s.drop, new)):
            self.rows.put(new, batch.x, order)
        return new

    def erase(self, leaving: Array) -> None:  # (k,)
        """Erase samples that have no part in the solution."""
        self.rows.erase(leaving)
        self.margin.erase_columns(leaving)
        self.samples.drop(leaving)
        if not self.samples.n:
            self.margin.a[0] = 0.0

    def solve_change(self, new: Array, leaving: Array, method: str = "auto") -> None:  # (B,), (k,) positions
        """Solve with new samples and without the leaving ones, which keep their positions. A failure does not restore all.

        Few samples follow the path, more samples are pivoted, and many are solved from scratch.
        """
        s = self.samples
        s.u[leaving] = 0.0
        if not s.has_both_classes():
            self._solve_one_class()
            return
        held = s.n - len(new) - len(leaving)
        if method == "auto" and len(new) > max(MIN_SAMPLES_PIVOTED, 2 * held):
            self._solve(self._feasible_alpha())
            return
        wrong = self._prepare_new(new) if len(new) else new
        support = leaving[s.alpha[leaving] > 0]
        if not len(wrong) and not len(support):
            self.last_method = "path"
            self._release(leaving)
            if not len(self.margin):
                self._centre_b()
            return
        many = len(wrong) >= MIN_SAMPLES_PIVOTED or len(support) > s.n // 4
        if method == "pivot" or (method == "auto" and many):
            side = s.side.copy()  # a new sample starts in S, unless it is misclassified
            side[wrong] = np.where(s.g[wrong] > -1.0, 0.0, -1.0)
            self._solve(self._feasible_alpha(), side)
            return
        self.last_method = "path" if method == "path" or len(wrong) + len(support) == 1 else "joint"
        self._release(leaving)
        walks = [(wrong, support)]
        if method == "path":
            walks = [(NO_POSITIONS, support[[k]]) for k in range(len(support))]
            walks += [(wrong[[k]], NO_POSITIONS) for k in range(len(wrong))]
        # an earlier walk may have moved a sample to the right side
        self._finish_walk(all(self.path.walk(up[s.alpha[up] == 0], down) for up, down in walks))

    def _solve_one_class(self) -> None:
        """Without samples of the other class alpha = 0, and b alone puts every sample on its margin."""
        s = self.samples
        remaining = s.y[s.u > 0]
        self.margin.clear(b=float(remaining[0]) if len(remaining) else 0.0)
        s.alpha[:] = s.rest[:] = s.g[:] = 0.0
        s.side[:] = np.where(s.u > 0, 1.0, 0.0)
        self.last_method = "path"

    def _prepare_new(self, new: Array) -> Array:  # (B,) -> (k,)
        """Compute rest, g and the entries of QS for new samples with alpha = 0. Returns the samples on the wrong side."""
        s = self.samples
        outside = s.alpha * (s.side != 0)
        for part, Q in self.rows.blocks(new):
            self.margin.add_columns(part, Q)
            i = index_of(part)
            s.rest[i] = Q @ outside
            s.g[i] = Q @ s.alpha + s.y[i] * self.margin.b - 1.0
        return new[s.g[new] < 0]

    def _release(self, leaving: Array) -> None:
        """Take samples that are to be removed out of S, with their alpha, and out of the Kuhn-Tucker checks (side = 0)."""
        s, margin = self.samples, self.margin
        margin.write_alpha()
        for i in leaving.tolist():
            if s.side[i] == 0:
                slot = int(np.flatnonzero((margin.at == i) & (margin.used > 0))[-1])
                self.rows.keep_row(i, margin.QS[slot])
                margin.leave(slot, float(s.alpha[i]), 0.0)
                self.path.roundings += float(s.alpha[i] * s.root[i]) ** 2
            s.side[i] = 0.0

    # -- methods -------------------------------------------------------------------------------------------------------

    def _finish_walk(self, followed: bool) -> None:
        """Correct S at the end of a walk, learn samples that are on the wrong side there, and certify."""
        s = self.samples
        for _ in range(8):  # walks, each of which learns samples missed by the walk before; one or two are usual
            if not followed:
                break
            self._correct()
            self._recompute_rounded_rest()
            found = self.check_optimality()
            if found.holds:
                self._warn_if_undetermined()
                return
            wrong = found.wrong
            if not found.feasible or not len(wrong) or bool((s.side[wrong] == 0).any()):
                break
            followed = self.path.walk(wrong, NO_POSITIONS)
        self._solve_from_present_sets()

    def _solve(self, start: Array, side: Array | None = None, rest: Array | None = None) -> None:  # (capacity,) each
        """Pivot from the sets ``side`` if given, then from the sets of an approximate optimum, and at last solve robustly.

        start: alpha in its box, with y^T alpha = 0. rest: the ``rest`` of the sets ``side``, if known.
        """
        self.last_method = "pivot"
        if side is not None and self._pivot(side, start, rest):
            return
        alpha = self._solve_in_bulk(start)
        if alpha is not None:
            self._solve_robustly(alpha)

    def _solve_from_present_sets(self) -> None:
        """Solve again, starting from the present sets. The rest of the state may be wrong."""
        start, side = self._feasible_alpha(), self.samples.side.copy()
        self.margin.clear(b=self.margin.b)
        self._solve(start, side)

    def _solve_in_bulk(self, start: Array) -> Array | None:  # (capacity,)
        """Pivot from the sets of an approximate optimum. Returns None if solved, otherwise coefficients near the optimum.

        A few trades are enough, unless C times the kernel is large. If few coefficients are then inside their box, the sets
        of a smaller C, which are almost the same, are found first. Otherwise more trades are made.
        """
        s = self.samples
        self.last_method, alpha, u = "solve", start, s.u.copy()
        for violation in (1e-2, 1e-3) if s.n <= MAX_SAMPLES_WHOLE_MATRIX else (1e-3, 1e-4):
            for trades in (5, 100):  # for each sample
                alpha, converged = approximate_optimum(s, self.rows, alpha, violation, trades, self.report)
                self.margin.clear(b=self.margin.b)
                if self._pivot((alpha <= 0) * 1.0 - (alpha >= u) * 1.0, alpha):
                    return None
                if converged:
                    break
                few = np.count_nonzero((alpha > 0) & (alpha < u)) <= 512  # the robust method is faster than more trades
                if few and float((s.root**2).max() * u.max()) > 1.0:
                    return self._solve_by_smaller_C(start)
        return alpha

    def _solve_by_smaller_C(self, start: Array) -> Array | None:  # (capacity,)
        """Solve with an eighth of C, then with C from the sets found. Returns the same as :meth:`_solve_in_bulk`."""
        s, u = self.samples, self.samples.u.copy()
        s.u[:] = u / 8
        near = self._solve_in_bulk(start / 8)
        alpha, side = (s.alpha if near is None else near) * 8, s.side.copy()
        s.u[:], alpha = u, balanced(np.minimum(alpha, u), u, s.y)
        self.margin.clear(b=self.margin.b)
        if near is None and self._pivot(side, alpha):
            return None
        return None if self._run_active_set(alpha, self.margin.b).holds else self._feasible_alpha()

    def _pivot(self, side: Array, alpha: Array, rest: Array | None = None) -> bool:  # (capacity,) each
        """Pivot from these sets, correct S, and tell whether the result is optimal."""
        roundings = pivot(self.samples, self.rows, self.margin, side, alpha, rest)
        if roundings is None:
            return False
        if rest is None:  # pivoting has computed it from the kernel
            self._count_no_rounding()
            self.path.roundings = roundings
        else:
            self._recompute_rest()
        self._correct()
        self._recompute_rounded_rest()
        return self.check_optimality().holds

    def _solve_robustly(self, alpha: Array) -> None:  # (capacity,) in its box, with y^T alpha = 0
        """Run the active-set method from one start after another: alpha, an approximate optimum, 0, the last end."""
        s = self.samples
        found, zero = None, np.zeros(s.capacity)
        for b, start in (
            (self.margin.b, lambda: alpha),
            (0.0, lambda: approximate_optimum(s, self.rows, zero)[0]),
            (0.0, lambda: zero),
            (0.0, self._feasible_alpha),
        ):
            found = self._run_active_set(start(), b)
            if found.holds:
                self._warn_if_undetermined()
                return
        raise ConvergenceError(
            "no point was found that passes the certificate of a solution"
            + (f": (2) is violated by {found.violation:.1e} at {len(found.wrong)} sample(s)" if found else "")
            + ". The kernel may not be positive semidefinite, or C times its values too large for float64. Nothing was changed."
        )

    def _run_active_set(self, alpha: Array, b: float) -> OptimalityCheck:  # (capacity,)
        """Run the active-set method from this start, and check its end."""
        self.last_method, self.margin.watched = "fallback", None
        if ActiveSet(self.path, self.check_optimality).run(alpha, b):
            self._recompute_rest()
            self._correct()
            return self.check_optimality()
        return OptimalityCheck(NO_POSITIONS, False, np.inf)

    def _feasible_alpha(self) -> Array:
        """Return the present coefficients, in their box and balanced, without those of samples that are removed."""
        s = self.samples
        self.margin.write_alpha()
        alpha = np.where(s.u > 0, np.clip(np.nan_to_num(s.alpha), 0.0, s.u), 0.0)
        return balanced(alpha, s.u, s.y)

    # -- the certificate -----------------------------------------------------------------------------------------------

    def check_optimality(self) -> OptimalityCheck:
        """Check alpha, b and the sets by g, which must be up to date. Costs O(n), and kernel rows for doubtful samples only."""
        s, b = self.samples, self.margin.b
        off = np.where(s.side == 0, np.abs(s.g) * (s.u > 0), -s.side * s.g)  # u = 0: free, or about to leave
        wrong = np.flatnonzero(~(off <= MAX_ROUNDING_UNITS * EPS * self._least_rounding_unit()))
        if len(wrong):
            units = EPS * (self.rows.absolute_products(wrong, s.alpha) + abs(b) + 1.0)
            wrong = wrong[~(off[wrong] <= MAX_ROUNDING_UNITS * units)]
        inside = bool(((s.alpha >= 0.0) & (s.alpha <= s.u)).all())
        feasible = inside and abs(float(s.y @ s.alpha)) <= MAX_ROUNDING_UNITS * EPS * float(s.alpha.sum())
        return OptimalityCheck(wrong, feasible, max(0.0, float(off.max(initial=0.0))))

    def _least_rounding_unit(self) -> Array:  # -> (capacity,)
        """Return a lower bound of sum_j |Q_ij| alpha_j + |b| + 1, from signed sums of its terms: g and rest."""
        s, b = self.samples, self.margin.b
        return np.maximum(np.abs(s.g + 1.0 - s.y * b), np.abs(s.rest)) + (abs(b) + 1.0)

    def rounding_bound(self) -> float:
        """Return the largest unit of rounding, EPS (sum_j |Q_ij| alpha_j + |b| + 1), of all samples i."""
        s = self.samples
        held = np.flatnonzero(s.ids >= 0)
        return EPS * float(self.rows.absolute_products(held, s.alpha).max(initial=0.0) + abs(self.margin.b) + 1.0)

    # -- exact ends ----------------------------------------------------------------------------------------------------

    def _correct(self) -> None:
        """Take a Newton step on S and compute every g. If no margin vector fixes b, centre b in its interval."""
        margin = self.margin
        if len(margin) and not self._newton_step():
            self._empty_margin_set_at_bounds()
        if not len(margin):
            self.margin.compute_g()
            self._centre_b()

    def _newton_step(self) -> bool:
        """Take a Newton step on S with the residuals of (2) and (3) if it stays in the box, and write alpha and every g.

        Returns True if any margin vector is inside its box by more than AT_BOUND_SHARE of it. S must have a margin vector.
        """
        s, margin = self.samples, self.margin
        k = margin.top
        a, lower, upper = margin.a[:k], margin.lower[:k], margin.upper[:k]
        margin.write_alpha()
        r = margin.A[:k, :k] @ a + margin.used[:k] * (s.rest[margin.at[:k]] - 1.0)
        r[0] = float(s.y @ s.alpha)
        new = a - margin.times_R(r)
        within = np.clip(new, lower, upper)
        if bool((np.abs(new - within)[1:] <= 1e-9 * upper[1:]).all()):  # more means wrong sets
            a[:] = within
        np.clip(a, lower, upper, out=a)
        margin.write_alpha()
        margin.compute_g()
        return bool((margin.used[1:k] * np.minimum(a, upper - a)[1:] > AT_BOUND_SHARE * upper[1:]).any())

    def _empty_margin_set_at_bounds(self) -> None:
        """Move all of S to E and R if every margin vector is at a bound, to rounding, since no margin vector then fixes b."""
        s, margin = self.samples, self.margin
        slots = margin.slots()
        a, u = margin.a[slots], margin.upper[slots]
        bound = np.where(a > 0.5 * u, u, 0.0)
        effect = np.abs(a - bound) * s.root[margin.at[slots]] * s.root.max()  # on any g, at most
        if bool(((np.abs(a - bound) > AT_BOUND_SHARE * u) | (effect > MAX_ROUNDING_UNITS / 4 * EPS)).any()):
            return
        at = margin.at[slots].copy()
        s.alpha[at] = bound
        if not abs(s.y @ s.alpha) <= MAX_ROUNDING_UNITS * EPS * s.alpha.sum():
            s.alpha[at] = a
            return
        s.rest += bound @ margin.QS[slots]
        s.side[at] = np.where(bound > 0, -1.0, 1.0)
        margin.clear(b=margin.b)

    def _centre_b(self) -> None:
        """Set b, which an empty margin set leaves an interval, to its middle, or to the end that is finite."""
        low, high = self.b_interval()
        if high < low and max(low, -high) <= 2.0 * (low - high):
            return  # the interval is one value and rounding, which differs between samples: b is there
        shift = 0.5 * (low + high) if low > -np.inf and high < np.inf else low if low > -np.inf else high
        # An interval this narrow is one value and rounding: b is left where it is.
        narrow = 1e-9 * (abs(self.margin.b) + 1.0)
        if np.isfinite(shift) and not (high - low <= narrow and abs(shift) <= narrow):
            self.margin.a[0] += shift
            self.margin.compute_g()

    def b_interval(self) -> tuple[float, float]:
        """Return how far b can move down and up while every sample stays on its side, if the margin set is empty."""
        s = self.samples
        pull, at = s.y * s.side, -(s.y * s.g)  # the move is >= at where pull > 0, and <= at where it is < 0
        return float(at[pull > 0].max(initial=-np.inf)), float(at[pull < 0].min(initial=np.inf))

    def _recompute_rest(self) -> None:
        """Compute rest from the kernel."""
        self.samples.rest[:] = self.rows.product(self.margin.alpha_outside())
        self._count_no_rounding()

    def _count_no_rounding(self) -> None:
        """Note that rest has just been computed from the kernel."""
        s, path = self.samples, self.path
        path.events += 1
        s.rounding[:], self._rest_before = 0.0, s.rest.copy()
        self._counted_events, path.roundings = path.events, 0.0

    def _recompute_rounded_rest(self) -> None:
        """Compute rest from the kernel for the samples in which the rounding errors of events could show."""
        s, path = self.samples, self.path
        events, roundings = 1.0 + path.events - self._counted_events, path.roundings
        self._counted_events, path.roundings = path.events, 0.0
        # Each event rounds rest_i once, and the product that is added to it once. Variances add up.
        s.rounding += events * (s.rest * s.rest + self._rest_before * self._rest_before) + roundings * s.root * s.root
        rounded = self.rounded_positions()
        if not len(rounded):
            return
        if 2 * len(rounded) > s.n:
            self._recompute_rest()
        else:
            s.rest[rounded] = self.rows.product_at(rounded, self.margin.alpha_outside())
            s.rounding[rounded], self._rest_before = 0.0, s.rest.copy()
        self._correct()

    def rounded_positions(self) -> Array:  # -> (k,)
        """Return the samples in which gathered rounding errors could change the side of g, which must be up to date."""
        s = self.samples
        unit = MAX_REST_ROUNDING_UNITS * self._least_rounding_unit()
        unit *= np.where(s.side * s.g > CLEAR_SIDE_FACTOR * EPS * np.sqrt(s.rounding), CLEAR_SIDE_FACTOR, 1.0)
        return np.flatnonzero(~(s.rounding <= unit * unit))

    def _warn_if_undetermined(self) -> None:
        """Warn where rounding alone changes g, which is of size 1, visibly: float64 does not determine alpha."""
        s = self.samples
        unit = EPS * float(s.root.max(initial=0.0) * (s.root @ s.alpha) + abs(self.margin.b) + 1.0)
        if unit > 1e-3 and (unit := self.rounding_bound()) > 1e-3:
            warnings.warn(
                f"rounding alone changes g by {unit:.0e}: the problem is not determined in float64; scale the features or "
                "lower C",
                NumericalWarning,
                stacklevel=2,
            )

    # -- bounds and kernels --------------------------------------------------------------------------------------------

    def set_bounds(self, u: Array, method: str = "auto") -> None:  # (capacity,)
        """Change the upper bounds, by pivoting or along the path, on which alpha is linear between breakpoints."""
        s = self.samples
        with self.snapshotted():
            if not s.has_both_classes():
                s.u[:] = u
                return
            if method == "path" or not len(self.margin) or s.n <= 200:  # for so few, pivoting is not faster
                self.last_method = "joint"
                if self.follow_bounds(u, self.path.callback):
                    self._warn_if_undetermined()
                    return
            factor = np.divide(u, s.u, out=np.ones(s.capacity), where=s.u > 0)
            first = factor[s.u > 0][0]
            sets = (s.side.copy(), s.rest * first) if bool((factor[s.u > 0] == first).all()) else ()
            s.u[:] = u
            self._solve(balanced(s.alpha * factor, u, s.y), *sets)

    def follow_bounds(self, u: Array, callback: Callable[[PathEvent], None] | None) -> bool:  # (capacity,)
        """Change the upper bounds along the path and report its events. Returns False, and changes nothing, if that fails."""
        path, before, followed = self.path, self.snapshot(), False
        old, path.callback = path.callback, callback
        try:
            if path.walk_to(u):
                self._recompute_rest()
                self._correct()
                followed = self.check_optimality().holds
        finally:
            path.callback = old
            if not followed:
                self.restore(before)
        return followed

    def polish(self) -> None:
        """Compute R and every g again, and take Newton steps."""
        if self.samples.has_both_classes():
            with self.snapshotted():
                self.margin.invert_A()
                self._settle(FINAL_NEWTON_STEPS)

    def resume(self, margin: Array, b: float) -> None:  # (s,) positions
        """Continue from saved coefficients and sets."""
        self.margin.set_members(margin, self.samples.alpha[margin], b, self.rows.block(margin))
        self._settle(0)

    def _settle(self, steps: int) -> None:
        """Compute every g and take Newton steps. If the result does not pass the certificate, solve from the present sets."""
        self._recompute_rest()
        self.margin.compute_g()
        if self.samples.has_both_classes():
            for _ in range(steps or not self.check_optimality().holds):
                self._correct()
            if not self.check_optimality().holds:
                self._solve_from_present_sets()

    def check_from_kernel(self, kernel: Kernel | None) -> tuple[OptimalityCheck, float]:
        """Check optimality with every g computed from this kernel; also return the largest unit of rounding."""
        s, g, rows = self.samples, self.samples.g.copy(), self.rows
        self.rows = KernelRows(s, rows.gram.renewed(kernel), rows.places)
        try:
            s.g[:] = self.rows.product(s.alpha) + s.y * self.margin.b - np.abs(s.y)
            return self.check_optimality(), self.rounding_bound()
        finally:
            s.g[:], self.rows = g, rows

    # -- all or nothing ------------------------------------------------------------------------------------------------

    @contextmanager
    def snapshotted(self, new: Array = NO_POSITIONS) -> Iterator[Snapshot]:  # (B,)
        """Put everything back if the operation fails, without the samples in positions ``new``."""
        before = self.snapshot()
        before.vectors[:, new], before.ids[new] = 0.0, -1
        with all_or_nothing(self, functools.partial(self.restore, before)):
            yield before

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Put everything back at the end, and report no event."""
        before, callback = self.snapshot(), self.path.callback
        self.path.callback = None
        try:
            yield
        finally:
            self.path.callback = callback
            self.restore(before)

    def snapshot(self) -> Snapshot:
        """Copy the state."""
        s, margin, path = self.samples, self.margin, self.path
        slots, vectors = margin.slots(), s.vectors.copy()
        self._rest_before = vectors[VECTOR_NAMES.index("rest")]
        counters = path.events, path.roundings, self._counted_events, self.last_method
        return Snapshot(vectors, s.ids.copy(), margin.at[slots], margin.a[slots], margin.b, counters)

    def restore(self, before: Snapshot) -> None:
        """Restore the state, bit for bit, and compute R again."""
        s, n = self.samples, len(before.ids)
        ids = np.concatenate([before.ids, np.full(s.capacity - n, -1)])
        new = np.flatnonzero(s.ids != ids)
        if len(new):
            self.rows.erase(new)
            s.drop(new)
        s.vectors[:] = 0.0
        s.vectors[:, :n] = before.vectors
        self.path.events, self.path.roundings, self._counted_events, self.last_method = before.counters
        self.margin.set_members(before.margin, before.a, before.b, self.rows.block(before.margin))
