"""Checks of sums: that they can be those of samples, and that enough samples are in them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torchlssvm.functional import checks
from torchlssvm.functional.definite import is_semidefinite, least_rank
from torchlssvm.statistics import Statistics


def check_held(stats: Statistics, groups: Iterable[int], shrunk: bool) -> None:
    """RemovalError unless the sums can be those of actual samples: counts, diagonals and definiteness of these groups.

    ``shrunk`` says whether anything was removed; sums of samples added are definite of themselves.
    """
    stats.canonicalize()
    if stats._sums is None:
        return
    K = stats.num_classes
    side = stats._side
    counts = checks.to_host(side if side.ndim == 2 else side[:, 0, 0], stats._sums.diag.amin())
    if counts is None:
        return
    if min(counts[0]) < 0:
        where = f"the count of class {counts[0].index(min(counts[0])) % K}" if side.ndim == 2 else "the count"
        raise checks.removal_error(f"{where} would fall to {min(counts[0]):g}")
    if counts[1][0] < 0:
        raise checks.removal_error("a sum of squares would fall below zero")
    if stats.drained:
        raise checks.removal_error("no sample would be left, but the sums would not be zero")
    if not shrunk:
        return
    for group in sorted(groups):
        if not bool(is_semidefinite(stats._sums.total(group), *_moments(stats, group))):
            which = f" of class {group % K}" if stats.per_class else ""
            raise checks.removal_error(f"the sums{which} would not be positive semidefinite")


def _moments(stats: Statistics, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum m (J,) and the number n of a group's samples."""
    V, side = stats._view(group), stats._side
    if side.ndim == 3:
        return V[0], side[group, 0, 0]
    if stats.per_class:
        return V[0], side[group // stats.num_classes, group % stats.num_classes]
    return V.sum(0), side[group].sum()


def least_samples(stats: Statistics) -> int | None:
    """The smallest number of samples that provably went into the sums of any class; None when nothing changed.

    Adds and removes may cancel, so what counts is the net number of samples or, if larger, the rank of the sums.

    >>> import torch
    >>> from torchlssvm import FixedPoint, Statistics
    >>> delta = Statistics(4, 2, grid=FixedPoint(8.0), per_class=True).add(torch.eye(4), torch.tensor([0, 0, 0, 1]))
    >>> least_samples(delta)  # class 1 is one sample: its sums give it away
    1
    """
    stats.canonicalize()
    if stats._sums is None:
        return None
    bounds = []
    F, K = max(1, stats.folds), stats.num_classes
    for fold in range(F):
        if stats._side.ndim == 2 and not stats.per_class:
            V = stats._view(fold)
            nets = stats._side[fold].abs().tolist()
            bounds += [int(n) for n, v in zip(nets, V, strict=True) if n or bool(v.any())]
            if not bounds and bool(stats._sums.total(fold).any()):
                bounds.append(0)
            continue
        for c in range(K if stats.per_class else 1):
            group = fold * K + c if stats.per_class else fold
            sums, net = stats._sums.sums.get(group), abs(int(_moments(stats, group)[1]))
            if net or (sums is not None and bool(sums.any())):
                rank = 0 if sums is None else int(least_rank(sums, stats.in_features))
                bounds.append(max(net, rank))
    return min(bounds, default=None)


def check_enough(stats: Statistics, min_samples: int, allow_small: bool) -> None:
    """ValueError when the sums to be sent may be of fewer samples than chosen."""
    if isinstance(min_samples, bool) or not isinstance(min_samples, int) or min_samples < 0:
        raise ValueError(f"min_samples must be an int >= 0, got {min_samples!r}")
    if allow_small or min_samples == 0:
        return
    least = least_samples(stats)
    if least is not None and least < min_samples:
        raise ValueError(
            f"the changes to be sent have a class with the sums of perhaps only {least} sample(s), fewer than "
            f"min_samples={min_samples}: sums of few samples give them away. Wait for more, or say allow_small=True."
        )
