"""The path: coefficients move from p = 0 to 1 while every other sample keeps its Kuhn-Tucker conditions (2), (3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchlssvm.functional.modes import interrupt
from torchlssvm.svm import steps
from torchlssvm.svm.kernel_rows import KernelRows
from torchlssvm.svm.margin_set import MarginSet
from torchlssvm.svm.samples import Array, Samples
from torchlssvm.svm.steps import SIMULTANEOUS_STEP, Drive

MAX_EVENTS_FOR_FEW, MAX_EVENTS_PER_SAMPLE = 1500, 40
"""Events of a walk, plus so many for each sample held, after which it is given up. A path visits each sample a few times."""
SET_NAMES = {steps.TO_MARGIN: "margin", steps.TO_ERROR: "error", steps.TO_RESERVE: "reserve"}


@dataclass
class Event:
    """One step of a walk: at ``p``, sample ``id`` went to ``to``: "margin", "error", "reserve"; "end" when p = 1."""

    p: float
    id: int | None
    to: str
    step: float


class Path:
    """Moves samples and margin set along the path of a drive."""

    def __init__(self, samples: Samples, rows: KernelRows, margin: MarginSet):
        self.samples, self.rows, self.margin = samples, rows, margin
        self.callback: Callable[[Event], None] | None = None
        self.events = 0
        self.roundings = 0.0  # of rest, see steps.walk; not counted in samples.rounding yet

    def walk(self, wrong: Array, down: Array) -> bool:  # (k,), (l,) positions
        """Move alpha of ``wrong`` to its other bound, or until g is 0, and alpha of ``down`` to 0 whatever its g.

        Samples of ``wrong`` that are in S, and of ``down`` with alpha = 0, stay. The coefficients of S are in the margin set
        alone afterwards. False if the path cannot be followed.
        """
        s = self.samples
        wrong, down = wrong[s.side[wrong] != 0], down[s.alpha[down] > 0]
        if not len(wrong) and not len(down):
            return True
        d = np.zeros(s.capacity)
        s.side[wrong], s.side[down] = -s.side[wrong], 0.0
        d[wrong], d[down] = np.where(s.side[wrong] < 0, s.u[wrong], 0.0) - s.alpha[wrong], -s.alpha[down]
        if not self._follow(d, np.zeros(0)):
            return False
        s.alpha[down] = 0.0
        arrived = wrong[s.side[wrong] != 0]
        s.alpha[arrived] = np.where(s.side[arrived] < 0, s.u[arrived], 0.0)
        return True

    def walk_to(self, u: Array) -> bool:  # (capacity,)
        """Move the upper bounds to these, with the coefficients of E on them; False if the path cannot be followed."""
        s = self.samples
        rise = u - s.u
        if not self._follow(np.where(s.side < 0, rise, 0.0), rise):
            return False
        s.u[:] = u
        s.alpha[s.side < 0] = u[s.side < 0]
        m = self.margin.m
        slots = self.margin.slots()
        m.upper[slots] = u[m.at[slots]]
        return True

    def _follow(self, d: Array, rise: Array) -> bool:
        """Walk from p = 0 to 1; False if the path cannot be followed: samples and margin set are then somewhere on it."""
        s, margin, callback = self.samples, self.margin, self.callback
        moving = np.flatnonzero(d)
        force = d[moving[0]] * self.rows.row(int(moving[0])) if len(moving) == 1 else self.rows.product(d)
        drive = Drive(d, rise, force, float(np.square(d * s.root).sum()))
        watch = margin.watch(len(rise) > 0 or callback is not None, moving)
        limit = MAX_EVENTS_FOR_FEW + MAX_EVENTS_PER_SAMPLE * s.n
        p, last, i, inverted = 0.0, 0.0, -1, False
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            while limit > 0:
                if interrupt.arrived:
                    interrupt.hand_over()
                max_events = limit if callback is None else 1
                code, i, event, p, margin.top, events, roundings = steps.walk(
                    margin.m, margin.top, s.arrays, watch, drive, self.rows.cache, p, max_events, i
                )
                limit, self.events, self.roundings = limit - events, self.events + events, self.roundings + roundings
                if callback is not None and event and events:
                    self._report(callback, Event(p, int(s.ids[i]), SET_NAMES[event], p - last))
                    last = p
                if code == steps.WALK_ENDED:
                    if callback is not None:
                        self._report(callback, Event(1.0, None, "end", 1.0 - last))
                    self.events += 1
                    return True
                if code == steps.WALK_PAUSED:
                    i = -1
                elif code == steps.NEEDS_ROW:
                    self.rows.row(i)
                elif code == steps.NEEDS_SLOT:
                    margin.grow()
                elif code == steps.NEEDS_COLUMN:
                    watch = margin.add_watch_columns()
                elif code == steps.NEEDS_NEW_R:
                    if inverted:
                        return False
                    margin.invert_A()
                    inverted = True
                elif code == steps.NEEDS_MARGIN_VECTOR:
                    watch, i = self._shift_b(drive)
                    if i < 0:
                        return bool((np.abs(drive.d) * (1.0 - p) <= SIMULTANEOUS_STEP * s.u.max()).all())
                else:
                    return False
        return False

    def _shift_b(self, drive: Drive) -> tuple[Any, int]:
        """Move b alone until a sample that can balance the drive is at its margin; for an empty S."""
        s, margin = self.samples, self.margin
        self.compute_g()
        watch = margin.watch(True, np.flatnonzero(drive.d))
        direction = 1.0 if float((s.y * drive.d).sum()) > 0 else -1.0
        rate = watch.sign * s.y[watch.at] * direction
        t = np.where(rate < 0, np.maximum(watch.slack, 0.0), np.inf)
        k = int(t.argmin())
        if not t[k] < np.inf:
            return watch, -1
        margin.m.a[0] += t[k] * direction
        watch.slack[:] += t[k] * rate
        return watch, int(watch.at[k])

    def compute_g(self) -> None:
        """Compute every g."""
        steps.compute_g(self.margin.m, self.margin.top, self.samples.arrays)

    def _report(self, callback: Callable[[Event], None], event: Event) -> None:
        self.margin.write_alpha()
        self.compute_g()
        callback(event)
