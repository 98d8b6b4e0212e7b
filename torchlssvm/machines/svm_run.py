"""Plain events in one compiled call, and what Python keeps of the sets brought up to date after it."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import torch

from torchlssvm.functional.loops import load
from torchlssvm.machines.svm_margin import MILD, STEADY
from torchlssvm.machines.svm_samples import as_tensor
from torchlssvm.machines.svm_sight import Nearest
from torchlssvm.machines.svm_step import ENDS, NOISE, Stepper

LOG = 64
"""Events in one call."""
SPARE = 16
"""Rows of the cache that it may fill."""
REFINE = 6
"""While R is steady, beta is carried from event to event and refined every so many."""
_NONE = np.empty((0, 0))


class Runner(Stepper):
    """Steps that are compiled as a whole."""

    events: int
    budget: int
    age: int
    beta: Any  # of the drive, carried over from the last event, where it can be

    @property
    def runs(self) -> Any:
        """The compiled run, where a walk may use it: it looks at near samples only, and there are margin vectors."""
        near = isinstance(self.sight, Nearest) and len(self.margin) > 0 and self.margin.loops is not None
        return load("svm_run_loops") if near else None

    def run(self, loops: Any) -> tuple[float, str, int, Any, Any] | None:
        """Plain events, until one is not plain: the step up to that is made, and returned with every gamma (12) and beta.

        None: all of them are done, and the walk goes on.
        """
        s, m, sight, drive = self.samples, self.margin, self.sight, self.drive
        assert isinstance(sight, Nearest)
        a, _, used, lower, upper, at = m.whole
        rows, near = s.rows, sight.near
        beta, gamma = np.zeros(m.slots), np.empty(len(sight.slack))
        if self.beta is not None:
            beta[: m.top] = self.beta
        lift, kernel = (s.hlift, s.kernel.gamma) if s.lifted else (_NONE, 0.0)  # type: ignore[union-attr]
        numbers = np.array([self.p, m.residual, drive.size, drive.balance, NOISE * s.scale, STEADY, MILD, kernel])
        counts = np.array([m.top, len(m), self.age, REFINE, self.beta is not None, 0, 0], dtype=np.int64)
        log = np.empty((max(1, min(LOG, self.budget + 1 - self.events)), 4), dtype=np.int64)
        code, i, t = loops.run(
            m.hR, m.hA, m.hQS, sight.Q, a, lower, upper, used, at, sight.slack, sight.sign, sight.hforce, near.positions,
            near.place, s.hy, s.hu, s.halpha, drive.hd, drive.hforce, sight.g, sight.start, beta, gamma, rows.hrows,
            rows.hheld, rows.place, rows.spare(SPARE), lift, numbers, counts, log,
        )  # fmt: skip
        self.p, m.residual, self.age = float(numbers[0]), float(numbers[1]), int(counts[2])
        self._replay(log[: counts[5]].tolist())
        self.beta = beta[: m.top] if code == loops.STOP else None
        if code == loops.STOP:
            return None
        if code < 0 or code == loops.UNSTEADY:  # one step with care
            hbeta = beta[: m.top] if code < 0 else self.sensitivities()
            before = self.p
            t, to, i, gamma = self.advance(hbeta)
            self.p = before + t
            return t, to, i, gamma, hbeta
        return t, ENDS[code], i, gamma, beta[: m.top]

    def sensitivities(self) -> Any:  # -> (top,), a tensor or an array
        """beta of the drive (10): carried, refined when it is time."""
        m, drive = self.margin, self.drive
        if not len(m):
            return torch.zeros_like(m.a[: m.top]) if m.loops is None else np.zeros(m.top)
        refined = self.refined()
        if self.beta is None or refined:
            return m.sensitivities(m.gather(drive.hforce, drive.balance), refined)
        return self.beta if m.loops is not None else as_tensor(self.beta)

    def refined(self) -> bool:
        """Whether it is time to refine what R gives, and to measure R by that."""
        refined = self.age >= REFINE or not self.margin.residual < STEADY
        self.age = 0 if refined else self.age + 1
        return refined

    def _replay(self, log: list[list[int]]) -> None:
        """The events of a run, on what Python keeps: positions, slots, free slots, rows of the cache."""
        m, rows = self.margin, self.samples.rows
        for what, i, slot, row in log:
            if ENDS[what] == "margin":
                if m.free:
                    heapq.heappop(m.free)
                    m.position[slot] = i
                else:
                    m.position.append(i)
                m.slot[i] = slot
            else:
                del m.slot[i]
                m.position[slot] = -1
                heapq.heappush(m.free, slot)
                if row >= 0:
                    rows.filled(i, row)
        if log:
            self.events += len(log)
            m.trim()
