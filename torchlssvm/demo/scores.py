"""The head of the demo, and which of its samples look wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from torchlssvm import FixedPoint, LSSVMHead
from torchlssvm.demo.data import CLASSES, FEATURES


def new_head() -> LSSVMHead:
    """An empty head. The grid is fixed beforehand, so that no sample, erased or not, has a say in it."""
    return LSSVMHead(FEATURES, CLASSES, grid=FixedPoint(limit=64.0))


def leave_one_out(head: LSSVMHead, x: Tensor, y: Tensor) -> Tensor:
    """Scores of each sample by the head that never saw that sample, without retraining.

        e_i = (y_i - f(x_i)) / (1 - h_i),    h_i = 1/n + (x_i - mu)^T A_c^-1 (x_i - mu),    A_c^-1 = P / rho

    is the error of the head without sample i at x_i, so y_i - e_i is its score. x: (n, J), y: (n,): all samples held by
    a head with a free intercept and a grid. Returns (n, K).
    """
    assert head.grid is not None
    x = head.grid.snap(x)
    target = 2.0 * torch.nn.functional.one_hot(y, head.num_classes).to(x.dtype) - 1.0
    centred = x - x.mean(0)
    h = 1 / len(x) + ((centred @ head.P) * centred).sum(1) / head.rho
    scores: Tensor = head(x)
    return target - (target - scores) / (1 - h)[:, None]


def margins(scores: Tensor, y: Tensor) -> Tensor:
    """The score of the given label minus the best other score. scores: (n, K), y: (n,); returns (n,)."""
    own = scores.gather(1, y[:, None])
    return (own - scores.scatter(1, y[:, None], -torch.inf).amax(1, keepdim=True))[:, 0]
