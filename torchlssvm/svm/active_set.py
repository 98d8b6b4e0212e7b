"""The robust method: a primal active-set method that keeps alpha in its box and sum y alpha = 0 at every step.

Newton steps on S solve the conditions g_S = 0. If a coefficient reaches a bound, the step ends and the sample leaves S. When S
is solved, the sample that is furthest on the wrong side enters. A sample in the span of S cannot enter, so alpha moves along
the null vector [beta_i; 1] of the sample instead, until a margin vector or the sample itself reaches a bound. Linear systems
are solved by a backward stable method, so the objective never rises, whatever the condition of A.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from torchlssvm.functional.modes import interrupt
from torchlssvm.functional.svm_path import EPS
from torchlssvm.svm.path import Path, first_bound
from torchlssvm.svm.samples import Array

if TYPE_CHECKING:
    from torchlssvm.svm.solver import OptimalityCheck

MAX_STEPS_FOR_FEW, MAX_STEPS_PER_SAMPLE = 100, 6
"""The method gives up after the first number of steps plus the second for each sample. From a good start, each moves once."""
FINAL_NEWTON_STEPS = 3
"""Newton steps at the end. Each step corrects the rounding of the step before, in alpha and then in b."""


class ActiveSet:
    """Brings samples and margin set from any feasible alpha to the optimum."""

    def __init__(self, path: Path, certify: Callable[[], OptimalityCheck]):
        self.samples, self.rows, self.margin = path.samples, path.rows, path.margin
        self.path, self.check_optimality = path, certify
        self.waiting: list[int] = []  # positions with alpha inside the box that are still to enter S

    @np.errstate(all="ignore")  # values that overflow are not finite, and fail the checks below
    def run(self, alpha: Array, b: float) -> bool:  # (capacity,) in its box, with y^T alpha = 0
        """Solve from this alpha. Returns False if steps run out. Samples with u = 0 and side 0 are left out."""
        s = self.samples
        self._start(alpha, b)
        generator = np.random.default_rng(0)
        last, patience = np.inf, 0
        for _ in range(MAX_STEPS_FOR_FEW + MAX_STEPS_PER_SAMPLE * s.n):
            if interrupt.arrived:
                interrupt.hand_over()
            if self.waiting:
                i = self.waiting.pop()
                g = float(s.rest[i] + self.margin.a @ self.margin.QS[:, i] - 1.0)
                self._enter(i, 1.0 if g < 0 else -1.0)
                if not np.isfinite(self.margin.a).all():
                    return False
                continue
            if not self._newton():
                continue
            self.margin.write_alpha()
            self.margin.compute_g()
            if not np.isfinite(s.g).all():
                return False
            found = self.check_optimality()
            wrong = found.wrong[s.side[found.wrong] != 0]
            if not len(wrong):
                for _ in range(FINAL_NEWTON_STEPS):
                    self._newton()
                self.margin.write_alpha()
                self.margin.compute_g()
                return True
            gain = np.abs(s.g[wrong]) / np.maximum(s.root[wrong], 1e-150)
            worst = float(np.abs(s.g[wrong]).sum())
            # Share by which the sum of violations must fall for a step to count as progress.
            patience = 0 if worst < (1.0 - 1e-3) * last else patience + 1
            last = min(last, worst)
            # After 20 steps without progress, a sample chosen at random enters, which breaks cycles.
            i = int(wrong[gain.argmax()] if patience < 20 else generator.choice(wrong))
            self._enter(i, s.side[i])
        return False

    def _start(self, alpha: Array, b: float) -> None:
        """Set samples and margin set by alpha. Coefficients inside their box belong to S, the ones furthest inside first."""
        s, margin = self.samples, self.margin
        inside = np.flatnonzero((alpha > 0) & (alpha < s.u))
        depth = np.minimum(alpha[inside], s.u[inside] - alpha[inside]) / s.u[inside]
        inside = inside[np.argsort(-depth)]
        active = s.u > 0
        s.alpha[:] = alpha
        s.side[:] = np.where(active, np.where(alpha <= 0, 1.0, -1.0), 0.0)
        s.side[inside] = 0.0
        margin.clear(16 + len(inside), b)
        rejected = inside[:0]
        if len(inside):
            rejected = margin.exchange(inside[:0], inside, self.rows.block(inside))
            slots = margin.slots()
            margin.a[slots] = alpha[margin.at[slots]]
        s.rest[:] = self.rows.product(margin.alpha_outside())
        self.waiting = rejected.tolist()

    def _newton(self) -> bool:
        """Take a Newton step on S, as far as the box allows. Returns False if a sample had to leave S."""
        s = self.samples
        m = margin = self.margin
        if not len(margin):
            return True
        r = m.A @ m.a + m.used * (s.rest[m.at] - 1.0)
        outside = margin.alpha_outside()
        r[0] = float(m.A[0] @ m.a + s.y @ outside)
        if abs(r[0]) <= 4 * EPS * (np.abs(m.a[1:]).sum() + outside.sum()):
            r[0] = 0.0  # rounding, which would only push coefficients against their bounds
        delta = margin.solve(r)
        if not np.isfinite(delta).all():
            delta = np.zeros(len(r))
        floor = EPS * np.maximum(np.abs(delta[1:]).max(), 8 * np.abs(m.a))  # smaller changes are clipped
        t, slot, up = first_bound(m.a, delta, m.lower, m.upper, floor)
        m.a[:] = np.clip(m.a + min(t, 1.0) * delta, m.lower, m.upper)
        if t < 1.0:
            self._leave(slot, up)
        return t >= 1.0

    def _leave(self, slot: int, up: bool) -> None:
        """Take a margin vector that is at a bound out of S."""
        margin = self.margin
        margin.write_alpha()
        margin.leave(slot, float(margin.upper[slot]) if up else 0.0, -1.0 if up else 1.0)
        self.path.events += 1

    def _enter(self, i: int, direction: float) -> None:
        """Let sample i enter S, or move along its null vector in this direction until it or a margin vector reaches a bound."""
        s = self.samples
        m = margin = self.margin
        row = self.rows.row(i)
        self.path.events += 1
        while True:
            h = row[m.at] * m.used
            h[0] = s.y[i]
            beta = margin.solve(h) if len(margin) else h * 0.0
            gamma, terms = row[i] + float(h @ beta), abs(row[i]) + float(np.abs(h * beta).sum())
            # Below this share of its terms, gamma_i is rounding. Above it, i enters S, however badly conditioned A becomes.
            if not len(margin) or gamma > (64 * EPS) * terms:
                margin.enter(i, row, beta, gamma)
                return
            room = float(s.u[i] - s.alpha[i] if direction > 0 else s.alpha[i])
            t, slot, up = first_bound(m.a, beta * direction, m.lower, m.upper, EPS * np.abs(beta[1:]).max())
            step = min(t, room)
            m.a[:] = np.clip(m.a + step * direction * beta, m.lower, m.upper)
            s.rest += step * direction * row
            if room <= t:
                s.alpha[i], s.side[i] = (s.u[i], -1.0) if direction > 0 else (0.0, 1.0)
                return
            s.alpha[i] += step * direction
            self._leave(slot, up)
