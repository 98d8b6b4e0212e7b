r"""Maps from scores to probabilities (temperature, Platt's sigmoid, isotonic regression), and measures of their calibration.

Let s be the scores of a sample, s_k the score of class k, y the label, and d_i the weight of sample i. The three maps are

    Temperature (one number for all classes):  p = softmax(t s), where t > 0 minimizes the log-loss sum_i d_i L_i(t)
    Platt (two numbers for each class):        p = 1 / (1 + exp(-(a s_k + c)))
    Isotonic (one function for each class):    p = the nondecreasing fit of 1[y = k] to s_k, by pooling adjacent violators

A fitted map depends on the (score, label) pairs alone, because the fit minimizes a convex function of them, from a fixed
starting point to convergence. After a removal, a new fit therefore equals a fit on only the remaining samples.

Platt's sigmoid is fitted to the targets of Platt (1999), (n_+ + 1) / (n_+ + 2) for the n_+ samples of the class and
1 / (n_- + 2) for the n_- others. The targets lie slightly inside 0 and 1, so that the parameters stay finite even if the scores
separate the classes perfectly. With several classes, the probabilities are normalized to a sum of one.

A temperature preserves the order of the scores, so the most probable class is always the predicted class. The other two maps
treat each class separately and can change the order of two classes with similar scores.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def least_squares(scores: Tensor) -> Tensor:
    """Estimate probabilities (B, K) from the scores s of a least-squares fit to targets -1 and +1.

    Such a score estimates 2 P(k | x) - 1, so (1 + s) / 2 estimates P(k | x). Each row is projected to the nearest row of
    nonnegative numbers that sum to 1 (Held, Wolfe, Crowder 1974). The projection subtracts one number from the row and clips
    the row at 0, which preserves the order of the classes.
    """
    p = (1.0 + scores) / 2
    sorted_, _ = p.sort(1, descending=True)
    above = (sorted_.cumsum(1) - 1.0) / torch.arange(1, p.shape[1] + 1, dtype=p.dtype, device=p.device)
    used = (sorted_ > above).sum(1, keepdim=True).clamp(min=1)
    return (p - above.gather(1, used - 1)).clamp(min=0.0)


def strictly_inside(p: Tensor) -> Tensor:
    """Keep probabilities of labels 1e-9 away from 0 and 1, so that their logarithms are finite. p: (B, K)."""
    return p.clamp(1e-9, 1.0 - 1e-9)


def minimized(
    theta: Tensor, loss: Callable[[Tensor], Tensor], newton_step: Callable[[Tensor], Tensor], low: float, high: float
) -> Tensor:
    """Minimize a convex loss between bounds by Newton's method with halved steps (Lin, Lin, Weng 2007).

    A step is halved until it does not increase the loss, where an increase by up to 1e-13 of the loss counts as rounding. The
    method stops when a step moves the parameters by at most 1e-12 of their size, usually after ten steps.
    """
    value = loss(theta)
    for _ in range(100):
        step, size = newton_step(theta), 1.0
        while size > 1e-10:
            trial = (theta - size * step).clamp(low, high)
            new = loss(trial)
            if bool(new <= value + 1e-13 * value.abs()):
                break
            size /= 2
        moved = (trial - theta).abs().amax()
        theta, value = trial, new
        if bool(moved <= 1e-12 * (1 + theta.abs().amax())):
            break
    return theta


def fit_temperature(scores: Tensor, y: Tensor, d: Tensor) -> Tensor:
    """Fit the temperature t (1,) by the log-loss of softmax(t s). scores: (n, K); y: (n,) labels; d: (n,) weights."""
    K, n = scores.shape[1], d.sum()
    eps = 1.0 / (n + 2.0)
    hit = torch.nn.functional.one_hot(y, K).to(torch.bool)
    target = torch.where(hit, 1.0 - eps, eps / (K - 1))
    goal = (d[:, None] * target * scores).sum()

    def loss(t: Tensor) -> Tensor:
        return (d * torch.logsumexp(t * scores, 1)).sum() - t * goal

    def newton_step(t: Tensor) -> Tensor:
        p = torch.softmax(t * scores, 1)
        mean = (p * scores).sum(1)
        curve = (d * ((p * scores.square()).sum(1) - mean.square())).sum()
        return ((d * mean).sum() - goal) / curve.clamp(min=torch.finfo(t.dtype).tiny)

    one = torch.ones((), dtype=torch.float64, device=scores.device)
    return minimized(one, loss, newton_step, 1e-9, 1e6)[None]


def fit_platt(s: Tensor, hit: Tensor, d: Tensor) -> Tensor:
    """Fit (a, c) of Platt's sigmoid. s: (n,) scores; hit: (n,) bool; d: (n,) weights."""
    plus, minus = d[hit].sum(), d[~hit].sum()
    target = torch.where(hit, (plus + 1) / (plus + 2), 1 / (minus + 2))
    # Standardized scores make the fit of a independent of their scale.
    mean = (d * s).sum() / d.sum()
    spread = ((d * (s - mean).square()).sum() / d.sum()).sqrt().clamp(min=torch.finfo(s.dtype).tiny)
    X = torch.stack([(s - mean) / spread, torch.ones_like(s)], 1)
    theta = torch.stack([torch.zeros_like(plus), torch.log((plus + 1) / (minus + 1))])

    def loss(theta: Tensor) -> Tensor:
        margin = X @ theta
        return (d * (torch.nn.functional.softplus(margin) - target * margin)).sum()

    def newton_step(theta: Tensor) -> Tensor:
        p = torch.sigmoid(X @ theta)
        hessian = X.mT @ ((d * p * (1 - p))[:, None] * X)
        # 1e-12: the ridge per unit of weight. It keeps the Hessian invertible if all scores are equal.
        hessian.diagonal().add_(1e-12 * d.sum())
        step: Tensor = torch.linalg.solve(hessian, X.mT @ (d * (p - target)))
        return step

    theta = minimized(theta, loss, newton_step, -torch.inf, torch.inf)
    a = theta[0] / spread
    return torch.stack([a, theta[1] - a * mean])


def fit_isotonic(s: Tensor, hit: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Fit a nondecreasing function and return its knots (m,) and its values at the knots (m,).

    The function is linear between knots and constant beyond them. s: (n,) scores; hit: (n,) bool; d: (n,) weights. Equal scores
    are pooled first.
    """
    knots, which = s.unique(return_inverse=True)
    weight = torch.zeros_like(knots).index_add_(0, which, d)
    mean = torch.zeros_like(knots).index_add_(0, which, d * hit) / weight
    blocks: list[tuple[float, float, int]] = []  # value, weight, number of knots
    for value, total, count in zip(mean.tolist(), weight.tolist(), [1] * len(knots), strict=True):
        while blocks and blocks[-1][0] >= value:
            v, t, n = blocks.pop()
            value = (v * t + value * total) / (t + total)
            total, count = t + total, n + count
        blocks.append((value, total, count))
    first, keep, values = 0, [], []
    for value, _, count in blocks:  # a block is constant: its two ends describe it
        for i in {first, first + count - 1}:
            keep.append(i)
            values.append(value)
        first += count
    order = sorted(range(len(keep)), key=keep.__getitem__)
    at = torch.tensor([keep[i] for i in order], device=s.device)
    return knots[at], torch.tensor([values[i] for i in order], dtype=s.dtype, device=s.device)


def interpolate(x: Tensor, knots: Tensor, values: Tensor) -> Tensor:
    """Interpolate linearly between knots, and constantly beyond them. x: (B,); knots, values: (m,), knots increasing."""
    if len(knots) == 1:
        return values.expand(len(x)).clone()
    right = torch.searchsorted(knots, x.contiguous()).clamp(1, len(knots) - 1)
    a, b = knots[right - 1], knots[right]
    share = ((x - a) / (b - a)).clamp(0.0, 1.0)
    return values[right - 1] + share * (values[right] - values[right - 1])


def normalized(p: Tensor, scores: Tensor) -> Tensor:
    """Scale rows to sum to one. Equal entries, including zeros, are ordered by their scores. p: (B, K) >= 0; scores: (B, K)."""
    p = p + 1e-9 * torch.softmax(scores, 1)  # a share that breaks ties
    return p / p.sum(1, keepdim=True)


def _binned(probabilities: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Number of samples (bins,) in each bin of confidence, and their summed confidence (bins,) and correctness (bins,)."""
    bins = 15  # of equal width between 0 and 1: the usual number in the literature, so errors can be compared
    confidence, predicted = probabilities.to(torch.float64).max(1)
    which = (confidence * bins).ceil().to(torch.int64).sub_(1).clamp_(0, bins - 1)
    sums = [torch.bincount(which, v, bins) for v in (confidence, (predicted == y).to(torch.float64))]
    return torch.bincount(which, minlength=bins), sums[0], sums[1]


def expected_calibration_error(probabilities: Tensor, y: Tensor) -> float:
    """ECE: sum over bins of confidence of (share of samples) |accuracy - mean confidence|. probabilities: (n, K); y: (n,).

    >>> sure = torch.tensor([[0.9, 0.1], [0.9, 0.1]])
    >>> round(expected_calibration_error(sure, torch.tensor([0, 1])), 3)
    0.4
    """
    _, confidence, right = _binned(probabilities, y)
    return float((right - confidence).abs().sum() / max(1, len(y)))


def reliability(probabilities: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean confidence, accuracy and number of samples of each bin (bins,); NaN for an empty bin."""
    count, confidence, right = _binned(probabilities, y)
    return confidence / count, right / count, count
