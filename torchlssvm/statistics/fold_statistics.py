"""Statistics of some folds only."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchlssvm.functional import checks
from torchlssvm.statistics.statistics import Statistics


def of_folds(stats: Statistics, folds: Sequence[int]) -> Statistics:
    """Return the statistics of the samples in the given folds, as if nothing else had ever been added; without folds.

    >>> import torch
    >>> x, y = torch.randn(20, 3), torch.arange(20) % 2
    >>> both = Statistics(3, 2, folds=2).add(x, y, ids=range(20))
    >>> int(of_folds(both, [0]).n + of_folds(both, [1]).n)
    20
    """
    out = Statistics(
        stats.in_features, stats.num_classes, grid=stats.requested.grid or ("auto" if stats.exact else None),
        target_grid=stats.requested.target_grid or "auto", per_class=stats.per_class, normalize=stats.normalize,
        scale=stats.scale, device=stats.device,
    )  # fmt: skip
    moments = stats.moments[list(folds)].sum(0, keepdim=True)
    host = checks.to_host(moments[0, 0, 0] if moments.ndim == 3 else moments.sum())
    weight = 1.0 if host is None else host[0][0]
    if stats.empty or not weight:
        return out
    sums, each = stats.group_sums(), stats.num_classes if stats.per_class else 1
    total: dict[int, Tensor] = {}
    for group in range(each):
        present = [sums[m] for m in (fold * each + group for fold in folds) if m in sums]
        for i, part in enumerate(present):
            total[group] = part.clone() if i == 0 else total[group].add_(part)
    return out.with_sums(stats.choices, total, moments, stats.bound, weight)
