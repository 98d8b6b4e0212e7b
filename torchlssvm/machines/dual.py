"""The solution of a kernel LS-SVM in slots: alpha and b beside the inverse, ready for the next forward."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchlssvm.functional import kernel_lssvm
from torchlssvm.kernels import Kernel
from torchlssvm.machines.inverse import Inverse
from torchlssvm.machines.rows import Rows


class Dual(Inverse):
    """alpha (capacity, K), zero where no sample is, and b (K,), from h = U [y, 1]."""

    def __init__(self, kernel: Kernel, rows: Rows, C: float, bias: bool):
        super().__init__(kernel, rows, C)
        self.bias = bias
        self.publish()

    def publish(self) -> None:
        """Equation (7)."""
        if len(self.rows):
            h = self.h[: self.rows.top]
            alpha, self.b = kernel_lssvm.solve(h[:, :-1], h[:, -1], self.bias)
            self.coefficients = pad(alpha, (0, 0, 0, self.rows.capacity - len(alpha)))
        else:
            self.coefficients, self.b = torch.zeros_like(self.h[:, :-1]), torch.zeros_like(self.h[0, :-1])

    def change(self, removed: list[int], x: Tensor, y: Tensor) -> list[int]:
        """As :meth:`Inverse.change`."""
        out = super().change(removed, x, y)
        self.publish()
        return out

    def retarget(self, ids: list[int], y: Tensor) -> None:
        """As :meth:`Inverse.retarget`."""
        super().retarget(ids, y)
        self.publish()

    def solve(self) -> None:
        """As :meth:`Inverse.solve`."""
        super().solve()
        self.publish()

    def settle(self) -> None:
        """As :meth:`Inverse.settle`."""
        super().settle()
        self.publish()

    def tidy(self) -> None:
        """As :meth:`Inverse.tidy`."""
        super().tidy()
        self.publish()

    def to(self, device: torch.device) -> None:
        """As :meth:`Inverse.to`."""
        super().to(device)
        self.publish()

    def alpha(self) -> Tensor:
        """The coefficients in slots."""
        return self.coefficients

    def scores(self, x: Tensor) -> Tensor:
        """k(x, X) alpha + b (B, K). Compiled, over the whole capacity, so that its shape is that of the next call too."""
        top = self.rows.capacity if torch.compiler.is_compiling() else self.rows.top
        return self.kernel.tiled_product(x, self.rows.x[:top], self.coefficients[:top]) + self.b

    def left_out(self) -> Tensor:
        """H_ii in slots (capacity,); one where no sample is."""
        diagonal = self.diagonal()  # first: it may close gaps
        H, top = torch.ones_like(self.h[:, 0]), self.rows.top
        values = kernel_lssvm.left_out_diagonal(diagonal, self.h[:top, -1], self.bias)
        H[:top] = torch.where(self.rows.mask[:top] > 0, values, H[:top])
        return H

    def state(self) -> Tensor:
        """h in the order of ids: with it alpha and b come back to the bit."""
        return self.h[self.rows.order()]

    def resume(self, h: Tensor) -> None:
        """Undo :meth:`state`."""
        if h.shape != (len(self.rows), self.h.shape[1]):
            raise ValueError(f"solution has shape {tuple(h.shape)}, needed {(len(self.rows), self.h.shape[1])}")
        self.h[self.rows.order()] = h
        self.publish()
