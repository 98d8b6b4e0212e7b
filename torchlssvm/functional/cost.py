"""The choice between updating a solution and solving again.

For J features, an update by Theorem 1 is cheaper than a new solve if no more than about J / 6 samples have changed, or J / 8
if the inverse is needed too. This follows from the number of floating point operations (flops) for L changed samples:

    result          update by Theorem 1     solve from statistics
    w               2 J^2 L                 J^3 / 3 (a Cholesky factorization)
    w and inverse   4 J^2 L                 J^3

A factorization runs at about half the rate of a matrix product. If the L x L part of Theorem 1 is counted too, both ways take
the same time at L between J / 6 and J / 4 for w, and near J / 8 with the inverse. ``recipes/benchmarks/linear_head.py --only
crossover`` measures this point.
"""

from __future__ import annotations

import math


def solve_is_cheaper(J: int, changed: int, since: int, inverse: bool) -> bool:
    """Whether to solve from statistics instead of applying Theorem 1.

    changed: columns that are not yet part of the base; since: columns since the last solve; inverse: whether P itself is kept.
    """
    # 2**22: if the changed rows have more numbers than this (32 MiB), a solve is made, because Theorem 1 needs six such arrays.
    # This limit matters beyond J = 5,000.
    many = changed > (J // 8 if inverse else J // 6) or changed * J > 2**22
    # 48: below this many features a factorization is cheaper than the bookkeeping of an update
    # 8 J: columns of updates after which an inverse is computed from scratch, to limit rounding errors
    return J < 48 or many or since > 8 * J


def batch_size(J: int) -> int:
    """The batch size at which Theorem 1 costs least per sample when there are no statistics to solve from.

    The time for a batch of L columns is about t0 + s J^2 + (4 J^2 L + 4 J L^2) / f: a fixed overhead (t0 = 0.3 ms), three
    passes over the inverse (s = 24 bytes at 10 GB/s), and the products (f = 60 GFlop/s). Divided by L, this is least at L =
    sqrt((t0 + s J^2) f / (4 J)). The constants need not be precise, because the time changes little around the minimum (see
    ``recipes/mnist_parity.py``).
    """
    return max(16, min(1024, round(math.sqrt((3e-4 + 2.4e-9 * J * J) * 60e9 / (4 * J)))))


SMALL_KERNEL = 64
"""Below this many samples, a kernel machine factors its matrix again, which is cheaper than an update and has no drift."""

LEAST_SHARE = 1e-3
"""A kernel machine factors again if an update would leave less than this share of a number after cancellation, as happens for
near-duplicates at a large C."""

DEFERRED_ROWS = 64
"""A kernel machine collects up to this many rows of low-rank terms before one product adds them to its inverse. Until then,
each of these rows adds n operations to reading a row of the inverse."""


LARGEST_KEPT_MATRIX = 512
"""Up to this many samples a kernel machine keeps its matrix too (2 MB), so that factoring again needs no kernel evaluation."""


def block_update_pays(n: int, added: int, removed: int, inverse: bool, gram: bool = False) -> bool:
    """Whether a kernel machine of n samples should update its inverse instead of factoring the new matrix.

    An update takes 4 n^2 flops for an added row (bordered inverse) and 2 n^2 for a removed row (Schur complement), at the rate
    of a matrix product. Let r = n + added - removed be the number of samples after the change. Factoring their matrix takes
    r^3 / 3 flops and the inverse 2 r^3 / 3 more, at about half that rate, in addition to the kernel evaluations. If the inverse
    is known, updating is cheaper until its flops reach 2 r^3. If only a factor is known (after a bulk change), each row takes
    2 n^2 flops in two triangular solves, so updating pays for up to r / 6 rows, of which DEFERRED_ROWS can be collected.
    If the matrix is kept (``gram``), updating several rows pays only if the update and its bookkeeping are cheaper than a
    factorization. Updating one row always pays.
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
    return max(added, removed) <= DEFERRED_ROWS and 6 * n * n * (added + removed) < left**3
