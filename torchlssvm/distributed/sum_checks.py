"""Checks that sums can come from actual samples, and from enough of them."""

from __future__ import annotations

from collections.abc import Iterable

from torchlssvm.functional import checks
from torchlssvm.functional.definite import is_semidefinite
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


def least_samples(stats: Statistics, rows: RowCounts | None) -> int | None:
    """Bound from below the number of distinct samples in the sums of any class; None when nothing changed.

    Weights do not count, and neither do samples that were added and removed again. ``rows``: the samples. Without ``rows`` the
    bound is 1.
    """
    stats.canonicalize()
    if stats.empty:
        return None
    if rows is None:
        return 1
    return rows.least


def check_enough(stats: Statistics, rows: RowCounts | None, min_samples: int) -> None:
    """ValueError when the sums to be sent may be of fewer distinct samples than ``min_samples``."""
    if isinstance(min_samples, bool) or not isinstance(min_samples, int) or min_samples < 0:
        raise ValueError(f"min_samples must be an int >= 0, got {min_samples!r}")
    least = least_samples(stats, rows)
    if least is not None and least < min_samples:
        unknown = "" if rows is not None else " (single samples are not known here: sums were merged from a file)"
        raise ValueError(
            f"the changes to be sent have a class with the sums of perhaps only {least} sample(s){unknown}, fewer than "
            f"min_samples={min_samples}: sums of few samples reveal them, whatever their weight. Wait for more, or lower "
            "min_samples."
        )
