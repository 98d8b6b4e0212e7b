"""The solver of the incremental SVM: plans an operation, carries it out, certifies the end, or takes the robust way."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchlssvm.errors import ConvergenceError, NumericalWarning
from torchlssvm.kernels import Kernel
from torchlssvm.svm import steps
from torchlssvm.svm.active_set import ActiveSet
from torchlssvm.svm.kernel_rows import KernelRows, index_of
from torchlssvm.svm.margin_set import MarginSet
from torchlssvm.svm.path import Event, Path
from torchlssvm.svm.pivoting import Pivoting
from torchlssvm.svm.samples import Array, Samples, Snapshot
from torchlssvm.svm.steps import AT_BOUND_SHARE, EPS, MAX_ROUNDING_UNITS
from torchlssvm.svm.warm_start import approximate_optimum, balanced

MIN_SAMPLES_PIVOTED = 32
"""New samples on the wrong side from which block pivoting is faster than one walk for all of them."""
MAX_SAMPLES_WALKED_FOR_C = 200
"""Samples held up to which a change of C follows the path: pivoting is not faster there."""
MAX_WALKS = 8
"""Walks that learn samples which the walk before did not watch, before the robust method is used. One or two are usual."""
MAX_DETERMINED_UNIT = 1e-3
"""Unit of rounding of g above which alpha is not determined in float64, and a warning is given: g itself is of size 1."""
NARROW_B_INTERVAL = 1e-9
"""Width, as a share of |b| + 1, of an interval for b that is one value and rounding: b is left where it is."""
NO_POSITIONS = np.zeros(0, dtype=np.int64)


class OptimalityCheck(NamedTuple):
    """The verdict on a solution."""

    wrong: Array  # (k,) positions whose g is on the wrong side by more than rounding
    feasible: bool  # 0 <= alpha <= u, and |sum y alpha| is rounding
    violation: float  # the largest violation of (2)

    @property
    def holds(self) -> bool:
        """Whether this is the solution."""
        return self.feasible and not len(self.wrong)


class PathSolver:
    """Samples, kernel rows, margin set and path of one machine; every operation ends certified, or changes nothing."""

    def __init__(self, kernel: Kernel | None, device: torch.device, cache_bytes: int):
        self.samples = Samples()
        self.rows = KernelRows(self.samples, kernel, device, cache_bytes)
        self.margin = MarginSet(self.samples)
        self.path = Path(self.samples, self.rows, self.margin)
        self.next_id = 0
        self.report: Callable[[float], None] | None = None  # told the share of a fit that is done
        self.last_method = ""  # how the last operation was done: "path", "pivot", "solve" or "fallback"
        self._rounding_variance = np.zeros(
            0
        )  # (capacity,) squared roundings in rest since it was fresh, in units of EPS
        self._rounding_events = 0  # events that are in it
        self._rest_before = np.zeros(0)  # (capacity,) rest at the start of the operation

    # -- adding and removing -------------------------------------------------------------------------------------------

    def change(
        self, x: Tensor | None, ids: list[int], y: Array, weight: Array, u: Array, leaving: Array, method: str = "auto"
    ) -> None:
        """Add samples x (B, J), or (B, capacity) if precomputed, under these ids, and remove those in positions ``leaving``."""
        new, wrong = NO_POSITIONS, NO_POSITIONS
        if x is not None and len(ids):
            new = self._place(x, ids, y, weight, u)
        if self.rows.fake:
            pass
        elif len(new) == 1 and not len(leaving) and len(self.margin):
            try:
                wrong = self._prepare_new(new)
            except BaseException:
                self.erase(new)
                raise
            self.last_method = "path"
            if len(wrong):
                with self._all_or_nothing(new):
                    self._finish_walk(self._walk(wrong, NO_POSITIONS))
        else:
            with self._all_or_nothing(new):
                self._add_and_remove(new, leaving, method)
        if len(leaving):
            self.erase(leaving)

    def _place(self, x: Tensor, ids: list[int], y: Array, weight: Array, u: Array) -> Array:  # -> (B,)
        """Positions for new samples, with their rows and labels."""
        s = self.samples
        if s.grow(len(ids)):
            self.margin.fit_capacity()
        new = s.place(ids, y, weight, u)
        try:
            self.rows.fit_capacity(x.shape[1])
            if self.rows.kernel is None:
                x = torch.cat([x, x.new_zeros(len(x), s.capacity - x.shape[1])], 1)
            self.rows.put(new, x)
        except BaseException:
            s.drop(new)
            raise
        return new

    def unlearn(self, leaving: Array) -> None:  # (k,)
        """Solve without these samples, which keep their positions; nothing is put back if that fails."""
        self._add_and_remove(NO_POSITIONS, leaving, "auto")

    def erase(self, leaving: Array) -> None:  # (k,)
        """Erase samples that have no part in the solution."""
        self.rows.erase(leaving)
        self.margin.erase_columns(leaving)
        self.samples.drop(leaving)
        self._rounding_variance[leaving[leaving < len(self._rounding_variance)]] = 0.0
        if not self.samples.n:
            self.margin.m.a[0] = 0.0

    def _add_and_remove(self, new: Array, leaving: Array, method: str) -> None:
        """Few samples walk; many are pivoted; a multitude is solved anew from a warm start."""
        s = self.samples
        left = s.y.copy()
        left[leaving] = 0.0
        if not left.max(initial=0.0) > 0.0 > left.min(initial=0.0):
            self._solve_one_class(leaving, left)
            return
        held = s.n - len(new) - len(leaving)
        if method == "auto" and len(new) > max(MIN_SAMPLES_PIVOTED, 2 * held):
            s.u[leaving], s.side[leaving] = 0.0, 0.0
            self.rows.empty_cache()
            self.last_method = "solve"
            start = balanced(np.where(s.u > 0, s.alpha, 0.0), s.u, s.y)
            self._solve(approximate_optimum(s, self.rows, start, self.report))
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
            if self._pivot(leaving):
                return
            s.u[leaving], s.side[leaving] = 0.0, 0.0
            self.last_method = "solve"
            self._solve(approximate_optimum(s, self.rows, balanced(np.where(s.u > 0, s.alpha, 0.0), s.u, s.y)))
            return
        self.last_method = "path" if method == "path" or len(wrong) + len(support) == 1 else "joint"
        self._release(leaving)
        if method == "path":
            followed = all(self._walk(NO_POSITIONS, support[k : k + 1]) for k in range(len(support)))
            # one before may have taken it along
            followed = followed and all(
                self._walk(wrong[[k]][s.alpha[wrong[[k]]] == 0], NO_POSITIONS) for k in range(len(wrong))
            )
        else:
            followed = self._walk(wrong, support)
        s.u[leaving] = 0.0
        self._finish_walk(followed)

    def _solve_one_class(self, leaving: Array, left: Array) -> None:
        """No sample of the other class: alpha = 0, and b alone puts every sample on its margin."""
        s = self.samples
        b = float(left[np.flatnonzero(left)[0]]) if left.any() else 0.0
        self.margin.clear(b=b)
        self.rows.empty_cache()  # rows kept from before lack the entries of new samples
        s.alpha[:] = s.rest[:] = s.g[:] = 0.0
        s.side[:] = np.where(s.ids >= 0, 1.0, 0.0)
        s.u[leaving], s.side[leaving] = 0.0, 0.0
        self.last_method = "path"

    def _prepare_new(self, new: Array) -> Array:  # (B,) -> (k,)
        """rest, g and entries of QS for new samples, alpha = 0; returns those on the wrong side."""
        s = self.samples
        outside = s.alpha * (s.side != 0)
        for part, Q in self.rows.blocks(new):
            self.rows.extend_cache(part, Q)
            self.margin.add_columns(part, Q)
            i = index_of(part)
            s.rest[i] = Q @ outside
            s.g[i] = Q @ s.alpha + s.y[i] * self.margin.b - 1.0
            if len(new) == 1 and s.g[part[0]] < 0:
                self.rows.cache_row(int(part[0]), Q[0])
        return new[s.g[new] < 0]

    def _release(self, leaving: Array) -> None:
        """Samples are to go: they leave S, and the conditions no longer concern them."""
        s, margin = self.samples, self.margin
        margin.write_alpha()
        for i in leaving.tolist():
            if s.side[i] == 0:
                slot = int(np.flatnonzero((margin.m.at == i) & (margin.m.used > 0))[-1])
                row = margin.m.QS[slot].copy()
                margin.leave(slot, float(s.alpha[i]), 0.0)
                self.path.roundings += float(s.alpha[i] * s.root[i]) ** 2
                self.rows.cache_row(i, row)
            s.side[i] = 0.0

    # -- ways ----------------------------------------------------------------------------------------------------------

    def _walk(self, wrong: Array, down: Array) -> bool:
        s = self.samples
        wrong, down = wrong[s.side[wrong] != 0], down[s.alpha[down] > 0]
        if not len(wrong) and not len(down):
            return True
        if not self.path.walk(wrong, down):
            return False
        self.margin.write_alpha()
        return True

    def _finish_walk(self, followed: bool) -> None:
        """The end of a walk: correct S, look at every sample, learn what is on the wrong side, certify."""
        s = self.samples
        for _ in range(MAX_WALKS):
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
            followed = self._walk(wrong, NO_POSITIONS)
        self._solve_robustly(self._feasible_alpha())

    def _pivot(self, leaving: Array, factor: float = 1.0) -> bool:
        """Pivot from the present sets, without the samples in ``leaving``. factor: what u has been multiplied by."""
        s = self.samples
        bound = np.where(s.alpha > 0.5 * s.u, -1.0, 1.0)
        start = s.side.copy()
        # a new sample with g < 0 starts as a margin vector, unless it is far on the wrong side
        fresh = (s.alpha <= 0) & (s.side > 0) & (s.g < 0)
        start[fresh] = np.where(s.g[fresh] > -1.0, 0.0, -1.0)
        rest = None
        if not len(leaving):
            rest = s.rest * factor
            late = np.flatnonzero(fresh & (start < 0))
            rest = (
                rest + self.rows.product(np.where(start < 0, s.u, 0.0) * (fresh & (start < 0))) if len(late) else rest
            )
        s.u[leaving] = 0.0
        start[leaving] = 1.0
        if not Pivoting(s, self.rows, self.margin).run(start, bound, rest):
            return False
        self.last_method = "pivot"
        self._recompute_rest()
        self._correct()
        return self.check_optimality().holds

    def _solve(self, alpha: Array) -> None:  # (capacity,) in its box, with y^T alpha = 0
        """Everything anew from a guess: pivot from its sets, or the robust way."""
        s = self.samples
        guess = (alpha <= 0) * 1.0 - (alpha >= s.u) * 1.0
        bound = np.where(alpha > 0.5 * s.u, -1.0, 1.0)
        self.margin.clear(b=self.margin.b)
        if Pivoting(s, self.rows, self.margin).run(guess, bound):
            self._note_rest_recomputed()
            self._correct()
            if self.check_optimality().holds:
                return
        self._solve_robustly(alpha)

    def _solve_robustly(self, alpha: Array) -> None:  # (capacity,) in its box, with y^T alpha = 0
        """The active-set method from one start after the other: here, near the optimum, nothing learned, where that ended."""
        s = self.samples
        self.last_method = "fallback"
        attempt = ActiveSet(s, self.rows, self.margin, self.path, self.check_optimality)
        found, nothing = None, np.zeros(s.capacity)
        for b, start in (
            (self.margin.b, lambda: alpha),
            (0.0, lambda: approximate_optimum(s, self.rows, nothing)),
            (0.0, lambda: nothing),
            (0.0, self._feasible_alpha),
        ):
            if attempt.run(start(), b):
                self._recompute_rest()
                self._correct()
                self._rebalance()
                found = self.check_optimality()
                if found.holds:
                    self.margin.watched = None
                    self._warn_if_undetermined()
                    return
        raise ConvergenceError(
            "no point was found that passes the certificate of a solution"
            + (f": (2) is violated by {found.violation:.1e} at {len(found.wrong)} sample(s)" if found else "")
            + ". The kernel may not be positive semidefinite, or C times its values too large for float64. Nothing was changed."
        )

    def _rebalance(self) -> None:
        """Put sum y alpha, where it is more than rounding, into the margin vector of the smallest K_ii that has room for it."""
        s, margin = self.samples, self.margin
        m, slots, excess = margin.m, margin.slots(), float(s.y @ s.alpha)
        if abs(excess) <= MAX_ROUNDING_UNITS * EPS * s.alpha.sum():
            return
        a = m.a[slots] - s.y[m.at[slots]] * excess
        fits = np.flatnonzero((a >= 0.0) & (a <= m.upper[slots]))
        if len(fits):
            k = int(fits[s.root[m.at[slots[fits]]].argmin()])
            m.a[slots[k]] = a[k]
            margin.write_alpha()
            self.path.compute_g()

    def _feasible_alpha(self) -> Array:
        """The present coefficients, in their box and balanced, without those of samples about to leave."""
        s = self.samples
        self.margin.write_alpha()
        alpha = np.where(s.u > 0, np.clip(np.nan_to_num(s.alpha), 0.0, s.u), 0.0)
        return balanced(alpha, s.u, s.y)

    # -- the certificate -----------------------------------------------------------------------------------------------

    def check_optimality(self) -> OptimalityCheck:
        """Judge alpha, b and the sets by g, which must be up to date. Costs O(n), and kernel rows only where there is doubt."""
        s, b = self.samples, self.margin.b
        wrong, feasible, violation = steps.find_violations(self.path.vectors(), b)
        if len(wrong):
            off = np.where(s.side[wrong] == 0, np.abs(s.g[wrong]), -s.side[wrong] * s.g[wrong])
            wrong = wrong[
                ~(off <= MAX_ROUNDING_UNITS * EPS * (self.rows.absolute_products(wrong, s.alpha) + abs(b) + 1.0))
            ]
        return OptimalityCheck(wrong, feasible, violation)

    def rounding_bound(self) -> float:
        """The largest unit of rounding, EPS (sum_j |Q_ij| alpha_j + |b| + 1) over the samples i held."""
        s = self.samples
        held = np.flatnonzero(s.ids >= 0)
        return EPS * float(self.rows.absolute_products(held, s.alpha).max(initial=0.0) + abs(self.margin.b) + 1.0)

    # -- exact ends ----------------------------------------------------------------------------------------------------

    def _correct(self) -> None:
        """A Newton step on S, then every g; where nothing on the margin holds b, b in the middle of its interval."""
        margin = self.margin
        if len(margin) and not steps.newton_step(margin.m, margin.top, self.path.vectors()):
            self._empty_margin_set_at_bounds()
        if not len(margin):
            self.path.compute_g()
            self._centre_b()

    def _empty_margin_set_at_bounds(self) -> None:
        """Empty S if every margin vector is at a bound, to rounding: then nothing on the margin holds b."""
        s, margin = self.samples, self.margin
        slots = margin.slots()
        a, u = margin.m.a[slots], margin.m.upper[slots]
        bound = np.where(a > 0.5 * u, u, 0.0)
        effect = np.abs(a - bound) * s.root[margin.m.at[slots]] * s.root.max()  # on any g, at most
        if bool(((np.abs(a - bound) > AT_BOUND_SHARE * u) | (effect > MAX_ROUNDING_UNITS / 4 * EPS)).any()):
            return
        at = margin.m.at[slots].copy()
        s.alpha[at] = bound
        if not abs(s.y @ s.alpha) <= MAX_ROUNDING_UNITS * EPS * s.alpha.sum():
            s.alpha[at] = a
            return
        s.rest += bound @ margin.m.QS[slots]
        s.side[at] = np.where(bound > 0, -1.0, 1.0)
        margin.clear(b=margin.b)

    def _centre_b(self) -> None:
        """With an empty margin set b can lie in an interval: take its middle, or the end that is finite."""
        low, high = self.b_interval()
        if high < low and max(low, -high) <= 2.0 * (low - high):
            return  # one value and rounding, which differs from sample to sample: b is there
        shift = 0.5 * (low + high) if low > -np.inf and high < np.inf else low if low > -np.inf else high
        narrow = NARROW_B_INTERVAL * (abs(self.margin.b) + 1.0)
        if np.isfinite(shift) and not (high - low <= narrow and abs(shift) <= narrow):
            self.margin.m.a[0] += shift
            self.path.compute_g()

    def b_interval(self) -> tuple[float, float]:
        """How far b can move down and up while every sample stays on its side; for an empty margin set."""
        s = self.samples
        # t >= -y_i g_i where y_i side_i > 0, t <= -y_i g_i where it is < 0
        pull, at = s.y * s.side, -(s.y * s.g)
        return float(at[pull > 0].max(initial=-np.inf)), float(at[pull < 0].min(initial=np.inf))

    def _recompute_rest(self) -> None:
        """rest from the kernel."""
        self.samples.rest[:] = self.rows.product(self._outside())
        self._note_rest_recomputed()

    def _outside(self) -> Array:  # -> (capacity,)
        """alpha, without that of margin vectors."""
        outside: Array = self.samples.alpha.copy()
        outside[self.margin.positions()] = 0.0
        return outside

    def _note_rest_recomputed(self) -> None:
        """Note that rest has just come from the kernel."""
        self.path.events += 1
        self._rounding_variance, self._rounding_events = np.zeros(self.samples.capacity), self.path.events
        self._rest_before, self.path.roundings = self.samples.rest.copy(), 0.0

    def _recompute_rounded_rest(self) -> None:
        """rest from the kernel again, of the samples in which roundings that events have left could show."""
        s, path = self.samples, self.path
        count, path_roundings, path.roundings = 1.0 + path.events - self._rounding_events, path.roundings, 0.0
        self._rounding_events = path.events
        dusty = steps.add_rest_rounding(
            path.vectors(), self.margin.b, self._rounding_variance, self._rest_before, count, path_roundings
        )
        if not len(dusty):
            return
        if 2 * len(dusty) > s.n:
            self._recompute_rest()
        else:
            s.rest[dusty] = self.rows.product_at(dusty, self._outside())
            self._rounding_variance[dusty], self._rest_before = 0.0, s.rest.copy()
        self._correct()

    def mark_rounding_unknown(self) -> None:
        """Samples and margin set have been put back: what is known about roundings in rest is of no use."""
        self._rounding_variance, self._rounding_events = np.full(self.samples.capacity, np.inf), self.path.events

    def _warn_if_undetermined(self) -> None:
        s = self.samples
        unit = EPS * float(s.root.max(initial=0.0) * (s.root @ s.alpha) + abs(self.margin.b) + 1.0)
        if unit > MAX_DETERMINED_UNIT and (unit := self.rounding_bound()) > MAX_DETERMINED_UNIT:
            warnings.warn(
                f"rounding alone changes g by {unit:.0e}: the problem is not determined in float64; scale the features or "
                "lower C",
                NumericalWarning,
                stacklevel=2,
            )

    # -- bounds and kernels --------------------------------------------------------------------------------------------

    def set_bounds(self, u: Array, method: str = "auto") -> None:  # (capacity,)
        """Change C: by pivoting, or along the path, on which alpha is linear between breakpoints."""
        s = self.samples
        with self._all_or_nothing():
            if not ((s.y > 0).any() and (s.y < 0).any()):
                s.u[:] = u
                return
            if method == "path" or not len(self.margin) or s.n <= MAX_SAMPLES_WALKED_FOR_C:
                self.last_method = "joint"
                followed = self.path.walk_to(u)
                s.u[:] = u
                self.margin.write_alpha()
                self._recompute_rest()
                self._finish_walk(followed)
                return
            held = s.u > 0
            factor = np.ones(s.capacity)
            factor[held] = u[held] / s.u[held]
            same = factor[held][0]
            rest = bool((factor[held] == same).all())
            start = balanced(s.alpha * factor, u, s.y)
            s.u[:] = u
            if not (rest and self._pivot(NO_POSITIONS, float(same))):
                self.last_method = "solve"
                self._solve(approximate_optimum(s, self.rows, start))

    def follow_bounds(self, u: Array, callback: Callable[[Event], None]) -> bool:  # (capacity,)
        """Change C along the path and report its events; False, and nothing changed, if it cannot be followed."""
        old, before = self.path.callback, self.snapshot()
        try:
            self.path.callback = callback
            followed = self.path.walk_to(u)
            self.path.callback = old
            if followed:
                self._recompute_rest()
                self._correct()
                followed = self.check_optimality().holds
        except BaseException:
            self.path.callback = old
            self.restore(before)
            raise
        if not followed:
            self.restore(before)
        return followed

    def set_kernel(self, kernel: Kernel | None, x: Tensor | None = None) -> None:
        """Another kernel, or Gram matrix (capacity, capacity), on the same samples."""
        s, old = self.samples, (self.rows.kernel, self.rows.x)
        before = self.snapshot()
        try:
            self.rows.change_kernel(kernel, x)
            if s.n and not self.rows.fake:
                self._anew()
        except BaseException:
            self.rows.change_kernel(*old)
            self.restore(before)
            raise

    def _anew(self) -> None:
        """Solve with the sets as they are, whatever they come from."""
        s = self.samples
        if not ((s.y > 0).any() and (s.y < 0).any()):
            return
        self.margin.write_alpha()
        alpha, side, bound = s.alpha.copy(), s.side.copy(), np.where(s.alpha > 0.5 * s.u, -1.0, 1.0)
        self.margin.clear(b=self.margin.b)
        if Pivoting(s, self.rows, self.margin).run(side, bound):
            self.last_method = "pivot"
            self._note_rest_recomputed()
            self._correct()
            if self.check_optimality().holds:
                return
        self.last_method = "solve"
        self._solve(approximate_optimum(s, self.rows, balanced(np.clip(alpha, 0.0, s.u), s.u, s.y)))

    def polish(self) -> None:
        """R and every g anew, and Newton corrections."""
        s = self.samples
        if not s.n or not ((s.y > 0).any() and (s.y < 0).any()):
            return
        with self._all_or_nothing():
            self.margin.invert_A()
            self._recompute_rest()
            for _ in range(3):
                self._correct()
            if not self.check_optimality().holds:
                self._anew()

    def resume(self) -> None:
        """Go on from a saved solution: rest and g from the kernel; solved anew if it does not pass the certificate."""
        s = self.samples
        self._recompute_rest()
        self.path.compute_g()
        if (s.y > 0).any() and (s.y < 0).any() and not self.check_optimality().holds:
            self._correct()
            if not self.check_optimality().holds:
                self._anew()

    def check_from_kernel(self) -> tuple[OptimalityCheck, float]:
        """The certificate, with every g computed from the kernel, and the largest unit of rounding."""
        s = self.samples
        kept = (
            s.rest.copy(),
            s.g.copy(),
            self._rounding_variance,
            self._rounding_events,
            self._rest_before,
            self.path.events,
        )
        self._recompute_rest()
        self.path.compute_g()
        found = self.check_optimality()
        s.rest[:], s.g[:], self._rounding_variance, self._rounding_events, self._rest_before, self.path.events = kept
        return found, self.rounding_bound()

    # -- all or nothing ------------------------------------------------------------------------------------------------

    @contextmanager
    def _all_or_nothing(self, new: Array = NO_POSITIONS) -> Iterator[None]:  # (B,)
        """Put everything back as it was if the operation fails, without the samples in positions ``new``."""
        before = self.snapshot()
        before.vectors[:, new], before.ids[new] = 0.0, -1
        try:
            yield
        except BaseException:
            self.restore(before)
            raise

    def snapshot(self) -> Snapshot:
        """The state, to come back to."""
        s, margin = self.samples, self.margin
        slots = margin.slots()
        if len(self._rounding_variance) < s.capacity:
            self._rounding_variance = np.concatenate(
                [self._rounding_variance, np.zeros(s.capacity - len(self._rounding_variance))]
            )
        vectors = s.vectors.copy()
        self._rest_before = vectors[5]
        return Snapshot(vectors, s.ids.copy(), margin.m.at[slots], margin.m.a[slots], margin.b, self.path.events)

    def restore(self, before: Snapshot) -> None:
        """The state as it was, bit for bit; R is made anew."""
        s, n = self.samples, len(before.ids)
        late = np.flatnonzero(s.ids >= 0)
        late = late[(late >= n) | (before.ids[np.minimum(late, n - 1)] != s.ids[late])] if n else late
        if len(late):
            if not self.rows.fake:
                self.rows.erase(late)
            s.drop(late)
        s.vectors[:] = 0.0
        s.vectors[:, :n] = before.vectors
        rows = self.rows.block(before.margin) if len(before.margin) else np.zeros((0, s.capacity))
        self.margin.set_members(before.margin, before.a, before.b, rows)
        self.path.events = before.events
        self.mark_rounding_unknown()
