"""A dense primal-dual interior-point method (Mehrotra): near the optimum in some thirty steps, however the kernel is scaled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from torchlssvm.svm.samples import Array

STEPS = 100
"""Most iterations; 20 to 40 are usual."""
SHORT = 0.995
"""The share of the way to the nearest bound that a step goes."""
SMALL = 1e-14
"""A complementarity below this share of the first one ends the iteration."""
PATIENCE = 6
"""Steps without progress that end it, too: rounding allows no more."""


class Interior(NamedTuple):
    """A point near the optimum."""

    alpha: Array  # (n,) strictly inside the box
    low: Array  # (n,) multipliers of alpha >= 0
    high: Array  # (n,) multipliers of alpha <= u
    b: float


def centred(K: Array) -> tuple[Array, Array]:  # (n, n) -> (n, n), (n,)
    """The kernel of phi - c, c = sum_i w_i phi_i with w_i ~ 1 / K_ii, and <phi, c>: the same problem, as sum y alpha = 0.

    Features far from the origin have a kernel that is nearly constant; a sample far from all others hardly counts in c.
    """
    own = np.maximum(K.diagonal(), 0.0)
    w = 1.0 / np.maximum(own, np.finfo(float).tiny + 1e-12 * own.max(initial=0.0))
    w /= w.sum()
    mean = K @ w
    return K - mean[:, None] - mean + w @ mean, mean


def interior_point(Q: Array, q: Array, y: Array, u: Array, e: float) -> Interior:  # (n, n), (n,) x 3
    """Minimize 1/2 x^T Q x + q^T x under 0 <= x <= u and y^T x = e, Q positive semidefinite."""
    n = len(q)
    scale = 1.0 / np.sqrt(np.maximum(Q.diagonal(), np.finfo(float).tiny) + 1e-30)
    x = np.minimum(0.5 * u, scale * scale / max(1.0, np.sqrt(n)))
    x = np.maximum(x, 1e-12 * u)
    nu, size = 0.0, max(1.0, float(np.abs(q).max(initial=0.0)))
    z, w = np.full(n, size), np.full(n, size)
    best, best_error, idle, first = None, np.inf, 0, 0.0
    for _ in range(STEPS):
        s = u - x
        r_d = Q @ x + q + y * nu - z + w
        r_p = float(y @ x - e)
        mu = float(x @ z + s @ w) / (2 * n)
        first = first or mu
        error = mu / first + float(np.abs(r_d).max()) / size + abs(r_p) / max(float(np.abs(x).sum()), 1e-300)
        idle = 0 if error < 0.9 * best_error else idle + 1
        if error < best_error:
            best, best_error = Interior(x.copy(), z.copy(), w.copy(), nu), error
        if mu <= SMALL * first or idle > PATIENCE or not np.isfinite(error):
            break
        D = z / x + w / s
        jacobi = 1.0 / np.sqrt(Q.diagonal() + D)
        H = torch.from_numpy(Q * jacobi * jacobi[:, None])
        H.diagonal().add_(torch.from_numpy(D * jacobi * jacobi))
        L, info = torch.linalg.cholesky_ex(H)
        jitter = 1e-15
        while int(info) and jitter < 1e-6:
            L, info = torch.linalg.cholesky_ex(H + jitter * torch.eye(n, dtype=torch.float64))
            jitter *= 100
        if int(info):
            break

        def solve(right: Array, L: torch.Tensor = L, jacobi: Array = jacobi) -> Array:
            return jacobi * torch.cholesky_solve(torch.from_numpy(right * jacobi)[:, None], L)[:, 0].numpy()

        Hy = solve(y)
        yHy = float(y @ Hy)

        def direction(c_z: Array, c_w: Array, Hy: Array = Hy, yHy: float = yHy, **k: Array) -> tuple[Array, float]:
            t = solve(-k["r_d"] + c_z - c_w)
            d_nu = (float(y @ t) + float(k["r_p"])) / yHy
            return t - d_nu * Hy, d_nu

        dx, d_nu = direction(-z, -w, r_d=r_d, r_p=r_p)
        dz, dw = -z - z / x * dx, -w + w / s * dx
        t = _to_bound(x, s, z, w, dx, dz, dw)
        after = float((x + t * dx) @ (z + t * dz) + (s - t * dx) @ (w + t * dw)) / (2 * n)
        sigma = (after / mu) ** 3
        c_z, c_w = (sigma * mu - dx * dz) / x - z, (sigma * mu + dx * dw) / s - w
        dx, d_nu = direction(c_z, c_w, r_d=r_d, r_p=r_p)
        dz, dw = c_z - z / x * dx, c_w + w / s * dx
        t = SHORT * _to_bound(x, s, z, w, dx, dz, dw, 1.0 / SHORT)
        x, nu, z, w = x + t * dx, nu + t * d_nu, z + t * dz, w + t * dw
        x = np.clip(x, 1e-300, u * (1 - 1e-16))
    return best if best is not None else Interior(x, z, w, nu)


def _to_bound(x: Array, s: Array, z: Array, w: Array, dx: Array, dz: Array, dw: Array, most: float = 1.0) -> float:
    """The largest step, up to ``most``, that keeps everything positive."""
    t = most
    for value, rate in ((x, dx), (s, -dx), (z, dz), (w, dw)):
        falling = rate < 0
        if falling.any():
            t = min(t, float((value[falling] / -rate[falling]).min()))
    return t
