"""Coefficients near the optimum for many samples at once: libsvm's, where scikit-learn is installed, else two at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np

from torchlssvm.kernels import RBF, Linear, Polynomial
from torchlssvm.svm.kernel_rows import KernelRows
from torchlssvm.svm.samples import Array, Samples

CLOSE = 1e-3
"""The violation of (2) that the start may have, in units of g, where C is 1 or more."""
LIBSVM_FROM = 500
"""Samples from which libsvm's start is worth the call."""
LIBSVM_CACHE = 200
"""MiB of single-precision rows that libsvm keeps meanwhile."""
STEPS = 20
"""Steps for each sample: what is not near the optimum by then is left to the robust way."""
ROWS = 2**27
"""Bytes of kernel rows kept meanwhile."""


def near_optimum(samples: Samples, rows: KernelRows, alpha: Array) -> Array:  # (capacity,) -> (capacity,)
    """alpha in its box with y^T alpha = 0, near the optimum, from another such alpha."""
    s = samples
    close = CLOSE * min(1.0, float((s.root**2).max() * s.u.max()))  # small bounds: f differs little between samples
    if s.n >= LIBSVM_FROM and (found := _libsvm(s, rows, close)) is not None:
        return balanced(found, s.u, s.y)
    kept: dict[int, Array] = {}
    most = max(2, ROWS // (8 * s.capacity))

    def row(i: int) -> Array:
        if i not in kept:
            if len(kept) >= most:
                del kept[next(iter(kept))]
            kept[i] = rows.block(np.array([i]))[0] * (s.y * s.y[i])
        return kept[i]

    F = s.y - s.y * rows.product(alpha)
    return balanced(minimize(s.y, s.u, s.root**2, row, alpha, F, close, STEPS * s.n), s.u, s.y)


def _libsvm(s: Samples, rows: KernelRows, close: float) -> Array | None:
    """alpha of scikit-learn's SVC (capacity,), or None where it is not installed or has no such kernel."""
    kernel, at = rows.kernel, np.flatnonzero((s.ids >= 0) & (s.u > 0))
    options: dict[str, object] = {"cache_size": LIBSVM_CACHE, "tol": close, "max_iter": 200 * STEPS * s.n}
    if type(kernel) is Linear:
        options["kernel"] = "linear"
    elif type(kernel) is RBF:
        options |= {"kernel": "rbf", "gamma": kernel.gamma}
    elif type(kernel) is Polynomial:
        options |= {"kernel": "poly", "degree": kernel.degree, "gamma": kernel.gamma, "coef0": kernel.coef0}
    else:
        return None
    try:
        from sklearn.svm import SVC
    except ImportError:
        return None
    C = float(s.u.max())
    model = SVC(C=C, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a start that is not near is no harm
        model.fit(rows.x.cpu().numpy()[at], s.y[at], sample_weight=s.u[at] / C)
    alpha = np.zeros(s.capacity)
    alpha[at[model.support_]] = np.abs(model.dual_coef_[0])
    near = 1e-9 * s.u
    alpha = np.where(alpha > s.u - near, s.u, np.where(alpha < near, 0.0, alpha))
    return alpha if np.isfinite(alpha).all() else None


def minimize(
    y: Array,  # (n,) -1, +1, or 0 where there is no sample
    u: Array,  # (n,) upper bounds
    diagonal: Array,  # (n,) K_ii
    row: Callable[[int], Array],  # i -> K_i: (n,)
    alpha: Array,  # (n,) in its box, with y^T alpha = 0
    F: Array,  # (n,) y - K (y alpha)
    close: float = 1e-3,
    steps: int = 100_000,
) -> Array:
    """Sequential minimal optimization (Platt; second-order selection of Fan, Chen and Lin, JMLR 2005): alpha (n,).

    F_i is what b would have to be for sample i to lie on its margin. At the optimum no sample whose y alpha may rise has a
    larger F than one whose y alpha may fall. As long as there are such, i with the largest F, and j with the largest gain
    (F_i - F_j)^2 / (K_ii + K_jj - 2 K_ij), trade: y_i alpha_i rises and y_j alpha_j falls by the same amount, to the optimum
    along that line or to the first bound.

    Example:
        >>> x, y = np.array([-1.0, 1.0]), np.array([-1.0, 1.0])
        >>> minimize(y, np.full(2, 10.0), x * x, lambda i: x[i] * x, np.zeros(2), y).tolist()
        [0.5, 0.5]
    """
    a, F = alpha.copy(), F.copy()
    # 0 where y alpha may rise (fall), infinite where it may not
    rise = np.where(np.where(y > 0, a < u, (a > 0) & (y < 0)), 0.0, -np.inf)
    fall = np.where(np.where(y > 0, a > 0, (a < u) & (y < 0)), 0.0, np.inf)
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
    return a


def balanced(alpha: Array, u: Array, y: Array) -> Array:  # (n,) x 3 -> (n,)
    """alpha in its box with y^T alpha = 0: the heavier class gives way, its free coefficients first."""
    excess = float(y @ alpha)
    heavy = y * excess > 0
    for giving in (heavy & (alpha < u), heavy):
        total, excess = float(alpha[giving].sum()), abs(float(y @ alpha))
        if excess <= 1e-15 * float(alpha.sum()):
            break  # what is at its bound stays there
        if total > 0:
            alpha = np.where(giving, alpha * max(1.0 - excess / total, 0.0), alpha)
    return alpha
