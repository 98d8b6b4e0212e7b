"""Metrics for samples with several labels each (multilabel), and for numeric targets (regression).

For each label, F1 = 2 tp / (2 tp + fp + fn), with the counts of true positives tp, false positives fp and false negatives fn.
The micro average computes F1 from the counts summed over all labels, while the macro average is the mean of the F1 scores of
the labels. A label that neither occurs nor is predicted has F1 = 0, as in scikit-learn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchlssvm.functional import checks


def confusion_by_label(y: Tensor, predicted: Tensor) -> Tensor:
    """Count samples (K, 2, 2) by true label (row) and predicted label (column), for each label. y, predicted: (n, K).

    >>> y, predicted = torch.tensor([[1, 0], [1, 1], [0, 0]]), torch.tensor([[1, 1], [0, 1], [0, 0]])
    >>> confusion_by_label(y, predicted).tolist()
    [[[1, 0], [1, 1]], [[1, 1], [0, 1]]]
    """
    y, predicted = checks.truth(y, predicted, "multilabel"), checks.binary(predicted)
    cells = [(a & b).sum(0) for a in (~y, y) for b in (~predicted, predicted)]
    return torch.stack(cells, 1).view(-1, 2, 2)


def f1_score(y: Tensor, predicted: Tensor, average: str = "micro") -> float:
    """Return the F1 score of labels (n, K), with ``average`` "micro" or "macro"."""
    counts = confusion_by_label(y, predicted).to(torch.float64)
    if checks.one_of(average, "average", ("micro", "macro")) == "micro":
        counts = counts.sum(0, keepdim=True)
    twice = 2.0 * counts[:, 1, 1]
    wrong = counts[:, 0, 1] + counts[:, 1, 0]
    return float((twice / (twice + wrong).clamp(min=1.0)).mean())


def f1_thresholds(scores: Tensor, y: Tensor) -> Tensor:
    """Return, for each label, the threshold (K,) with the largest F1. scores: (n, K), leave-one-out; y: (n, K), 0 and 1.

    The function tries the midpoints between neighbouring scores of the label, and the lowest score minus 1. If several of
    these have the largest F1, it returns the highest. The threshold is 0 if no sample or every sample has the label.

    >>> scores, y = torch.tensor([[-0.9], [-0.6], [-0.2]]), torch.tensor([[0], [1], [1]])
    >>> f1_thresholds(scores, y).tolist()
    [-0.75]
    """
    scores, hit = scores.to(torch.float64), checks.truth(y, scores, "multilabel")
    if checks.not_finite(scores):
        checks.raise_not_finite("scores", scores)
    n, positive = len(scores), hit.sum(0)
    sorted_, order = scores.sort(0, descending=True)
    found = hit.gather(0, order).cumsum(0).to(torch.float64)  # true positives if the first 1, 2, ... scores are above
    above = torch.arange(1, n + 1, device=scores.device, dtype=torch.float64)[:, None]
    f1 = 2.0 * found / (above + positive)
    below = torch.cat([sorted_[1:], sorted_[-1:] - 2.0])
    f1 = torch.where(below < sorted_, f1, -1.0)  # equal scores are above together
    best = f1.argmax(0, keepdim=True)  # the first, which is the largest threshold
    middle = (sorted_.gather(0, best) + below.gather(0, best))[0] / 2
    return torch.where((positive > 0) & (positive < n), middle, torch.zeros_like(middle))


def r2_score(y: Tensor, predicted: Tensor) -> float:
    """Return R^2, one minus the squared error divided by the variance, averaged over the columns. y, predicted: (n,) or (n, K).

    The R^2 of a column without variance is 1 if the column is predicted exactly and 0 otherwise, as in scikit-learn.
    """
    y = checks.truth(y, predicted, "regression")
    if checks.not_finite(predicted):
        checks.raise_not_finite("predicted", predicted)
    y, predicted = (values.to(torch.float64).reshape(len(y), -1) for values in (y, predicted))
    error, spread = (y - predicted).square().sum(0), (y - y.mean(0)).square().sum(0)
    constant = torch.where(error == 0, 1.0, 0.0).to(spread)
    return float(torch.where(spread > 0, 1.0 - error / spread.clamp(min=1e-300), constant).mean())
