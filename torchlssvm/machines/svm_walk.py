"""The walk: a drive runs from p = 0 to 1 while every other sample keeps its Kuhn-Tucker conditions (2), (3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchlssvm.errors import ConvergenceError
from torchlssvm.functional import svm_path
from torchlssvm.functional.svm_path import TINY
from torchlssvm.machines.svm_drive import Drive, Event
from torchlssvm.machines.svm_margin import DEPENDENT, NEAR, STEADY, Margin
from torchlssvm.machines.svm_run import REFINE, Runner
from torchlssvm.machines.svm_samples import Samples, as_tensor, places
from torchlssvm.machines.svm_sight import All, Nearest
from torchlssvm.machines.svm_step import ENDLESS, PATIENCE

MUCH = 1e-6
"""More than this, in units of g, is left of (2) and (3) only where what a walk believed was not so."""


class Walker(Runner):
    """Walks samples and margin vectors along a drive."""

    def __init__(self, samples: Samples, margin: Margin, watch: Callable[[Event], None] | None = None):
        self.samples, self.margin, self.watch = samples, margin, watch
        self.events, self.age = 0, REFINE
        self.corrected = False  # whether the last walk has ended with a correction

    def walk(self, drive: Drive, everything: bool = False) -> None:
        """From p = 0 to 1; ``everything``: every sample is looked at all along, as it is when events are watched.

        Where only near ones are, those that turn out to be on the wrong side walk up from alpha = 0 afterwards.
        """
        self.waiting: list[int] = []
        everything = everything or self.watch is not None
        self._walk(drive, everything)
        s = self.samples
        while up := [i for i in self.waiting if s.hsign[i] < 0 and s.halpha[i] == 0]:
            if len(up) == 1:
                self._walk(Drive.single(s, up[0], float(s.hu[up[0]])), everything)
                continue
            d, target = s.zeros(), s.zeros()
            d[up] = target[up] = s.hu[up]
            self._walk(Drive(s, d, target), everything)

    def walk_out(self, drive: Drive, c: int, g: float, stop_below: float) -> float:
        """The same for sample c, with this g, that leaves: its g at the end, or as soon as it is below ``stop_below``."""
        return self._walk(drive, True, c, g, stop_below)

    def _walk(
        self, drive: Drive, everything: bool, watching: int = -1, g: float = 0.0, stop_below: float = -ENDLESS
    ) -> float:
        s, m = self.samples, self.margin
        self.p, self.drive, self.over = 0.0, drive, False
        if everything or not m.near_ready():
            m.near.forget()  # what comes near now, nobody notes
            self.sight = All(s, m, drive)
        else:
            self.sight = Nearest(s, m, drive)
        self.budget = self.events + 1500 + 40 * s.n
        self.beta = None
        self.idle, self.age = 0, REFINE  # R is looked at before it is used
        self.corrected = False
        if drive.hrise is not None:
            m.hrise[:] = m.gather(drive.hrise, 0.0)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            while 1.0 - self.p > TINY and not self.over:
                g += self._step(watching)
                if g < stop_below:
                    return g
        if self.over and self.watch is not None:
            self.watch(Event(1.0, None, "end", 1.0 - self.p))
        self._finish()
        return g

    # -- one step ------------------------------------------------------------------------------------------------------

    def _step(self, watching: int) -> float:
        """The next event, or several where they run, and the change of the watched g."""
        s, m, drive = self.samples, self.margin, self.drive
        if self.events > self.budget:
            raise ConvergenceError(
                f"no end after {self.events} events with {s.n} samples; the walk is at p = {self.p:.6g}"
            )
        if not len(m) and abs(drive.balance) > 1e-14 * drive.size:
            return self._shift_b(watching)
        if (loops := self.runs) is not None:
            found = self.run(loops)
            if found is None:
                return 0.0
            t, to, i, gamma, beta = found
        else:
            beta = self.sensitivities()
            t, to, i, gamma = self.advance(beta)
            self.p += t
        if drive.hrise is not None:
            s.hu += t * drive.hrise
            m.hupper += t * m.hrise
        if to == "margin":
            self._enter(self.sight.position(i), float(gamma[i]), m.host(beta))
            i = self.sight.position(i)
        elif to != "end":
            i = m.position[i]
            self._leave(i, to, m.host(beta))
        self._note(to, i, t)
        return t * float(gamma[watching])

    def _note(self, to: str, i: int, t: float) -> None:
        self.events += 1
        if self.watch is not None:
            self.drive.place(self.samples, self.p)
            self.settle()
            self.watch(Event(self.p, None if i < 0 else self.samples.ids[i], to, t))

    def _leave(self, i: int, to: str, beta: Any = None) -> None:
        """A margin vector reaches a bound: to the reserve set at 0, to the error set at u, which may itself move."""
        s, m, drive = self.samples, self.margin, self.drive
        carry = beta is not None and len(m) > 1 and m.residual < STEADY and m.mild(m.slot[i])
        up = to == "error"
        s.halpha[i] = s.hu[i] if up else 0.0
        self.sight.leaves(i, float(s.halpha[i]))
        _, self.beta = m.leave(i, beta if carry else None)
        c = self.sight.column(i)
        self.sight.slack[c], self.sight.sign[c] = 0.0, -1.0 if up else 1.0
        if up and drive.hrise is not None:
            self._redirect(i, float(drive.hrise[i]))

    def _redirect(self, i: int, rate: float) -> None:
        """alpha_i moves at this rate from now on."""
        s, drive = self.samples, self.drive
        change = rate - float(drive.hd[i])
        if change:
            self.beta = None
            drive.place(s, self.p)
            self.sight.redirects(self.p)
            drive.hd[i] = rate
            drive.htarget[i] = s.halpha[i] + rate * (1.0 - self.p)
            hrow = s.host(s.q(i))
            drive.hforce += change * hrow
            self.sight.redirected(hrow, change)
            drive.measure(s)
            if not len(drive.driven) and drive.hrise is None and not drive.tilted:
                self.over = True  # nothing is driven any more; what is left of the force is rounding
                drive.hforce[:] = 0.0

    # -- entering the margin set ---------------------------------------------------------------------------------------

    def _enter(self, i: int, rate: float = 0.0, drive_beta: Any = None) -> None:
        """g_i has come to 0: sample i becomes a margin vector, or takes the place of one if it lies in their span."""
        s, m = self.samples, self.margin
        self.beta = None
        carry = drive_beta is not None and len(m) > 0 and float(self.drive.hd[i]) == 0
        self._redirect(i, 0.0)
        c = self.sight.column(i)
        self.sight.sign[c], self.sight.slack[c] = 0.0, ENDLESS
        row = s.q(i, keep=False)  # the margin set keeps it
        hrow = m.host(row)
        while len(m):
            # In a cycle, whatever is not dependent to the last bit counts as independent.
            beta, gamma, dependent = m.span(i, hrow, DEPENDENT if self.idle < PATIENCE else 4 * svm_path.EPS)
            if not dependent:
                self.beta = m.enter(i, hrow, float(s.halpha[i]), beta, gamma, (drive_beta, rate) if carry else None)
                break
            carry = False
            if self._exchange(i, row, beta):
                return
        else:
            m.enter(i, hrow, float(s.halpha[i]), None, 0.0)
        self.sight.entered(i)
        if self.drive.hrise is not None:
            m.hrise[m.slot[i]] = self.drive.hrise[i]

    def _exchange(self, i: int, row: Tensor, beta: Any) -> bool:
        """Along the null vector [beta; 1] no g changes: move until a margin vector, or i itself, is at a bound.

        p waits. Whatever the rounding of gamma_i moves all the same is followed. True if i is at its other bound.
        """
        s, m = self.samples, self.margin
        direction = -1.0 if float(s.halpha[i]) >= float(s.hu[i]) else 1.0
        beta = as_tensor(beta) * direction
        sight = self.sight
        gamma = sight.rates_along(beta, row * direction)
        hbeta = m.host(beta)
        room = float(s.hu[i] - s.halpha[i] if direction > 0 else s.halpha[i])
        inner = svm_path.coefficient_steps(m.ha, hbeta, m.hlower, m.hupper)
        inner[abs(hbeta) <= svm_path.EPS * float(abs(hbeta).max())] = ENDLESS
        rate, quotient = svm_path.margin_rates(sight.slack, gamma, sight.sign)
        quotient[rate >= -1e-9 * s.scale * float(abs(hbeta).sum())] = ENDLESS
        slot, j = int(inner.argmin()), int(quotient.argmin())
        t_in, q = float(inner[slot]), float(quotient[j])
        t_out = -1.0 / q if q < 0 else ENDLESS
        t = min(room, t_in, t_out)
        m.ha += t * hbeta
        sight.slack += t * rate
        s.halpha[i] += direction * t
        sight.moves(row, direction * t)
        if self.events > self.budget:
            raise ConvergenceError(f"no end to the exchanges of margin vectors after {self.events} events")
        if t == room:
            s.halpha[i] = s.hu[i] if direction > 0 else 0.0
            c = sight.column(i)
            sight.sign[c], sight.slack[c] = -direction, 0.0
            self.events += 1
            return True
        if t == t_in:
            j, to = m.position[slot], "error" if float(hbeta[slot]) > 0 else "reserve"
            self._leave(j, to)
            self._note(to, j, 0.0)
        else:
            j = sight.position(j)
            self._enter(j)
            self._note("margin", j, 0.0)
        return False

    def _shift_b(self, watching: int) -> float:
        """S is empty and the drive unbalanced: move b, alone, until a sample that can give way reaches its margin."""
        s, m, drive = self.samples, self.margin, self.drive
        direction = 1.0 if drive.balance > 0 else -1.0
        sight = self.sight
        rate, quotient = svm_path.margin_rates(sight.slack, sight.y * direction, sight.sign)
        i = int(quotient.argmin())
        q = float(quotient[i])
        if q >= 0 and isinstance(sight, Nearest):
            self._look_at_all()
            m.near.forget()
            return 0.0
        if q >= 0:
            drive.place(s, self.p)
            left = float(abs((drive.htarget - s.halpha) * (drive.hd != 0)).sum())
            if left > 1e-12 * float(s.hu.max()):
                raise ConvergenceError("no sample can balance the drive: sum y alpha = 0 does not hold")
            self.p = 1.0  # what is left to be driven is rounding
            return 0.0
        t = -1.0 / q
        m.ha[0] += t * direction
        sight.slack += t * rate
        i = sight.position(i)
        self._enter(i)
        self._note("margin", i, 0.0)
        return t * direction * float(s.hy[watching])

    def _look_at_all(self) -> None:
        """From here on; what turns out to be on the wrong side waits."""
        s = self.samples
        for i in self.sight.finish(self.p):
            s.hsign[i], s.hslack[i] = -1.0, -s.hslack[i]
            self.waiting.append(i)
        self.sight = All(s, self.margin, self.drive)

    def assemble(self, positions: list[int]) -> None:
        """Take these samples, with the coefficients they have, into an empty margin set, one at a time.

        One in the span of those before is moved along the null vector, by which f does not change, to where it is not.
        """
        s = self.samples
        self.idle = 0
        self.p, self.over, self.beta = 0.0, False, None
        self.drive = Drive(s, s.zeros(), s.zeros(), force=s.zeros())
        self.budget = self.events + 100 + 40 * s.n
        s.sign.zero_()
        s.slack.fill_(ENDLESS)
        self.sight, self.waiting = All(s, self.margin, self.drive), []
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            for i in positions:
                self._enter(i)
        self.settle()

    # -- the end -------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        s, drive = self.samples, self.drive
        s.halpha[drive.driven] = drive.htarget[drive.driven]
        if isinstance(self.sight, Nearest):
            self.sight.arrive()
            self.corrected = len(self.margin) > 0 and self.newton() is not None
            self._look_at_all()
        if drive.hrise is not None:
            self.margin.rise.zero_()
        if not self.corrected:
            self.settle()
        off = abs(float(s.hy @ s.halpha))
        if off > 1e-8 and off > 1e-8 * float(s.hu.max()):  # never an answer that breaks (3)
            raise ConvergenceError(f"rounding has broken sum y alpha = 0, by {off:.1e}")

    def newton(self) -> Any:  # -> (top,)
        """A Newton step a -= R r, r what is left of (2) and (3) at the margin vectors; None, and no step, if it is no help."""
        s, m = self.samples, self.margin
        refined = self.refined()
        if (loops := m.loops) is not None and not refined:
            delta, box = np.empty(m.top), (m.ha, m.hlower, m.hupper, m.hused, m.hat)
            limits = (MUCH, s.scale, NEAR)
            done = loops.newton(m.hQS, m.hA, m.hR, m.top, *box, s.halpha, s.hsign, *limits, delta)
            return delta if done else None
        if loops is not None:
            r = np.empty(m.top)
            largest = loops.residual(m.hQS, m.hA, m.top, m.ha, m.hused, s.halpha, s.hsign, r)
        else:
            self.settle()
            r = m.host(torch.mv(m.QS[: m.top, : s.n], s.alpha))  # row 0 of QS is y: its entry is y^T alpha
            r[1:] += m.hAk[1:, 0] * m.ha[0] - 1.0
            r *= m.hused
            largest = float(abs(r).max())
        if largest > MUCH and largest > MUCH * float(s.halpha.max()) * s.scale:
            return None
        delta = m.sensitivities(r, refined)
        a = m.ha + m.host(delta)
        within = a.clip(m.hlower, m.hupper)
        if bool((abs(a - within) > NEAR * m.hupper).any()):
            return None  # margin vectors that are dependent: R is of no use
        m.ha[:] = within
        self.settle()
        return delta

    def settle(self) -> None:
        """Write the margin vectors' coefficients back to the samples."""
        m = self.margin
        if len(m):
            slots = places(m.hused)[1:]  # without b's
            self.samples.halpha[m.hat[slots]] = m.ha[slots]
