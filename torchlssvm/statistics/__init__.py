"""Sufficient statistics of a least-squares head, from which every weight is derived.

Features phi are rounded to a fixed-point grid, where they are integers q. For rows q and targets t the statistics are

    M = sum [q; 1] [q; 1]^T      V = sum [q; 1] t^T      T = sum t^2

in total or per class. Because the sums are integers, they do not depend on order, batch size, device or the number of machines.
Removing a sample therefore restores, bit for bit, the state that never saw it. Labels are treated as targets -1/+1. For labels,
class sums and counts are stored, from which any coding can be derived. :meth:`torchlssvm.Statistics.digest` specifies the
digest.
"""

from torchlssvm.functional.grid import FixedPoint
from torchlssvm.statistics.statistics import Statistics

__all__ = ["FixedPoint", "Statistics"]
