"""One-against-one classification: class scores from the scores of pairs."""

from __future__ import annotations

import torch
from torch import Tensor


def votes(pair_scores: Tensor, K: int) -> Tensor:
    """Compute scores (B, K) from pair scores (B, pairs): the number of pairs won, ties broken by the sum of margins.

    The sum of margins is squashed into (-1/3, 1/3), so it decides only between classes with equally many wins.
    """
    first, second = torch.triu_indices(K, K, 1, device=pair_scores.device)
    won = torch.zeros(len(pair_scores), K, dtype=pair_scores.dtype, device=pair_scores.device)
    share = (pair_scores.sign() + 1) / 2
    won = won.index_add(1, first, share).index_add(1, second, 1 - share)
    margin = torch.zeros_like(won).index_add(1, first, pair_scores).index_add(1, second, -pair_scores)
    return won + margin / (3 * (margin.abs() + 1))


def least_of_pairs(pair_scores: Tensor, K: int) -> Tensor:
    """Compute scores (B, K) from pair scores (B, pairs): the lowest score of a class against any other, min over j of f_kj.

    If a class wins all its pairs, its score is positive, the scores of all other classes are negative, and :func:`votes`
    predicts the same class. Unlike numbers of votes, these scores also have a meaningful margin, which is in units of a pair
    score.
    """
    first, second = torch.triu_indices(K, K, 1, device=pair_scores.device)
    table = torch.full((len(pair_scores), K, K), torch.inf, dtype=pair_scores.dtype, device=pair_scores.device)
    table[:, first, second] = pair_scores
    table[:, second, first] = -pair_scores
    return table.amin(2)
