"""A linear kernel with more samples than features: the same machine from sums over samples (J, J), not from (n, n).

The sums are counted from a point c, the mean when they were last taken, so that with a bias nothing is lost to an offset.
They are added to and subtracted from as samples come and go, taken anew from the rows held now and then, and w is solved from
them when it is read.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from torchlssvm.functional import checks, cost, kernel_lssvm, system
from torchlssvm.kernel_machines.sample_slots import SampleSlots
from torchlssvm.kernels import Kernel


class PrimalForm:
    """The solver of ``KernelLSSVM(Linear())`` for n > J; its methods are those of :class:`DualForm`."""

    name = "primal"

    def __init__(self, slots: SampleSlots, C: float, bias: bool):
        self.slots, self.C, self.bias = slots, C, bias
        self._cache: tuple[system.Factor, Tensor, Tensor, Tensor] | None = None
        self.changed = 0  # samples that came or went since the sums were last taken
        self._sum()

    def change(self, removed: list[int], x: Tensor, y: Tensor) -> list[int]:
        """Take samples out by id and rows x (k, J) with targets y (k, K) in; returns their ids."""
        if removed:
            at = self.slots.at_ids(removed)
            self._count(self.slots.x[at], self.slots.y[at], -1)
            self.slots.drop(removed)
            self.slots.release()
            if 4 * len(self.slots.free) > self.slots.top:
                self.slots.compact()
        out = []
        if len(x):
            places = self.slots.places(len(x))
            self.slots.grow(max(places) + 1)
            out = self.slots.put(x, y, places)
            self._count(x, y, 1)
        if self.changed > cost.COLUMNS_BETWEEN_SOLVES * self.A.shape[0]:
            self._sum()
        return out

    def retarget(self, ids: list[int], y: Tensor) -> None:
        """Give samples other targets (k, K)."""
        at = self.slots.at_ids(ids)
        change = y - self.slots.y[at]
        self.v += (self.slots.x[at] - self.c).mT @ change
        self.s += change.sum(0)
        self.slots.columns[at, : self.slots.K] = y
        self._cache = None

    def solve(self) -> None:
        """Take the sums anew."""
        self._sum()

    def set_C(self, C: float) -> None:
        """Change the penalty; :meth:`solve` makes the solution that of the new one."""
        self.C = C

    def settle(self) -> None:
        """Do what was put off: solve."""
        self._solved()

    def copy(self, kernel: Kernel) -> PrimalForm:
        """An independent copy; the kernel, a linear one, is not needed."""
        del kernel
        other = copy.copy(self)
        other.slots = self.slots.copy()
        other.A, other.m, other.v, other.s = (t.clone() for t in (self.A, self.m, self.v, self.s))
        return other

    def clean(self) -> None:
        """Close gaps and take the sums anew, free of what rounding left of the samples removed."""
        if self.changed:
            self.slots.compact()
            self._sum()

    @property
    def b(self) -> Tensor:
        """The bias (K,), for rows counted from zero."""
        _, _, w, b = self._solved()
        return b - self.c @ w

    def alpha(self) -> Tensor:
        """C (y - f(x)) (n, K), in the order of ids."""
        at = self.slots.order_index()
        return self.C * (self.slots.y[at] - self.scores(self.slots.x[at]))

    def scores(self, x: Tensor) -> Tensor:
        """(x - c) w + b."""
        _, _, w, b = self._solved()
        return (x - self.c) @ w + b

    def drift(self) -> Tensor:
        """max |X^T alpha - w| / max |w|: zero at the solution of these very rows."""
        _, _, w, _ = self._solved()
        wrong = (self.slots.x[self.slots.order_index()] - self.c).mT @ self.alpha() - w
        return wrong.abs().max() / w.abs().max().clamp(min=1e-300)

    def left_out(self) -> Tensor:
        """H_ii = C (1 - h_i) (n,), in the order of ids."""
        factor, Pm, _, _ = self._solved()
        x = self.slots.x[self.slots.order_index()] - self.c
        h = (factor.solve(x) * x).sum(1)
        if self.bias:
            h = h + (1.0 - x @ Pm).square() / (len(self.slots) - Pm @ self.m)
        return self.C * (1.0 - h)

    def state(self) -> Tensor:
        """c, w and b, one below the other, the first with zeros beside it."""
        _, _, w, b = self._solved()
        return torch.cat([torch.nn.functional.pad(self.c[:, None], (0, w.shape[1] - 1)), w, b[None]])

    def resume(self, state: Tensor) -> None:
        """Restore a saved :meth:`state`."""
        J, K = self.A.shape[0], self.slots.K
        if state.shape != (2 * J + 1, K):
            raise ValueError(f"solution has shape {tuple(state.shape)}, needed {(2 * J + 1, K)}")
        self._sum(state[:J, 0])
        factor, Pm, _, _ = self._solved()
        self._cache = (factor, Pm, state[J : 2 * J].clone(), state[2 * J].clone())

    def to(self, device: torch.device) -> None:
        """Move to another device."""
        self.slots.to(device)
        self._sum()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _sum(self, c: Tensor | None = None) -> None:
        slots, J, K = self.slots, self.slots.x.shape[1], self.slots.K
        if c is None:
            c = slots.x.sum(0) / max(1, len(slots)) if self.bias else torch.zeros_like(slots.x[0])
        self.c = c.clone()
        self.A, self.m = slots.x.new_zeros(J, J), slots.x.new_zeros(J)
        self.v, self.s = slots.x.new_zeros(J, K), slots.x.new_zeros(K)
        at = slots.order()
        self._count(slots.x[at], slots.y[at], 1)
        self.changed = 0

    def _count(self, x: Tensor, y: Tensor, sign: int) -> None:
        x = x - self.c
        self.A.addmm_(x.mT, x, alpha=sign)
        self.v.addmm_(x.mT, y, alpha=sign)
        self.m.add_(x.sum(0), alpha=sign)
        self.s.add_(y.sum(0), alpha=sign)
        self.changed += len(x)
        self._cache = None

    def _solved(self) -> tuple[system.Factor, Tensor, Tensor, Tensor]:
        """The factor of A + I/C, P m, w and b."""
        if self._cache is None:
            with torch.inference_mode(False), torch.no_grad():
                J = self.A.shape[0]
                factor = system.factor_(self._system(), J)
                host = checks.to_host(factor.info)
                if host is not None and host[0][0] != 0:  # rounding: A is a sum of squares
                    factor, _ = system.clamped_factor(self._system(), J, self.A.new_tensor(1.0 / self.C))
                P = factor.solve(torch.cat([self.v, self.m[:, None]], 1).mT).mT
                w, b = kernel_lssvm.primal(P[:, :-1], P[:, -1], self.m, self.v, self.s, len(self.slots), self.bias)
                self._cache = (factor, P[:, -1], w, b)
        return self._cache

    def _system(self) -> Tensor:
        J = self.A.shape[0]
        work = system.workspace(J, self.A.device)
        work.zero_()
        work[:J, :J] = self.A
        work.diagonal()[:J].add_(1.0 / self.C)
        work.diagonal()[J:].fill_(1.0)
        return work
