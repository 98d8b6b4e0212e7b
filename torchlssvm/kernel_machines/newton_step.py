"""A Newton step of the Lagrangian SVM: given the support, alpha and z from the smaller of two systems."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchlssvm.kernel_machines.inverse import KernelInverse

PAIR_FLOPS = 60
"""Flops that the kernel of a pair of rows costs beside the 2 J of their product: an exponential and passes over memory."""


def support_solver(inverse: KernelInverse) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The step as a function: support (n,) bool -> alpha (n,), z = Q alpha - 1 (n,), all in the order of ids."""
    slots = inverse.slots
    order, J = slots.order_index(), slots.x.shape[1]
    n, y = len(slots), slots.y[order, 0]
    pair = inverse.kernel.floats(J) + 2 * J + PAIR_FLOPS

    def solve(support: Tensor) -> tuple[Tensor, Tensor]:
        outside = (~support).nonzero()[:, 0]
        if not len(outside):
            return y * inverse.h[order, 0], torch.zeros_like(y)
        inside = support.nonzero()[:, 0]
        i, a = len(inside), len(outside)
        by_kernel = i**3 / 3 + n * i * pair
        by_inverse = a**3 / 3 + 2 * n * a + (0 if inverse.U is not None else 2 * n**2 * a)
        if by_kernel < by_inverse:
            return step_by_kernel(inverse, y, inside, outside)
        return step_by_inverse(inverse, y, outside)

    return solve


def step_by_kernel(inverse: KernelInverse, y: Tensor, inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """Q_II alpha_I = 1, z_A = Q_AI alpha_I - 1."""
    alpha, z = torch.zeros_like(y), torch.zeros_like(y)
    if len(inside):
        order, rows = inverse.slots.order(), inverse.slots.x
        x, y_in = rows[order[inside]], y[inside]
        factor = inverse.factor_of(x)
        beta = factor.solve(y_in[None])[0]  # Q_II = D (K + offset + I/C)_II D
        alpha[inside] = y_in * beta
        f = inverse.kernel.tiled_product(rows[order[outside]], x, beta[:, None])[:, 0]
        z[outside] = y[outside] * (f + inverse.offset * beta.sum()) - 1.0
    else:
        z[outside] = -1.0
    return alpha, z


def step_by_inverse(inverse: KernelInverse, y: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """U_AA z_A = -(U 1)_A, alpha = U 1 + U_:A z_A, with U in the signs of D."""
    order = inverse.slots.order()
    R = inverse.inverse_rows(order[outside])[:, order] * y * y[outside, None]  # (|A|, n)
    alpha, z = y * inverse.h[order, 0], torch.zeros_like(y)
    L, info = torch.linalg.cholesky_ex(R[:, outside])
    if int(info):  # rounding, at a large C
        inside = torch.ones_like(y, dtype=torch.bool)
        inside[outside] = False
        return step_by_kernel(inverse, y, inside.nonzero()[:, 0], outside)
    z[outside] = -torch.cholesky_solve(alpha[outside, None], L)[:, 0]
    alpha = alpha + z[outside] @ R
    alpha[outside] = 0.0
    return alpha, z
