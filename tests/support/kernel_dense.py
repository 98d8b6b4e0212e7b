"""Kernel machines by dense float64 solves of the equations as printed, without a line of the library."""

from __future__ import annotations

import torch
from torch import Tensor


def rbf(a: Tensor, b: Tensor, sigma: float = 2.0) -> Tensor:
    """exp(-|x - z|^2 / (2 sigma^2)), by differences."""
    return torch.exp(-torch.stack([(row - b).square().sum(1) for row in a]) / (2 * sigma**2))


def code(y: Tensor, K: int) -> Tensor:
    """Labels as -1/+1 columns."""
    return torch.where(y[:, None] == torch.arange(K), 1.0, -1.0).double()


def lssvm(K: Tensor, y: Tensor, C: float, bias: bool = True) -> tuple[Tensor, Tensor]:
    """Equation (6): [[0, 1^T], [1, K + I/C]] [b; alpha] = [0; y], by LU. Returns alpha (n, K) and b (K,)."""
    n = len(K)
    Q = K + torch.eye(n, dtype=torch.float64) / C
    if not bias:
        return torch.linalg.solve(Q, y), torch.zeros(y.shape[1], dtype=torch.float64)
    M = torch.ones(n + 1, n + 1, dtype=torch.float64)
    M[0, 0], M[1:, 1:] = 0.0, Q
    solution = torch.linalg.solve(M, torch.cat([torch.zeros(1, y.shape[1], dtype=torch.float64), y]))
    return solution[1:], solution[0]


def lsvm(K: Tensor, signs: Tensor, C: float) -> Tensor:
    """The QP min 1/2 a^T Q a - 1^T a, a >= 0, as non-negative least squares by scipy's active set."""
    from scipy.optimize import nnls

    Q = signs[:, None] * K * signs + torch.eye(len(K), dtype=torch.float64) / C
    L = torch.linalg.cholesky(Q)
    right = torch.linalg.solve_triangular(L, torch.ones(len(K), 1, dtype=torch.float64), upper=False)[:, 0]
    return torch.from_numpy(nnls(L.mT.numpy(), right.numpy(), maxiter=100 * len(K))[0])
