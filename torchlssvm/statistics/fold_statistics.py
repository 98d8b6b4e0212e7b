"""Statistics of some folds only."""

from __future__ import annotations

from collections.abc import Sequence

from torchlssvm.functional import checks
from torchlssvm.statistics import Statistics


def of_folds(stats: Statistics, folds: Sequence[int]) -> Statistics:
    """The statistics of the samples in the given folds, as if nothing else had ever been added; without folds themselves.

    >>> import torch
    >>> x, y = torch.randn(20, 3), torch.arange(20) % 2
    >>> both = Statistics(3, 2, folds=2).add(x, y, ids=range(20))
    >>> int(of_folds(both, [0]).n + of_folds(both, [1]).n)
    20
    """
    out = Statistics(
        stats.in_features, stats.num_classes, grid=stats._wanted.grid or ("auto" if stats.exact else None),
        target_grid=stats._wanted.target_grid or "auto", per_class=stats.per_class, device=stats.device,
    )  # fmt: skip
    if stats.empty:
        return out
    side = stats._side[list(folds)].sum(0, keepdim=True)
    sums = out._decide(stats._choices)
    out._side = side
    labels = range(stats.num_classes) if stats.per_class else [0]
    assert stats._sums is not None
    stats._sums.settle()
    for group in labels:
        members = [f * len(labels) + group for f in folds]
        present = [stats._sums.sums[m] for m in members if m in stats._sums.sums]
        for i, part in enumerate(present):
            sums.sums[group] = part.clone() if i == 0 else sums.sums[group].add_(part)
    sums.refresh_diagonals()
    out._gross = stats._gross
    host = checks.to_host(side[0, 0, 0] if side.ndim == 3 else side.sum())
    out._n = 1.0 if host is None else host[0][0]
    if not out._n:
        out._reset()
    return out
