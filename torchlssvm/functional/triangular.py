"""The inverse of a triangular matrix by halves, at the rate of large triangular solves."""

from __future__ import annotations

import torch
from torch import Tensor

LEAF = 256


def inverse_lower(L: Tensor) -> Tensor:
    """L^-1 for lower triangular L (n, n), n^3 / 3 flops; what stands above the diagonal of L is not read.

    [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]].
    """
    W = torch.zeros_like(L)
    _invert(L, W)
    return W


def _invert(L: Tensor, W: Tensor) -> None:
    n = len(L)
    if n <= LEAF:
        W.copy_(torch.linalg.solve_triangular(L, torch.eye(n, dtype=L.dtype, device=L.device), upper=False))
        return
    h = n // 2
    _invert(L[:h, :h], W[:h, :h])
    _invert(L[h:, h:], W[h:, h:])
    below = torch.linalg.solve_triangular(L[h:, h:], L[h:, :h], upper=False)
    W[h:, :h] = torch.linalg.solve_triangular(L[:h, :h], below, upper=False, left=False).neg_()
