"""The kernel LS-SVM from Q^-1 (Duan et al., equations (6), (7), (12)) and its leave-one-out scores.

For n samples with the kernel matrix K, let Q = K + I/C and U = Q^-1. The targets y (n, K) have one column per output, and all
outputs share U. With a = U y and e = U 1,

    b = 1^T a / 1^T e,      alpha = U (y - 1 b) = a - e b,      f(x) = k(x, X) alpha + b.           (7)

**Leave one out.** The system (6) is M [b; alpha] = [0; y] with M = [[0, 1^T], [1, Q]]. The lower right block of M^-1 is
H = U - e e^T / (1^T e). Let f_-i be the machine that is trained without sample i. Deleting row and column i from M and
comparing with the full solution gives the exact leave-one-out residual of every output,

    y_i - f_-i(x_i) = alpha_i / H_ii,                                  (without a bias: H = U).

Since y_i - f(x_i) = alpha_i / C, leaving out sample i changes its score by alpha_i (1 / H_ii - 1 / C) in magnitude.
"""

from __future__ import annotations

import torch
from torch import Tensor


def solve(a: Tensor, e: Tensor, bias: bool) -> tuple[Tensor, Tensor]:
    """alpha (n, K) and b (K,) of (7), from a = U y (n, K) and e = U 1 (n,)."""
    if not bias:
        return a, torch.zeros(a.shape[1], dtype=a.dtype, device=a.device)
    b = a.sum(0) / e.sum()
    return a - e[:, None] * b, b


def left_out_diagonal(diagonal: Tensor, e: Tensor, bias: bool) -> Tensor:
    """H_ii (n,), from the diagonal of U and e = U 1."""
    return diagonal - e.square() / e.sum() if bias else diagonal


def leave_one_out(y: Tensor, alpha: Tensor, H: Tensor) -> Tensor:
    """Return f_-i(x_i) (n, K), the score of each sample by the machine that never saw it. H: (n,)."""
    return y - alpha / H[:, None]


def own_effect(alpha: Tensor, H: Tensor, ridge: Tensor | float) -> Tensor:
    """Return max_k |f_k(x_i) - f_-i,k(x_i)| (n,), the largest change of a sample's scores if it is left out. ridge: 1/C."""
    return alpha.abs().amax(1) * (1.0 / H - ridge).clamp(min=0.0)
