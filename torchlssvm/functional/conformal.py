r"""Conformal prediction sets from leave-one-out scores: sets that contain the right class in a stated share of cases.

Let s_k(x) be the score of class k at x. The misfit of class k is r(x, k) = max_{l != k} s_l(x) - s_k(x), the distance by which
another class is ahead. It is negative for the predicted class. For each of the n training samples, let r_i = r(x_i, y_i) be the
misfit of its own label, scored by the head that never saw sample i. For a level p, such as 0.9,

    q = the ceil(p (n + 1))-th smallest r_i,        set(x) = {k : r(x, k) <= q}.

If new samples come from the same distribution, set(x) contains the right class with probability about p (the jackknife of
Barber, Candes, Ramdas and Tibshirani, 2021). The probability is only approximate, because x is scored by the head of all
samples, which differs by O(1/n) from a head without one sample. A set may contain several classes, and it is empty if the
misfit of even the best class is above q.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def misfit(scores: Tensor) -> Tensor:
    """r (B, K): for each class, the best score among the others minus its own. scores: (B, K), K >= 2.

    >>> misfit(torch.tensor([[3.0, 1.0, 0.0]]))
    tensor([[-2.,  2.,  3.]])
    """
    best, second = scores.topk(2, 1).values.unbind(1)
    rival = torch.where(scores == best[:, None], second[:, None], best[:, None])
    return rival - scores


def threshold(own: Tensor, level: float) -> float:
    """Return q, the ceil(level (n + 1))-th smallest misfit of the samples' own labels (n,), or infinity with too few samples.

    >>> threshold(torch.arange(9.0), 0.5), threshold(torch.arange(9.0), 0.95)
    (4.0, inf)
    """
    rank = math.ceil(level * (len(own) + 1))
    return float(own.kthvalue(rank).values) if rank <= len(own) else math.inf
