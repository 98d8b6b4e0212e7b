"""A least-squares SVM as a differentiable function of its features: weights and exact leave-one-out scores.

Let X (n, J) be centred features, Y (n, K) targets, A = X^T X + rho I and w = A^-1 X^T Y. A free intercept is
b = mean(y) - w^T mean(x). The score of sample i by the head that never saw it is

    f_-i(x_i) = y_i - (y_i - f(x_i)) / (1 - h_i),      h_i = 1/n + x_i^T A^-1 x_i.

With fewer samples than features, the (n, n) matrix G = X X^T + rho I gives the same scores: y_i - f(x_i) = rho (G^-1 Y)_i and
1 - h_i = rho (G^-1)_ii - 1/n. The computation uses a Cholesky factor and triangular solves, which autograd differentiates in
closed form. You can therefore train a network so that the *head* on its features generalizes, as in R2-D2 and MetaOptNet, and
then freeze the network.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchlssvm.functional import checks


class Fit(NamedTuple):
    """A fitted head with scores x @ w + b. ``leave_one_out`` (n, K) holds the scores of each sample by a head without it."""

    w: Tensor  # (J, K)
    b: Tensor  # (K,)
    leave_one_out: Tensor  # (n, K)


def fit(x: Tensor, y: Tensor, rho: float | Tensor = 1.0, intercept: str = "free") -> Fit:
    """Fit a least-squares SVM, differentiably in x, in float targets and in rho.

    Args:
        x: (n, J) features.
        y: (n,) labels, coded -1 and +1, or (n, K) float targets.
        rho: the regularization, > 0: a number or a tensor ().
        intercept: ``"free"`` or ``"none"``.

    Example:
        >>> import torch
        >>> x, y = torch.randn(30, 4, dtype=torch.float64, requires_grad=True), torch.arange(30) % 3
        >>> result = fit(x, y, rho=0.5)
        >>> result.leave_one_out.shape
        torch.Size([30, 3])
        >>> torch.nn.functional.cross_entropy(result.leave_one_out, y).backward()
        >>> x.grad.shape
        torch.Size([30, 4])
    """
    checks.one_of(intercept, "intercept", ("free", "none"))
    if x.ndim != 2 or not len(x) or y.shape[0] != len(x):
        raise ValueError(
            f"x must be (n, J) and y (n,) or (n, K), with n >= 1; got {tuple(x.shape)} and {tuple(y.shape)}"
        )
    t = y if y.is_floating_point() else 2.0 * nn.functional.one_hot(y.long()).to(x) - 1.0
    t = t[:, None] if t.ndim == 1 else t
    n, J = x.shape
    free = intercept == "free"
    mean_x, mean_t = (x.mean(0), t.mean(0)) if free else (x.new_zeros(J), t.new_zeros(t.shape[1]))
    X, T = x - mean_x, t - mean_t
    taken = 1.0 / n if free else 0.0
    if n <= J:
        eye = torch.eye(n, dtype=x.dtype, device=x.device)
        L = torch.linalg.cholesky(X @ X.mT + rho * eye)
        alpha = torch.cholesky_solve(T, L)
        w = X.mT @ alpha
        wrong = rho * alpha
        left = rho * torch.linalg.solve_triangular(L, eye, upper=False).square().sum(0) - taken
    else:
        L = torch.linalg.cholesky(X.mT @ X + rho * torch.eye(J, dtype=x.dtype, device=x.device))
        w = torch.cholesky_solve(X.mT @ T, L)
        wrong = T - X @ w
        left = 1.0 - taken - torch.linalg.solve_triangular(L, X.mT, upper=False).square().sum(0)
    return Fit(w, mean_t - mean_x @ w, t - wrong / left[:, None])


class LeaveOneOutLoss(nn.Module):
    """The loss of the leave-one-out scores of a least-squares SVM. Minimize it to train features on which the head generalizes.

    Args:
        rho: the initial regularization. It is learned with the features unless ``learn_rho=False``.
        loss: ``"cross_entropy"`` of the scores times a learned factor, or ``"squared"`` distance to the targets -1 and +1.
        learn_rho: whether to learn rho. The parameter is log(rho), so rho stays positive.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> network, criterion = nn.Linear(8, 4), LeaveOneOutLoss()
        >>> loss = criterion(network(torch.randn(20, 8)), torch.arange(20) % 2)
        >>> loss.backward()
        >>> network.weight.grad is not None, criterion.log_rho.grad is not None
        (True, True)
    """

    def __init__(self, rho: float = 1.0, loss: str = "cross_entropy", learn_rho: bool = True):
        super().__init__()
        checks.one_of(loss, "loss", ("cross_entropy", "squared"))
        self.loss = loss
        self.log_rho = nn.Parameter(torch.tensor(checks.positive(rho, "rho")).log(), requires_grad=learn_rho)
        self.scale = nn.Parameter(torch.tensor(4.0), requires_grad=loss == "cross_entropy")

    @property
    def rho(self) -> float:
        """The regularization now."""
        return float(self.log_rho.detach().exp())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # (n, J), (n,) -> ()
        """Mean loss of the leave-one-out scores of samples x with labels y."""
        scores = fit(x, y, self.log_rho.exp().to(x)).leave_one_out
        if self.loss == "cross_entropy":
            return nn.functional.cross_entropy(self.scale * scores, y)
        targets = 2.0 * nn.functional.one_hot(y, scores.shape[1]).to(scores) - 1.0
        return (scores - targets).square().mean()
