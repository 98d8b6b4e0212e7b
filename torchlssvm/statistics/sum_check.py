r"""Freivalds' test of sums against rows: are S = sum [q; z] q^T those of the samples, in O(n J) instead of O(n J^2)?

Here q is a row on the grid, and z is its side: the one-hot label or [1, targets]. For a random vector r, computing S r = sum
[q; z] (q^T r) costs two products of a matrix and a vector. The products are computed in float64 modulo primes p. They are
exact, because every sum of products stays below 2^52. Suppose that D = S - sum [q; z] q^T is not zero. The product of the
primes (2^88) exceeds every |D_ij| (int64 sums, and at most 2^35 rows of 2^26 steps), so some entry of D is not zero modulo at
least one prime p. Then D r = 0 modulo that p for at most one r in p. With three new r for each prime, a wrong S passes with a
probability below 2^-65, whichever the prime.

The vectors are drawn from the system's randomness when the test begins, so nobody can fit earlier sums to them. An additive
hash of the rows would be simpler, but it is not used, because its difference before and after a removal would confirm a guess
about the removed row.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torchlssvm.functional import gram
from torchlssvm.functional.modes import exactly

if TYPE_CHECKING:
    from torchlssvm.statistics.statistics import Statistics

PRIMES = (4194301, 4194287, 4194277, 4194271)
"""The four largest primes below 2^22."""

VECTORS_PER_PRIME = 3
"""Random vectors for each prime. Wrong sums pass with a probability of p^-3 < 2^-65."""


class SumCheck:
    """Compares statistics on a grid with samples, batch by batch: counts exactly, all other sums by Freivalds' test."""

    def __init__(self, statistics: Statistics):
        self.statistics = s = statistics
        self.groups, sides = (1, 0) if s.accumulator is None else (s.accumulator.groups, s.accumulator.R)
        J, T = s.in_features, len(PRIMES) * VECTORS_PER_PRIME
        self.moduli = torch.tensor(PRIMES, dtype=torch.float64, device=s.device).repeat_interleave(VECTORS_PER_PRIME)
        drawn = np.frombuffer(os.urandom(8 * J * T), np.uint64).reshape(J, T)
        residues = drawn % np.repeat(np.array(PRIMES, np.uint64), VECTORS_PER_PRIME)
        self.r = self._reduce(torch.from_numpy(residues.astype(np.float64)).to(s.device))  # (J, T)
        self.right = torch.zeros(self.groups, J + sides, T, dtype=torch.float64, device=s.device)
        self.counted = s.zero()

    def _reduce(self, values: Tensor) -> Tensor:  # (..., T)
        """The residues nearest to zero, for |values| <= 2^52."""
        return values - self.moduli * torch.round(values / self.moduli)

    def _product(self, left: Tensor, right: Tensor, largest: float) -> Tensor:
        """left @ right modulo the primes. left: (m, k) integers up to ``largest``; right: (k, T) residues."""
        room = max(1, int(2**52 // (max(1.0, largest) * (max(PRIMES) // 2 + 1))) - 1)  # products that can be summed
        out = torch.zeros(left.shape[0], right.shape[1], dtype=torch.float64, device=left.device)
        for a in range(0, left.shape[1], room):
            out = self._reduce(out + left[:, a : a + room] @ right[a : a + room])
        return out

    @exactly
    def add(self, x: Tensor, y: Tensor, ids: Any = None) -> None:
        """Take in samples on the grid. x: (B, J); y: (B,) labels or (B, K) targets; ids: needed for folds."""
        s = self.statistics
        if s.grid is None or s.kind != ("labels" if y.ndim == 1 else "values"):
            raise ValueError(f"the statistics hold {s.kind or 'nothing'}, and the samples do not match")
        batch = s.check(x, y, ids=ids)
        if not len(batch):
            return
        self.counted.moments = self.counted.moments_after([(batch, 1)], s.choices)
        assert s.accumulator is not None
        for part in batch.parts(s.per_class):
            q, codes = s.grid.quantize(part.x), part.codes(s.per_class)
            z = torch.empty(len(q), s.accumulator.R, dtype=torch.float64, device=s.device)
            s.accumulator.write_side(part, slice(None), z)
            groups = torch.from_numpy(np.zeros(len(q), np.int64) if codes is None else codes).to(s.device)
            for group in torch.unique(groups).tolist():
                mine = slice(None) if self.groups == 1 else groups == group
                both = torch.cat([q[mine], z[mine]], 1)
                largest = float(torch.stack(torch.aminmax(both)).abs().max())
                for rows in both.split(256):  # still in the cache for the second product
                    projected = self._product(rows[:, : s.in_features], self.r, largest)
                    self.right[group] = self._reduce(self.right[group] + self._product(rows.mT, projected, largest))

    @exactly
    def failure(self) -> str | None:
        """A message about the first sum that differs from that of the samples; None if all agree."""
        s = self.statistics
        if not torch.equal(self.counted.moments.reshape(s.moments.shape), s.moments):
            return "the counts differ from those of the rows"
        found = s.group_sums()
        for group, right in enumerate(self.right):
            sums = torch.zeros(right.shape[0], s.in_features, dtype=torch.int64, device=s.device)
            if group in found:
                sums = torch.cat([gram.unpack(found[group], s.in_features), s.side_sums([group])])
            for k, p in enumerate(PRIMES):
                mine = slice(k * VECTORS_PER_PRIME, (k + 1) * VECTORS_PER_PRIME)
                left = self._product(torch.remainder(sums, p).to(torch.float64), self.r, p)
                if bool(torch.remainder(left[:, mine] - right[:, mine], p).any()):
                    return "the sums of products differ from those of the rows"
        return None
