"""The Lagrangian SVM (Duan et al., equations (2), (3), (10)): min 1/2 alpha^T Q alpha - 1^T alpha over alpha >= 0.

Here K is the kernel matrix, D = diag(y) holds the labels -1 and +1, and Q = I/C + D K D. With z = Q alpha - 1, a solution has
alpha >= 0, z >= 0 and alpha_i z_i = 0 for every i. For any step lambda > 0, these conditions are equivalent to

    z = (z - lambda alpha)_+.

**Iteration (3)** is alpha <- Q^-1 (1 + (z - lambda alpha)_+). It converges for 0 < lambda < 2/C. The clipped vector is the
next z, so an iteration costs one product with Q^-1 and no product with Q.

**Semismooth Newton** solves the same equation with lambda = 1/C. On the support I, where z_i < alpha_i / C, the equation reads
z_i = 0. On the other samples, A, it reads alpha_i = 0. Both parts are linear, so a step solves one of two equivalent systems:

    Q_II alpha_I = 1, z_A = Q_AI alpha_I - 1,        or        U_AA z_A = -(U 1)_A, alpha = U 1 + U_:A z_A,   U = Q^-1.

With g = D K D alpha = 1 + z - alpha / C, the equation is alpha = C (1 - g)_+. Its solution minimizes the primal objective

    p(alpha) = 1/2 alpha^T g + C/2 |(1 - g)_+|^2,

which is convex and piecewise quadratic, and the step is the Newton step of p. If a full step does not lower p enough, an exact
line search finds the length that does. Since p decreases in every step, the method never returns to an earlier support. There
are finitely many supports, so it reaches the solution after finitely many steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchlssvm.functional import checks


class LagrangianResult(NamedTuple):
    """alpha (n,), z = Q alpha - 1 (n,), the number of steps, and whether alpha is a solution within the tolerance."""

    alpha: Tensor
    z: Tensor
    iterations: int
    converged: bool


def violation(alpha: Tensor, z: Tensor) -> Tensor:
    """Return max |min(alpha, z)|, which is zero exactly at a solution."""
    return torch.minimum(alpha, z).abs().max()


def iterate(
    product: Callable[[Tensor], Tensor],  # v (n,) -> Q^-1 v (n,)
    alpha: Tensor,  # (n,)
    z: Tensor,  # (n,) = Q alpha - 1
    step: float,
    tol: float,
    max_iter: int,
    largest: Tensor,  # max_i Q_ii, and so a bound of every entry of Q
) -> LagrangianResult:
    """Run iteration (3) from any alpha until a step moves alpha by at most tol and (alpha)_+ is a solution within tol.

    Clipping alpha at zero changes each entry of Q alpha by at most ``largest`` times the sum of the negative entries.
    """
    for i in range(1, max_iter + 1):
        z = (z - step * alpha).clamp(min=0.0)
        before, alpha = alpha, product(1.0 + z)
        kept = alpha.clamp(min=0.0)
        moved, wrong = checks.read((alpha - before).norm(), violation(kept, z) + largest * (kept - alpha).sum())
        if moved <= tol and wrong <= tol:
            return LagrangianResult(kept, z, i, True)
    return LagrangianResult(kept, z, max_iter, False)


def newton(
    solve: Callable[[Tensor], tuple[Tensor, Tensor]],  # support (n,) bool -> alpha (n,), z (n,)
    support: Tensor,  # (n,) bool
    C: float,
    max_iter: int,
) -> LagrangianResult:
    """Semismooth Newton from a guess of the support."""
    full_alpha, full_z = alpha, z = solve(support)
    for i in range(1, max_iter + 1):
        wanted = alpha > C * z
        if torch.equal(wanted, support):
            return LagrangianResult(*_without_negative(solve, support, full_alpha, full_z), i, True)
        support = wanted
        full_alpha, full_z = solve(support)
        t = _line_search(alpha, z, full_alpha - alpha, full_z - z, C)
        alpha, z = (full_alpha, full_z) if t == 1.0 else (alpha + t * (full_alpha - alpha), z + t * (full_z - z))
    return LagrangianResult(alpha, z, max_iter, False)


def _without_negative(
    solve: Callable[[Tensor], tuple[Tensor, Tensor]], support: Tensor, alpha: Tensor, z: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the solution with alpha >= 0 to the bit. Entries that rounding has made negative leave the support."""
    while float(alpha.min()) < 0.0:
        support = support & (alpha > 0.0)
        alpha, z = solve(support)
    return alpha, z


def objective(alpha: Tensor, z: Tensor, C: float) -> Tensor:
    """The primal objective p(alpha)."""
    g = 1.0 + z - alpha / C
    return 0.5 * (alpha @ g) + 0.5 * C * (1.0 - g).clamp(min=0.0).square().sum()


def _line_search(alpha: Tensor, z: Tensor, d_alpha: Tensor, d_z: Tensor, C: float) -> float:
    """Return the t > 0 at which p(alpha + t d_alpha) is least, or 1 if p falls enough there. p' is increasing in t."""
    g, dg = 1.0 + z - alpha / C, d_z - d_alpha / C

    def slope(t: float) -> float:
        return float(alpha @ dg + t * (d_alpha @ dg) - C * ((1.0 - g - t * dg).clamp(min=0.0) @ dg))

    fall = float(objective(alpha + d_alpha, z + d_z, C) - objective(alpha, z, C))
    if fall <= 1e-4 * slope(0.0):
        return 1.0
    low, high = 0.0, 1.0
    while slope(high) < 0.0 and high < 1e6:
        low, high = high, 2.0 * high
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if slope(middle) < 0.0 else (low, middle)
    return 0.5 * (low + high)
