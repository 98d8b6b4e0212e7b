"""The margin vectors in their slots: coefficients, the Jacobian A, its inverse R, and their columns of Q."""

from __future__ import annotations

import torch
from torch import Tensor

from torchlssvm.functional import svm_path
from torchlssvm.machines.svm_samples import Samples

DEPENDENT = 1e-12
"""gamma below this share of the terms it is the difference of: a sample in the span of the margin vectors."""
DRIFT = 1e-7
"""A residual of R above this is answered by a new inverse; refinement takes care of what lies below."""


class Margin:
    """Slots 1.. for margin vectors, slot 0 for b; buffers double, a free slot is a row and a column of zeros.

    QS (n, slots) holds the columns of Q, sample by sample, so that dropping or picking samples moves whole rows.
    """

    def __init__(self, samples: Samples):
        self.samples = samples
        self.device = samples.device
        self.slots = 8
        self.top = 1  # slots in use lie below
        self.position: list[int] = [-1]  # of each slot, -1 where it is free
        self.slot: dict[int, int] = {}  # of each position
        self._allocate(self.slots)

    def _allocate(self, slots: int) -> None:
        def new(*shape: int, value: float = 0.0) -> Tensor:
            return torch.full(shape, value, dtype=torch.float64, device=self.device)

        old = self.__dict__.copy() if hasattr(self, "R") else None
        self.R, self.A = new(slots, slots), new(slots, slots)
        self.QS = new(self.samples.capacity, slots)
        self.a, self.rise, self.used = new(slots), new(slots), new(slots)
        self.lower, self.upper = new(slots, value=-torch.inf), new(slots, value=torch.inf)
        self.at = torch.zeros(slots, dtype=torch.int64, device=self.device)
        self.used[0] = 1.0
        if old is not None:
            k = old["slots"]
            self.R[:k, :k], self.A[:k, :k] = old["R"], old["A"]
            self.QS[: len(old["QS"]), :k] = old["QS"]
            for name in ("a", "rise", "used", "lower", "upper", "at"):
                getattr(self, name)[:k] = old[name]
        self.slots = slots

    def __len__(self) -> int:
        return len(self.slot)

    def members(self) -> Tensor:
        """The slots in use (s,), without b's."""
        return torch.tensor(sorted(self.slot.values()), dtype=torch.int64, device=self.device)

    def fit_capacity(self) -> None:
        """Follow the sample buffers when they have grown."""
        if len(self.QS) < self.samples.capacity:
            QS = torch.zeros(self.samples.capacity, self.slots, dtype=torch.float64, device=self.device)
            QS[: len(self.QS)] = self.QS
            self.QS = QS

    def appended(self, positions: range, Q: Tensor | None) -> None:  # (B, n)
        """Rows of QS for samples just appended, from their rows of Q."""
        self.fit_capacity()
        start, stop = positions.start, positions.stop
        self.QS[start:stop, 0] = self.samples.y[start:stop]
        if len(self) and Q is not None:
            self.QS[start:stop, : self.top] = Q[:, self.at[: self.top]]
            self.QS[start:stop, 0] = self.samples.y[start:stop]

    def moved(self, moves: list[tuple[int, int]]) -> None:
        """Follow the samples that filled gaps."""
        for last, i in moves:
            self.QS[i] = self.QS[last]
            if (slot := self.slot.pop(last, None)) is not None:
                self.slot[i] = slot
                self.position[slot] = i
                self.at[slot] = i

    def gather(self, values: Tensor, first: float) -> Tensor:  # (n,) -> (top,)
        """values of the margin vectors in their slots, ``first`` in b's, zero in free ones: a right-hand side of (6)."""
        h = values[self.at[: self.top]].mul_(self.used[: self.top])
        h[0] = first
        return h

    # -- who is in -----------------------------------------------------------------------------------------------------

    def sensitivities(self, h: Tensor) -> Tensor:  # (top,) -> (top,)
        """beta = -R h (10), refined; R is made anew when it has drifted."""
        k = self.top
        beta, residual = svm_path.sensitivities(self.R[:k, :k], self.A[:k, :k], h)
        if float(residual) > DRIFT * float(torch.linalg.vector_norm(h, torch.inf)):
            self.refresh()
            beta, _ = svm_path.sensitivities(self.R[:k, :k], self.A[:k, :k], h)
        return beta

    def span(self, i: int, row: Tensor) -> tuple[Tensor, float, float]:  # (n,) -> (top,)
        """beta for a unit of alpha_i, gamma_i (12), and the size of the terms gamma_i is the difference of."""
        h = self.gather(row, float(self.samples.y[i]))
        beta = self.sensitivities(h)
        q = float(row[i])
        terms = h * beta
        return beta, q + float(terms.sum()), abs(q) + float(terms.abs().sum())

    def enter(self, i: int, row: Tensor, alpha: float, beta: Tensor | None, gamma: float) -> None:
        """Sample i becomes a margin vector: R grows by (13), or begins."""
        slot = next((s for s in range(1, self.top) if self.position[s] < 0), self.top)
        if slot == self.slots:
            self._allocate(2 * self.slots)
        y = float(self.samples.y[i])
        if beta is None:
            svm_path.first_(self.R[: slot + 1, : slot + 1], float(row[i]), y, slot)
        else:
            if slot == self.top:
                beta = torch.cat([beta, beta.new_zeros(1)])
            k = max(self.top, slot + 1)
            svm_path.grow_(self.R[:k, :k], beta, gamma, slot)
        self._place(i, slot, row, y, alpha)

    def _place(self, i: int, slot: int, row: Tensor, y: float, alpha: float) -> None:
        if slot == self.top:
            self.top += 1
            self.position.append(i)
        self.position[slot], self.slot[i] = i, slot
        self.at[slot], self.used[slot], self.a[slot] = i, 1.0, alpha
        self.lower[slot], self.upper[slot] = 0.0, self.samples.u[i]
        self.QS[: self.samples.n, slot] = row
        border = self.gather(row, y)
        self.A[slot, : self.top] = border
        self.A[: self.top, slot] = border

    def leave(self, i: int) -> float:
        """Margin vector i leaves: R shrinks by (14), or ends. Returns its alpha."""
        slot = self.slot.pop(i)
        alpha = float(self.a[slot])
        k = self.top
        if len(self.slot):
            svm_path.shrink_(self.R[:k, :k], slot)
        else:
            self.R.zero_()
        self.A[slot], self.A[:, slot] = 0.0, 0.0
        self.position[slot] = -1
        self.at[slot], self.used[slot], self.a[slot], self.rise[slot] = 0, 0.0, 0.0, 0.0
        self.lower[slot], self.upper[slot] = -torch.inf, torch.inf
        while self.top > 1 and self.position[self.top - 1] < 0:
            self.top -= 1
            self.position.pop()
        return alpha

    # -- made anew -----------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """R from A anew."""
        used = torch.cat([torch.zeros(1, dtype=torch.int64, device=self.device), self.members()])
        if len(used) > 1:
            self.R.copy_(svm_path.inverse(self.A, used))

    def clear(self) -> None:
        """No margin vectors; b stays."""
        b = float(self.a[0])
        self.top, self.position, self.slot = 1, [-1], {}
        del self.R
        self._allocate(self.slots)
        self.a[0] = b
        self.QS[: self.samples.n, 0] = self.samples.y

    def build(self, positions: Tensor, alpha: Tensor, b: float) -> bool:  # (s,), (s,)
        """All at once: these margin vectors, R by one inversion. False, and no margin vectors, if they are dependent."""
        s = len(positions)
        while self.slots <= s:
            self.slots *= 2
        self.a[0] = b
        self.clear()
        if not s:
            return True
        block = self.samples.block(positions)  # (s, n)
        k = s + 1
        self.top, self.position = k, [-1, *positions.tolist()]
        self.slot = {i: t for t, i in enumerate(self.position) if t}
        self.at[1:k], self.used[1:k], self.a[1:k] = positions, 1.0, alpha
        self.lower[1:k], self.upper[1:k] = 0.0, self.samples.u[positions]
        self.QS[: self.samples.n, 1:k] = block.T
        y = self.samples.y[positions]
        A = self.A[:k, :k]
        A[0, 1:], A[1:, 0], A[1:, 1:] = y, y, block[:, positions]
        try:
            self.R[:k, :k] = svm_path.inverse(A, torch.arange(k, device=self.device))
        except torch.linalg.LinAlgError:
            self.clear()
            return False
        # 1 / R_jj is the gamma of margin vector j with respect to the others (14): none may lie in their span.
        own = self.R.diagonal()[1:k].reciprocal()
        good = s == 1 or bool((own > 10 * DEPENDENT * A.diagonal()[1:]).all())
        if good:
            h = A.sum(1)
            residual = (A @ (self.R[:k, :k] @ h) - h).abs().amax()
            good = bool(residual <= DRIFT * h.abs().amax())
        if not good:
            self.clear()
        return good
