"""What a walk looks at: every sample, or those near the margin, with the rest brought up to date where it ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchlssvm.functional import svm_path
from torchlssvm.machines.svm_drive import Drive
from torchlssvm.machines.svm_margin import Margin
from torchlssvm.machines.svm_samples import Samples, as_tensor

ENDLESS = float("inf")
SURE = 1e-13
"""g below this share of the scale, negative, is on the wrong side."""


class All:
    """Every sample; columns are positions."""

    def __init__(self, samples: Samples, margin: Margin, drive: Drive):
        self.samples, self.margin, self.drive = samples, margin, drive
        self.slack, self.sign = samples.hslack, samples.hsign

    @property
    def Q(self) -> Any:
        """y and the margin vectors' rows of Q, slot by slot, by columns, on the host; there may be more of both."""
        return self.margin.hQS

    @property
    def y(self) -> Any:
        """The label of each column."""
        return self.samples.hy

    @property
    def hforce(self) -> Any:
        """The drive's force on each column."""
        return self.drive.hforce

    def rates(self, beta: Tensor) -> Any:  # (top,) -> (columns,)
        """gamma (12) under the drive."""
        return self.margin.host(svm_path.margin_sensitivities(self.margin.QSn, beta, as_tensor(self.drive.hforce)))

    def rates_along(self, beta: Tensor, row: Tensor) -> Any:  # (top,), (n,) -> (columns,)
        """gamma (12) when only margin vectors move, and one sample whose row of Q, times its rate, is ``row``."""
        return self.margin.host(svm_path.margin_sensitivities(self.margin.QSn, beta, row))

    def position(self, column: int) -> int:
        """The position of a column."""
        return column

    def column(self, position: int) -> int:
        """The column of a position."""
        return position

    def entered(self, i: int) -> None:
        """Position i has become a margin vector."""

    def leaves(self, i: int, alpha: float) -> None:
        """Position i is about to leave the margin set, with this coefficient."""

    def moves(self, row: Tensor, by: float) -> None:
        """The coefficient of a sample outside, with this row of Q, moves by so much."""

    def redirects(self, p: float) -> None:
        """The drive is about to change."""

    def redirected(self, hrow: Any, change: float) -> None:
        """The force has changed by so much of this row of Q."""

    def finish(self, p: float) -> list[int]:
        """The walk has come to p: positions that turn out to be on the wrong side."""
        return []


class Nearest(All):
    """The samples near the margin. For all, the change of g is kept as what made it, until :meth:`finish`.

    That is Q_:S (alpha_S - alpha_S at the start, or when each entered) + y (b - b at the start), one product with QS, and the
    sum over those that have left S, and over whatever else has moved, of Q_:i times its change, added to g a row at a time.
    """

    def __init__(self, samples: Samples, margin: Margin, drive: Drive):
        self.samples, self.margin, self.drive = samples, margin, drive
        self.near = near = margin.near
        for i in drive.driven.tolist():
            if samples.hsign[i] < 0:
                near.insert(i, margin.hQS, margin.top)
        at, n = near.positions, samples.n
        self.start = np.zeros(margin.slots)
        self.start[: margin.top] = margin.ha
        if (loops := margin.loops) is not None:
            self.slack, self.sign, self.near_force, self.g = (np.empty(k) for k in (len(at), len(at), len(at), n))
            given = (samples.hslack, samples.hsign, drive.hforce)
            loops.look(at, *given, self.slack, self.sign, self.near_force, self.g)
        else:
            self.slack, self.sign, self.near_force = samples.hslack[at], samples.hsign[at], drive.hforce[at]
            self.g = np.zeros(n)
            np.multiply(samples.hslack, samples.hsign, out=self.g, where=samples.hsign != 0)
        self.since = 0.0

    @property
    def Q(self) -> Any:
        """Of the near samples."""
        return self.near.buffer()[0]

    @property
    def y(self) -> Any:
        """Of the near samples."""
        return self.samples.hy[self.near.positions]

    @property
    def hforce(self) -> Any:
        """On the near samples."""
        return self.near_force

    def rates(self, beta: Tensor) -> Any:
        """As in :class:`All`, of the near samples."""
        columns = self.near.columns(len(beta))
        return svm_path.margin_sensitivities(columns, beta, torch.from_numpy(self.near_force)).numpy()

    def rates_along(self, beta: Tensor, row: Tensor) -> Any:
        """As in :class:`All`, of the near samples."""
        row = torch.from_numpy(row.numpy()[self.near.positions])
        return svm_path.margin_sensitivities(self.near.columns(len(beta)), beta, row).numpy()

    def position(self, column: int) -> int:
        """The position of a column."""
        return int(self.near.positions[column])

    def column(self, position: int) -> int:
        """The column of a position."""
        return int(self.near.place[position])

    def entered(self, i: int) -> None:
        """Its change counts from here."""
        slot = self.margin.slot[i]
        if slot >= len(self.start):
            self.start = np.concatenate([self.start, np.zeros(self.margin.slots - len(self.start))])
        self.start[slot] = self.margin.ha[slot]

    def leaves(self, i: int, alpha: float) -> None:
        """Its change so far is added."""
        slot = self.margin.slot[i]
        self.g += (alpha - self.start[slot]) * self.margin.hQS[slot, : self.samples.n]
        self.start[slot] = 0.0

    def moves(self, row: Tensor, by: float) -> None:
        """This is added."""
        self.g += by * row.numpy()

    def redirects(self, p: float) -> None:
        """What the drive has done so far is added."""
        self.g += (p - self.since) * self.drive.hforce
        self.since = p

    def redirected(self, hrow: Any, change: float) -> None:
        """The force on the near samples."""
        self.near_force += change * hrow[self.near.positions]

    def arrive(self) -> None:
        """Signs are everybody's from here."""
        self.samples.hsign[self.near.positions] = self.sign

    def finish(self, p: float) -> list[int]:
        """Every slack as it is at p; the far samples that are on the wrong side."""
        s, m = self.samples, self.margin
        self.arrive()
        self.redirects(p)
        moved = m.ha - self.start[: m.top]
        if (loops := m.loops) is not None:
            loops.slacks(m.hQS, m.top, moved, self.g, s.hsign, s.hslack)
        else:
            g = svm_path.margin_sensitivities(m.QSn, torch.from_numpy(moved), torch.from_numpy(self.g)).numpy()
            s.hslack[:] = np.where(s.hsign == 0, ENDLESS, s.hsign * g)
        if not float(s.hslack.min()) < -SURE * s.scale:
            return []
        return [i for i in (s.hslack < -SURE * s.scale).nonzero()[0].tolist() if self.near.place[i] < 0]
