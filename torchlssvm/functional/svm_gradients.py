r"""Derivatives of the SVM's solution with respect to its kernel matrix K.

The sets S (margin vectors), E (at the upper bound u) and R (alpha = 0) are those of :mod:`~torchlssvm.functional.svm_path`. For
a small change of K, no sample changes its set, and the coefficients of E and R stay at their bounds. Only the bias b and the
coefficients of S change. They solve A [b; alpha_S] = [-sum_E y u; 1 - Q_SE u_E], with the matrix A of equation (7) there.
Implicit differentiation of this system gives the derivatives.
"""

from __future__ import annotations

import torch
from torch import Tensor


def bordered(Q: Tensor, y: Tensor, S: Tensor) -> Tensor:  # (n, n), (n,), (s,) -> (s + 1, s + 1)
    """Return A = [[0, y_S^T], [y_S, Q_SS]] (7)."""
    rows = torch.cat([y[S][:, None], Q[S][:, S]], 1)
    return torch.cat([torch.nn.functional.pad(y[S], (1, 0))[None], rows])


def solution(K: Tensor, y: Tensor, side: Tensor, alpha: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return alpha (n,) and b () with their given values, differentiable in K (n, n).

    y (n,): -1, +1; side (n,): +1 in R, -1 in E, 0 in S. Without margin vectors, b lies in an interval, and its derivative is
    that of the middle of the interval, or of its only finite end.

    Example:
        >>> x = torch.tensor([[-1.0], [2.0]], dtype=torch.float64, requires_grad=True)
        >>> y = torch.tensor([-1.0, 1.0], dtype=torch.float64)
        >>> value = torch.full((2,), 2 / 9, dtype=torch.float64), torch.tensor(-1 / 3, dtype=torch.float64)
        >>> alpha, b = solution(x @ x.T, y, torch.zeros(2), *value)  # w = 2 / (x_2 - x_1), b = -w (x_1 + x_2) / 2
        >>> [round(v, 6) for v in torch.autograd.grad(b, x)[0].flatten().tolist()]
        [-0.444444, -0.222222]
    """
    Q = K * y[:, None] * y
    S, outside = (side == 0).nonzero()[:, 0], alpha * (side != 0)
    if len(S):
        right = torch.cat([-(y @ outside)[None], 1.0 - Q[S] @ outside])
        a = torch.linalg.solve(bordered(Q, y, S), right)
        derivative = a - a.detach()
        return alpha.index_add(0, S, derivative[1:]), b + derivative[0]
    # y_i (f_i + b) = 1 at both ends of the interval of b
    ends = y - y * (Q @ alpha)
    low = torch.where(y * side > 0, ends, -torch.inf).max()
    high = torch.where(y * side < 0, ends, torch.inf).min()
    finite = torch.stack([end for end in (low, high) if bool(end.isfinite())])
    return alpha, b + (finite.mean() - finite.mean().detach())


def span_margins(K: Tensor, y: Tensor, side: Tensor, alpha: Tensor, b: Tensor) -> Tensor:  # -> (n,)
    """Return y_c f(x_c) - 1 of every sample c by the machine without it, by the span rule, differentiable in K.

    The span rule assumes that no other sample changes its set when c leaves, and is exact in that case. The value is then g_c
    - alpha_c gamma_c, where gamma_c is the squared distance between sample c and the span of the margin vectors other than c.
    If alpha_c > 0 and no margin vector is left that could compensate for alpha_c, the value is minus infinity.
    """
    alpha, b = solution(K, y, side, alpha, b)
    Q = K * y[:, None] * y
    S = (side == 0).nonzero()[:, 0]
    g = (Q @ alpha + y * b - 1.0) * (side != 0)
    if not len(S):
        return torch.where(alpha > 0, -torch.inf, g)
    R = torch.linalg.inv(bordered(Q, y, S))
    H = torch.cat([y[None], Q[S]])
    distance = (Q.diagonal() - ((R @ H) * H).sum(0)) * (side != 0)
    own = 1.0 / R.diagonal()[1:] if len(S) > 1 else torch.full_like(alpha[S], torch.inf)
    margins: Tensor = g - alpha * distance.index_add(0, S, own)
    return margins
