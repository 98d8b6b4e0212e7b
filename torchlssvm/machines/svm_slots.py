"""Where the margin vectors are kept: slots in buffers that double, and views of them for the host."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchlssvm.functional.loops import load
from torchlssvm.machines.svm_near import Near
from torchlssvm.machines.svm_samples import Samples

ENDLESS = float("inf")
PAD = 8
"""Numbers by which a row is longer than a power of two: rows a power of two apart share the same few lines of a cache."""


def room(count: int) -> int:
    """Slots for so many margin vectors and b, with some to spare: an odd multiple of PAD."""
    return PAD * (2 * ((count + count // 4 + PAD) // (2 * PAD)) + 1)


class Slots:
    """Slots 1.. for margin vectors, slot 0 for b; buffers double, a free slot is a row and a column of zeros.

    QS (slots, n) holds the margin vectors' rows of Q, and y in row 0; QSn is its transpose, as far as it is in use. Names that
    begin with h are views of the same memory for the host (see :class:`Samples`).
    """

    def __init__(self, samples: Samples):
        self.samples, self.device, self.host = samples, samples.device, samples.host
        self.near = Near(samples)
        self.drifted = False  # whether R has been found to be wrong, and with it perhaps what was computed from it
        self._empty(8)

    def _empty(self, slots: int, b: float = 0.0) -> None:
        self.position: list[int] = [-1]  # of each slot, -1 where it is free
        self.slot: dict[int, int] = {}  # of each position
        self.free: list[int] = []  # free slots below top
        self.slots = 0
        self.residual = ENDLESS  # of R, when last seen
        self.near.forget()
        self._allocate(slots)
        self.ha[0] = b

    def _allocate(self, slots: int) -> None:
        def new(*shape: int, value: float = 0.0) -> Tensor:
            return torch.full(shape, value, dtype=torch.float64, device=self.device)

        k, old = self.slots, self.__dict__.copy()
        self.slots = slots
        self.R, self.A = new(slots, slots), new(slots, slots)
        self.QS = new(slots, self.samples.capacity + PAD)
        self.a, self.rise, self.used = new(slots), new(slots), new(slots)
        self.lower, self.upper = new(slots, value=-ENDLESS), new(slots, value=ENDLESS)
        self.at = torch.zeros(slots, dtype=torch.int64, device=self.device)
        if k:
            self.R[:k, :k], self.A[:k, :k] = old["R"], old["A"]
            self.QS[:k, : old["QS"].shape[1]] = old["QS"]
            for name in ("a", "rise", "used", "lower", "upper", "at"):
                getattr(self, name)[:k] = old[name]
        self.used[0] = 1.0
        self.near.slots(slots)
        self._set_host()

    @property
    def top(self) -> int:
        """Slots in use lie below."""
        return len(self.position)

    def _set_host(self) -> None:
        vectors = (self.a, self.rise, self.used, self.lower, self.upper, self.at)
        self.whole = [self.host(t) for t in vectors]
        self.hR, self.hA, self.hQS = self.host(self.R), self.host(self.A), self.host(self.QS)
        self._set_top()

    def _set_top(self) -> None:
        """Views of what is in use; h...: for the host."""
        k = self.top
        self.Rk, self.Ak = self.R[:k, :k], self.A[:k, :k]
        self.hRk, self.hAk = self.hR[:k, :k], self.hA[:k, :k]
        self.ha, self.hrise, self.hused, self.hlower, self.hupper, self.hat = (whole[:k] for whole in self.whole)

    def trim(self) -> None:
        """No free slots at the end."""
        if self.position[-1] < 0 < self.top - 1:
            while self.top > 1 and self.position[-1] < 0:
                self.position.pop()
            self.free = [s for s in self.free if s < self.top]
            heapq.heapify(self.free)
        self._set_top()

    @property
    def loops(self) -> Any:
        """The compiled steps, where the memory is the host's and they are installed."""
        return load("svm_loops") if isinstance(self.hR, np.ndarray) else None

    @property
    def QSn(self) -> Tensor:
        """y and the columns of Q, slot by slot (n, top)."""
        return self.QS[: self.top, : self.samples.n].T

    def __len__(self) -> int:
        return len(self.slot)

    def members(self) -> Tensor:
        """The slots in use (s,), without b's."""
        return torch.tensor(sorted(self.slot.values()), dtype=torch.int64, device=self.device)

    def fit_capacity(self) -> None:
        """Follow the sample buffers when they have grown."""
        if self.QS.shape[1] < self.samples.capacity:
            QS = torch.zeros(self.slots, self.samples.capacity + PAD, dtype=torch.float64, device=self.device)
            QS[:, : self.QS.shape[1]] = self.QS
            self.QS, self.hQS = QS, self.host(QS)

    def appended(self, positions: range, Q: Any) -> None:  # (B, n) on the host
        """Columns of QS for samples just appended, from their rows of Q."""
        self.fit_capacity()
        start, stop = positions.start, positions.stop
        if len(self) and Q is not None:
            self.hQS[: self.top, start:stop] = Q[:, self.hat].T
        self.hQS[0, start:stop] = self.samples.hy[start:stop]

    def moved(self, moves: list[tuple[int, int]]) -> None:
        """Follow the samples that filled gaps, after a deletion."""
        for last, i in moves:
            self.near.moved(last, i, self.top)
            if last == i:
                continue
            self.hQS[: self.top, i] = self.hQS[: self.top, last]
            if (slot := self.slot.pop(last, None)) is not None:
                self.slot[i] = slot
                self.position[slot] = i
                self.hat[slot] = i

    def near_ready(self) -> bool:
        """Whether a walk may look at the samples near the margin only."""
        return self.device.type == "cpu" and self.near.ready(self.QS, self.top)

    def gather(self, values: Any, first: float) -> Any:  # (n,) -> (top,)
        """values of the margin vectors in their slots, ``first`` in b's, zero in free ones: a right-hand side of (6)."""
        h = values[self.hat] * self.hused
        h[0] = first
        return h

    def backup(self) -> dict[str, Any]:
        """Everything that a walk changes."""
        tensors = {
            name: getattr(self, name).clone() for name in ("R", "A", "QS", "a", "rise", "used", "lower", "upper", "at")
        }
        return tensors | {"position": list(self.position), "slot": dict(self.slot), "free": list(self.free)}

    def put_back(self, old: dict[str, Any]) -> None:
        """As it was at the backup."""
        for name, value in old.items():
            setattr(self, name, value)
        self.slots = len(self.a)
        self.near.forget()
        self._set_host()

    def clear(self) -> None:
        """No margin vectors; b stays."""
        self._empty(self.slots, float(self.ha[0]))
        self.QS[0, : self.samples.n] = self.samples.y
