"""Freivalds' test of a Gram matrix: is M = sum q q^T, in O(n J) instead of O(n J^2)?

For a random vector r, M r = sum q (q^T r) costs two products of a matrix and a vector. It is done modulo primes p, in float64,
which is exact here: every product-sum stays below 2^52. If D = M - sum q q^T is not zero, some entry of it is not zero modulo
one of the primes at least, since their product (2^88) exceeds every |D_ij| (int64 sums, and at most 2^35 rows of 2^26 steps);
then D r = 0 modulo that p for at most one r in p. With three fresh r for each prime, a wrong M passes with a probability
below 2^-65, whichever the prime.

The vectors are drawn from the system's randomness when the test begins: a matrix made before cannot know them. No hash of the
rows is kept: one that is additive would be a perfect test of a guess, before minus after.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

from torchlssvm.functional import gram

PRIMES = (4194301, 4194287, 4194277, 4194271)
"""The four largest primes below 2^22."""

VECTORS_PER_PRIME = 3
"""Random vectors for each prime: a wrong matrix passes with p^-3 < 2^-65."""

LARGEST_PRODUCT_SUM = 2**52
"""Bound on every product-sum: exact in float64, with a bit to spare for the reduction."""

PART_ROWS = 256
"""Rows that are multiplied at a time, so that they are still in the cache for the second product."""


class GramCheck:
    """The test for several groups of rows, each with a matrix of its own."""

    def __init__(self, J: int, groups: int, device: torch.device):
        self.J, self.T = J, len(PRIMES) * VECTORS_PER_PRIME
        self.moduli = torch.tensor(PRIMES, dtype=torch.float64, device=device).repeat_interleave(VECTORS_PER_PRIME)
        drawn = np.frombuffer(os.urandom(8 * J * self.T), np.uint64).reshape(J, self.T)
        residues = drawn % np.repeat(np.array(PRIMES, np.uint64), VECTORS_PER_PRIME)
        self.r = self._reduce(torch.from_numpy(residues.astype(np.float64)).to(device))  # (J, T)
        self.right = torch.zeros(groups, J, self.T, dtype=torch.float64, device=device)

    def _reduce(self, values: Tensor) -> Tensor:  # (..., T)
        """The residues nearest to zero. Needs |values| <= 2^52."""
        return values - self.moduli * torch.round(values / self.moduli)

    def _room(self, largest: float) -> int:
        """The number of products of a number up to ``largest`` and a residue that can be summed."""
        return max(1, int(LARGEST_PRODUCT_SUM // (max(1.0, largest) * (max(PRIMES) // 2 + 1))) - 1)

    def project(self, q: Tensor, largest: float) -> Tensor:
        """q r modulo the primes. q: (B, J) integers up to ``largest`` -> (B, T)."""
        out = torch.zeros(q.shape[0], self.T, dtype=torch.float64, device=q.device)
        room = self._room(largest)
        for start in range(0, q.shape[1], room):
            part = slice(start, start + room)
            out = self._reduce(out + q[:, part] @ self.r[part])
        return out

    def sum_outer(self, z: Tensor, projected: Tensor, largest: float) -> Tensor:
        """z^T (q r) modulo the primes. z: (B, R) integers up to ``largest``; projected: (B, T) -> (R, T)."""
        out = torch.zeros(z.shape[1], self.T, dtype=torch.float64, device=z.device)
        room = self._room(largest)
        for start in range(0, z.shape[0], room):
            part = slice(start, start + room)
            out = self._reduce(out + z[part].mT @ projected[part])
        return out

    def add(self, q: Tensor, largest: float, group: int = 0) -> None:
        """Take in rows of a group. q: (B, J) integers as float64, up to ``largest``."""
        for start in range(0, q.shape[0], PART_ROWS):
            part = q[start : start + PART_ROWS]
            self.right[group] = self._reduce(
                self.right[group] + self.sum_outer(part, self.project(part, largest), largest)
            )

    def project_sums(self, sums: Tensor) -> Tensor:
        """S r modulo the primes. S: (R, J) int64 -> (R, T)."""
        parts = []
        for k, p in enumerate(PRIMES):
            residues = torch.remainder(sums, p).to(torch.float64)
            columns = slice(k * VECTORS_PER_PRIME, (k + 1) * VECTORS_PER_PRIME)
            total = torch.zeros(sums.shape[0], VECTORS_PER_PRIME, dtype=torch.float64, device=sums.device)
            room = self._room(p)
            for start in range(0, self.J, room):
                part = slice(start, start + room)
                total = torch.remainder(total + residues[:, part] @ self.r[part, columns], p)
            parts.append(total)
        return self._reduce(torch.cat(parts, 1))

    def same(self, left: Tensor, right: Tensor) -> bool:
        """True if residues are the same modulo their primes. (R, T) each."""
        return not bool(torch.remainder(left - right, self.moduli).any())

    def holds(self, packed: Tensor, group: int = 0) -> bool:
        """True if the packed M of a group is the sum of q q^T over the rows that were taken in."""
        return self.same(self.project_sums(gram.unpack(packed, self.J)), self.right[group])
