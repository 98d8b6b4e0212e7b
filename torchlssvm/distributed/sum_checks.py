"""Checks of sums: that they can be those of samples, and that enough samples are in them."""

from __future__ import annotations

from collections.abc import Iterable

from torchlssvm.functional import checks
from torchlssvm.functional.definite import is_semidefinite, least_rank
from torchlssvm.linear.membership import RowCounts
from torchlssvm.statistics import Statistics


def check_held(stats: Statistics, groups: Iterable[int], shrunk: bool) -> None:
    """RemovalError unless the sums can be those of actual samples: counts, diagonals and definiteness of these groups.

    ``shrunk``: something was removed; sums of samples added are definite of themselves.
    """
    stats.canonicalize()
    if stats.accumulator is None:
        return
    stats.check_counts(stats.moments)
    stats.check_diagonal(stats.diagonal())
    if stats.drained:
        raise checks.removal_error("no sample would be left, but the sums would not be zero")
    if not shrunk:
        return
    for group in sorted(groups):
        if not bool(is_semidefinite(stats.accumulator.total(group), *stats.group_mean_terms(group))):
            which = f" of class {group % stats.num_classes}" if stats.per_class else ""
            raise checks.removal_error(f"the sums{which} would not be positive semidefinite")


def least_samples(stats: Statistics, rows: RowCounts | None = None, enough: int | None = None) -> int | None:
    """Bound from below the number of distinct samples in the sums of any class; None when nothing changed.

    Weights do not count, and what was added and removed again does not. ``rows`` tells samples apart, where they are known;
    else the rank of the sums does: s samples have rank s at most. Sums in total have no rank for each class: 1 is all that
    they prove. Classes that are known to have ``enough`` are not looked at further.

    >>> import torch
    >>> from torchlssvm import FixedPoint, Statistics
    >>> delta = Statistics(4, 2, grid=FixedPoint(8.0), per_class=True).add(torch.eye(4), torch.tensor([0, 0, 0, 1]))
    >>> delta = delta.add(torch.eye(4)[3:], torch.tensor([1]), torch.tensor([20]))
    >>> least_samples(delta)  # class 1 is one sample, many times: its sums give it away
    1
    """
    stats.canonicalize()
    if stats.empty:
        return None
    rows = RowCounts() if rows is None else rows
    sums, moments, K = stats.group_sums(), stats.moments, stats.num_classes
    bounds = []
    for fold in range(max(1, stats.folds)):
        where = fold if stats.folds else None
        if stats.kind == "labels" and not stats.per_class:
            changed = [c for c, v in enumerate(stats.side_sums(fold)) if bool(moments[fold, c]) or bool(v.any())]
            bounds += [max(1, rows.least(where, c)) for c in changed]
            if not changed and fold in sums and bool(sums[fold].any()):
                bounds.append(0)
            continue
        for c in range(K if stats.per_class else 1):
            group = fold * K + c if stats.per_class else fold
            packed, net = sums.get(group), stats.group_mean_terms(group)[1]
            if bool(net) or (packed is not None and bool(packed.any())):
                known = max(1, rows.least(where, None if stats.kind == "values" else c))
                if packed is not None and (enough is None or known < enough):
                    known = max(known, int(least_rank(packed, stats.in_features)))
                bounds.append(known)
    return min(bounds, default=None)


def check_enough(stats: Statistics, rows: RowCounts | None, min_samples: int, allow_small: bool) -> None:
    """ValueError when the sums to be sent may be of fewer distinct samples than chosen."""
    if isinstance(min_samples, bool) or not isinstance(min_samples, int) or min_samples < 0:
        raise ValueError(f"min_samples must be an int >= 0, got {min_samples!r}")
    if allow_small or min_samples == 0:
        return
    least = least_samples(stats, rows, min_samples)
    if least is not None and least < min_samples:
        unknown = "" if rows is not None else " (after a save, a load or a merge of files single samples are not known)"
        raise ValueError(
            f"the changes to be sent have a class with the sums of perhaps only {least} sample(s){unknown}, fewer than "
            f"min_samples={min_samples}: sums of few samples give them away, whatever their weight. Wait for more, or say "
            "allow_small=True."
        )
