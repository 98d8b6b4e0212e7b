"""The Cholesky factor Q = L L^T of a matrix that grows by rows: [[Q, q^T], [q, s]] = [[L, 0], [l, m]] [[L, 0], [l, m]]^T."""

from __future__ import annotations

import torch
from torch import Tensor

from torchlssvm.functional.whitened import inverse_lower

SPARE_SHARE, SPARE_ROWS = 8, 64
"""Growing makes room for n / 8 + 64 rows. A solve then costs up to a quarter more, but adding a row copies no factor."""


class GrowingFactor:
    """L (N, N), row-major, of the first ``size`` slots. Unit rows follow."""

    def __init__(self, L: Tensor, size: int):
        self.L, self.size = L, size

    def half_solve(self, rows: Tensor) -> Tensor:
        """L^-1 v for each of the rows v (k, size)."""
        return self._padded_solve(rows, transposed=False)

    def half_solve_transposed(self, rows: Tensor) -> Tensor:
        """L^-T v for each of the rows v (k, size)."""
        return self._padded_solve(rows, transposed=True)

    def solve(self, rows: Tensor) -> Tensor:
        """Q^-1 v for each of the rows v (k, size)."""
        return self.half_solve_transposed(self.half_solve(rows))

    def _padded_solve(self, rows: Tensor, transposed: bool) -> Tensor:
        missing = self.L.shape[0] - self.size
        right = torch.nn.functional.pad(rows, (0, missing)) if missing else rows
        triangle = self.L.mT if transposed else self.L
        solved: Tensor = torch.linalg.solve_triangular(triangle, right.mT, upper=transposed)
        return solved.mT[:, : self.size]

    def inverse(self) -> Tensor:
        """The inverse Q^-1 (size, size)."""
        return torch.cholesky_inverse(self.L[: self.size, : self.size])

    def inverse_diagonal(self) -> Tensor:
        """Return the diagonal (size,) of Q^-1, the sums of squares of the columns of L^-1."""
        return inverse_lower(self.L[: self.size, : self.size]).square_().sum(0)

    def extend(self, below: Tensor, corner: Tensor) -> None:
        """Append k rows. below: (k, size) the new rows left of the corner; corner: (k, k) lower triangular."""
        size, k = self.size, len(below)
        if size + k > self.L.shape[0]:
            wide = size + k + size // SPARE_SHARE + SPARE_ROWS
            wide += wide % 64 == 0  # rows a power of two apart share cache lines
            L = torch.zeros(wide, wide, dtype=self.L.dtype, device=self.L.device)
            L.diagonal().fill_(1.0)
            L[:size, :size] = self.L[:size, :size]
            self.L = L
        self.L[size : size + k, :size] = below
        self.L[size : size + k, size : size + k] = corner
        self.size += k

    def to(self, device: torch.device) -> None:
        """Move to another device."""
        self.L = self.L.to(device)
