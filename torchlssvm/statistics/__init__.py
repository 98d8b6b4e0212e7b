"""Sufficient statistics of a least-squares head: the truth from which every weight is derived.

For features phi on a grid (integers q) and targets t the statistics are

    M = sum [q; 1] [q; 1]^T      V = sum [q; 1] t^T      T = sum t^2

in total or per class. They are integers, so sums do not depend on order, batch size, device or the number of machines,
and removing a sample gives, bit for bit, the state that never saw it. Labels are targets -1/+1; what is stored for them
are class sums and counts, from which any coding follows. :meth:`torchlssvm.Statistics.digest` specifies
the digest.
"""

from torchlssvm.functional.grid import FixedPoint
from torchlssvm.statistics.statistics import Statistics

__all__ = ["FixedPoint", "Statistics"]
