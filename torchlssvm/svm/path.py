r"""The path: coefficients move as p goes from 0 to 1, while every other sample keeps its Kuhn-Tucker conditions (2), (3).

Coefficients outside S move at rates d per unit of p. With force = Q d,

    beta = -R [sum y d; force_S]                    the rates of a = [b; alpha_S] that keep g_S = 0 and sum y alpha = 0  (10)
    gamma_i = force_i + Q_iS beta_S + y_i beta_0    the rate of g_i                                                    (12)

Between events every rate is constant. At an event, a margin vector reaches a bound and leaves S (14), or the g of a watched
sample reaches 0 and the sample enters S (13). beta is then updated with the same vector as R, which costs less than (10).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from torchlssvm.functional.modes import interrupt
from torchlssvm.functional.svm_path import EPS, RATE_ROUNDING_UNITS, SIMULTANEOUS_STEP
from torchlssvm.svm import device_paths
from torchlssvm.svm.kernel_rows import KernelRows
from torchlssvm.svm.margin_set import DEPENDENT_SHARE, MAX_PENDING_EVENTS, MarginSet
from torchlssvm.svm.samples import Array, Samples

MAX_EVENTS_FOR_FEW, MAX_EVENTS_PER_SAMPLE = 1000, 8
"""A walk is given up after the first number of events plus the second for each sample. A fit costs less than more events."""


@dataclass
class PathEvent:
    """One step of a walk: at ``p``, sample ``id`` went to ``to``: "margin", "error", "reserve"; "end" when p = 1."""

    p: float
    id: int | None
    to: str
    step: float


class NextEvent(NamedTuple):
    """The event that ends a step: a sample enters S, or the margin vector in a slot leaves S."""

    step: float  # up to which p = 1 may come first
    sample: int  # position of the sample that enters, or -1
    rate: float  # of its g
    slot: int  # of the margin vector that leaves
    to_error: bool  # to its upper bound


class Path:
    """Moves samples and margin set along paths."""

    def __init__(self, samples: Samples, rows: KernelRows, margin: MarginSet):
        self.samples, self.rows, self.margin = samples, rows, margin
        self.callback: Callable[[PathEvent], None] | None = None
        self.events = 0
        self.ahead: device_paths.Walk | None = None  # the next walk, if it was followed with those of other machines
        self.roundings = 0.0  # as :func:`pivot` returns them, not counted in samples.rounding yet

    def walk(self, wrong: Array, down: Array) -> bool:  # (k,), (l,) positions
        """Move alpha of ``wrong`` to its other bound, or until g is 0, and alpha of ``down`` to 0, whatever its g.

        Samples of ``wrong`` in S do not move. Afterwards, only the margin set has the coefficients of S. Returns False if the
        path cannot be followed.
        """
        s = self.samples
        wrong, down = wrong[s.side[wrong] != 0], down[s.alpha[down] > 0]
        if not len(wrong) and not len(down):
            return True
        d = np.zeros(s.capacity)
        s.side[wrong], s.side[down] = -s.side[wrong], 0.0
        d[wrong], d[down] = np.where(s.side[wrong] < 0, s.u[wrong], 0.0) - s.alpha[wrong], -s.alpha[down]
        if self.callback is None and device_paths.used_for(self.rows):
            steps = device_paths.follow_on_device(self.rows, self.margin, d, self.ahead)
            self.events += steps
            if not steps:
                return False
        elif not self._follow(d, None):
            return False
        s.alpha[down] = 0.0
        arrived = wrong[s.side[wrong] != 0]
        s.alpha[arrived] = np.where(s.side[arrived] < 0, s.u[arrived], 0.0)
        return True

    def walk_to(self, u: Array) -> bool:  # (capacity,)
        """Move the upper bounds to u, and the coefficients of E with them. Returns False if the path cannot be followed."""
        s, margin = self.samples, self.margin
        rise = u - s.u
        if not self._follow(np.where(s.side < 0, rise, 0.0), rise):
            return False
        s.u[:] = u
        s.alpha[s.side < 0] = u[s.side < 0]
        slots = margin.slots()
        margin.upper[slots] = u[margin.at[slots]]
        return True

    @np.errstate(divide="ignore", invalid="ignore", over="ignore")
    def _follow(self, d: Array, rise: Array | None) -> bool:
        """Walk from p = 0 to 1. Returns False if the path cannot be followed; the state is then somewhere on the path."""
        s, walk, last = self.samples, Walk(self, d, rise), 0.0
        for _ in range(MAX_EVENTS_FOR_FEW + MAX_EVENTS_PER_SAMPLE * s.n):
            if interrupt.arrived:
                interrupt.hand_over()
            i, to = -1, "margin"
            if walk.needs_margin_vector():
                i = walk.shift_b()
                if i < 0:
                    return bool((np.abs(d) * (1.0 - walk.p) <= SIMULTANEOUS_STEP * s.u.max()).all())
                followed = walk.enter(i, 0.0)
            else:
                if not walk.find_rates():
                    return False
                event = walk.next_event()
                if walk.move(event.step):
                    break
                i, followed = event.sample, walk.stalled <= 60  # a longer tie is a cycle
                if i >= 0:
                    followed = followed and walk.enter(i, event.rate)
                else:
                    i, to = int(self.margin.at[event.slot]), "error" if event.to_error else "reserve"
                    followed = followed and walk.leave(event.slot, event.to_error)
            if not followed:
                return False
            self.events += 1
            if self.callback is not None:
                self._report(PathEvent(walk.p, int(s.ids[i]), to, walk.p - last))
                last = walk.p
            if walk.p >= 1.0:
                break
        else:
            return False
        if self.callback is not None:
            self._report(PathEvent(1.0, None, "end", 1.0 - last))
        self.events += 1
        return True

    def _report(self, event: PathEvent) -> None:
        assert self.callback is not None
        self.margin.write_alpha()
        self.margin.compute_g()
        self.callback(event)


class Walk:
    """One walk from p = 0 to 1: coefficients outside S move at rates ``d``, upper bounds at rates ``rise`` (None: they stay).

    The walk keeps alpha, side, rest and u of the samples up to date, but not g.
    """

    def __init__(self, path: Path, d: Array, rise: Array | None):  # (capacity,), (capacity,)
        s, rows, margin = path.samples, path.rows, path.margin
        self.path, self.s, self.rows, self.margin, self.d, self.rise = path, s, rows, margin, d, rise
        moving = np.flatnonzero(d)
        self.force = d[moving[0]] * rows.row(int(moving[0])) if len(moving) == 1 else rows.product(d)
        self.watch = margin.watch(rise is not None or path.callback is not None, moving)
        sizes = np.abs(d) * s.root
        self.size, self.square = float(sizes.sum()), float(sizes @ sizes)  # of the terms of force, which round it
        self.balanced_within = SIMULTANEOUS_STEP * float(np.abs(d).sum())
        self.p, self.stalled, self.since_refined, self.inverted = 0.0, 0, MAX_PENDING_EVENTS, False
        self.beta: Any = None  # (top,) None: to be computed
        self._drive_changed()

    def _drive_changed(self) -> None:
        """Set a new ``d`` and force. beta must then be computed again."""
        self.balance = float(self.s.y @ self.d)
        self.watched_force, self.beta = self.force[self.watch.at], None

    # -- an empty margin set -------------------------------------------------------------------------------------------

    def needs_margin_vector(self) -> bool:
        """Return True if S is empty and the moving coefficients do not balance each other, so that only b can move."""
        return abs(self.balance) > self.balanced_within and not len(self.margin)

    def shift_b(self) -> int:
        """Move b alone until a sample that can balance the moving ones reaches its margin. Returns its position, or -1."""
        s, margin = self.s, self.margin
        margin.compute_g()
        self.watch = w = margin.watch(True, np.flatnonzero(self.d))
        self._drive_changed()
        direction = 1.0 if self.balance > 0 else -1.0
        rate = w.sign * s.y[w.at] * direction
        t = np.where(rate < 0, np.maximum(w.slack, 0.0), np.inf)
        k = int(t.argmin())
        if not t[k] < np.inf:
            return -1
        margin.a[0] += t[k] * direction
        w.slack += t[k] * rate
        return int(w.at[k])

    # -- one step ------------------------------------------------------------------------------------------------------

    def find_rates(self) -> bool:
        """Find beta (10) and the rates gamma (12) of the watched g. Returns False if R has become useless."""
        margin, k = self.margin, self.margin.top
        refine = self.since_refined >= MAX_PENDING_EVENTS
        if self.beta is None or refine:
            beta = np.zeros(k)
            if k > 1:
                h = self.force[margin.at[:k]] * margin.used[:k]
                h[0] = self.balance
                np.negative(margin.times_R(h), out=beta)
                if refine:
                    r = h + margin.A[:k, :k] @ beta
                    beta -= margin.times_R(r)
                    # Up to this residual of R, one step of refinement leaves 1e-12. Beyond, R is computed again.
                    if not np.abs(r).max() <= 1e-6 * max(np.abs(h).max(), 1e-300):
                        return self._invert() and self.find_rates()
            self.beta, self.since_refined = beta, 0 if refine else self.since_refined
        self.gamma = self.watched_force + self.beta @ margin.W[:k]
        return True

    def _invert(self) -> bool:
        """Compute R from A, which gathers no rounding errors. Returns False if that was done before in this walk."""
        if self.inverted:
            return False
        self.margin.invert_A()
        self.beta, self.inverted = None, True
        return True

    def next_event(self) -> NextEvent:
        """Find the next event: the first margin vector at a bound, or the first watched sample at the margin."""
        margin, w, beta, k = self.margin, self.watch, self.beta, self.margin.top
        speed = np.abs(beta)
        rise, fastest = None, speed[1:].max(initial=0.0)
        if self.rise is not None:
            rise = self.rise[margin.at[:k]] * margin.used[:k]
            rise[0] = 0.0
            fastest = max(fastest, np.abs(rise).max())
        unit = RATE_ROUNDING_UNITS * EPS
        t_out, slot, up = first_bound(margin.a[:k], beta, margin.lower[:k], margin.upper[:k], unit * fastest, rise)
        total = float(speed[1:] @ self.s.root[margin.at[1:k]]) + self.size
        self.rate = self.gamma * w.sign
        falling = -self.rate
        noise = w.root * (unit * total) + unit * speed[0]
        t_in = np.where(falling > noise, np.maximum(w.slack, 0.0) / falling, np.inf)
        c = int(t_in.argmin())
        if t_in[c] <= t_out:
            return NextEvent(float(t_in[c]), int(w.at[c]), float(self.gamma[c]), 0, False)
        return NextEvent(t_out, -1, 0.0, slot, up)

    def move(self, step: float) -> bool:
        """Move everything by a step, or to p = 1 if that is nearer. Returns True if p = 1 was reached."""
        s, margin, k = self.s, self.margin, self.margin.top
        ended = not step < 1.0 - self.p
        t = 1.0 - self.p if ended else step
        self.stalled = self.stalled + 1 if t <= SIMULTANEOUS_STEP else 0
        margin.a[:k] += t * self.beta
        self.watch.slack += t * self.rate
        s.alpha += t * self.d
        s.rest += t * self.force
        self.path.roundings += t * t * self.square
        if self.rise is not None:
            s.u += t * self.rise
            margin.upper[:k] += t * self.rise[margin.at[:k]] * margin.used[:k]
        self.p = 1.0 if ended else self.p + t
        return ended

    # -- events --------------------------------------------------------------------------------------------------------

    def enter(self, i: int, rate: float) -> bool:
        """Let sample i, whose g is 0 and moves at this rate, enter S by (13). Returns False if it lies in the span of S."""
        s, margin = self.s, self.margin
        row = self.rows.row(i)
        beta_i, gamma_i, size = margin.beta_and_gamma(i, row)
        first = margin.top == 1
        if not first and not gamma_i > DEPENDENT_SHARE * size:
            return False
        slot = margin.enter(i, row, beta_i, gamma_i)
        self.path.roundings += float(s.alpha[i] * s.root[i]) ** 2
        self.watch.sign[self.watch.column_of[i]] = 0.0
        self.since_refined += 1
        if self.d[i] != 0.0:
            self.force -= self.d[i] * row
            self.d[i] = 0.0
            self._drive_changed()
            if self.rise is None and not self.d.any():  # all that moved are margin vectors now
                self.p = 1.0
        elif self.beta is not None and not first:
            beta = np.zeros(margin.top)
            beta[: len(self.beta)] = self.beta
            beta[: len(beta_i)] -= rate / gamma_i * beta_i
            beta[slot] -= rate / gamma_i
            self.beta = beta
        else:
            self.beta = None
        return True

    def leave(self, slot: int, to_error: bool) -> bool:
        """Let the margin vector in this slot, which is at a bound, leave S by (14). Returns False if R has become useless."""
        s, margin, w = self.s, self.margin, self.watch
        j, only = int(margin.at[slot]), len(margin) == 1
        R_k = margin.row_of_R(slot)
        if not only and not R_k[slot] > 0.0:  # 1 / R_kk is a squared distance: only rounding makes it anything else
            if not self._invert() or not margin.R[slot, slot] > 0.0:
                return False
            R_k = margin.row_of_R(slot)
        if w.column_of[j] < 0:  # it is watched from now on
            margin.watch_one(w, j)
            self.watched_force = self.force[w.at]
        c, row = w.column_of[j], margin.QS[slot]
        alpha, side = (float(s.u[j]), -1.0) if to_error else (0.0, 1.0)
        w.sign[c], w.slack[c] = side, 0.0
        self.rows.keep_row(j, row)
        self.path.roundings += float(alpha * s.root[j]) ** 2
        if to_error and self.rise is not None and self.rise[j] != 0.0:
            self.d[j] = self.rise[j]
            self.force += self.rise[j] * row
            self._drive_changed()
        elif self.beta is not None and not only:
            self.beta -= (self.beta[slot] / R_k[slot]) * R_k
            self.beta[slot] = 0.0
        else:
            self.beta = None
        margin.leave(slot, alpha, side)
        if self.beta is not None:
            self.beta = self.beta[: margin.top]
        self.since_refined += 1
        return True


def first_bound(
    a: Array, rate: Array, lower: Array, upper: Array, floor: Array | float, rise: Array | None = None
) -> tuple[float, int, bool]:  # (k,) each
    """Return the step at which the first coefficient reaches a bound, its index, and True if that is the upper bound.

    Rates up to ``floor`` count as zero. rise: the rates of the upper bounds.
    """
    if rise is None:
        speed = np.abs(rate)
        room = np.where(rate > 0.0, upper - a, a - lower)
        t = np.where(speed > floor, np.maximum(room, 0.0) / speed, np.inf)
        k = int(t.argmin())
        return float(t[k]), k, bool(rate[k] > 0.0)
    toward = rate - rise
    up = np.where(toward > floor, np.maximum(upper - a, 0.0) / toward, np.inf)
    down = np.where(-rate > floor, np.maximum(a - lower, 0.0) / -rate, np.inf)
    high, low = int(up.argmin()), int(down.argmin())
    return (float(up[high]), high, True) if up[high] <= down[low] else (float(down[low]), low, False)
