"""A dense interior-point method for the SVM's quadratic program: a fast start that pivoting or the path then make exact."""

from __future__ import annotations

import torch
from torch import Tensor


def interior_point(
    Q: Tensor,  # (n, n)
    y: Tensor,  # (n,) -1, +1
    u: Tensor,  # (n,) upper bounds
    tolerance: float = 1e-7,
    steps: int = 60,
) -> tuple[Tensor, float]:
    """alpha (n,) strictly inside its box, and b, near the optimum of (1): Mehrotra's predictor-corrector method.

    With multipliers z of alpha >= 0 and w of alpha <= u, a Newton step on
        Q alpha - 1 + y b - z + w = 0,   y^T alpha = 0,   alpha z = mu,   (u - alpha) w = mu
    is (Q + Theta) d = r - y db with Theta = z / alpha + w / (u - alpha): one Cholesky factorization. Both classes must occur.

    Example:
        >>> x = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
        >>> y = torch.tensor([-1.0, 1.0], dtype=torch.float64)
        >>> alpha, b = interior_point(
        ...     (x * y[:, None]) @ (x * y[:, None]).T, y, torch.full((2,), 10.0, dtype=torch.float64)
        ... )
        >>> [round(a, 5) for a in alpha.tolist()], abs(round(b, 5))
        ([0.5, 0.5], 0.0)
    """
    n = len(y)
    scale = float(Q.diagonal().mean().clamp(min=1e-300))
    tolerance *= min(1.0, scale * float(u.amax()))  # small bounds: f differs little between samples
    positive = y > 0
    # A start with y^T alpha = 0: each class shares the smaller of the two sums of bounds, halved.
    total = 0.5 * torch.minimum(u[positive].sum(), u[~positive].sum())
    share = torch.where(positive, total / u[positive].sum(), total / u[~positive].sum())
    alpha = u * torch.minimum(share, 1.0 / (scale * u * n**0.5 + 1.0))
    plus, minus = alpha[positive].sum(), alpha[~positive].sum()
    alpha = torch.where(
        positive, alpha * torch.clamp(minus / plus, max=1.0), alpha * torch.clamp(plus / minus, max=1.0)
    )
    b = alpha.new_zeros(())
    z, w = torch.ones_like(alpha), torch.ones_like(alpha)
    for _ in range(steps):
        room = u - alpha
        dual = Q @ alpha - 1.0 + y * b - z + w
        primal = y @ alpha
        mu = (alpha @ z + room @ w) / (2 * n)
        if float(mu * n) < tolerance * float(alpha.sum().clamp(max=1.0)) and float(dual.abs().amax()) < tolerance:
            break
        theta = z / alpha + w / room
        H = Q.clone()
        H.diagonal().add_(theta + 1e-13 * scale)
        L, info = torch.linalg.cholesky_ex(H)
        if int(info):
            break
        Hy = torch.cholesky_solve(y[:, None], L)[:, 0]
        yHy = y @ Hy
        target_z, target_w = -z, -w  # predictor: mu = 0
        for corrector in (False, True):
            # (Q + Theta) d + y db = -dual + target_z - target_w, where alpha dz + z d = alpha target_z
            r = -dual + target_z - target_w
            d = torch.cholesky_solve(r[:, None], L)[:, 0]
            db = (y @ d + primal) / yHy
            d = d - Hy * db
            dz = target_z - z / alpha * d
            dw = target_w + w / room * d
            step_p = _room(alpha, d, room)
            step_d = min(_ratio(z, dz), _ratio(w, dw))
            if corrector:
                break
            after = ((alpha + step_p * d) @ (z + step_d * dz) + (room - step_p * d) @ (w + step_d * dw)) / (2 * n)
            aim = mu * (after / mu).clamp(0.0, 1.0) ** 3
            target_z = -z + (aim - d * dz) / alpha
            target_w = -w + (aim + d * dw) / room
        step = 0.995 * min(step_p, step_d)
        step = min(step, 1.0)
        alpha, b, z, w = alpha + step * d, b + step * db, z + step * dz, w + step * dw
    return alpha, float(b)


def _ratio(v: Tensor, d: Tensor) -> float:
    """The step at which v + t d first reaches 0."""
    return float(torch.where(d < 0, -v / d, torch.inf).amin())


def _room(alpha: Tensor, d: Tensor, room: Tensor) -> float:
    return min(_ratio(alpha, d), _ratio(room, -d))
