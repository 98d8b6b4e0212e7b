"""The walk: a drive runs from p = 0 to 1 while every other sample keeps its Kuhn-Tucker conditions (2), (3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchlssvm.errors import ConvergenceError
from torchlssvm.functional import svm_path
from torchlssvm.machines.svm_margin import DEPENDENT, Margin
from torchlssvm.machines.svm_samples import Samples, host

TINY = 1e-13
"""A step up to this length is none: the events at its end are simultaneous, and the smallest index goes first."""
ENDLESS = float("inf")


class Drive:
    """What moves while p goes from 0 to 1.

    Coefficients at the rate d to their target; upper bounds at the rate ``rise``; and the gradient itself at the rate
    ``tilt``, for a kernel that has changed. Margin vectors are never driven.
    """

    def __init__(
        self,
        samples: Samples,
        d: Tensor,  # (n,) rate of alpha; zero where it does not move by itself
        target: Tensor,  # (n,) alpha at p = 1
        rise: Tensor | None = None,  # (n,) rate of the upper bounds u
        tilt: Tensor | None = None,  # (n,) rate of g that no coefficient causes
        force: Tensor | None = None,  # (n,) Q d, where it is known
    ):
        self.d, self.target, self.rise = d, target, rise
        self.force = samples.product(d) if force is None else force  # rate of g with the margin vectors at rest
        if tilt is not None:
            self.force = self.force + tilt
        self.hd, self.htarget, self.hforce = host(d), host(target), host(self.force)
        self.hrise = None if rise is None else host(rise)
        self.measure(samples)

    def measure(self, samples: Samples) -> None:
        """The balance sum y_k d_k and the size sum |d_k|, after a change of d."""
        self.balance = float((samples.hy * self.hd).sum())
        self.size = float(abs(self.hd).sum())


@dataclass
class Event:
    """One step of a walk: at ``p``, sample ``id`` went to ``to``: "margin", "error", "reserve"; "end" when p = 1."""

    p: float
    id: int | None
    to: str
    step: float


class Walker:
    """Walks samples and margin vectors along a drive."""

    def __init__(self, samples: Samples, margin: Margin, watch: Callable[[Event], None] | None = None):
        self.samples, self.margin, self.watch = samples, margin, watch
        self.events = 0

    def walk(self, drive: Drive, watching: int | None = None, stop_below: float = -ENDLESS) -> bool:
        """From p = 0 to 1. With ``watching`` a sample, ends early (False) once its g falls below ``stop_below``."""
        self.p, self.drive = 0.0, drive
        self.budget = self.events + 100 + 40 * self.samples.n
        if drive.hrise is not None:
            self.margin.hrise[:] = self.margin.gather(drive.hrise, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            while 1.0 - self.p > TINY:
                if not self._step(watching, stop_below):
                    return False
        self._finish()
        return True

    # -- one step ------------------------------------------------------------------------------------------------------

    def _step(self, watching: int | None, stop_below: float) -> bool:
        s, m, drive = self.samples, self.margin, self.drive
        if self.events > self.budget:
            raise ConvergenceError(
                f"no end after {self.events} events with {s.n} samples; the walk is at p = {self.p:.6g}"
            )
        if len(m):
            beta = m.sensitivities(m.gather(drive.hforce, drive.balance))
            gamma = svm_path.margin_sensitivities(m.QSk[: s.n], beta, drive.force)
        elif abs(drive.balance) > 1e-14 * drive.size:
            self._shift_b()
            return True
        else:
            beta, gamma = torch.zeros_like(m.a[:1]), drive.force
        hbeta, hgamma = host(beta), host(gamma)
        t, to, i = self._largest_step(hbeta, hgamma, 1.0 - self.p)
        if watching is not None and float(s.hg[watching]) + t * float(hgamma[watching]) < stop_below:
            return False
        if t > 0:
            self._advance(t, hbeta, hgamma)
        if to == "margin":
            self._enter(i)
        elif to != "end":
            self._leave(i, to)
        self._note(to, i, t)
        return True

    def _largest_step(self, beta: Any, gamma: Any, most: float) -> tuple[float, str, int]:
        """The largest step (2.3), what ends it ("end" if nothing does), and the position of the sample."""
        s, m = self.samples, self.margin
        rise = m.hrise if self.drive.rise is not None else None
        inner = svm_path.coefficient_steps(m.ha, beta, m.hlower, m.hupper, rise)
        floor = 16 * svm_path.EPS * s.scale * (float(abs(beta).sum()) + self.drive.size)
        outer = svm_path.margin_steps(s.hg, gamma, s.hsign, floor)
        slot, i = int(inner.argmin()), int(outer.argmin())
        t, u = float(inner[slot]), float(outer[i])
        if min(t, u) <= TINY:
            return self._tie(inner, outer, beta)
        if min(t, u) >= most:
            return most, "end", -1
        if u <= t:
            return u, "margin", i
        return t, "error" if float(beta[slot]) > 0 else "reserve", m.position[slot]

    def _tie(self, inner: Any, outer: Any, beta: Any) -> tuple[float, str, int]:
        """Among simultaneous events the sample with the smallest index goes first (Bland): no cycles."""
        m = self.margin
        slots = [slot for slot in range(m.top) if float(inner[slot]) <= TINY]
        i = int((outer <= TINY).argmax()) if bool((outer <= TINY).any()) else self.samples.n
        j, slot = min(((m.position[slot], slot) for slot in slots), default=(self.samples.n, 0))
        if i < j:
            return 0.0, "margin", i
        return 0.0, "error" if float(beta[slot]) > 0 else "reserve", j

    def _advance(self, t: float, beta: Any, gamma: Any) -> None:
        s, m, drive = self.samples, self.margin, self.drive
        m.ha += t * beta
        s.hg += t * gamma
        s.halpha += t * drive.hd
        if drive.hrise is not None:
            s.hu += t * drive.hrise
            m.hupper += t * m.hrise
        self.p += t

    def _note(self, to: str, i: int, t: float) -> None:
        self.events += 1
        if self.watch is not None:
            self.settle()
            self.watch(Event(self.p, None if i < 0 else self.samples.ids[i], to, t))

    def _leave(self, i: int, to: str) -> None:
        """A margin vector reaches a bound: to the reserve set at 0, to the error set at u, which may itself move."""
        s, drive = self.samples, self.drive
        self.margin.leave(i)
        up = to == "error"
        s.halpha[i] = s.hu[i] if up else 0.0
        s.hg[i] = 0.0
        s.hsign[i] = -1.0 if up else 1.0
        if up and drive.hrise is not None:
            self._redirect(i, float(drive.hrise[i]))

    def _redirect(self, i: int, rate: float) -> None:
        """alpha_i moves at this rate from now on."""
        s, drive = self.samples, self.drive
        change = rate - float(drive.hd[i])
        if change:
            drive.hd[i] = rate
            drive.htarget[i] = s.halpha[i] + rate * (1.0 - self.p)
            drive.force.add_(s.q(i), alpha=change)
            drive.measure(s)

    # -- entering the margin set ---------------------------------------------------------------------------------------

    def _enter(self, i: int) -> None:
        """g_i has come to 0: sample i becomes a margin vector, or takes the place of one if it lies in their span."""
        s, m = self.samples, self.margin
        self._redirect(i, 0.0)
        direction = -1.0 if float(s.halpha[i]) >= float(s.hu[i]) else 1.0
        s.hg[i], s.hsign[i] = 0.0, 0.0
        row = s.q(i)
        while True:
            if not len(m):
                m.enter(i, row, float(s.halpha[i]), None, 0.0)
                break
            beta, gamma, size = m.span(i, row)
            if gamma > DEPENDENT * size:
                m.enter(i, row, float(s.halpha[i]), beta, gamma)
                break
            if self._exchange(i, row, beta, direction):
                return
        if self.drive.hrise is not None:
            m.hrise[m.slot[i]] = self.drive.hrise[i]

    def _exchange(self, i: int, row: Tensor, beta: Tensor, direction: float) -> bool:
        """Along the null vector [beta; 1] no g changes: move until a margin vector, or i itself, is at a bound.

        p waits. Whatever the rounding of gamma_i moves all the same is followed. True if i is at its other bound.
        """
        s, m = self.samples, self.margin
        beta = beta * direction
        gamma = host(svm_path.margin_sensitivities(m.QSk[: s.n], beta, row * direction))
        hbeta = host(beta)
        room = float(s.hu[i] - s.halpha[i] if direction > 0 else s.halpha[i])
        inner = svm_path.coefficient_steps(m.ha, hbeta, m.hlower, m.hupper)
        outer = svm_path.margin_steps(s.hg, gamma, s.hsign, 1e-9 * s.scale * float(abs(hbeta).sum()))
        slot, j = int(inner.argmin()), int(outer.argmin())
        t_in, t_out = float(inner[slot]), float(outer[j])
        t = min(room, t_in, t_out)
        m.ha += t * hbeta
        s.hg += t * gamma
        s.halpha[i] += direction * t
        s.hg[i] = 0.0
        if self.events > self.budget:
            raise ConvergenceError(f"no end to the exchanges of margin vectors after {self.events} events")
        if t == room:
            s.halpha[i] = s.hu[i] if direction > 0 else 0.0
            s.hsign[i] = -direction
            self.events += 1
            return True
        if t == t_in:
            j, to = m.position[slot], "error" if float(hbeta[slot]) > 0 else "reserve"
            self._leave(j, to)
            self._note(to, j, 0.0)
        else:
            self._enter(j)
            self._note("margin", j, 0.0)
        return False

    def _shift_b(self) -> None:
        """S is empty and the drive unbalanced: move b, alone, until a sample that can give way reaches its margin."""
        s, m, drive = self.samples, self.margin, self.drive
        direction = 1.0 if drive.balance > 0 else -1.0
        gamma = s.hy * direction
        outer = svm_path.margin_steps(s.hg, gamma, s.hsign, 0.5)
        i = int(outer.argmin())
        t = float(outer[i])
        if t == ENDLESS:
            left = float(abs((drive.htarget - s.halpha) * (drive.hd != 0)).sum())
            if left > 1e-12 * float(s.hu.max()):
                raise ConvergenceError("no sample can balance the drive: sum y alpha = 0 does not hold")
            self.p = 1.0  # what is left to be driven is rounding
            return
        m.ha[0] += t * direction
        s.hg += t * gamma
        self._enter(i)
        self._note("margin", i, 0.0)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        s, drive = self.samples, self.drive
        s.alpha.copy_(torch.where(drive.d != 0, drive.target, s.alpha))
        if drive.rise is not None:
            self.margin.rise.zero_()
        self.settle()

    def settle(self) -> None:
        """Write the margin vectors' coefficients back to the samples."""
        m = self.margin
        if len(m):
            slots = m.members()
            self.samples.alpha[m.at[slots]] = m.a[slots]
