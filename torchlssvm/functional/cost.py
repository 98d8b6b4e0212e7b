"""The choice between updating and solving again, made in one place.

Flops for J features and L changed columns: Theorem 1 costs 4 J^2 L if the inverse is kept up to date, and 2 J^2 L for w alone.
Solving for w from statistics costs J^3 / 3 (one Cholesky factorization, at about half the rate of a matrix product), and
computing the inverse as well costs J^3. Including the L x L part of Theorem 1, both ways cost the same at L between J/6 and
J/4 for w alone, and near J/8 with the inverse; ``recipes/benchmarks/linear_head.py --only crossover`` measures this point.
"""

from __future__ import annotations

import math


def solve_is_cheaper(J: int, changed: int, since: int, inverse: bool) -> bool:
    """Whether to solve from statistics instead of applying Theorem 1.

    changed: columns that are not yet part of the base; since: columns since the last solve; inverse: whether P itself is kept.
    """
    # 2**22: numbers (32 MiB) in the rows of a change above which a solve is made, beyond J = 5,000. Theorem 1 needs six such
    # arrays
    many = changed > (J // 8 if inverse else J // 6) or changed * J > 2**22
    # 48: below this many features a factorization is cheaper than the bookkeeping of an update
    # 8 J: columns of updates after which an inverse is computed from scratch, to limit rounding errors
    return J < 48 or many or since > 8 * J


def batch_size(J: int) -> int:
    """The batch size at which Theorem 1 costs least per sample when there are no statistics to solve from.

    A batch of L columns costs about t0 + s J^2 + (4 J^2 L + 4 J L^2) / f seconds: a fixed overhead, three passes over the
    inverse, and the products. Per sample this is least at L = sqrt((t0 + s J^2) f / (4 J)). Only the rough size matters:
    the curve is flat (see ``recipes/mnist_parity.py``). t0 = 0.3 ms, s = 24 bytes at 10 GB/s, f = 60 GFlop/s.
    """
    return max(16, min(1024, round(math.sqrt((3e-4 + 2.4e-9 * J * J) * 60e9 / (4 * J)))))


SMALL_KERNEL = 64
"""Below this many samples, a kernel machine factors its matrix again, which is cheaper than an update and has no drift."""

LEAST_SHARE = 1e-3
"""If all but this share cancels in an update (a near-duplicate at a large C), a kernel machine factors again instead."""

DEFERRED_ROWS = 64
"""Rows of low-rank terms that wait for one product with the inverse of a kernel machine. Each adds n to reading a row."""


LARGEST_KEPT_MATRIX = 512
"""Up to this many samples a kernel machine keeps its matrix too (2 MB), so that factoring again needs no kernel evaluation."""


def block_update_pays(n: int, added: int, removed: int, inverse: bool, gram: bool = False) -> bool:
    """Whether a kernel machine of n samples should update its inverse instead of factoring the new matrix.

    Updating costs 4 n^2 flops for an added row (bordered inverse) and 2 n^2 for a removed row (Schur complement), at the rate
    of a product. For the r = n + added - removed samples left, a factor costs r^3 / 3 and the inverse 2 r^3 / 3 more, at about
    half that rate, plus the kernel. With a known inverse, both ways cost the same at 2 r^3. With a factor alone (after a bulk
    change), each row costs 2 n^2 in two triangular solves against a factor of r^3 / 3, so updating up to r / 6 rows pays. If
    more rows are removed than can wait, the matrix is factored again. If the matrix is kept (``gram``), updating several rows
    pays only if the update and its bookkeeping cost less than a factorization. Updating one row always pays.
    ``recipes/benchmarks/kernel_machines.py --only crossover`` measures these costs.
    """
    left = n + added - removed
    if min(n, left) < SMALL_KERNEL:
        return False
    update = n * n * (4 * added + 2 * removed)
    # 4_000_000: the flops of a factorization that takes as long as the bookkeeping of an update of several rows
    if gram and added + removed > 1 and 3 * update + 4_000_000 > left**3:
        return False
    if inverse:
        return update < 2 * left**3
    return removed <= DEFERRED_ROWS and 6 * n * n * (added + removed) < left**3
