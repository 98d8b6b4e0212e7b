"""The dual form of the kernel LS-SVM: alpha and b from the inverse of K + I/C."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from torchlssvm.functional import kernel_lssvm
from torchlssvm.kernel_machines.inverse import KernelInverse
from torchlssvm.kernel_machines.sample_slots import SampleSlots
from torchlssvm.kernels import Kernel


class DualForm:
    """The solver of :class:`KernelLSSVM` for any kernel: alpha and b from h."""

    name = "dual"

    def __init__(self, kernel: Kernel, slots: SampleSlots, C: float, bias: bool):
        self.inverse, self.bias = KernelInverse(kernel, slots, C), bias

    @property
    def slots(self) -> SampleSlots:
        """The samples held, in slots."""
        return self.inverse.slots

    @property
    def b(self) -> Tensor:
        """The bias (K,); zeros without one."""
        h = self.inverse.h
        if not self.bias or not self.slots.filled:
            return torch.zeros_like(h[0, :-1])
        total = h[self.slots.order_index()].sum(0)
        return total[:-1] / total[-1]

    def alpha(self) -> Tensor:
        """The coefficients (n, K), in the order of ids."""
        h = self.inverse.h[self.slots.order()]
        return kernel_lssvm.solve(h[:, :-1], h[:, -1], self.bias)[0]

    def scores(self, x: Tensor) -> Tensor:
        """k(x, X) alpha + b (B, K). Compiled, over the whole capacity, so that its shape is that of the next call too."""
        at = slice(0, self.slots.capacity) if torch.compiler.is_compiling() else self.slots.order_index()
        h = self.inverse.h[at]
        alpha, b = kernel_lssvm.solve(h[:, :-1], h[:, -1], self.bias)
        return self.inverse.kernel.tiled_product(x, self.slots.x[at], alpha) + b

    def left_out(self) -> Tensor:
        """H_ii (n,), in the order of ids."""
        diagonal = self.inverse.diagonal()
        at = self.slots.order_index()
        return kernel_lssvm.left_out_diagonal(diagonal[at], self.inverse.h[at, -1], self.bias)

    def drift(self) -> Tensor:
        """A bound of the relative error of the solution, from the residuals of all equations."""
        return self.inverse.drift(self.slots.order())

    def state(self) -> Tensor:
        """h in the order of ids: with it alpha and b come back to the bit."""
        return self.inverse.h[self.slots.order()]

    def resume(self, h: Tensor) -> None:
        """Restore a saved :meth:`state`."""
        if h.shape != (len(self.slots), self.inverse.h.shape[1]):
            raise ValueError(
                f"solution has shape {tuple(h.shape)}, needed {(len(self.slots), self.inverse.h.shape[1])}"
            )
        self.inverse.h[self.slots.order()] = h

    def change(self, removed: list[int], x: Tensor, y: Tensor) -> list[int]:
        """Take samples out by id and rows x (k, J) with targets y (k, K) in; returns their ids."""
        return self.inverse.change(removed, x, y)

    def retarget(self, ids: list[int], y: Tensor) -> None:
        """Give samples other targets (k, K)."""
        self.inverse.retarget(ids, y)

    def set_C(self, C: float) -> None:
        """Change the penalty; :meth:`solve` makes the solution that of the new one."""
        self.inverse.set_C(C)

    def solve(self) -> None:
        """Factor the matrix anew."""
        self.inverse.solve()

    def settle(self) -> None:
        """Do what was put off."""
        self.inverse.settle()

    def copy(self, kernel: Kernel) -> DualForm:
        """An independent copy, with its own kernel."""
        other = copy.copy(self)
        other.inverse = self.inverse.copy(kernel)
        return other

    def to(self, device: torch.device) -> None:
        """Move to another device."""
        self.inverse.to(device)
