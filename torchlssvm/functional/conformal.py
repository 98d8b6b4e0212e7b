r"""Conformal prediction sets from leave-one-out scores: classes that hold the right one in a stated share of cases.

How badly class k fits a sample is r(x, k) = max_{l != k} s_l(x) - s_k(x), negative for the predicted class. For the samples
held, leave-one-out gives r_i = r(x_i, y_i) under the head that never saw sample i. With n of them and level p,

    q = the ceil(p (n + 1))-th smallest r_i,        set(x) = {k : r(x, k) <= q}.

If new samples are drawn like those held, set(x) contains the right class with probability about p. This is the jackknife of
Barber, Candes, Ramdas and Tibshirani (2021): x is scored by the head of all samples, which differs from those without one
sample by O(1/n). A set may hold several classes, or none where even the best class fits worse than q.
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
    """q: the ceil(level (n + 1))-th smallest of the misfits of the samples' own labels; infinite for too few. own: (n,).

    >>> threshold(torch.arange(9.0), 0.5), threshold(torch.arange(9.0), 0.95)
    (4.0, inf)
    """
    rank = math.ceil(level * (len(own) + 1))
    return float(own.kthvalue(rank).values) if rank <= len(own) else math.inf
