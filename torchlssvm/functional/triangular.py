"""The inverse of a triangular matrix by halves, at the rate of large triangular solves."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_LEAF = 256
"""Rows up to which one triangular solve with the identity is faster than two halves."""


def inverse_lower(L: Tensor) -> Tensor:
    """L^-1 for lower triangular L (n, n), n^3 / 3 flops; what stands above the diagonal of L is not read.

    [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]].
    """
    n = len(L)
    if n <= LARGEST_LEAF:
        inverse: Tensor = torch.linalg.solve_triangular(L, torch.eye(n, dtype=L.dtype, device=L.device), upper=False)
        return inverse
    W, h = torch.zeros_like(L), n // 2
    W[:h, :h], W[h:, h:] = inverse_lower(L[:h, :h]), inverse_lower(L[h:, h:])
    below = torch.linalg.solve_triangular(L[h:, h:], L[h:, :h], upper=False)
    W[h:, :h] = torch.linalg.solve_triangular(L[:h, :h], below, upper=False, left=False).neg_()
    return W
