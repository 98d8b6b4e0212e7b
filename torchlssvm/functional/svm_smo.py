"""Sequential minimal optimization of the SVM (Platt; second-order selection of Fan, Chen and Lin, JMLR 2005).

Two coefficients at a time come near the optimum whatever the conditioning of the kernel, and fast; pivoting or the path then
make it exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any  # of NumPy: a step is a dozen operations on n numbers


def minimize(
    y: Array,  # (n,) -1, +1
    u: Array,  # (n,) upper bounds
    diagonal: Array,  # (n,) K_ii
    row: Callable[[int], Array],  # i -> K_i: (n,)
    alpha: Array,  # (n,) in its box, with y^T alpha = 0
    F: Array,  # (n,) y - K (y alpha)
    close: float = 1e-3,
    steps: int = 100_000,
) -> tuple[Array, float]:
    """alpha (n,) and b near the optimum of (1), from another alpha: (2) is violated by less than ``close``.

    F_i is what b would have to be for sample i to lie on its margin. At the optimum no sample whose y alpha may rise has a
    larger F than one whose y alpha may fall. As long as there are such, i with the largest F, and j with the largest gain
    (F_i - F_j)^2 / (K_ii + K_jj - 2 K_ij), trade: y_i alpha_i rises and y_j alpha_j falls by the same amount, to the optimum
    along that line or to the first bound.

    Example:
        >>> x, y = np.array([-1.0, 1.0]), np.array([-1.0, 1.0])
        >>> alpha, b = minimize(y, np.full(2, 10.0), x * x, lambda i: x[i] * x, np.zeros(2), y)
        >>> alpha.tolist(), b
        ([0.5, 0.5], 0.0)
    """
    a, F = alpha.copy(), F.copy()
    # 0 where y alpha may rise (fall), infinite where it may not
    rise = np.where(np.where(y > 0, a < u, a > 0), 0.0, -np.inf)
    fall = np.where(np.where(y > 0, a > 0, a < u), 0.0, np.inf)
    for _ in range(steps):
        i = int((F + rise).argmax())
        lead = F[i] - (F + fall)  # (n,) by how much i is ahead
        if rise[i] < 0 or not float(lead.max()) > close:
            break
        K_i = row(i)
        curve = np.maximum(diagonal[i] + diagonal - 2.0 * K_i, 1e-12)
        j = int((np.maximum(lead, 0.0) ** 2 / curve).argmax())
        room_i = u[i] - a[i] if y[i] > 0 else a[i]
        room_j = a[j] if y[j] > 0 else u[j] - a[j]
        step = min(float(lead[j] / curve[j]), float(room_i), float(room_j))
        for k, change in ((i, y[i] * step), (j, -y[j] * step)):
            value = a[k] + change
            a[k] = value = 0.0 if value < 1e-12 * u[k] else (u[k] if value > (1 - 1e-12) * u[k] else value)
            rise[k] = 0.0 if (value < u[k] if y[k] > 0 else value > 0) else -np.inf
            fall[k] = 0.0 if (value > 0 if y[k] > 0 else value < u[k]) else np.inf
        F -= step * (K_i - row(j))
    ends = [v for v in (float((F + rise).max()), float((F + fall).min())) if abs(v) < np.inf]
    return a, sum(ends) / max(1, len(ends))
