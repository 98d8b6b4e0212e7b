"""An SVM's solution without a line of the library: libsvm finds the sets, a dense float64 solve makes them exact."""

from __future__ import annotations

import numpy as np
from sklearn.svm import SVC


def kkt(K, y, u, alpha, b) -> float:
    """The largest violation of the Kuhn-Tucker conditions; y in -1, +1. Coefficients are measured by u, if that is above 1."""
    g = y * (K @ (alpha * y) + b) - 1
    wrong = np.where(alpha <= 0, np.maximum(-g, 0), np.where(alpha >= u, np.maximum(g, 0), np.abs(g)))
    box = np.maximum(np.maximum(-alpha, alpha - u), 0)
    return float(max(wrong.max(), max(box.max(), abs(y @ alpha)) / max(1.0, u.max())))


def libsvm(K, y, u):
    """alpha (n,) and b of scikit-learn's SVC on a precomputed kernel, at the tightest tolerance it has."""
    C = u.max()
    model = SVC(C=C, kernel="precomputed", tol=1e-12, cache_size=500).fit(K, y, sample_weight=u / C)
    alpha = np.zeros(len(y))
    alpha[model.support_] = np.abs(model.dual_coef_[0])
    return alpha, float(model.intercept_[0])


def exact(K, y, u):
    """alpha (n,) and b to machine precision: libsvm's sets, corrected by dense solves until they no longer change."""
    alpha, b = libsvm(K, y, u)
    Q = K * np.outer(y, y)
    side = np.where(alpha <= 1e-6 * u, 1, np.where(alpha >= u * (1 - 1e-6), -1, 0))
    for _ in range(50):
        S, E = np.flatnonzero(side == 0), np.flatnonzero(side < 0)
        A = np.zeros((len(S) + 1, len(S) + 1))
        A[0, 1:] = A[1:, 0] = y[S]
        A[1:, 1:] = Q[np.ix_(S, S)]
        right = np.concatenate([[-(y[E] @ u[E])], 1 - Q[np.ix_(S, E)] @ u[E]])
        x = np.linalg.solve(A, right)
        x += np.linalg.solve(A, right - A @ x)
        alpha = np.zeros(len(y))
        alpha[E], alpha[S], b = u[E], x[1:], x[0]
        g = Q @ alpha + y * b - 1
        new = side.copy()
        new[S] = np.where(alpha[S] < 0, 1, np.where(alpha[S] > u[S], -1, 0))
        new[(side > 0) & (g < -1e-12)] = 0
        new[(side < 0) & (g > 1e-12)] = 0
        if (new == side).all():
            assert kkt(K, y, u, np.clip(alpha, 0, u), b) < 1e-11
            return alpha, float(b)
        side = new
    raise AssertionError("the truth was not found: choose another problem")


def rbf(x, z, gamma):
    """exp(-gamma |x - z|^2), by differences."""
    return np.exp(-gamma * ((x[:, None, :] - z[None, :, :]) ** 2).sum(-1))
