"""The walk: a drive runs from p = 0 to 1 while every other sample keeps its Kuhn-Tucker conditions (2), (3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchlssvm.errors import ConvergenceError
from torchlssvm.functional import svm_path
from torchlssvm.machines.svm_margin import DEPENDENT, Margin
from torchlssvm.machines.svm_samples import Samples

TINY = 1e-13
"""A step up to this length is none: the events at its end are simultaneous, and the smallest index goes first."""


@dataclass
class Drive:
    """What moves while p goes from 0 to 1.

    Coefficients at the rate d to their target; upper bounds at the rate rise; and the gradient itself by ``tilt``, for a
    kernel that has changed. Margin vectors are never driven.
    """

    d: Tensor  # (n,) rate of alpha; zero where it does not move by itself
    target: Tensor  # (n,) alpha at p = 1
    rise: Tensor | None = None  # (n,) rate of the upper bounds u
    tilt: Tensor | None = None  # (n,) rate of g that no coefficient causes
    force: Tensor = field(init=False)  # (n,) rate of g with the margin vectors at rest
    balance: float = field(init=False)  # sum of y_k d_k


@dataclass
class Event:
    """One step of the walk: at ``p``, sample ``id`` went to the set ``to`` ("margin", "error", "reserve", or "end")."""

    p: float
    id: int | None
    to: str
    step: float


class Walker:
    """Walks samples and margin vectors along a drive."""

    def __init__(self, samples: Samples, margin: Margin, watch: Callable[[Event], None] | None = None):
        self.samples, self.margin, self.watch = samples, margin, watch
        self.events = 0

    def walk(self, drive: Drive, watching: int | None = None, stop_below: float | None = None) -> bool:
        """From p = 0 to 1. With ``watching`` a sample, ends early (False) once its g falls below ``stop_below``."""
        s, m = self.samples, self.margin
        self.p, self.drive = 0.0, drive
        self._start(drive)
        budget = self.events + 100 + 40 * s.n
        while True:
            if self.events > budget:
                raise ConvergenceError(f"no end after {self.events} events with {s.n} samples; the walk is at p = {self.p:.6g}")
            if not len(m) and abs(drive.balance) > 1e-14 * float(drive.d.abs().sum()):
                self._shift_b()
                continue
            h = m.gather(drive.force, drive.balance)
            beta = m.sensitivities(h) if len(m) else torch.zeros_like(h)
            gamma = svm_path.margin_sensitivities(m.QS[: s.n, : m.top], beta, drive.force)
            t, to, i = self._largest_step(beta, gamma, 1.0 - self.p)
            if watching is not None and stop_below is not None:
                rate = float(gamma[watching])
                if rate < 0 and float(s.g[watching]) + t * rate < stop_below:
                    return False
            self._advance(t, beta, gamma)
            if to == "end":
                self._finish()
                return True
            self._event(to, i, t)

    # -- one step ------------------------------------------------------------------------------------------------------

    def _start(self, drive: Drive) -> None:
        s, m = self.samples, self.margin
        drive.force = s.product(drive.d)
        if drive.tilt is not None:
            drive.force += drive.tilt
        drive.balance = float(s.y @ drive.d)
        if drive.rise is not None:
            m.rise[: m.top] = m.gather(drive.rise, 0.0)

    def _largest_step(self, beta: Tensor, gamma: Tensor, most: float) -> tuple[float, str, int]:
        """The largest step (2.3), what ends it ("end" if nothing does), and the position of the sample."""
        s, m = self.samples, self.margin
        k = m.top
        rise = m.rise[:k] if self.drive.rise is not None else None
        inner = svm_path.coefficient_steps(m.a[:k], beta, m.lower[:k], m.upper[:k], rise)
        floor = 16 * svm_path.EPS * float(torch.linalg.vector_norm(beta, 1) + self._size)
        outer = svm_path.margin_steps(s.g, gamma, s.sign, floor)
        t_in, slot = inner.min(0)
        t_out, i = outer.min(0)
        t, u = float(t_in), float(t_out)
        if min(t, u) <= TINY:
            return self._tie(inner, outer, beta)
        if min(t, u) >= most:
            return most, "end", -1
        if u <= t:
            return u, "margin", int(i)
        return t, "error" if float(beta[slot]) > 0 else "reserve", m.position[int(slot)]

    @property
    def _size(self) -> Tensor:
        return torch.linalg.vector_norm(self.drive.d, 1)

    def _tie(self, inner: Tensor, outer: Tensor, beta: Tensor) -> tuple[float, str, int]:
        """Among simultaneous events the sample with the smallest index goes first (Bland): no cycles."""
        m = self.margin
        slots = (inner <= TINY).nonzero()[:, 0].tolist()
        found = [(m.position[slot], slot) for slot in slots] + [(i, 0) for i in (outer <= TINY).nonzero()[:, 0].tolist()]
        i, slot = min(found)
        if not slot:
            return 0.0, "margin", i
        return 0.0, "error" if float(beta[slot]) > 0 else "reserve", i

    def _advance(self, t: float, beta: Tensor, gamma: Tensor) -> None:
        if t > 0:
            s, m, drive = self.samples, self.margin, self.drive
            m.a[: m.top].add_(beta, alpha=t)
            s.g.add_(gamma, alpha=t)
            s.alpha.add_(drive.d, alpha=t)
            if drive.rise is not None:
                s.u.add_(drive.rise, alpha=t)
                m.upper.add_(m.rise, alpha=t)
            self.p += t

    def _event(self, to: str, i: int, t: float) -> None:
        """Sample i changes sets."""
        if to == "margin":
            self._enter(i)
        else:
            self._leave(i, to)
        self._note(to, i, t)

    def _note(self, to: str, i: int | None, t: float) -> None:
        self.events += 1
        if self.watch is not None:
            self.settle()
            self.watch(Event(self.p, None if i is None else self.samples.ids[i], to, t))

    def _leave(self, i: int, to: str) -> None:
        """A margin vector reaches a bound: to the reserve set at 0, to the error set at u, which may itself move."""
        s, drive = self.samples, self.drive
        self.margin.leave(i)
        up = to == "error"
        s.alpha[i] = s.u[i] if up else 0.0
        s.g[i] = 0.0
        s.sign[i] = -1.0 if up else 1.0
        if up and drive.rise is not None:
            self._redirect(i, float(drive.rise[i]))

    def _redirect(self, i: int, rate: float) -> None:
        """alpha_i moves at this rate from now on."""
        s, drive = self.samples, self.drive
        change = rate - float(drive.d[i])
        if change:
            drive.d[i] = rate
            drive.target[i] = s.alpha[i] + rate * (1.0 - self.p)
            drive.force.add_(s.q(i), alpha=change)
            drive.balance = float(s.y @ drive.d)

    # -- entering the margin set ---------------------------------------------------------------------------------------

    def _enter(self, i: int) -> None:
        """g_i has come to 0: sample i becomes a margin vector, or takes the place of one if it lies in their span."""
        s, m = self.samples, self.margin
        self._redirect(i, 0.0)
        direction = -1.0 if float(s.alpha[i]) >= float(s.u[i]) else 1.0
        s.g[i], s.sign[i] = 0.0, 0.0
        row = s.q(i)
        while True:
            if not len(m):
                m.enter(i, row, float(s.alpha[i]), None, 0.0)
                break
            beta, gamma, size = m.span(i, row)
            if gamma > DEPENDENT * size:
                m.enter(i, row, float(s.alpha[i]), beta, gamma)
                break
            if self._exchange(i, row, beta, direction):
                return
        if self.drive.rise is not None:
            m.rise[m.slot[i]] = self.drive.rise[i]

    def _exchange(self, i: int, row: Tensor, beta: Tensor, direction: float) -> bool:
        """Along the null vector [beta; 1] no g changes: move until a margin vector, or i itself, is at a bound.

        p waits. Whatever else the rounding of gamma_i moves is followed exactly. True if i is at its other bound.
        """
        s, m = self.samples, self.margin
        beta = beta * direction
        gamma = svm_path.margin_sensitivities(m.QS[: s.n, : m.top], beta, row * direction)
        room = float(s.u[i] - s.alpha[i] if direction > 0 else s.alpha[i])
        k = m.top
        inner = svm_path.coefficient_steps(m.a[:k], beta, m.lower[:k], m.upper[:k])
        outer = svm_path.margin_steps(s.g, gamma, s.sign, 1e-9 * float(torch.linalg.vector_norm(beta, 1)))
        t = min(room, float(inner.min()), float(outer.min()))
        m.a[:k].add_(beta, alpha=t)
        s.g.add_(gamma, alpha=t)
        s.alpha[i] += direction * t
        s.g[i] = 0.0
        self._check_budget()
        if t >= room:
            s.alpha[i] = s.u[i] if direction > 0 else 0.0
            s.sign[i] = -direction
            return True
        if float(inner.min()) <= t:
            slot = int(inner.argmin())
            j, to = m.position[slot], "error" if float(beta[slot]) > 0 else "reserve"
            self._leave(j, to)
            self._note(to, j, 0.0)
        else:
            j = int(outer.argmin())
            self._enter(j)
            self._note("margin", j, 0.0)
        return False

    def _check_budget(self) -> None:
        self.events += 1
        if self.events > 10**7:
            raise ConvergenceError("no end to the exchanges between margin vectors")

    def _shift_b(self) -> None:
        """S is empty and the drive unbalanced: move b, alone, until a sample that can give way reaches its margin."""
        s, m, drive = self.samples, self.margin, self.drive
        gamma = s.y * (1.0 if drive.balance > 0 else -1.0)
        t, i = svm_path.margin_steps(s.g, gamma, s.sign, 0.5).min(0)
        if float(t) == float("inf"):
            raise ConvergenceError("no sample can balance the drive: sum y alpha = 0 was not true at the start")
        m.a[0] += float(t) * (1.0 if drive.balance > 0 else -1.0)
        s.g.add_(gamma, alpha=float(t))
        self._event("margin", int(i), 0.0)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        s, m, drive = self.samples, self.margin, self.drive
        driven = drive.d != 0
        s.alpha.copy_(torch.where(driven, drive.target, s.alpha))
        m.rise.zero_()
        self.settle()
        self._note("end", None, 0.0)

    def settle(self) -> None:
        """Write the margin vectors' coefficients back to the samples."""
        m = self.margin
        if len(m):
            slots = m.members()
            self.samples.alpha[m.at[slots]] = m.a[slots]
