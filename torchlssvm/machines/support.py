"""A Newton step of the Lagrangian SVM: given the support, alpha and z from the smaller of two systems."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchlssvm.functional import checks
from torchlssvm.machines.inverse import Inverse

PAIR = 60
"""What the kernel of a pair of rows costs beside 2 J flops, in flops."""


def support_solver(engine: Inverse, order: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """support (n,) bool -> alpha (n,), z = Q alpha - 1 (n,), all in the order of ids. order: the slots (n,) in that order."""
    n, y = len(order), engine.rows.y[order, 0]
    pair = engine.kernel.floats(engine.rows.x.shape[1]) + 2 * engine.rows.x.shape[1] + PAIR

    def solve(support: Tensor) -> tuple[Tensor, Tensor]:
        if checks.is_fake(support):  # no data to go by: half of them
            inside, outside = torch.arange(n, device=y.device).tensor_split(2)
        else:
            inside, outside = support.nonzero()[:, 0], (~support).nonzero()[:, 0]
        i, a = len(inside), len(outside)
        if a == 0:
            return y * engine.h[order, 0], torch.zeros_like(y)
        by_kernel = i**3 / 3 + n * i * pair
        by_inverse = a**3 / 3 + 2 * n * a + (0 if engine.U is not None else n**3)
        if by_kernel < by_inverse:
            return _by_kernel(engine, order, y, inside, outside)
        return _by_inverse(engine, order, y, outside)

    return solve


def _by_kernel(engine: Inverse, order: Tensor, y: Tensor, inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """Q_II alpha_I = 1, z_A = Q_AI alpha_I - 1."""
    alpha, z = torch.zeros_like(y), torch.zeros_like(y)
    if len(inside):
        x, y_in = engine.rows.x[order[inside]], y[inside]
        factor, _ = engine.factor_of(x)
        beta = factor.solve(y_in[None])[0]  # Q_II = D (K + offset + I/C)_II D
        alpha[inside] = y_in * beta
        f = engine.kernel.tiled_product(engine.rows.x[order[outside]], x, beta[:, None])[:, 0]
        z[outside] = y[outside] * (f + engine.offset * beta.sum()) - 1.0
    else:
        z[outside] = -1.0
    return alpha, z


def _by_inverse(engine: Inverse, order: Tensor, y: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """U_AA z_A = -(U 1)_A, alpha = U 1 + U_:A z_A, with U in the signs of D."""
    R = engine.inverse_rows(order[outside])[:, order] * y * y[outside, None]  # (|A|, n)
    alpha, z = y * engine.h[order, 0], torch.zeros_like(y)
    L, _ = torch.linalg.cholesky_ex(R[:, outside])
    z[outside] = -torch.cholesky_solve(alpha[outside, None], L)[:, 0]
    alpha = alpha + z[outside] @ R
    alpha[outside] = 0.0
    return alpha, z
