"""How far a step goes, and what ends it: the bookkeeping of section 2.3, with ties and rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchlssvm.errors import ConvergenceError
from torchlssvm.functional import svm_path
from torchlssvm.functional.svm_path import TINY
from torchlssvm.machines.svm_drive import Drive
from torchlssvm.machines.svm_margin import NEAR, Margin
from torchlssvm.machines.svm_samples import Samples, places
from torchlssvm.machines.svm_sight import All

PERTURB = 200
"""Events without a step before ties are broken by a perturbation, which the correction at the end takes back."""
PERTURBED = 5
"""So many perturbations, each ten times the last, and then it is given up."""
PATIENCE = 50
"""Events without a step before their order is changed."""
NOISE = 16 * svm_path.EPS
"""The rounding of a rate, as a share of the terms that it is the sum of."""
ENDS = ("end", "margin", "error", "reserve")
"""What ends a step, in the order of the numbers in :mod:`torchlssvm.functional.svm_loops`."""
ENDLESS = float("inf")
_NONE = np.empty(0)


class Stepper:
    """Where a walk is, and its next step."""

    samples: Samples
    margin: Margin
    drive: Drive
    sight: All
    p: float
    idle: int  # events without a step, in a row
    perturbed = False  # whether slacks have been shifted

    def advance(self, beta: Any) -> tuple[float, str, int, Any]:  # (top,) -> (columns,)
        """The largest step (2.3), made: its length, what ends it ("end": nothing), its column or slot; and every gamma (12)."""
        m, sight = self.margin, self.sight
        if (loops := m.loops) is not None:
            Q, force, gamma = sight.Q, sight.hforce, np.empty(len(sight.slack))
            rise = m.hrise if self.drive.hrise is not None else _NONE
            most, noise = 1.0 - self.p, NOISE * self.samples.scale
            code, i, t = loops.advance(
                Q, m.top, len(gamma), beta, force, sight.slack, sight.sign, m.ha, m.hlower, m.hupper, rise, most, noise,
                self.drive.size, gamma,
            )  # fmt: skip
            if code >= 0:
                return t, ENDS[code], i, gamma
        else:
            gamma = sight.rates(beta)
        rate, quotient = svm_path.margin_rates(sight.slack, gamma, sight.sign)
        hbeta = m.host(beta) if isinstance(beta, Tensor) else beta
        t, to, i = self.largest_step(hbeta, rate, quotient, 1.0 - self.p)
        if t > 0:
            m.ha += t * hbeta
            rate *= t
            sight.slack += rate
        return t, to, i, gamma

    def largest_step(self, beta: Any, rate: Any, quotient: Any, most: float) -> tuple[float, str, int]:
        """The largest step (2.3), what ends it ("end": nothing), the column of what enters S or the slot of what leaves."""
        m = self.margin
        rise = m.hrise if self.drive.hrise is not None else None
        inner = svm_path.coefficient_steps(m.ha, beta, m.hlower, m.hupper, rise)
        slot, i = int(inner.argmin()), int(quotient.argmin())
        t, q = float(inner[slot]), float(quotient[i])
        u = -1.0 / q if q < 0 else ENDLESS
        noise = NOISE * self.samples.scale
        # sum |beta| <= sqrt(m beta^T beta), which is cheaper
        floor = noise * (float(len(beta) * (beta @ beta)) ** 0.5 + self.drive.size)
        if min(t, u) <= TINY or -float(rate[i]) <= floor:
            floor = noise * (float(abs(beta).sum()) + self.drive.size)
            return self._careful_step(inner, beta, rate, quotient, floor, most)
        if min(t, u) >= most:
            return most, "end", -1
        return (u, "margin", i) if u <= t else (t, self._bound(slot, beta, t), slot)

    def _bound(self, slot: int, beta: Any, t: float) -> str:
        m = self.margin
        if self.drive.hrise is None:
            return "error" if float(beta[slot]) > 0 else "reserve"
        a, b, u, r = (float(v[slot]) for v in (m.ha, beta, m.hupper, m.hrise))
        return "error" if svm_path.reaches_upper(a, b, u, r, t) else "reserve"

    def _careful_step(
        self, inner: Any, beta: Any, rate: Any, quotient: Any, floor: float, most: float
    ) -> tuple[float, str, int]:
        """The same where rates are 0 to rounding (a sample in the span of S, such as a duplicate, has no events).

        Among simultaneous events the sample with the smallest index goes first (Bland): no cycles. Should rounding make one
        all the same, the order changes after a while.
        """
        m, still = self.margin, svm_path.EPS * float(abs(beta).max())
        if self.drive.hrise is None:
            inner[abs(beta) <= still] = ENDLESS
        quotient[rate >= -floor] = ENDLESS
        t, q = float(inner.min()), float(quotient.min())
        u = -1.0 / q if q < 0 else ENDLESS
        if min(t, u) >= most:
            return most, "end", -1
        at_once = max(min(t, u), TINY)
        slots = [(m.position[k], k) for k in range(m.top) if float(inner[k]) <= at_once]
        found = places((quotient < 0) & (-1.0 / quotient <= at_once)).tolist()
        events = sorted(slots + [(self.sight.position(c), 0) for c in found])
        first, t = (int(inner.argmin()) if t <= u else 0), min(t, u)
        self.idle = self.idle + 1 if t <= TINY else 0
        if self.idle and self.idle % PERTURB == 0:
            self._perturb()
        i, slot = events[0] if self.idle < PATIENCE else events[self.idle * 7919 % len(events)]
        if slot and (float(inner[slot]) - t) * abs(float(beta[slot])) > NEAR * float(m.hupper[slot]):
            slot = first  # a coefficient so fast that even this step is one: the first event, and no other
            i = m.position[slot] if slot else self.sight.position(int(quotient.argmin()))
        return (t, self._bound(slot, beta, t), slot) if slot else (t, "margin", self.sight.column(i))

    def _perturb(self) -> None:
        """So many events without a step are a cycle made by rounding: shift every slack a little, each differently."""
        s = self.samples
        if self.idle // PERTURB > PERTURBED:
            raise ConvergenceError(
                f"{self.idle} events without a step, at p = {self.p:.6g}: rounding makes them a cycle"
            )
        shift = torch.rand(
            len(self.sight.slack),
            generator=torch.Generator("cpu").manual_seed(self.idle),
            dtype=torch.float64,
            device="cpu",
        )
        shift = s.host((1.0 + shift.to(s.device)) * 1e-13 * 10 ** (self.idle // PERTURB) * max(1.0, s.scale))
        self.sight.slack += shift
        self.perturbed = True
