r"""The steps of the exact incremental SVM (Cauwenberghs and Poggio, NIPS 2000), as pure functions.

The SVM minimizes, over 0 <= alpha_i <= u_i (u = C, per sample), with Q_ij = y_i y_j K(x_i, x_j),

    W = 1/2 alpha^T Q alpha - 1^T alpha + b y^T alpha                                                              (1)
    g_i = dW/dalpha_i = sum_j Q_ij alpha_j + y_i b - 1:  >= 0 in R (alpha = 0), = 0 in S, <= 0 in E (alpha = u)    (2)
    dW/db = sum_j y_j alpha_j = 0                                                                                  (3)

The margin vectors S live in *slots*: index 0 belongs to b, a free slot is a row and a column of zeros, so that growing and
shrinking never move anything. In slots, with the letters of the paper:

    A = [[0, y_S^T], [y_S, Q_SS]], the Jacobian                                                                    (7)
    R = A^-1 on the slots in use, zero elsewhere
    a = [b; alpha_S]

What moves is a *drive*: coefficients alpha_k outside S that change at the rate d_k while a parameter p runs from 0 to 1
(Diehl and Cauwenberghs, 2003); one sample c with d_c = 1 is the case of the first paper. The right-hand side of (6) is then
h = [sum_k y_k d_k; sum_k Q_Sk d_k].
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

EPS = torch.finfo(torch.float64).eps
TINY = 1e-13
"""A step up to this length is none: the events at its end are simultaneous, and the smallest index goes first."""
FAR = 1e-3
"""gamma_i above this share of Q_ii: sample i is far from the span of S, and rounding cannot say otherwise."""
Array = Any  # a Tensor, or a NumPy array on the same memory


def _namespace(array: Array) -> Any:
    return torch if isinstance(array, Tensor) else np


def _host(t: Tensor) -> Array:
    """The same memory for a few numbers at a time, where it is the CPU's."""
    return t.numpy() if type(t) is Tensor and t.device.type == "cpu" else t


def sensitivities(R: Tensor, A: Tensor, h: Tensor, beta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """beta = -R h (m,) (10), or a guess at it, with one step of refinement; and the residual h + A beta (m,) before it.

    The residual measures the drift of R: refinement divides the error by (1 / drift), so R may be far from exact before
    beta is. h must be zero in free slots.

    Example:
        >>> A = torch.tensor([[0.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
        >>> beta, residual = sensitivities(torch.linalg.inv(A), A, torch.tensor([1.0, 0.5], dtype=torch.float64))
        >>> beta.tolist(), residual.tolist()
        ([1.5, -1.0], [0.0, 0.0])
    """
    if beta is None:
        beta = torch.mv(R, h).neg_()
    residual = torch.addmv(h, A, beta)
    return torch.addmv(beta, R, residual, alpha=-1.0), residual


def margin_sensitivities(QS: Tensor, beta: Tensor, drive: Tensor) -> Tensor:  # (n, m), (m,), (n,) -> (n,)
    """gamma_i = sum_k Q_ik d_k + sum_S Q_ij beta_j + y_i beta_0, the rate of every g_i (12).

    QS holds the columns Q_:S in their slots, and y in column 0; drive_i = sum_k Q_ik d_k.
    """
    return torch.addmv(drive, QS, beta)


def coefficient_steps(a: Array, beta: Array, lower: Array, upper: Array, rise: Array | None = None) -> Array:
    """(m,) How far each margin vector can go until alpha_j = 0 or alpha_j = u_j (2.3, condition 3).

    rise: the rate of u, when the bounds move (a change of C). Slots for b and free slots have infinite bounds. Where beta_j
    is 0 to rounding the quotient means nothing (it may be 0): the caller looks at beta_j. Tensors or NumPy arrays: on the
    CPU a step is so small that what it costs is the overhead of its operations.

    Example:
        >>> a, beta = torch.tensor([0.25, 1.0]), torch.tensor([-0.5, 4.0])
        >>> coefficient_steps(a, beta, torch.zeros(2), torch.tensor([3.0, 3.0]))
        tensor([0.5000, 0.5000])
    """
    xp = _namespace(a)
    if rise is None:
        bound = xp.where(beta > 0, upper, lower)
        bound -= a
        bound /= beta + 1e-300
        return abs(bound)
    up, floor = beta - rise, 16 * EPS * (float(abs(beta).max()) + float(abs(rise).max()))
    t_up = xp.where(up > floor, (upper - a).clip(0.0) / (abs(up) + 1e-300), xp.inf)
    t_down = xp.where(-beta > floor, (a - lower).clip(0.0) / (abs(beta) + 1e-300), xp.inf)
    return xp.minimum(t_up, t_down)


def reaches_upper(a: float, beta: float, upper: float, rise: float, t: float) -> bool:
    """Whether the bound that a margin vector comes to after a step t is the upper one, which moves at the rate ``rise``."""
    return abs(upper + t * rise - a - t * beta) <= abs(a + t * beta)


def margin_rates(slack: Array, gamma: Array, sign: Array) -> tuple[Array, Array]:  # (n,) x 3 -> (n,), (n,)
    """Of each sample outside S the rate of its slack, sign_i gamma_i, and that rate over the slack.

    The slack is sign_i g_i >= 0: sign +1 where g_i >= 0 must hold (R), -1 where g_i <= 0 must (E, and candidates); it is
    infinite where nothing must hold (S, leaving). The sample with the smallest quotient, if that is negative, is the first
    to come to g_i = 0, after the step -1 / quotient (2.3, conditions 1, 4 and 5).

    Example:
        >>> slack, gamma = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([-0.5, 4.0, 1.0])
        >>> margin_rates(slack, gamma, torch.tensor([1.0, -1.0, 1.0]))[1]
        tensor([-0.5000, -2.0000,  0.3333])
    """
    rate = gamma * sign
    return rate, rate / (slack.clip(1e-200) if isinstance(slack, Tensor) else np.maximum(slack, 1e-200))


def grow_(R: Tensor, v: Tensor, gamma: float) -> Tensor:  # (m, m), (m,) -> (m, m)
    """R += v v^T / gamma_c, in place: c enters S in a free slot (13), where v is 1; elsewhere v is beta.

    beta = -R [y_c; Q_Sc] and gamma_c = Q_cc + [y_c; Q_Sc]^T beta, by (10) and (12).
    """
    return R.addr_(v, v, alpha=1.0 / gamma)


def shrink_(R: Tensor, slot: int) -> Tensor:  # (m, m) -> (m, m)
    """R_ij -= R_ik R_kj / R_kk, in place: k leaves S and its slot is free again (14)."""
    v, h = R[slot].clone(), _host(R)
    R.addr_(v, v, alpha=-1.0 / float(h[slot, slot]))
    h[:, slot] = 0.0
    h[slot] = 0.0
    return R


def after_growth(beta: Array, v: Array, rate: float, gamma: float) -> Array:  # (m,), (m,) -> (m,)
    """The sensitivities of a drive after (13): beta - v (rate / gamma_c), with v = [beta_c; 1].

    -R' h = -R h - v (v^T h) / gamma_c, and v^T h is the rate of g_c under the drive, read off (12).
    """
    return beta - v * (rate / gamma)


def after_shrinkage(beta: Array, R_k: Array, slot: int) -> Array:  # (m,), (m,) -> (m,)
    """The sensitivities of a drive after (14): beta - R_:k (beta_k / R_kk), R_:k taken before."""
    return beta - R_k * (float(beta[slot]) / float(R_k[slot]))


def first_(R: Tensor, q: float, y: float, slot: int) -> Tensor:
    """R = [[-Q_cc, y_c], [y_c, 0]], in place: S was empty, where (7) has no inverse and (13) does not apply."""
    R.zero_()
    R[0, 0] = -q
    R[0, slot] = R[slot, 0] = y
    return R


def inverse(A: Tensor, used: Tensor) -> Tensor:  # (m, m), (s,) -> (m, m)
    """R from A anew: the slots in use inverted (LU with pivoting), the others zero.

    Rows are scaled to a unit diagonal of Q first, D A D with D = diag(1, Q_jj^-1/2): features of any scale then give a
    system as well conditioned as the geometry allows. One Newton-Schulz step R (2 I - A R) removes the rounding of LU.
    """
    B = A[used][:, used]
    d = B.diagonal().clamp(min=torch.finfo(B.dtype).tiny).rsqrt()
    d[0] = d[1:].reciprocal().mean() if len(d) > 1 else 1.0
    scaled = B * d[:, None] * d
    inv = torch.linalg.inv(scaled)
    inv = inv + inv @ (torch.eye(len(d), dtype=B.dtype, device=B.device) - scaled @ inv)
    inv = (inv + inv.T) * 0.5 * d[:, None] * d
    R = torch.zeros_like(A)
    R[used[:, None], used] = inv
    return R


def distance_to_span(K_cc: Tensor, K_cS: Tensor, K_SS: Tensor, y_c: Tensor, y_S: Tensor) -> Tensor:
    """gamma_c = min over beta of |X_c + sum_S X_j beta_j|^2 with sum_S y_j beta_j = -y_c (20), (21), X_i = y_i phi(x_i).

    The squared distance in feature space from sample c to the affine span of the margin vectors, by a dense solve: what
    the path reads off R in passing.

    Example:
        >>> one = torch.ones(2, dtype=torch.float64)  # two points at distance 1 on a line, and a third at distance 3
        >>> K = torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 9.0]], dtype=torch.float64)
        >>> float(distance_to_span(K[2, 2], K[2, :2], K[:2, :2], one[0], one))
        9.0
    """
    A = torch.zeros(len(y_S) + 1, len(y_S) + 1, dtype=K_SS.dtype, device=K_SS.device)
    A[0, 1:], A[1:, 0], A[1:, 1:] = y_S, y_S, K_SS * torch.outer(y_S, y_S)
    h = torch.cat([y_c.reshape(1), y_c * y_S * K_cS])
    gamma: Tensor = K_cc - h @ torch.linalg.solve(A, h)
    return gamma


def b_interval(g: Tensor, y: Tensor, sign: Tensor) -> tuple[Tensor, Tensor]:  # (n,) x 3 -> (), ()
    """The shifts of b that keep every g_i on its side when S is empty: (lowest, highest), infinite where nothing binds.

    g_i moves by y_i delta. R needs g_i >= 0 and E needs g_i <= 0.
    """
    rises = sign * y  # the side on which delta is bounded: from below where +1, from above where -1
    low = torch.where(rises > 0, -g * y, -torch.inf)
    high = torch.where(rises < 0, -g * y, torch.inf)
    return low.amax(), high.amin()


def kkt_violation(alpha: Tensor, g: Tensor, u: Tensor, y: Tensor) -> Tensor:  # (n,) x 4 -> ()
    """The largest violation of (2) and (3): of g where alpha is free, of g's sign at a bound, of the box, of y^T alpha.

    The last two are in units of alpha: they are divided by the largest u, if that is above 1.
    """
    if not len(alpha):
        return torch.zeros((), dtype=alpha.dtype, device=alpha.device)
    low, high = alpha <= 0, alpha >= u
    wrong = torch.where(low, (-g).clamp(min=0.0), torch.where(high, g.clamp(min=0.0), g.abs()))
    box = torch.maximum(-alpha, alpha - u).clamp(min=0.0)
    unit = u.amax().clamp(min=1.0)
    return torch.maximum(wrong.amax(), torch.maximum(box.amax(), (y @ alpha).abs()) / unit)
