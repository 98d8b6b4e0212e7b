"""An independent truth: ridge solved densely in float64, by orthogonal factorization of the stacked system."""

import numpy as np
import torch
from torch import Tensor


def code(y: Tensor, K: int) -> Tensor:
    """Targets -1/+1 (n, K)."""
    return (2 * torch.nn.functional.one_hot(y, K) - 1).to(torch.float64)


def ridge(
    x: Tensor, Y: Tensor, rho: float, intercept: str = "free", weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """w (J, K) and b (K,) of the ridge problem; x: (n, J) float64, Y: (n, K), weight: (n,)."""
    s = torch.ones(len(x), dtype=torch.float64) if weight is None else weight.to(torch.float64)
    mean, target = torch.zeros(x.shape[1], dtype=torch.float64), torch.zeros(Y.shape[1], dtype=torch.float64)
    if intercept == "free":
        mean, target = s @ x / s.sum(), s @ Y / s.sum()
    design, goal = x - mean, Y - target
    if intercept == "penalized":
        design = torch.cat([design, torch.ones(len(x), 1, dtype=torch.float64)], 1)
    D = design.shape[1]
    stacked = np.vstack([(design * s.sqrt()[:, None]).numpy(), np.sqrt(rho) * np.eye(D)])
    right = np.vstack([(goal * s.sqrt()[:, None]).numpy(), np.zeros((D, Y.shape[1]))])
    q, r = np.linalg.qr(stacked)
    w = torch.from_numpy(np.linalg.solve(r, q.T @ right))
    if intercept == "penalized":
        return w[:-1], w[-1]
    return w, target - mean @ w if intercept == "free" else target


def relative(a: Tensor, b: Tensor) -> float:
    """The largest difference relative to the largest value of the truth b."""
    return float((a - b).abs().max() / b.abs().max())
